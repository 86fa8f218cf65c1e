"""Drawing: a program, or a time line of it, as text or as a picture."""

import math
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeGuard, cast

from pipeshard.schedule.program import Kind, Program
from pipeshard.schedule.simulate import Simulation, Span, simulate

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["draw_text", "draw_timeline"]

Rows = Sequence[Sequence[Span]]

# Okabe and Ito's palette, told apart with any colour vision: light enough to carry dark numbers.
_COLOURS = {Kind.F: "#56B4E9", Kind.B: "#E69F00", Kind.W: "#009E73"}
_NAMES = {Kind.F: "forward", Kind.B: "backward", Kind.W: "weight gradient"}
_INK, _FAINT = "#222222", "#F1F1EE"

_WIDTH, _ROW, _MARGIN = 12.0, 0.42, 0.9  # inches: the figure, one rank, and the space left of the time axis
_FONT = 7.5  # points, of the microbatch numbers


def draw_text(program: Program | Simulation) -> str:
    """One line a rank, time to the right, in cells of equal time; `..` is idle and `--` goes on with the last action.

    A Program is drawn with every compute action taking one cell and messages no time; a Simulation with its own
    times, rounded to its shortest span. Where a rank holds several stages, cells name theirs as in `F0@3`.

        rank 0  F0 F1 .. .. B0 -- B1 --
        rank 1  .. F0 B0 -- F1 B1 -- ..
    """
    simulation = program if isinstance(program, Simulation) else simulate(program, 1.0, 1.0, 1.0)
    placement = simulation.program.placement
    several = len(set(placement)) < len(placement)
    lengths = [span.end - span.start for row in simulation.spans for span in row]
    unit = min((length for length in lengths if length > 0), default=1.0)
    cells = [
        [(_label(span, several), _cell(span.start / unit), _cell(span.end / unit)) for span in row]
        for row in simulation.spans
    ]
    length = max((end for row in cells for _, _, end in row), default=0)
    width = max((len(label) for row in cells for label, _, _ in row), default=2)
    margin = len(str(len(cells) - 1))
    return "\n".join(f"rank {rank:<{margin}}  {_line(row, length, width)}".rstrip() for rank, row in enumerate(cells))


def _label(span: Span, several: bool) -> str:
    return str(span.action) if several else f"{span.action.kind}{span.action.microbatch}"


def _cell(time: float) -> int:
    """The nearest cell border; halves go up, always, so that a span of a cell or more is never rounded away."""
    return math.floor(time + 0.5 + 1e-9)


def _line(row: list[tuple[str, int, int]], length: int, width: int) -> str:
    line = ["." * width] * length
    for label, start, end in row:
        line[start:end] = [label.ljust(width), *["-" * width] * (end - start - 1)][: end - start]
    return " ".join(line)


def draw_timeline(
    rows: Rows | Sequence[tuple[str, Rows]], path: str | os.PathLike[str], title: str = "", subtitle: str = ""
) -> None:
    """Draw time lines as a Gantt chart into the file `path`, in the format that its suffix names (png, svg, pdf).

    `rows` has, for each rank, its spans with times in seconds; or it is a list of (label, rows), drawn as panels under
    each other on one time axis (say, measured above simulated). Each panel's time starts with its first span; its
    length and idle share stand above it. Needs matplotlib.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    panels = _panels(rows)
    longest = max((_extent(spans)[1] for _, spans in panels), default=0.0)
    scale, unit = (1.0, "s") if longest >= 2 else (1e3, "ms")
    heights = [_ROW * max(len(spans), 1) for _, spans in panels]
    top, gap, bottom = 0.55 + 0.25 * bool(title) + 0.25 * bool(subtitle), 0.5, 0.55
    total = top + sum(heights) + gap * (len(panels) - 1) + bottom
    figure = Figure(figsize=(_WIDTH, total), facecolor="white")
    y = total - top
    for (label, spans), height in zip(panels, heights, strict=True):
        y -= height
        box = (_MARGIN / _WIDTH, y / total, 1 - (_MARGIN + 0.25) / _WIDTH, height / total)
        axes = figure.add_axes(box, xlim=(0, longest * scale or 1))
        _draw_panel(axes, label, spans, scale, unit, box[2] * _WIDTH)
        y -= gap
    for axes in figure.axes[:-1]:
        axes.tick_params(labelbottom=False)
    figure.axes[-1].set_xlabel(f"time ({unit})", color=_INK)
    left = _MARGIN / _WIDTH
    figure.text(left, 1 - 0.14 / total, title, va="top", fontsize=13, fontweight="bold", color=_INK)
    below = 0.14 + 0.27 * bool(title)
    figure.text(left, 1 - below / total, subtitle, va="top", fontsize=9.5, color="#555555")
    kinds = {span.action.kind for _, spans in panels for row in spans for span in row}
    patches = [Patch(color=_COLOURS[kind], label=_NAMES[kind]) for kind in _COLOURS if kind in kinds]
    corner = (1 - 0.25 / _WIDTH, 1 - 0.08 / total)
    figure.legend(handles=patches, loc="upper right", bbox_to_anchor=corner, ncols=3, frameon=False, fontsize=9)
    figure.savefig(path, dpi=150)


def _panels(rows: Rows | Sequence[tuple[str, Rows]]) -> Sequence[tuple[str, Rows]]:
    return rows if _is_panels(rows) else [("", cast(Rows, rows))]


def _is_panels(rows: Rows | Sequence[tuple[str, Rows]]) -> TypeGuard[Sequence[tuple[str, Rows]]]:
    return len(rows) > 0 and len(rows[0]) > 0 and isinstance(rows[0][0], str)


def _extent(rows: Rows) -> tuple[float, float]:
    """When the first span starts, and how long it is from there to the end of the last."""
    start = min((span.start for row in rows for span in row), default=0.0)
    return start, max((span.end for row in rows for span in row), default=start) - start


def _draw_panel(axes: "Axes", label: str, rows: Rows, scale: float, unit: str, inches: float) -> None:
    start, length = _extent(rows)
    busy = math.fsum(span.end - span.start for row in rows for span in row)
    axes.barh(range(len(rows)), length * scale, height=0.84, color=_FAINT, zorder=0)
    for rank, row in enumerate(rows):
        for kind, colour in _COLOURS.items():
            spans = [span for span in row if span.action.kind is kind]
            bars = [((span.start - start) * scale, (span.end - span.start) * scale) for span in spans]
            axes.broken_barh(bars, (rank - 0.42, 0.84), facecolors=colour, edgecolors="white", linewidth=0.6)
            for span, (left, width) in zip(spans, bars, strict=True):
                _number(axes, str(span.action.microbatch), left, width, rank, inches)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_yticks(range(len(rows)), [_row_label(rank, row) for rank, row in enumerate(rows)], color=_INK)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", colors="#555555", labelsize=9)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color("#BBBBBB")
    axes.set_title(label, loc="left", fontsize=10, fontweight="bold", color=_INK, pad=5)
    if busy:
        idle = 1 - busy / (len(rows) * length)
        axes.set_title(f"{length * scale:.4g} {unit}, {idle:.1%} idle", loc="right", fontsize=9, color="#555555", pad=5)


def _number(axes: "Axes", text: str, left: float, width: float, rank: int, inches: float) -> None:
    """Write a microbatch's number into its box, if it fits: a digit is about 0.65 of the font size wide."""
    available = width / axes.get_xlim()[1] * inches * 72  # points
    if available > len(text) * _FONT * 0.65 + 1.5:
        axes.text(left + width / 2, rank, text, ha="center", va="center_baseline", fontsize=_FONT, color=_INK)


def _row_label(rank: int, row: Sequence[Span]) -> str:
    stages = sorted({span.action.stage for span in row})
    if not stages:
        return f"rank {rank}"
    return f"stage{'s' * (len(stages) > 1)} {', '.join(map(str, stages))}"
