"""Chart: the memory of each rank, as bars."""

from collections.abc import Mapping, Sequence
from pathlib import Path


def draw(bars: Mapping[str, Sequence[float]], title: str, path: Path) -> None:
    """Draw a group of bars for each rank, of so many GiB."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3.5), layout="constrained")
    axes, width = figure.subplots(), 0.8 / len(bars)
    for k, (label, sizes) in enumerate(bars.items()):
        places = [rank + (k - (len(bars) - 1) / 2) * width for rank in range(len(sizes))]
        axes.bar_label(axes.bar(places, sizes, width, label=label), fmt="%.2f", fontsize=8)
    axes.set(title=title, xlabel="rank", ylabel="GiB", xticks=range(max(map(len, bars.values()))))
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=150)
