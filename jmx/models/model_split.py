"""How the axes of a mesh divide a whole model: its experts, its heads, and the rows of a batch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import jax
from flax import nnx
from jax.core import Tracer
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jmx
from jmx.meshes import MeshAxes, Names, names_of
from jmx.models.config import Config
from jmx.models.layers import Linear, RMSNorm
from jmx.util.checks import check_instance

# What mesh axes divide, and the mesh axes that do by default, those of them that a mesh has.
DEFAULT_AXES: Mapping[str, Names] = {
    "expert": ("ep",),
    "intermediate": ("tp",),
    "heads": ("ep", "tp"),
    "token": ("dp",),
}


@dataclass(frozen=True)
class ModelSplit:
    """Which mesh axes divide a model; static. Made by `of`.

    Embedding, norms, router, shared experts and MLPs for all tokens are whole on every device.

    Args:
        mesh: with Auto axes.
        expert: each device along these axes has a part of every layer's experts.
        intermediate: each device along these has a shard of its experts' intermediate axis.
        heads: each device along these has a part of the heads of attention, whole groups of queries that share keys,
            and of the cache.
        token: each device along these has a part of the rows of a batch, and of the cache.
    """

    mesh: Mesh
    expert: Names
    intermediate: Names
    heads: Names
    token: Names

    @classmethod
    def of(cls, mesh: Mesh, axes: Mapping[str, MeshAxes] | None = None) -> "ModelSplit":
        """The split of a mesh.

        Args:
            mesh: of devices.
            axes: mesh axes, one or several, by what they divide, the keys of `DEFAULT_AXES`; None divides nothing. Keys
                that are left out have the default.

        Raises:
            TypeError: no mesh of devices, or axes that are no names.
            ValueError: as `axes_of`.
        """
        check_instance("mesh", mesh, Mesh, "a jax.sharding.Mesh")
        found = axes_of(mesh.axis_names, axes)
        kinds = (AxisType.Auto,) * len(mesh.axis_names)
        return cls(Mesh(mesh.devices, mesh.axis_names, axis_types=kinds), **found)

    def ways(self, key: str) -> int:
        """Into how many parts something is divided."""
        return prod(self.mesh.shape[name] for name in getattr(self, key))

    @property
    def of_several_processes(self) -> bool:
        """Whether only some of the devices are those of this process."""
        return self.mesh.is_multi_process

    def check(self, config: Config) -> None:
        """Raises ValueError, naming the key of the config, unless this can divide a model of that config."""
        kv_heads = getattr(config, "num_key_value_heads", None)
        rules = [
            ("expert", "num_experts", config.num_experts),
            ("heads", "num_attention_heads", config.num_attention_heads),
        ]
        if kv_heads is not None and not hasattr(config, "kv_lora_rank"):
            rules.append(("heads", "num_key_value_heads", kv_heads))
        for key, name, size in rules:
            if size % self.ways(key):
                remedy = (
                    "; axes={'heads': None} (--mesh-axes heads=none) has all heads on every device"
                    if key == "heads"
                    else ""
                )
                raise ValueError(
                    f"`mesh` ({_described({key: getattr(self, key)})}, {self.ways(key)} devices) must divide "
                    f"`{name}` (={size}) of the config evenly{remedy}"
                )

    def mark_sums(self, model: nnx.Module) -> None:
        """Sets the mesh axes along which products and norms of a model are sums of the devices' parts.

        Products that are not divided may be outside of `per_device.on_each_device`: XLA then divides their tokens.
        """
        for _, module in nnx.iter_modules(model):
            if isinstance(module, Linear | RMSNorm):
                key = module.divided[1] if isinstance(module, Linear) else module.divided
                module.summed = () if key is None else getattr(self, key)
            if isinstance(module, Linear):
                module.local = any(module.divided)

    def check_rows(self, name: str, rows: int) -> None:
        """Raises ValueError, naming the argument, unless this divides the rows of a batch evenly."""
        if rows % self.ways("token"):
            raise ValueError(
                f"`{name}` (of {rows} rows) must be a multiple of {self.ways('token')} rows, into which mesh axes "
                f"{self.token} divide a batch: add rows, and ignore them"
            )

    @property
    def experts(self) -> jmx.Split:
        """That of the layers of experts."""
        intermediate, tokens = self.intermediate or None, self.token or None
        return jmx.Split(expert=self.expert or None, tokens=tokens, intermediate=intermediate, mesh=self.mesh)

    def reading(self, num_experts: int) -> NamedSharding:
        """The sharding with which experts are read: each device reads others, if their number allows it.

        `sharded_moe.in_shards` then moves shards between devices that share experts.
        """
        names = self.expert + self.intermediate
        divides = num_experts % (self.ways("expert") * self.ways("intermediate")) == 0
        return NamedSharding(self.mesh, P((names if divides else self.expert) or None))

    def spec(self, *keys: str | None) -> P:
        """The spec of an array whose axes are divided as `keys` are; None: not at all."""
        entries = [None if key is None else getattr(self, key) or None for key in keys]
        while entries and entries[-1] is None:  # as jax writes the sharding of a result
            entries.pop()
        return P(*entries)

    def sharding(self, *keys: str | None) -> NamedSharding:
        """The sharding of such an array."""
        return NamedSharding(self.mesh, self.spec(*keys))

    def place(self, tree: Any, *keys: str | None) -> Any:
        """Arrays on the devices of the mesh, also while tracing."""
        sharding = self.sharding(*keys)
        return jax.tree.map(lambda array: _placed(array, sharding), tree)


def _placed(array: Any, sharding: NamedSharding) -> Any:
    if isinstance(array, Tracer):
        return jax.lax.with_sharding_constraint(array, sharding)
    return jax.device_put(array, sharding)


def axes_of(names: Sequence[str], axes: Mapping[str, MeshAxes] | None = None) -> dict[str, Names]:
    """The mesh axes that divide each thing of `DEFAULT_AXES`, of a mesh with axes of these names. Needs no devices.

    Args:
        names: of the mesh's axes.
        axes: see `ModelSplit.of`.

    Raises:
        TypeError: axes that are no names.
        ValueError: unknown keys, axes that the mesh lacks, axes of the mesh that divide nothing, or one that divides
            two things that it cannot divide at once.
    """
    given = {} if axes is None else dict(check_instance("axes", axes, Mapping, "a mapping to mesh axes"))
    if unknown := [key for key in given if key not in DEFAULT_AXES]:
        raise ValueError(f"`axes` (={given}) must have keys among {[*DEFAULT_AXES]}, not {unknown}")
    found: dict[str, Names] = {}
    for key, default in DEFAULT_AXES.items():
        if key in given:
            found[key] = _names(key, given[key], tuple(names))
        else:
            found[key] = tuple(name for name in default if name in names)
    if unused := [name for name in names if not any(name in named for named in found.values())]:
        raise ValueError(
            f"`mesh` (axes {tuple(names)}) must have axes that divide something, and {unused} do not: by default "
            f"{_described(DEFAULT_AXES)}; others are named in `axes`"
        )
    for one, other in (("expert", "intermediate"), ("heads", "token")):
        if both := {*found[one]} & {*found[other]}:
            raise ValueError(f"`axes` must not divide both {one!r} and {other!r} by {sorted(both)}: {found}")
    return found


def _names(key: str, given: Any, axes: Names) -> Names:
    names = names_of(given)
    for name in names:
        check_instance(f"axes[{key!r}]", name, str, "the name of a mesh axis, a tuple of those, or None")
        if name not in axes:
            raise ValueError(f"`axes[{key!r}]` (={name!r}) must be an axis of the mesh, one of {axes}")
    if len({*names}) < len(names):
        raise ValueError(f"`axes[{key!r}]` (={names}) must not name a mesh axis twice")
    return names


def _described(axes: Mapping[str, Names]) -> str:
    return ", ".join(f"{key} by {' and '.join(map(repr, names))}" for key, names in axes.items())
