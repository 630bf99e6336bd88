"""What all pictures share: the figure, its colors, and the settings by which equal pictures are equal files."""

import contextlib
import functools
import io
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from jmx.perf.roofline import require_matplotlib
from jmx.util import atomic_files

if TYPE_CHECKING:
    from matplotlib.figure import Figure

OURS = "#c2410c"  # what a picture is about
OTHERS = "#94a3b8"
COLORS = ("#9ca3af", "#1d4ed8", "#c2410c", "#047857", "#7c3aed", "#a16207")


@contextlib.contextmanager
def settings() -> Iterator[None]:
    """matplotlib's settings while a picture is drawn or saved: an SVG is the same bytes for the same matplotlib."""
    require_matplotlib()
    import matplotlib

    with matplotlib.rc_context({"svg.hashsalt": "jmx", "font.size": 11, "svg.fonttype": "path"}):
        yield


def figure(width: float, height: float, **subplot: Any) -> tuple["Figure", Any]:
    """A figure of width x height inches, and its only axes, without lines above and on the right."""
    require_matplotlib()
    made = _shown_in_notebooks()(figsize=(width, height), layout="constrained", facecolor="white")
    axes = made.add_subplot(**subplot)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.set_axisbelow(True)
    return made, axes


def outlined() -> list[Any]:
    """Path effects of a text that stays legible where it covers a line."""
    from matplotlib import patheffects

    return [patheffects.withStroke(linewidth=3, foreground="white")]


@functools.cache
def _shown_in_notebooks() -> type["Figure"]:
    """matplotlib's Figure, which shows itself as a PNG: without pyplot, notebooks print only the name of its type."""
    from matplotlib.figure import Figure

    class Picture(Figure):
        def _repr_png_(self) -> bytes:
            image = io.BytesIO()
            self.savefig(image, format="png", dpi=100)
            return image.getvalue()

    return Picture


def save(picture: "Figure", path: str) -> None:
    """Writes `picture` to `path`, SVG or PNG by its name, without the date of the run."""
    with settings():
        picture.savefig(path, dpi=130, metadata={"Date": None} if path.endswith(".svg") else None)


def check_new(argument: str, path: str) -> None:
    """Raises the errors that `save_new` would raise, before the work for the picture starts.

    Raises:
        ValueError: the name of the file ends with neither .svg nor .png.
        FileExistsError, FileNotFoundError: it exists, or the directory that should hold it does not.
        ModuleNotFoundError: matplotlib is not installed.
    """
    if not path.endswith((".svg", ".png")):
        raise ValueError(f"`{argument}` (={path!r}) must end with .svg or .png")
    require_matplotlib()
    atomic_files.check_new(path)


def save_new(picture: "Figure", path: str) -> None:
    """Writes `picture` like `save`, to a file that does not exist; it appears when it is complete."""
    with atomic_files.new_path(path) as place:
        save(picture, str(place))
