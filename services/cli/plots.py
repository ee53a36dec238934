"""What every figure of `xds bench --plot` shares: where it goes, what draws it, how it looks.

matplotlib is an extra (`plot`) and is imported only when a figure is drawn. The folder and the
library are looked at before anything is measured, so that a mistake costs no minute of waiting.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from libs.errors import BadInput

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Colours that people with any colour vision tell apart (Okabe and Ito), and that of what is
#: published.
BLUE, ORANGE, GREEN, PURPLE = "#0072B2", "#D55E00", "#009E73", "#8A4F7D"
GREY, PUBLISHED = "#5A5A5A", "#B8860B"
_STYLE: Any = {
    "font.size": 10,
    "axes.titlesize": 12,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": GREY,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#E4E4E4",
    "grid.linewidth": 0.7,
    "lines.linewidth": 2.0,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "figure.dpi": 150,
    "svg.hashsalt": "xds",
}


def prepare(folder: Path) -> Path:
    """The folder, made if need be; raises `BadInput` when no figure can be drawn into it."""
    try:
        import matplotlib

        matplotlib.use("Agg")
    except ImportError as error:
        text = f'--plot needs matplotlib ({error}): pip install "xdeepserve[plot]"'
        raise BadInput(text, field="plot") from error
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(f"--plot {folder}: {error.strerror}", field="plot") from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise BadInput(f"--plot {folder}: nothing can be written there", field="plot")
    return folder


@contextmanager
def figure(columns: int, width: float, height: float) -> Iterator[tuple[Figure, list[Axes]]]:
    """An empty figure of `columns` panels in the house style, closed again at the end."""
    from matplotlib import pyplot, rc_context

    with rc_context(_STYLE):
        drawn, axes = pyplot.subplots(
            1, columns, figsize=(width, height), squeeze=False, layout="constrained"
        )
        try:
            yield drawn, list(axes[0])
        finally:
            pyplot.close(drawn)


def save(drawn: Figure, folder: Path, name: str) -> list[str]:
    """Write `name` as PNG and SVG; raises `BadInput` when the disk refuses."""
    paths = [folder / f"{name}.{ending}" for ending in ("png", "svg")]
    try:
        for path in paths:
            # Without a date, so that an unchanged figure is an unchanged file.
            drawn.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    except OSError as error:
        raise BadInput(f"--plot {folder}: {error.strerror}", field="plot") from error
    return [str(path) for path in paths]


def plain_log(axis: Axes, ticks: Iterable[float]) -> None:
    """A logarithmic vertical axis with plain numbers at `ticks`."""
    from matplotlib.ticker import NullLocator

    places = list(ticks)
    axis.set_yscale("log")
    axis.set_yticks(places, [f"{place:g}" for place in places])
    axis.yaxis.set_minor_locator(NullLocator())


def sizes_axis(axis: Axes, sizes: Iterable[int]) -> None:
    """A logarithmic axis of bytes with a tick at each of `sizes`."""
    from matplotlib.ticker import NullLocator

    ticks = list(sizes)
    axis.set_xscale("log", base=2)
    axis.set_xticks(ticks, [size_name(size) for size in ticks])
    axis.xaxis.set_minor_locator(NullLocator())


def size_name(nbytes: int) -> str:
    """512 B, 36 KB, 9 MB."""
    if nbytes < 1024:
        return f"{nbytes} B"
    return f"{nbytes // 1024} KB" if nbytes < 9216 * 1024 else f"{nbytes >> 20} MB"


def footnote(drawn: Figure, text: str) -> None:
    """One small line under the figure that says what was measured on what."""
    drawn.supxlabel(text, fontsize=8, color=GREY, x=0.01, ha="left")


def note(axis: Axes, text: str, at: tuple[float, float], color: str, **about: Any) -> None:
    """A line of text beside the point `at`, `about` as for `Axes.annotate`."""
    options = {"xytext": (8, 0), "textcoords": "offset points", "fontsize": 9, **about}
    axis.annotate(text, at, color=color, **options)


def draw_all(
    report: dict[str, Any],
    folder: Path,
    drawings: Iterable[Callable[[dict[str, Any], Path], list[str]]],
) -> list[str]:
    """Every drawing that the report has rows for; returns the files written."""
    return [path for drawing in drawings for path in drawing(report, folder)]
