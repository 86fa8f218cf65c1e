"""Drawing: a program, or its timeline, as text or as a picture."""

import math
import os
from collections import defaultdict
from collections.abc import Sequence, Set
from typing import TYPE_CHECKING

from pipeshard.schedule.program import Action, Kind, Program
from pipeshard.schedule.simulate import Simulation, Span, simulate

if TYPE_CHECKING:
    from matplotlib.axes import Axes

RankSpans = Sequence[Sequence[Span]]

# Okabe and Ito's palette: distinguishable with any colour vision, and light enough for dark numbers.
_COLOURS = {Kind.F: "#56B4E9", Kind.B: "#E69F00", Kind.W: "#009E73"}
_NAMES = {Kind.F: "forward", Kind.B: "backward", Kind.W: "weight gradient"}
_DIGIT = 0.078  # the width of a digit in inches


def draw_text(program: Program | Simulation) -> str:
    """Draw a program as text: one line per rank, with time running to the right in cells of equal length. `..` is idle
    time, and `--` continues the last action.

    A Program is drawn with F = B = W = 1 cell and messages that take no time. The times of a Simulation are rounded to
    multiples of its shortest span. If a rank holds several stages, each cell names its stage, as in `F0@3`. For
    example, the Simulation of 1F1B with p=2, m=2:

        rank 0  F0 F1 .. .. B0 -- .. B1 --
        rank 1  .. F0 B0 -- F1 B1 -- .. ..
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
    """The nearest cell border. Halves are always rounded up, so that a span of at least one cell never disappears."""
    return math.floor(time + 0.5 + 1e-9)


def draw_timeline(
    panels: Sequence[tuple[str, RankSpans]], path: str | os.PathLike[str], title: str = "", relative: str = ""
) -> None:
    """Draw timelines as a Gantt chart to the file `path`, in the format that its suffix names (png, svg, pdf).

    Each panel is (label, rows), where `rows` contains the spans of each rank, with times in seconds or in the unit that
    `relative` names. Panels are drawn one above the other, such as the measured timeline above the simulated one, and
    share one time axis. A panel's time starts at its first span. The panel's duration and idle share are printed above
    the panel. If ranks hold several chunks of the model, later chunks are darker. The number in a bar is the index of
    the microbatch. Numbers that do not fit are omitted. The picture is at most about 24 by 16 inches. Requires
    matplotlib.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    longest = max((_extent(rows)[1] for _, rows in panels), default=0.0)
    chunks = max((len(_stages(row)) for _, rows in panels for row in rows), default=1)
    most = max((len(row) for _, rows in panels for row in rows), default=0)
    heights = [max(len(rows), 1) for _, rows in panels]
    width, height = min(max(12.0, 0.06 * most), 24.0), min(0.42, 14 / max(sum(heights), 1))
    figure = Figure(figsize=(width, 1.4 + height * sum(heights) + 0.4 * len(panels)), layout="constrained")
    column = figure.subplots(len(panels), sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    scale, unit = (1.0, "") if relative else (1.0, " s") if longest >= 2 else (1e3, " ms")
    column[-1].set(xlim=(0, longest * scale or 1), xlabel=f"time ({relative or unit.strip()})")
    for axes, (label, rows) in zip(column, panels):
        _draw_panel(axes, rows, scale, inch=(longest * scale or 1) / width, row_height=height)
        _, length = _extent(rows)
        axes.set_title(label, loc="left", fontsize=10, fontweight="bold")
        if length:
            idle = 1 - math.fsum(span.end - span.start for row in rows for span in row) / (len(rows) * length)
            axes.set_title(f"{length * scale:.4g}{unit}, {idle:.1%} idle", loc="right", fontsize=9)
    actions = {span.action for _, rows in panels for row in rows for span in row}
    kinds = {action.kind for action in actions}
    shades = [(kind, chunk) for kind in _COLOURS if kind in kinds for chunk in range(chunks)]
    called = _NAMES | {Kind.B: _backward(actions)}
    names = [called[kind] + (f", chunk {chunk + 1}" if chunks > 1 else "") for kind, chunk in shades]
    patches = [Patch(color=_shade(*shade), label=name) for shade, name in zip(shades, names)]
    figure.legend(handles=patches, loc="outside lower right", ncols=max(len(kinds), 1), frameon=False)
    figure.suptitle(title, fontweight="bold")
    figure.savefig(path, dpi=150)


def _backward(actions: Set[Action]) -> str:
    """The label of B in the legend. It depends on whether all, some or none of the B's have a W."""
    split = {Action(Kind.W, i, s) in actions for kind, i, s in actions if kind is Kind.B}
    if split == {False, True}:
        return "backward (input gradients if split)"
    return "input gradients" if True in split else _NAMES[Kind.B]


def _extent(rows: RankSpans) -> tuple[float, float]:
    """The start of the first span, and the duration from this start to the end of the last span."""
    start = min((span.start for row in rows for span in row), default=0.0)
    return start, max((span.end for row in rows for span in row), default=start) - start


def _stages(row: Sequence[Span]) -> list[int]:
    return sorted({span.action.stage for span in row})


def _shade(kind: Kind, chunk: int) -> str:
    """The colour of `kind` for a rank's chunk with the index `chunk`. Each chunk is two thirds as bright as the
    previous one."""
    return "#" + "".join(f"{int(int(_COLOURS[kind][k : k + 2], 16) * (2 / 3) ** chunk):02X}" for k in (1, 3, 5))


def _draw_panel(axes: "Axes", rows: RankSpans, scale: float, inch: float, row_height: float) -> None:
    """Draw a panel: the bars with their numbers, and the label of each row. `inch` is the duration that one inch
    represents, and `row_height` is the height of a row in inches."""
    start, length = _extent(rows)
    axes.barh(range(len(rows)), length * scale, height=0.84, color="#F1F1EE", zorder=0)
    for rank, row in enumerate(rows):
        chunks = _stages(row)
        bars: defaultdict[tuple[Kind, int], list[tuple[float, float]]] = defaultdict(list)
        for (kind, i, stage), begin, end in row:
            left, width, chunk = (begin - start) * scale, (end - begin) * scale, chunks.index(stage)
            bars[kind, chunk].append((left, width))
            if width > (len(str(i)) + 0.5) * _DIGIT * inch:
                colour = "white" if chunk else "black"
                axes.text(left + width / 2, rank, str(i), ha="center", va="center_baseline", size=7.5, color=colour)
        line = min(0.6, 7 * length * scale / inch / max(len(row), 1))  # a tenth of a bar, in points
        for shade, spans in bars.items():
            axes.broken_barh(spans, (rank - 0.42, 0.84), color=_shade(*shade), edgecolor="white", linewidth=line)
    names = [f"rank {rank}: {_held(_stages(row))}" for rank, row in enumerate(rows)]
    axes.set_yticks(range(len(rows)), names, size=min(10.0, 72 * 0.7 * row_height))
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)


def _held(stages: list[int]) -> str:
    return f"stage{'s' if len(stages) > 1 else ''} {', '.join(map(str, stages))}"
