"""Elastic: a small llama with random initial weights learns to count, on a number of ranks that may change.

`python -m pipeshard.launch --nnodes 2:4 examples/elastic.py`, run four times on one machine (or, with --rdzv-endpoint,
once on each of four), trains four stages. You can stop and restart any of these processes, except the first, at any
time. After every step, rank 0 appends a line to `steps.txt` under --output. On one machine with GPUs, give process k
its own GPU with `CUDA_VISIBLE_DEVICES=k`.
"""

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import StackDataset
from transformers import LlamaConfig, LlamaForCausalLM

from pipeshard import ElasticJob, Engine, PipelinePlugin

SAMPLES, LENGTH, VOCABULARY = 96, 16, 64


def main() -> int:
    train(parse(sys.argv[1:]))
    dist.destroy_process_group()
    return 0


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--steps", type=int, default=200, help="optimizer steps")
    add("--pp", type=int, default=4, help="maximum number of pipeline stages")
    add("--every", type=int, default=10, help="steps between two saves")
    add("--workers", type=int, default=0, help="processes per rank that load data")
    add("--pause", type=float, default=0.0, help="seconds to wait after each step, to leave time to stop a rank")
    add("--output", type=Path, default=Path("outputs/elastic"), help="folder for all output")
    return parser.parse_args(arguments)


def train(args: argparse.Namespace) -> None:
    args.output.mkdir(parents=True, exist_ok=True)
    job = ElasticJob(args.output / "state", pp_size=args.pp, global_batch=12, microbatch_size=2, every=args.every)
    plugin = PipelinePlugin(**job.layout.arguments, max_norm=1.0)
    samples = {"batch_size": job.layout.batch_size, "shuffle": True, "seed": 0, "num_workers": args.workers}
    dataloader = plugin.prepare_dataloader(numbers(), **samples)
    torch.manual_seed(0)
    model = LlamaForCausalLM(config()).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / args.steps)
    booster = Engine(plugin)
    model, optimizer, _, dataloader, scheduler = booster.boost(model, optimizer, None, dataloader, scheduler)
    first, batches = job.resume(model, optimizer, scheduler, dataloader), endless(dataloader)
    for step in range(first, args.steps):
        out = booster.execute_pipeline(batches, model, None, optimizer)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            with (args.output / "steps.txt").open("a") as file:
                file.write(f"{step} {job.layout.pp_size} {job.layout.dp_size} {float(out['loss']):.9f}\n")
        time.sleep(args.pause)
        job.step_done()


def config() -> LlamaConfig:
    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        attention_dropout=0.1,
        tie_word_embeddings=True,
    )


def numbers() -> StackDataset[Any]:
    """Return a dataset of sequences that count in steps of 1 to 9, from various starts."""
    starts = torch.arange(SAMPLES).unsqueeze(1)
    ids: Any = (7 * starts + (1 + starts % 9) * torch.arange(LENGTH)) % VOCABULARY
    return StackDataset(input_ids=ids, labels=ids)


def endless(dataloader: Any) -> Iterator[Any]:
    while True:
        yield from dataloader


if __name__ == "__main__":
    sys.exit(main())
