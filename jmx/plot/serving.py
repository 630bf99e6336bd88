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
        points: what `jmx bench serve --users ... --json FILE` saved, or the path of such a file.

    Raises:
        TypeError, ValueError: no points, or some without a number of users.
        OSError: the file cannot be read.
        ModuleNotFoundError: matplotlib is not installed.
    """
    check_instance("points", points, (str, Path, Sequence), "a path or a sequence")
    found = json.loads(Path(points).read_text()) if isinstance(points, str | Path) else [*points]
    if not found or not all(isinstance(its, Mapping) and {*_FIELDS} <= its.keys() and its["users"] for its in found):
        raise ValueError(f"`points` (of {len(found)}) must be one or more points of `jmx bench serve --users`")
    found = sorted(found, key=lambda its: its["users"])
    users, rates = [its["users"] for its in found], [its["tok_s"] for its in found]
    with style.settings():
        figure, axes = style.figure(7, 4)
        axes.plot(users, rates, "o-", color=style.OURS)
        for its in found:
            times = f"{its['tok_s']:,.0f}\n{its['ttft_ms']['p50']:.0f} ms, then {its['tpot_ms']['p50']:.1f}"
            place = {"xytext": (6, -22), "textcoords": "offset points", "ha": "left", "fontsize": 9}
            axes.annotate(times, (its["users"], its["tok_s"]), **place)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(users, [f"{count}" for count in users])
        axes.set_xlim(users[0] / 2, users[-1] * 4)
        axes.set_ylim(min(rates) / 2.2, max(rates) * 2)
        axes.set_xlabel("users")
        axes.set_ylabel("tokens/s")
        axes.set_title("Tokens/s of all users; ms to the first token, then of each")
    return figure
