"""Checks an installed wheel beside the running jax: its library loads, and `cpu` is chosen and right.

    PYTHONPATH=FOLDER python tests/wheel.py FOLDER [LIBRARY]

FOLDER is where the wheel was installed. LIBRARY is one that `jmx build cutlass` compiled: its handlers are registered,
too, on the CPU, since XLA checks their API version without a GPU. `make test-wheel` runs this with the oldest and the
newest jax.
"""

import pathlib
import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np

# The finder of an editable install would find the source tree first.
sys.meta_path[:] = [finder for finder in sys.meta_path if "ScikitBuild" not in type(finder).__name__]

import jmx  # noqa: E402
from jmx.ffi.cutlass import library as cutlass  # noqa: E402
from jmx.ffi.cutlass import source  # noqa: E402
from jmx.ffi.library import LibraryWarning, load, register  # noqa: E402


def check_layer() -> None:
    """`cpu` is chosen and agrees with `xla`."""
    keys = jax.random.split(jax.random.key(0), 3)
    experts = jmx.Experts.random(keys[0], 8, 128, 64, gate_up_order="interleaved")
    x = jax.random.normal(keys[1], (20, 128), jnp.bfloat16)
    routing = jmx.route(jmx.Logits(jax.random.normal(keys[2], (20, 8)), jmx.TopKSoftmax(2)))
    assert jmx.explain(x, routing, experts, activation="swiglu").chosen == "cpu"
    results = [jmx.moe(x, routing, experts, activation="swiglu", backend=name) for name in (None, "xla")]
    chosen, reference = (np.asarray(y, np.float64) for y in results)
    error = np.linalg.norm(chosen - reference) / np.linalg.norm(reference)
    assert error < 1e-2, error


def check_headers() -> None:
    """The headers that `jmx build cutlass` compiles with are in the wheel."""
    assert (source.JAX_HEADERS / "xla/ffi/api/ffi.h").is_file(), source.JAX_HEADERS


def check_cutlass(path: pathlib.Path) -> None:
    """This jax accepts the handlers of a library."""
    register(load(path, {}), (cutlass.TARGET, cutlass.INTERLEAVE), "cpu")


def main() -> None:
    folder, *libraries = map(pathlib.Path, sys.argv[1:])
    assert pathlib.Path(jmx.__file__).is_relative_to(folder.resolve()), jmx.__file__
    warnings.simplefilter("error", LibraryWarning)
    check_headers()
    check_layer()
    for library in libraries:
        check_cutlass(library)
    print(f"jax {jax.__version__}: cpu runs and is right")


if __name__ == "__main__":
    main()
