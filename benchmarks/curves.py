"""Curves: the losses of SmolLM2-135M, fine-tuned in one process, and with two replicas of two stages.

`make curves` trains on the same batches both ways and draws docs/curves.svg. It fails if a loss differs by more than
`TOLERANCE`.
"""

import argparse
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.progress import track
from torch.multiprocessing.spawn import spawn
from torch.utils.data import DataLoader, StackDataset
from transformers import AutoModelForCausalLM, AutoTokenizer

sys.path.insert(0, "examples")

from finetune import docstrings, samples, source

TOLERANCE = 1e-3
BATCH, LENGTH, RATE, SEED = 4, 32, 5e-5, 0


def alone(rank: int, steps: int, output: Path, meeting: Path) -> None:
    """Train in one process, with plain torch."""
    _join(rank, 1, meeting)
    model, tokenizer = _loaded(AutoModelForCausalLM.from_pretrained)
    model.config.use_cache = False
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=RATE)
    losses = []
    for batch in track(_batches(tokenizer, BATCH, steps), "one process", total=steps):
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    torch.save(losses, output / "alone.pt")
    dist.destroy_process_group()


def replicas(rank: int, steps: int, output: Path, meeting: Path) -> None:
    """Train with two replicas of two stages. Each replica has half of every batch."""
    from colossalai.booster import Booster

    from pipeshard import PipelinePlugin

    _join(rank, 4, meeting)
    model, tokenizer = _loaded(partial(PipelinePlugin.from_pretrained, AutoModelForCausalLM))
    plugin = PipelinePlugin(pp_size=2, dp_size=2, num_microbatches=2, max_norm=1.0)
    data = plugin.prepare_dataloader(_samples(tokenizer), BATCH // 2, drop_last=True)
    booster = Booster(plugin=plugin)
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=RATE)
    boosted, optimizer, _, data, _ = booster.boost(model, optimizer, None, data)
    losses, batches = [], iter(data)
    for _ in track(range(steps), "two replicas of two stages", disable=rank > 0):
        losses.append(booster.execute_pipeline(batches, boosted, None, optimizer)["loss"].item())
        optimizer.step()
        optimizer.zero_grad()
    if rank == 0:
        torch.save(losses, output / "replicas.pt")
    dist.barrier()
    dist.destroy_process_group()


def draw(curves: dict[str, list[float]], path: Path) -> float:
    """Plot the curves above their difference. Returns the largest difference."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot as plt

    (first, one), (second, two) = curves.items()
    differences = [abs(a - b) for a, b in zip(one, two, strict=True)]
    figure, (above, below) = plt.subplots(2, 1, figsize=(7, 5), sharex=True, height_ratios=(3, 1), layout="constrained")
    above.plot(one, label=first, color="#4477aa", linewidth=3, alpha=0.5)
    above.plot(two, label=second, color="#cc3311", linewidth=1)
    above.set_ylabel("loss")
    above.legend()
    below.semilogy([max(d, 1e-9) for d in differences], color="#222222", linewidth=1)
    below.axhline(TOLERANCE, color="#cc3311", linestyle="--", linewidth=1)
    below.set(ylabel="difference", xlabel="step")
    figure.savefig(path)
    return max(differences)


def _join(rank: int, world: int, meeting: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{meeting}", rank=rank, world_size=world)


def _loaded(load: Callable[..., Any]) -> Any:
    """Return SmolLM2, loaded with `load`, and its tokenizer."""
    folder, weights = source("smollm2")
    model = load(folder, gguf_file=weights, dtype=torch.float32)
    return model, AutoTokenizer.from_pretrained(folder, gguf_file=weights)


def _samples(tokenizer: Any) -> Any:
    rows: Any = samples(tokenizer, docstrings(), LENGTH)
    return StackDataset(input_ids=rows, labels=rows)


def _batches(tokenizer: Any, size: int, steps: int) -> Any:
    loader = iter(DataLoader(_samples(tokenizer), size, drop_last=True))
    return (next(loader) for _ in range(steps))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--output", type=Path, default=Path("outputs/curves"))
    parser.add_argument("--plot", type=Path, default=Path("docs/curves.svg"))
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    for part, processes in ((alone, 1), (replicas, 4)):
        with tempfile.TemporaryDirectory() as folder:
            spawn(part, (args.steps, args.output, Path(folder) / "meeting"), nprocs=processes)
    curves = {name: torch.load(args.output / f"{name}.pt") for name in ("alone", "replicas")}
    worst = draw({"one process": curves["alone"], "2 replicas of 2 stages": curves["replicas"]}, args.plot)
    print(
        f"largest difference of {args.steps} losses: {worst:.2e}; {curves['alone'][0]:.3f} -> {curves['alone'][-1]:.3f}"
    )
    if worst > TOLERANCE:
        sys.exit(f"the curves differ by more than {TOLERANCE}")


if __name__ == "__main__":
    main()
