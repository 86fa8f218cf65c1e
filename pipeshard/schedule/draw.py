"""Drawing: a program, or a time line of it, as text or as a picture."""

import math
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pipeshard.schedule.program import Kind, Program
from pipeshard.schedule.simulate import Simulation, Span, simulate

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Rows = Sequence[Sequence[Span]]

# Okabe and Ito's palette, told apart with any colour vision: light enough to carry dark numbers.
_COLOURS = {Kind.F: "#56B4E9", Kind.B: "#E69F00", Kind.W: "#009E73"}
_NAMES = {Kind.F: "forward", Kind.B: "backward", Kind.W: "weight gradient"}
_DIGIT = 0.0065  # the width of a digit, as a share of the time axis


def draw_text(program: Program | Simulation) -> str:
    """One line a rank, time to the right, in cells of equal time; `..` is idle and `--` goes on with the last action.

    A Program is drawn with every compute action taking one cell and messages no time; a Simulation with its own
    times, rounded to its shortest span. Where a rank holds several stages, cells name theirs as in `F0@3`.

        rank 0  F0 F1 .. .. B0 -- B1 --
        rank 1  .. F0 B0 -- F1 B1 -- ..
    """
    simulation = program if isinstance(program, Simulation) else simulate(program, 1.0, 1.0, 1.0)
    rows, placement = simulation.spans, simulation.program.placement
    several = len(set(placement)) < len(placement)
    labels = [[str(span.action) if several else str(span.action).split("@")[0] for span in row] for row in rows]
    width = max((len(label) for row in labels for label in row), default=2)
    unit = min((span.end - span.start for row in rows for span in row if span.end > span.start), default=1.0)
    length = _cell(simulation.makespan / unit)
    margin = len(str(len(rows) - 1))
    lines = []
    for rank, row in enumerate(rows):
        cells = ["." * width] * length
        for label, span in zip(labels[rank], row):
            start, end = _cell(span.start / unit), _cell(span.end / unit)
            cells[start:end] = [label.ljust(width), *["-" * width] * (end - start - 1)][: end - start]
        lines.append(f"rank {rank:<{margin}}  {' '.join(cells)}".rstrip())
    return "\n".join(lines)


def _cell(time: float) -> int:
    """The nearest cell border; halves go up, always, so that a span of a cell or more is never rounded away."""
    return math.floor(time + 0.5 + 1e-9)


def draw_timeline(panels: Sequence[tuple[str, Rows]], path: str | os.PathLike[str], title: str = "") -> None:
    """Draw time lines as a Gantt chart into the file `path`, in the format that its suffix names (png, svg, pdf).

    Each panel is (label, rows) with, for each rank, its spans with times in seconds; all are drawn under each other on
    one time axis (say, measured above simulated). A panel's time starts with its first span; its length and idle
    share stand above it. Needs matplotlib.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    longest = max((_extent(rows)[1] for _, rows in panels), default=0.0)
    scale, unit = (1.0, "s") if longest >= 2 else (1e3, "ms")
    heights = [max(len(rows), 1) for _, rows in panels]
    size = (12, 1.4 + 0.42 * sum(heights) + 0.4 * len(panels))
    figure = Figure(figsize=size, layout="constrained")
    column = figure.subplots(len(panels), sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    column[-1].set(xlim=(0, longest * scale or 1), xlabel=f"time ({unit})")
    for axes, (label, rows) in zip(column, panels):
        _draw_panel(axes, label, rows, scale, unit)
    kinds = {span.action.kind for _, rows in panels for row in rows for span in row}
    patches = [Patch(color=_COLOURS[kind], label=_NAMES[kind]) for kind in _COLOURS if kind in kinds]
    figure.legend(handles=patches, loc="outside lower right", ncols=3, frameon=False)
    figure.suptitle(title, fontweight="bold")
    figure.savefig(path, dpi=150)


def _extent(rows: Rows) -> tuple[float, float]:
    """When the first span starts, and how long it is from there to the end of the last."""
    start = min((span.start for row in rows for span in row), default=0.0)
    return start, max((span.end for row in rows for span in row), default=start) - start


def _draw_panel(axes: "Axes", label: str, rows: Rows, scale: float, unit: str) -> None:
    start, length = _extent(rows)
    axes.barh(range(len(rows)), length * scale, height=0.84, color="#F1F1EE", zorder=0)
    for rank, span in ((rank, span) for rank, row in enumerate(rows) for span in row):
        action, left, width = span.action, (span.start - start) * scale, (span.end - span.start) * scale
        axes.barh(rank, width, 0.84, left, color=_COLOURS[action.kind], edgecolor="white", linewidth=0.6)
        number = str(action.microbatch)
        if width > (len(number) + 0.5) * _DIGIT * axes.get_xlim()[1]:
            axes.text(left + width / 2, rank, number, ha="center", va="center_baseline", fontsize=7.5)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    stages = [sorted({span.action.stage for span in row}) for row in rows]
    axes.set_yticks(range(len(rows)), [f"stage {', '.join(map(str, held))}" for held in stages])
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.set_title(label, loc="left", fontsize=10, fontweight="bold")
    if length:
        idle = 1 - math.fsum(span.end - span.start for row in rows for span in row) / (len(rows) * length)
        axes.set_title(f"{length * scale:.4g} {unit}, {idle:.1%} idle", loc="right", fontsize=9)
