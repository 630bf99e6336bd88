"""Pictures of a server's speed."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jmx.plot import style
from jmx.util.checks import check_instance

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_FIELDS = ("users", "tok_s", "ttft_ms", "tpot_ms")


def serving(points: Sequence[Mapping[str, Any]] | str | Path) -> "Figure":
    """Tokens a second against users, with the median time to the first token and of each further one.

    Args:
        points: what `jmx bench serve --json FILE` saved, or the path of such a file. Those of `--rate` are left out.
            Points with different values of an added key `server` are different lines, at most six, of which the one
            that begins with the fewest users shows times.

    Raises:
        TypeError, ValueError: no points with a number of users, or of too many servers.
        OSError: the file cannot be read.
        ModuleNotFoundError: matplotlib is not installed.
    """
    check_instance("points", points, (str, Path, Sequence), "a path or a sequence")
    found = json.loads(Path(points).read_text()) if isinstance(points, str | Path) else [*points]
    if not all(isinstance(its, Mapping) and {*_FIELDS} <= its.keys() for its in found):
        raise ValueError(f"`points` (of {len(found)}) must be those of `jmx bench serve`, with {_FIELDS}")
    lines: dict[str, list[Mapping[str, Any]]] = {}
    for its in sorted((its for its in found if its["users"]), key=lambda its: its["users"]):
        lines.setdefault(its.get("server", ""), []).append(its)
    if not 1 <= len(lines) <= len(style.COLORS):
        raise ValueError(
            f"`points` (of {len(lines)} servers with a number of users) must be of 1 to {len(style.COLORS)} servers"
        )
    with style.settings():
        figure, axes = style.figure(7, 4)
        _draw(axes, lines)
        axes.set_xlabel("users")
        axes.set_ylabel("tokens/s")
        axes.set_title("Tokens/s of all users; ms to the first token, then of each")
    return figure


def _draw(axes: Any, lines: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """A line for each server, and times beside the points of the first."""
    colors = [style.OURS, *(color for color in style.COLORS if color != style.OURS)]
    for number, (server, its) in enumerate(lines.items()):
        users, rates = zip(*((point["users"], point["tok_s"]) for point in its), strict=True)
        axes.plot(users, rates, "o-", color=colors[number], label=server, zorder=3 - min(number, 1))
    for point in next(iter(lines.values())):
        times = f"{point['tok_s']:,.0f}\n{point['ttft_ms']['p50']:.0f} ms, then {point['tpot_ms']['p50']:.1f}"
        place = {"xytext": (6, -22), "textcoords": "offset points", "ha": "left", "fontsize": 9}
        axes.annotate(times, (point["users"], point["tok_s"]), **place)
    every = [point for its in lines.values() for point in its]
    users, rates = sorted({point["users"] for point in every}), [point["tok_s"] for point in every]
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(users, [f"{count}" for count in users])
    axes.set_xlim(users[0] / 2, users[-1] * 4)
    axes.set_ylim(min(rates) / 2.2, max(rates) * 2)
    if len(lines) > 1:
        axes.legend(frameon=False, loc="upper left", fontsize=9)
