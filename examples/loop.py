"""Loop: the steps of an example on one rank, with a progress bar, evaluations on held-out data, and a plot."""

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from torch import Tensor, nn
from torch.utils.data import Dataset

from pipeshard import Engine, PipelinePlugin

Batch = Mapping[str, Tensor]
EVALUATIONS = 10  # at most, beside the one before training; short runs are not mostly evaluation


def make_booster(args: argparse.Namespace) -> Engine:
    plugin = PipelinePlugin(
        pp_size=args.pp,
        dp_size=args.dp,
        num_microbatches=args.microbatches,
        schedule=args.schedule,
        num_model_chunks=2 if args.schedule == "interleaved" else 1,
        max_norm=1.0,
    )
    return Engine(plugin)


@dataclass(frozen=True)
class Metric:
    """A name, and which answers are right: bools, by the likeliest classes and the batch they were predicted for."""

    name: str
    right: Callable[[Tensor, Batch], Tensor]


@dataclass(frozen=True)
class Score:
    """How a model did on held-out data after so many steps: its loss, and the share of right answers."""

    step: int
    loss: float
    right: float


class Loop:
    """A model that trains behind `booster`: `step` and `evaluate` it as you like, or `run` all of `args.steps`."""

    def __init__(
        self,
        args: argparse.Namespace,
        booster: Engine,
        model: nn.Module,
        training: Dataset[Any],
        held_out: Batch,
        metric: Metric | None = None,
    ) -> None:
        dataloader = booster.plugin.prepare_dataloader(training, batch_size=args.batch_size, shuffle=True, seed=0)
        optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step, args.steps))
        boosted = booster.boost(model.train(), optimizer, None, dataloader, scheduler)
        self.model, self.optimizer, _, dataloader, self.scheduler = boosted
        self.booster, self.batches = booster, _endless(dataloader)
        self.steps, self.held_out, self.metric = args.steps, held_out, metric
        self.losses: list[float] = []
        self.scores: list[Score] = []

    def step(self) -> float:
        """One optimizer step; the seconds it took."""
        start = time.perf_counter()
        out = self.booster.execute_pipeline(self.batches, self.model, None, self.optimizer)
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        self.losses.append(float(out["loss"]))
        return time.perf_counter() - start

    def evaluate(self) -> Score:
        """Forward alone, over the held-out batch; the same on every rank."""
        self.model.eval()
        with torch.no_grad():
            out = self.booster.execute_pipeline(
                iter([self.held_out]), self.model, None, return_outputs=self.metric is not None
            )
        self.model.train()
        answers = torch.zeros(2)  # how many are right, and how many there are
        if self.metric is not None and out["outputs"] is not None:  # on the rank that the last stage is on
            right = self.metric.right(out["outputs"].logits.argmax(-1).cpu(), self.held_out)
            answers += torch.tensor([right.sum(), right.numel()])
        dist.all_reduce(answers)
        self.scores.append(Score(len(self.losses), float(out["loss"]), float(answers[0] / answers[1])))
        return self.scores[-1]

    def run(self, console: Console) -> None:
        """All steps, evaluated before, after and in between."""
        name = self.metric.name if self.metric else ""
        times = min(EVALUATIONS, max(1, self.steps // 3))
        evaluated = {round(self.steps * k / times) for k in range(1, times + 1)}
        self.evaluate()
        with Meter(console, self.steps) as meter:
            for k in range(1, self.steps + 1):
                seconds = self.step()
                if k in evaluated:
                    self.evaluate()
                status = f"loss {self.losses[-1]:.3f}  {1000 * seconds:.0f} ms/step"
                meter.advance(
                    f"{status}  held-out: loss {self.scores[-1].loss:.3f}, {name} {self.scores[-1].right:.1%}"
                )

    def run_and_save(self, console: Console, what: str, folder: Path) -> None:
        """All steps, the trained model in `folder`/model, and the report."""
        self.run(console)
        self.booster.save_model(self.model, str(folder / "model"), shard=True)
        self.report(console, what, folder)

    def report(self, console: Console, what: str, folder: Path) -> None:
        """Draw the plot, and tell on how much of `what` the model was right before and after."""
        if console.quiet or self.metric is None:
            return
        folder.mkdir(parents=True, exist_ok=True)
        draw(self.losses, self.scores, folder / "training.png", self.metric.name)
        before, after = self.scores[0], self.scores[-1]
        console.print(
            f"{self.metric.name} on {what}: {before.right:.1%} before, {after.right:.1%} after {after.step} steps "
            f"(loss {before.loss:.3f}, {after.loss:.3f})",
            soft_wrap=True,
        )
        console.print(f"wrote {', '.join(sorted(str(path) for path in folder.iterdir()))}", soft_wrap=True)


def _rate(step: int, steps: int) -> float:
    """The learning rate's share of its maximum: up over the first tenth of the steps, then down to 0."""
    warmup = steps // 10 + 1
    return min((step + 1) / warmup, (steps - step) / (steps - warmup + 1))


def _endless(dataloader: Any) -> Iterator[Any]:
    for _ in itertools.count():
        yield from dataloader


class Meter:
    """The progress bar on a terminal, a line for each of at most about 40 steps elsewhere."""

    def __init__(self, console: Console, steps: int) -> None:
        columns = (BarColumn(bar_width=6), TextColumn("{task.description}"))
        self.console, self.steps, self.done = console, steps, 0
        self.bar = Progress(*columns, console=console, disable=not console.is_terminal or console.quiet)
        self.task = self.bar.add_task(f"0/{steps}", total=steps)

    def __enter__(self) -> "Meter":
        self.bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.bar.stop()

    def advance(self, status: str) -> None:
        self.done += 1
        line = f"{self.done}/{self.steps}  {status}"
        self.bar.update(self.task, completed=self.done, description=line)
        if not self.console.is_terminal and (self.done % max(1, self.steps // 40) == 0 or self.done == self.steps):
            self.console.print(line, soft_wrap=True)


def draw(losses: Sequence[float], scores: Sequence[Score], path: Path, metric: str = "") -> None:
    """The loss of every step and on held-out data, and beside it, where it has a name, the metric."""
    figure = Figure(figsize=(11 if metric else 7, 4), layout="constrained")
    panels = figure.subplots(1, 2 if metric else 1, squeeze=False)[0]
    done = range(1, len(losses) + 1)
    steps = [score.step for score in scores]
    panels[0].plot(done, losses, ".", color="C0", alpha=0.5, label="step")
    if len(losses) > 5:
        means = [statistics.fmean(losses[k - 5 : k]) for k in done[4:]]
        panels[0].plot(done[4:], means, color="C0", label="mean of last 5")
    # A line would be a course that nobody measured.
    panels[0].plot(steps, [score.loss for score in scores], "s", color="C1", label="held out")
    panels[0].set(ylabel="loss (nats)", title="Loss")
    panels[0].ticklabel_format(axis="y", useOffset=False)
    panels[0].legend()
    if metric:
        panels[1].plot(steps, [score.right for score in scores], "s", color="C1")
        panels[1].set(ylabel=metric, title=f"{metric.capitalize()} on held-out data", ylim=(0, 1.02))
        panels[1].yaxis.set_major_formatter(PercentFormatter(1.0))
    for axes in panels:
        axes.set_xlabel("step")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=150)
