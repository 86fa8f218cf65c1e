"""The report: docs/benchmarks.md, of the sections that were measured last, and its picture."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.speed import picture
from benchmarks.speed.parts.work import UNSPLIT, spread
from benchmarks.speed.section import Section

HEAD = """\
# Benchmarks

`make bench` measures all of this and writes this page. Two processes of one thread each, on a machine of two cores;
gloo. Every contender is a pair of processes that stays alive and is stopped while others run; in each round each of
them has one turn, at a place that changes from round to round. All of them start from the same weights, and their
losses are compared after every step: they may differ by 1e-4 at most."""

PEERS = """\
## What the peers need, and do

- **torch** takes hand-written stages, knows no tied weights (the script sums both copies' gradients), and ends the
  process when a message has another length than in the first step.
- **DeepSpeed** takes a list of layers, each a module of one input; it clips gradients to norm 1.0 unless it is told
  not to (`"gradient_clipping": 0.0` here), and with `dynamic_shape=False` a new length is refused or read into a
  buffer of the first.
- **ColossalAI** 0.5.0 runs transformers 4.51.3 only. On a CPU its messages ask torch for `is_hccl_available`, and
  its GPT-2 sets a CUDA device: both are patched here. GPT-2 needs an `attention_mask` beside the ids, and with sdpa
  attends to future tokens, so GPT-2 has eager attention here, for all contenders. With a changing length
  `enable_metadata_cache=False` pickles a header a message."""

LEFT, RIGHT = 0.8, 1.2  # of the picture; bars that begin at 0 look alike


def write(sections: Mapping[str, Section], folder: Path) -> None:
    lines = [HEAD, ""]
    if "work" in sections:
        _plot(sections["work"], folder / "benchmarks.svg")
        lines += ["![time of a step over the limit of 1F1B](benchmarks.svg)", ""]
    for section in sections.values():
        lines += section.markdown()
    page = "\n".join([*lines, PEERS, ""])
    (folder / "benchmarks.md").write_text(page)
    if "links" in sections and not sections["links"].failed:
        picture.draw(picture.rows(page), folder / "links.svg")


def _plot(section: Section, path: Path) -> None:
    """The median ratio to 1F1B's limit, from quartile to quartile; a panel for each work."""
    works = {
        name: {c: spread(values) for c, values in figures["ratios"].items() if values and c != UNSPLIT.name}
        for name, figures in section.raw.items()
    }
    draw(works, path)


def draw(works: Mapping[str, Mapping[str, tuple[float, float, float]]], path: Path) -> None:
    """Lower quartile, median and upper quartile of each contender, in each work."""
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
            if ratio > RIGHT:  # off the picture
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
    """What `draw` takes, from the tables of docs/benchmarks.md."""
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
