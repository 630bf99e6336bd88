"""Programs: functions of arrays that are compiled before they are called, side by side, and kept between processes.

`jax.jit` compiles when a function is called, one program after the other, and traces and lowers it again in every
process, which takes as long as compiling: jax's compilation cache is keyed by what lowering returns.
"""

import functools
import threading
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.monitoring
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding
from jax.stages import Compiled

from jmx.models.program_identity import default_device, tracing_context
from jmx.models.program_store import ProgramStore
from jmx.selection.environment import Device

Signature = tuple[Hashable, ...]


class Program:
    """A function of a list of weights and of pytrees of arrays, compiled once for each signature of its arguments.

    A signature is shapes, dtypes and shardings, the static arguments, and the context: jax's configuration, the mesh
    in scope, and what decides which backend runs (`jmx.use_backend`, tuned tables).

    Args:
        function: (weights, *arguments, **static).
        weights: those of the first call, or others like them: all calls have weights of the same signature.
        donate: names of arguments that are donated.
        static: names of static arguments, which are passed by keyword.
        identity: what tells this function from all others of jmx with the same signature.
        store: keeps the compiled programs between processes; None: nothing does.

    Attributes:
        jitted: the function under `jax.jit`.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        weights: Sequence[jax.Array],
        *,
        donate: Sequence[str] = (),
        static: Sequence[str] = (),
        identity: str = "",
        store: ProgramStore | None = None,
    ):
        self.jitted = jax.jit(function, donate_argnames=tuple(donate), static_argnames=tuple(static))
        self._weights = [_abstract(array) for array in weights]
        self._identity, self._store = f"{identity} {signature(self._weights)}", store
        self._compiled: dict[Signature, Future[Compiled]] = {}

    def __call__(self, weights: Sequence[jax.Array], *arguments: Any, **static: Hashable) -> Any:
        """The function's results. It is compiled if it has not been, or traced into what the caller compiles."""
        if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves((weights, arguments))):
            return self.jitted(weights, *arguments, **static)
        return self.compiled(*arguments, **static)(weights, *arguments)

    def shapes(self, *arguments: Any, **static: Hashable) -> Any:
        """The results for such arguments, as `jax.ShapeDtypeStruct`. Nothing is compiled."""
        return self.jitted.eval_shape(self._weights, *jax.tree.map(_abstract, arguments), **static)

    def compiled(self, *arguments: Any, **static: Hashable) -> Callable[..., Any]:
        """The compiled program for such arguments, which takes the weights and the arguments that are not static."""
        return self.compile(*arguments, **static).result()

    def compile(self, *arguments: Any, context: Hashable = None, **static: Hashable) -> Future[Compiled]:
        """Begins to compile the program for such arguments, which may be `jax.ShapeDtypeStruct`, unless it has begun.

        Returns when the function is lowered: XLA compiles it in another thread. `context` is the present
        `tracing_context`, for a caller that looks up several programs.
        """
        its = (signature(arguments), *sorted(static.items()), tracing_context() if context is None else context)
        found = self._compiled.get(its)
        if found is None or (found.done() and found.exception() is not None):  # a failure may be one of memory
            found = self._compiled[its] = self._start(its, arguments, static)
        return found

    def _start(self, signature: Signature, arguments: Any, static: dict[str, Hashable]) -> Future[Compiled]:
        key, devices = None, _devices((self._weights, arguments))
        if self._store is not None and devices is not None:
            key = self._store.key(self._identity, signature, devices)
        if self._store is not None and key is not None and self._store.has(key):
            return _compilers().submit(self._kept, self._store, key, devices, arguments, static)
        return _compilers().submit(self._compile, self._lower(arguments, static), key)

    def _lower(self, arguments: Any, static: dict[str, Hashable]) -> jax.stages.Lowered:
        return self.jitted.lower(self._weights, *jax.tree.map(_abstract, arguments), **static)

    def _compile(self, lowered: jax.stages.Lowered, key: str | None) -> Compiled:
        compiled, read = _compile_or_read(lowered)
        if self._store is not None and key is not None:
            if read:
                _read.add(key)
            elif key not in _read:
                self._store.save(key, compiled)
        return compiled

    def _kept(
        self, store: ProgramStore, key: str, devices: Any, arguments: Any, static: dict[str, Hashable]
    ) -> Compiled:
        """The program that the store has, or if it is damaged, a compiled one in its place."""
        return store.load(key, devices) or self._compile(self._lower(arguments, static), key)


_thread = threading.local()
# Keys of programs that this process has read from jax's compilation cache: jit may return them again.
_read: set[str] = set()


def _compile_or_read(lowered: jax.stages.Lowered) -> tuple[Compiled, bool]:
    """The program, and whether it was read from jax's compilation cache.

    Of one that was read, serializing loses functions on a CPU: it fails when it is called (jax 0.12).
    """
    _listen()
    _thread.read = False
    return lowered.compile(), _thread.read


@functools.cache
def _listen() -> None:
    def note(event: str, **_: Any) -> None:
        if event == "/jax/compilation_cache/cache_hits":
            _thread.read = True

    jax.monitoring.register_event_listener(note)


@functools.cache
def _compilers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(thread_name_prefix="jmx-compile")


def _abstract(array: Any) -> jax.ShapeDtypeStruct:
    """Shape, dtype and sharding, without the array, which may be donated before it is compiled for."""
    if isinstance(array, jax.ShapeDtypeStruct):
        return array
    if not isinstance(array, jax.Array):
        array = np.asarray(array)
        return jax.ShapeDtypeStruct(array.shape, jax.dtypes.canonicalize_dtype(array.dtype))
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=_sharding(array), weak_type=array.weak_type)


def _sharding(array: jax.Array) -> jax.sharding.Sharding | None:
    """Where an array is; None on the default device, where arrays without a sharding go."""
    return None if array.sharding.device_set == {default_device()} else array.sharding


def signature(tree: Any) -> Signature:
    """What of a pytree of arrays, or of `jax.ShapeDtypeStruct`, programs depend on."""
    leaves, treedef = jax.tree.flatten(tree)
    abstract = map(_abstract, leaves)
    return (treedef, *((leaf.shape, leaf.dtype, leaf.sharding, leaf.weak_type) for leaf in abstract))


def _devices(tree: Any) -> tuple[Device, ...] | None:
    """The devices that a program of such arguments runs on, in the order of their mesh: the default one without a mesh.

    None if a store cannot keep it: arrays on a device that is not the default one, or in several meshes or processes.
    """
    shardings = {_abstract(leaf).sharding for leaf in jax.tree.leaves(tree)} - {None}
    if not shardings:
        return (default_device(),)
    meshes = {its.mesh if isinstance(its, NamedSharding) else None for its in shardings}
    mesh = meshes.pop()
    if meshes or not isinstance(mesh, Mesh) or jax.process_count() > 1:
        return None
    return tuple(mesh.devices.flat)
