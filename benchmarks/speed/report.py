"""The report: docs/benchmarks.md, of the sections that were measured last, and its picture."""

from collections.abc import Mapping, Sequence
from pathlib import Path

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


def write(sections: Mapping[str, Section], folder: Path) -> None:
    lines = [HEAD, ""]
    if "work" in sections:
        _plot(sections["work"], folder / "benchmarks.svg")
        lines += ["![time of a step over the limit of 1F1B](benchmarks.svg)", ""]
    for section in sections.values():
        lines += section.markdown()
    (folder / "benchmarks.md").write_text("\n".join([*lines, PEERS, ""]))


def _plot(section: Section, path: Path) -> None:
    """Bars of the median ratio to 1F1B's limit, whiskers from quartile to quartile; a panel for each work."""
    from matplotlib.figure import Figure

    works = {name: figures["ratios"] for name, figures in section.raw.items()}
    figure = Figure(figsize=(10, 0.6 + 2.6 * -(-len(works) // 2)), layout="constrained")
    columns = min(2, len(works))
    grid = figure.subplots(-(-len(works) // columns), columns, squeeze=False, sharex=True).flat
    for axes, (name, ratios) in zip(grid, works.items()):
        shown = {
            contender: spread(values) for contender, values in ratios.items() if values and contender != UNSPLIT.name
        }
        positions = range(len(shown))
        low, middle, high = zip(*shown.values())
        whiskers = _distances(low, middle), _distances(middle, high)
        colours = ["#56B4E9" if contender.startswith("pipeshard") else "#B8B8B0" for contender in shown]
        axes.barh(positions, middle, 0.7, color=colours, xerr=whiskers, error_kw={"elinewidth": 1, "capsize": 2})
        axes.axvline(1.0, color="#D55E00", linewidth=1)
        axes.set_yticks(positions, list(shown), fontsize=8)
        axes.invert_yaxis()
        axes.set_title(name, loc="left", fontsize=10, fontweight="bold")
        axes.spines[["top", "right"]].set_visible(False)
    figure.supxlabel("time of a step over the limit of 1F1B (median and quartiles)", fontsize=9)
    figure.savefig(path)


def _distances(left: Sequence[float], right: Sequence[float]) -> list[float]:
    return [b - a for a, b in zip(left, right)]
