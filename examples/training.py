"""Training: one rank's run, from the weights to the charts, the saved model and the samples."""

import argparse
import itertools
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from colossalai.booster import Booster
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from torch.distributed.rendezvous import rendezvous
from torch.utils.data import Subset, default_collate
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from models import make_folder
from pipeshard import PipelinePlugin
from pipeshard.errors import PipeshardError
from pipeshard.runtime.recording import Recording
from text import Samples

PROMPT = "This module provides"
NEW_TOKENS = 40


def run(args: argparse.Namespace) -> int:
    """Run this rank from start to end; the exit status."""
    store, rank, world_size = next(rendezvous("env://"))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // local_ranks))
    transformers.set_seed(0)
    try:
        _run(args, Console(quiet=rank > 0, highlight=False))
    except PipeshardError as error:
        if store.add("errors", 1) == 1:  # most errors are every rank's: the first to fail tells
            Console(stderr=True, highlight=False).print(f"error: {error}", markup=False, soft_wrap=True)
        return 1
    dist.destroy_process_group()
    return 0


def _run(args: argparse.Namespace, console: Console) -> None:
    with console.status(f"loading {args.model}"):
        model, tokenizer = _load(args)
        samples = Samples(tokenizer, args.sequence_length)
    if not console.quiet:
        _print_sample(console, "before", model, tokenizer)
    model.train()

    training, held_out = _divided(samples, args.batch_size)
    plugin = PipelinePlugin(
        pp_size=args.pp,
        num_microbatches=args.microbatches,
        schedule=args.schedule,
        num_model_chunks=2 if args.schedule == "interleaved" else 1,
        max_norm=1.0,
    )
    dataloader = plugin.prepare_dataloader(training, batch_size=args.batch_size, shuffle=True, seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step, args.steps))
    booster = Booster(plugin=plugin)
    boosted = booster.boost(model, optimizer, _criterion, dataloader, scheduler)
    unseen = [_evaluate(booster, boosted[0], held_out)]
    losses, recording = _train(args, console, plugin, booster, *boosted)
    unseen.append(_evaluate(booster, boosted[0], held_out))

    folder = args.output / "model"
    booster.save_model(boosted[0], str(folder), shard=True)
    if console.quiet:
        return
    tokenizer.save_pretrained(folder)
    _plot_losses(losses, unseen, args.output / "loss.png")
    title = f"{args.model}, {args.schedule}, {args.microbatches} microbatches"
    recording.draw(args.output / "timeline.png", title=title)
    _print_sample(console, "after", AutoModelForCausalLM.from_pretrained(folder), tokenizer)
    console.print(f"loss on held-out text: {unseen[0]:.3f} before, {unseen[1]:.3f} after {args.steps} steps")
    console.print(f"wrote {args.output}/loss.png, {args.output}/timeline.png, {folder}/")


def _load(args: argparse.Namespace) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model, whole and in float32, and its tokenizer. Rank 0 makes the folder they are read from."""
    args.output.mkdir(parents=True, exist_ok=True)
    if dist.get_rank() == 0:
        make_folder(args.model, args.output)
    dist.barrier()
    folder = make_folder(args.model, args.output)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model, AutoTokenizer.from_pretrained(folder)


def _divided(samples: Samples, batch_size: int) -> tuple[Subset[Any], dict[str, torch.Tensor]]:
    """Samples to train on, and one batch, spread over all of them, to evaluate on."""
    step = max(1, len(samples) // (2 * batch_size))
    held_out = list(range(0, len(samples), step))[: 2 * batch_size]
    training = Subset(samples, [k for k in range(len(samples)) if k not in set(held_out)])
    return training, default_collate([samples[k] for k in held_out])


def _evaluate(booster: Booster, model: Any, batch: dict[str, torch.Tensor]) -> float:
    model.eval()
    with torch.no_grad():
        out = booster.execute_pipeline(iter([batch]), model, _criterion)
    model.train()
    return float(out["loss"])


def _criterion(outputs: Any, inputs: Any) -> torch.Tensor:
    return outputs.loss


def _rate(step: int, steps: int) -> float:
    """The learning rate's share of its maximum: up over the first tenth of the steps, then down to 0."""
    warmup = steps // 10 + 1
    return min((step + 1) / warmup, (steps - step) / (steps - warmup + 1))


def _train(
    args: argparse.Namespace,
    console: Console,
    plugin: PipelinePlugin,
    booster: Booster,
    model: Any,
    optimizer: Any,
    criterion: Any,
    dataloader: Any,
    scheduler: Any,
) -> tuple[list[float], Recording]:
    """All steps. Returns the loss of each, and how the last one ran."""
    losses: list[float] = []
    batches = _endless(dataloader)
    tokens = args.batch_size * args.sequence_length * (dist.get_world_size() // args.pp)
    with _Meter(console, args.steps) as meter:
        for _ in range(args.steps):
            start = time.perf_counter()
            out = booster.execute_pipeline(batches, model, criterion, optimizer)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            seconds = time.perf_counter() - start
            losses.append(float(out["loss"]))
            recording = plugin.recording()
            meter.advance(
                f"loss {losses[-1]:.3f}  {tokens / seconds:.0f} tokens/s  {1000 * seconds:.0f} ms/step  "
                f"bubble {recording.bubble:.0%} (simulated {recording.simulation().bubble:.0%})"
            )
    return losses, recording


def _endless(dataloader: Any) -> Iterator[Any]:
    for _ in itertools.count():
        yield from dataloader


class _Meter:
    """The progress bar on a terminal, a line for each step elsewhere."""

    def __init__(self, console: Console, steps: int) -> None:
        columns = (BarColumn(bar_width=6), TextColumn("{task.description}"))
        self.console, self.steps, self.done = console, steps, 0
        self.bar = Progress(*columns, console=console, disable=not console.is_terminal or console.quiet)
        self.task = self.bar.add_task(f"0/{steps}", total=steps)

    def __enter__(self) -> "_Meter":
        self.bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.bar.stop()

    def advance(self, status: str) -> None:
        self.done += 1
        line = f"{self.done}/{self.steps}  {status}"
        self.bar.update(self.task, completed=self.done, description=line)
        if not self.console.is_terminal:
            self.console.print(line, soft_wrap=True)


def _print_sample(console: Console, when: str, model: Any, tokenizer: PreTrainedTokenizerBase) -> None:
    """What `model` makes of the prompt, taking the likeliest token each time; repeating itself makes one less so."""
    inputs = tokenizer(PROMPT, return_tensors="pt").to(model.device)
    with torch.no_grad():
        tokens = model.eval().generate(
            **inputs,
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            repetition_penalty=1.2,
            pad_token_id=tokenizer.eos_token_id,
        )
    console.rule(f"sample {when}", align="left")
    console.print(tokenizer.decode(tokens[0], skip_special_tokens=True), markup=False)
    console.rule()


def _plot_losses(losses: Sequence[float], unseen: Sequence[float], path: Path) -> None:
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    steps = range(1, len(losses) + 1)
    axes.plot(steps, losses, ".", color="C0", alpha=0.5, label="step")
    axes.plot(steps, [statistics.fmean(losses[max(0, k - 5) : k]) for k in steps], color="C0", label="mean of last 5")
    axes.plot([0, len(losses)], unseen, "s--", color="C1", label="held-out text")
    axes.set(xlabel="step", ylabel="loss (nats a token)", title="Training loss")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.ticklabel_format(axis="y", useOffset=False)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)
