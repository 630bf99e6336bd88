"""How the axes of `--mesh` divide one layer, for `jmx explain` and `jmx bench`."""

import argparse
import dataclasses
from typing import TYPE_CHECKING, Any

from jmx.cli.checks import check_known
from jmx.cli.parser import counts

if TYPE_CHECKING:
    from jax.sharding import AbstractMesh, Mesh

    from jmx.parallel import Split

# What each axis divides.
AXES = {
    "ep": "experts and tokens",
    "tp": "experts' intermediate axis",
    "fsdp": "tokens, and weights that are gathered at each call",
    "dp": "tokens",
}


def add(command: Any, what: str, *, several: bool = False) -> None:
    """Adds --mesh and --exchange to a parser or a group of it.

    Args:
        what: what the command does with a layer.
        several: whether --exchange may name more than one.
    """
    divides = ", ".join(f"{name} ({its})" for name, its in AXES.items())
    command.add_argument(
        "--mesh", metavar="NAME=SIZE,...", help=f"{what} over devices, along axes {divides}: dp=2,ep=4"
    )
    if several:
        command.add_argument("--exchange", metavar="NAME,...", help="request these exchanges in turn (needs --mesh)")
        what = "into how many chunks gather and peer split the tokens of a device, in turn (needs --mesh; default 1)"
        command.add_argument("--chunks", type=counts, metavar="N,...", help=what)
    else:
        command.add_argument("--exchange", metavar="NAME", help="request this exchange (needs --mesh)")


def check(arguments: argparse.Namespace, *, several: bool = False) -> None:
    """ValueError for a --mesh with other axes, an unknown --exchange, or one without a mesh; `several` as for `add`."""
    from jmx.cli import mesh_argument
    from jmx.parallel import EXCHANGES

    for name in () if arguments.mesh is None else mesh_argument.sizes(arguments.mesh):
        check_known("--mesh", name, AXES)
    if arguments.exchange is not None:
        for name in arguments.exchange.split(",") if several else (arguments.exchange,):
            check_known("--exchange", name, EXCHANGES)
        if arguments.mesh is None:
            raise ValueError(f"`--exchange` (={arguments.exchange!r}) needs --mesh")
    if several and arguments.chunks is not None and arguments.mesh is None:
        raise ValueError(f"`--chunks` (={','.join(map(str, arguments.chunks))}) needs --mesh")


def splits_of(mesh: "Mesh", arguments: argparse.Namespace) -> "list[Split]":
    """Those of a command with several exchanges and chunks."""
    exchanges = [None] if arguments.exchange is None else dict.fromkeys(arguments.exchange.split(","))
    chunks = dict.fromkeys(arguments.chunks or [1])
    return [dataclasses.replace(split_of(mesh, name), chunks=count) for name in exchanges for count in chunks]


def split_of(mesh: "Mesh | AbstractMesh", exchange: str | None) -> "Split":
    """The split of a mesh with axes among `AXES`."""
    from jmx.parallel import Split

    def named(*wanted: str) -> tuple[str, ...]:
        return tuple(name for name in wanted if name in mesh.axis_names)

    # Devices that exchange tokens have consecutive ones.
    return Split(
        expert=named("ep"),
        intermediate=named("tp"),
        hidden=named("fsdp"),
        tokens=named("dp", "fsdp", "ep"),
        exchange=exchange,
        mesh=mesh,
    )
