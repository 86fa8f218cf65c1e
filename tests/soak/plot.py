"""Plot: the memory and objects of the ranks over all their lives, as docs/soak.svg."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tests.soak.course import SIZE
from tests.soak.lives import Life

COLOURS = ("#4477aa", "#228833", "#ccbb44")
KILLED, ENDED = "#cc3311", "#888888"


def draw(lives: Sequence[Life], path: Path) -> None:
    """Memory above file descriptors: the undisturbed run pale, the lives between restarts above it."""
    import matplotlib

    matplotlib.use("agg")
    matplotlib.rcParams["svg.hashsalt"] = "soak"  # else every run would write another file
    from matplotlib import pyplot as plt
    from matplotlib.lines import Line2D

    figure, (above, below) = plt.subplots(2, 1, figsize=(9, 6), sharex=True, height_ratios=(3, 1), layout="constrained")
    for life in lives:
        style = {"alpha": 0.35, "linewidth": 3} if life.stop is None else {"linewidth": 1.2}
        for rank in range(SIZE):
            steps = [line["step"] for line in life.lines[rank]]
            for axes, quantity in ((above, "rss"), (below, "fds")):
                axes.plot(steps, [line[quantity] for line in life.lines[rank]], color=COLOURS[rank], **style)
    for stop in (life.stop for life in lives[:-1] if life.stop is not None):
        colour, dashes = (ENDED, ":") if stop.victim is None else (KILLED, "--")
        for axes in (above, below):
            axes.axvline(stop.step, color=colour, linestyle=dashes, linewidth=1)
    most = max(line["rss"] for life in lives for lines in life.lines for line in lines)
    above.set(ylabel="resident memory, MiB", ylim=(most - 40, most + 10))
    below.set(ylabel="file descriptors", xlabel="step", ylim=(0, 70))
    above.legend(
        [Line2D([], [], color=colour) for colour in COLOURS]
        + [
            Line2D([], [], color="#222222", alpha=0.35, linewidth=3),
            Line2D([], [], color=KILLED, linestyle="--", linewidth=1),
            Line2D([], [], color=ENDED, linestyle=":", linewidth=1),
        ],
        [*(f"rank {rank}" for rank in range(SIZE)), "undisturbed run", "a rank is killed", "all ranks restart"],
        ncols=2,
        loc="lower right",
    )
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
