"""Picture: plots the time of a step and the memory of a rank between two hosts, from the rows of docs/benchmarks.md.

`python -m benchmarks.speed.picture` draws docs/links.svg. `make bench` does this after it has written the page.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path

from benchmarks.speed.contender import ROOT

SHOWN = ("pipeshard zbv", "pipeshard 1f1b", "torch 1F1B", "FSDP2, once a step", "FSDP2, each microbatch")
TITLES = {
    "no limit (ms)": "no limit: s per step",
    "1 Gbit/s (ms)": "1 Gbit/s: s per step",
    "100 Mbit/s (ms)": "100 Mbit/s: s per step",
    "memory (MB)": "memory per rank: MB",
}
CAPTION = (
    "llama of 21 M parameters, 16×128 tokens per step, fp32, AdamW. Measured on a machine of two CPU cores: two ranks, "
    "each in a network\nnamespace with one thread, on a link of this rate (tc tbf). Medians of three rounds, and "
    "quartiles. Memory: resident set, Python included."
)


def rows(page: str) -> dict[str, dict[str, str]]:
    """Return the cells of the table "Between two hosts", by contender and column."""
    section = page.partition("## Between two hosts")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")]
    (_, *columns), _, *cells = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    return {name: dict(zip(columns, values)) for name, *values in cells}


def described(table: Mapping[str, Mapping[str, str]]) -> Iterator[str]:
    """Yield the content of the plot, one line per contender. The SVG file contains these lines, too."""
    for name in SHOWN:
        yield f"{name}: {'; '.join(f'{column} {table[name][column]}' for column in TITLES)}"


def draw(table: Mapping[str, Mapping[str, str]], path: Path) -> None:
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 2.6), layout="constrained", facecolor="white")  # readable on dark pages, too
    panels = figure.subplots(1, len(TITLES), sharey=True)
    for axes, (column, title) in zip(panels, TITLES.items()):
        cells = [_numbers(table[name][column]) for name in SHOWN]
        most = max(high for *_, high in cells)
        for place, (name, (middle, low, high)) in enumerate(zip(SHOWN, cells)):
            axes.barh(place, middle, 0.7, color="#56B4E9" if name.startswith("pipeshard") else "#B8B8B0")
            axes.plot([low, high], [place, place], color="black", linewidth=1)
            shown = f"{middle / 1000:.2f}" if "(ms)" in column else f"{middle:.0f}"
            axes.text(high + 0.02 * most, place, shown, va="center", size=9)
        axes.set(xlim=(0, 1.25 * most), xticks=[])
        axes.set_title(title, size=9)
        axes.spines[["top", "right", "bottom"]].set_visible(False)
        axes.tick_params(length=0, labelsize=9)
    panels[0].set_yticks(range(len(SHOWN)), SHOWN)
    panels[0].invert_yaxis()
    figure.supxlabel(CAPTION, size=8, x=0.01, ha="left")
    with rc_context({"svg.hashsalt": "links"}):  # the same rows give the same file
        figure.savefig(path, metadata={"Date": None, "Description": "\n".join(described(table))})


def _numbers(cell: str) -> tuple[float, float, float]:
    """Return the median and quartiles of `1798 (1783 to 1993)`; for `856`, all three are 856."""
    numbers = [float(word) for word in cell.replace("(", "").replace(")", "").replace(" to ", " ").split()]
    return (numbers[0], numbers[-2], numbers[-1]) if len(numbers) > 1 else (numbers[0],) * 3


if __name__ == "__main__":
    draw(rows((ROOT / "docs" / "benchmarks.md").read_text()), ROOT / "docs" / "links.svg")
