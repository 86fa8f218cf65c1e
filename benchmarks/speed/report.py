"""Report: writes docs/benchmarks.md and its plots from the latest result of each section."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.speed import picture
from benchmarks.speed.parts.work import UNSPLIT, spread
from benchmarks.speed.section import Section

HEAD = """\
# Benchmarks

`make bench` measures everything on this page and writes the page. Each contender is a pair of processes with one thread
each, connected by gloo, on a machine with two CPU cores. The processes of a contender stay alive until the last round,
and are stopped (SIGSTOP) while another contender runs. In each round, every contender runs once. The order of the
contenders rotates from round to round. Round 0 is the warm-up, which is not timed. All contenders start from the same
weights. The benchmark compares the losses of all contenders step by step. A loss may differ from the median by at most
0.01 %.

The lists below the tables compare the results with targets. A line ends with "NOT MET" if a target was missed."""

PEERS = """\
## Requirements and limitations of the peers

- **torch** requires hand-written stages. torch does not support tied weights between stages, so the benchmark sums the
  gradients of both copies. A step fails if the length of a message differs from its length in the first step.
- **DeepSpeed** requires a list of layers, in which each layer is a module with one input. By default, DeepSpeed clips
  gradients to norm 1.0 (turned off here with `"gradient_clipping": 0.0`). With `dynamic_shape=False`, a batch of a new
  length is rejected, or read into a buffer that has the length of the first batch.
- **ColossalAI** 0.5.0 only supports transformers 4.51.3. To run ColossalAI on a CPU, the benchmark patches two
  functions in torch: ColossalAI's communication calls `is_hccl_available`, which only torch's builds for Ascend have,
  and ColossalAI's GPT-2 sets a CUDA device. ColossalAI's GPT-2 requires an `attention_mask` in addition to the ids.
  With sdpa, ColossalAI's GPT-2 attends to future tokens, so all contenders use eager attention for GPT-2. With
  `enable_metadata_cache=False`, which changing lengths require, ColossalAI pickles a header for every message."""

LEFT, RIGHT = 0.8, 1.2  # limits of the x axis: differences between bars that start at 0 are hard to see


def write(sections: Mapping[str, Section], folder: Path) -> None:
    lines = [HEAD, ""]
    if "work" in sections:
        _plot(sections["work"], folder / "benchmarks.svg")
        lines += ["![step time divided by the limit of 1F1B](benchmarks.svg)", ""]
    for section in sections.values():
        lines += section.markdown()
    page = "\n".join([*lines, PEERS, ""])
    (folder / "benchmarks.md").write_text(page)
    if "links" in sections and not sections["links"].failed:
        picture.draw(picture.rows(page), folder / "links.svg")


def _plot(section: Section, path: Path) -> None:
    """Plot the median ratio to the limit of 1F1B, with quartiles, in one panel per work."""
    works = {
        name: {c: spread(values) for c, values in figures["ratios"].items() if values and c != UNSPLIT.name}
        for name, figures in section.raw.items()
    }
    draw(works, path)


def draw(works: Mapping[str, Mapping[str, tuple[float, float, float]]], path: Path) -> None:
    """Plot `works`, which maps each work and contender to (lower quartile, median, upper quartile)."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=(10, 0.6 + 2.6 * -(-len(works) // 2)), layout="constrained")
    columns = min(2, len(works))
    grid = figure.subplots(-(-len(works) // columns), columns, squeeze=False, sharex=True).flat
    for axes, (name, shown) in zip(grid, works.items()):
        positions = range(len(shown))
        low, middle, high = zip(*shown.values())
        whiskers = _distances(low, middle), _distances(middle, high)
        colours = ["#56B4E9" if contender.startswith("pipeshard") else "#B8B8B0" for contender in shown]
        bars = axes.barh(positions, [m - LEFT for m in middle], 0.7, LEFT, color=colours, label="_")
        axes.errorbar(middle, positions, xerr=whiskers, fmt="none", ecolor="black", elinewidth=1, capsize=2)
        for bar, ratio in zip(bars, middle):
            if ratio > RIGHT:  # outside the plot
                axes.text(RIGHT, bar.get_y() + 0.35, f"{ratio:.2f} ", ha="right", va="center", fontsize=8)
        line = axes.axvline(1.0, color="#D55E00", linewidth=1)
        axes.set_xlim(LEFT, RIGHT)
        axes.set_yticks(positions, list(shown), fontsize=8)
        axes.invert_yaxis()
        axes.set_title(name, loc="left", fontsize=10, fontweight="bold")
        axes.spines[["top", "right"]].set_visible(False)
    kinds = [Patch(color="#56B4E9", label="pipeshard"), Patch(color="#B8B8B0", label="others"), line]
    line.set_label("limit of 1F1B, without communication and Python")
    figure.legend(handles=kinds, loc="outside upper right", ncols=3, frameon=False, fontsize=9)
    figure.supxlabel("time of a step over the limit of 1F1B (median and quartiles)", fontsize=9)
    figure.savefig(path)


def stored(page: str) -> dict[str, dict[str, tuple[float, float, float]]]:
    """Return the argument of `draw`, read from the tables of docs/benchmarks.md."""
    section = page.partition("## The same work")[2].partition("\n## ")[0]
    works: dict[str, dict[str, tuple[float, float, float]]] = {}
    for line in section.splitlines():
        if line.startswith("**"):
            rows = works.setdefault(line.strip("*"), {})
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 7 and " to " in cells[5] and cells[0] != UNSPLIT.name:
            low, high = map(float, cells[5].split(" to "))
            rows[cells[0]] = (low, float(cells[4]), high)
    return works


def _distances(left: Sequence[float], right: Sequence[float]) -> list[float]:
    return [b - a for a, b in zip(left, right)]
