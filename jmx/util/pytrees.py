"""Classes as pytrees whose structure `jax.export` can write to a file, with a program that takes or returns them."""

import json
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import export

Codec = tuple[Callable[[Any], Any], Callable[[Any], Any]]  # from a value to one that JSON has, and back


def register[T](*, data: Sequence[str], static: Sequence[str] = (), **codecs: Codec) -> Callable[[type[T]], type[T]]:
    """A class decorator: a dataclass becomes a pytree, which `jax.export` serializes under its name.

    Args:
        data: the fields that hold arrays, or pytrees of them.
        static: the others, which are part of the structure: numbers, strings, None, and tuples of these.
        codecs: those of static fields that hold anything else.
    """

    def decorate(cls: type[T]) -> type[T]:
        def serialize(values: tuple[Any, ...]) -> bytes:
            named = dict(zip(static, values, strict=True))
            return json.dumps(named | {name: write(named[name]) for name, (write, _) in codecs.items()}).encode()

        def deserialize(written: bytes) -> tuple[Any, ...]:
            named = json.loads(written)
            if named.keys() != {*static}:
                raise ValueError(
                    f"the exported program, whose {cls.__name__} has the fields {[*named]}, must be of a version of "
                    f"jmx in which these are {[*static]}"
                )
            named |= {name: read(named[name]) for name, (_, read) in codecs.items()}
            return tuple(tuple(named[name]) if isinstance(named[name], list) else named[name] for name in static)

        def build(aux_data: tuple[Any, ...], children: Sequence[Any]) -> T:
            return cls(**dict(zip(data, children, strict=True)), **dict(zip(static, aux_data, strict=True)))

        jax.tree_util.register_dataclass(cls, data_fields=[*data], meta_fields=[*static])
        return export.register_pytree_node_serialization(
            cls,
            serialized_name=f"jmx.{cls.__name__}",
            serialize_auxdata=serialize,
            deserialize_auxdata=deserialize,
            from_children=build,
        )

    return decorate


def register_namedtuple[T: tuple[Any, ...]](cls: type[T]) -> type[T]:
    """A class decorator: likewise for a NamedTuple, which is a pytree already."""
    return export.register_namedtuple_serialization(cls, serialized_name=f"jmx.{cls.__name__}")
