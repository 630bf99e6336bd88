"""Lowering of Pallas Triton kernels without the warning that Pallas gives each time.

Kernels are primitives for this: Pallas warns when it lowers them, after tracing has left the module that calls them.
"""

import threading
import warnings
from collections.abc import Callable
from typing import Any

from jax.interpreters import mlir

_filters_lock = threading.Lock()  # warning filters are global to the process


def lower_quietly(function: Callable[..., Any], context: Any, *arrays: Any, multiple_results: bool = False) -> Any:
    """What a lowering rule returns for `function` of its operands, which calls a kernel."""
    with _filters_lock, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The Pallas Triton backend is deprecated", DeprecationWarning)
        return mlir.lower_fun(function, multiple_results=multiple_results)(context, *arrays)
