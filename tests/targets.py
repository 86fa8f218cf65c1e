"""Targets: GPT-2 (tied) and llama, trained by each runtime that accepts a split model, with the real packages.

`python -m tests.targets PYTHON ...` compares the losses of every target with those of one process; `make targets`
passes the Python of DeepSpeed's environment as the second PYTHON. The command starts its ranks with --target.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipeshard import build
from tests import zoo

MODELS = {"gpt2": [f"transformer.h.{k}" for k in range(3)], "llama": [f"model.layers.{k}" for k in range(3)]}
RANKS, STEPS, M, RATE, TOLERANCE = 4, 5, 4, 1e-3, 1e-5
TARGETS = ("one process", "colossalai", "torch", "deepspeed")


def batch(name: str, seed: int) -> dict[str, Tensor]:
    """A batch whose samples have equal numbers of labels: not every runtime weights microbatches by them."""
    data = zoo.batch(name, seed=seed)
    return {**data, "labels": data["input_ids"].clone()}


def microbatches(data: dict[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    for k in range(M):
        yield zoo.part(data, k, [len(data["labels"]) // M] * M)


def one_process(name: str) -> Iterator[float]:
    model = build(zoo.build(name), MODELS[name], batch=batch(name, 0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    for seed in range(STEPS):
        loss = model(**batch(name, seed)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()


def colossalai(name: str) -> Iterator[float]:
    adamw = {"optimizer": lambda parameters: torch.optim.AdamW(parameters, lr=RATE)}
    built = build(zoo.build(name), MODELS[name], "colossalai", batch(name, 0), num_microbatches=M, **adamw)
    for seed in range(STEPS):
        out = built.booster.execute_pipeline(iter([batch(name, seed)]), built.model, None, built.optimizer)
        built.optimizer.step()
        built.optimizer.zero_grad()
        yield float(out["loss"])


def by_torch(name: str) -> Iterator[float]:
    from torch.distributed.pipelining import Schedule1F1B

    built = build(zoo.build(name), MODELS[name], "torch", next(microbatches(batch(name, 0))))
    schedule = Schedule1F1B(built.stages[0], M, loss_fn=built.loss_fn)
    optimizer = torch.optim.AdamW(built.parameters(), lr=RATE)
    for seed in range(STEPS):
        data, losses = batch(name, seed), list[Tensor]()
        schedule.step(**data, target=data["labels"], losses=losses, return_outputs=False)
        built.sync_gradients()
        optimizer.step()
        built.zero_grad()
        if losses:
            yield float(torch.stack(losses).mean())


def by_deepspeed(name: str) -> Iterator[float]:
    import deepspeed  # type: ignore[import-not-found]

    module = build(zoo.build(name), MODELS[name], "deepspeed", next(microbatches(batch(name, 0))))
    adamw = {"lr": RATE, "weight_decay": 0.01, "torch_adam": True, "adam_w_mode": True}
    config = {
        "train_micro_batch_size_per_gpu": 8 // M,
        "gradient_accumulation_steps": M,
        "optimizer": {"type": "AdamW", "params": adamw},
        "gradient_clipping": 0.0,
        "steps_per_print": 10**9,
    }
    engine, *_ = deepspeed.initialize(model=module, config=config)
    for seed in range(STEPS):
        yield float(engine.train_batch(module.microbatches(microbatches(batch(name, seed)))))


def rank(target: str, output: Path) -> None:
    """Train both models with one target. The last rank writes the losses to `output`."""
    torch.set_num_threads(1)
    if target == "deepspeed":
        import deepspeed

        deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    else:
        dist.init_process_group("gloo")
    run = {"one process": one_process, "colossalai": colossalai, "torch": by_torch, "deepspeed": by_deepspeed}[target]
    losses = {name: list(run(name)) for name in MODELS}
    if dist.get_rank() == dist.get_world_size() - 1:
        output.write_text(json.dumps(losses))
    dist.barrier()
    os._exit(0)  # some libraries hang when they leave their groups one by one


def losses_of(target: str, python: str, folder: Path) -> dict[str, list[float]]:
    output = folder / f"{target}.json"
    ranks = 1 if target == "one process" else RANKS
    command = [python, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command += ["-m", "tests.targets", "--target", target, "--output", str(output)]
    run = subprocess.run(
        command, capture_output=True, text=True, timeout=600, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    if run.returncode or not output.exists():
        sys.exit(f"targets: {target} failed\n{run.stdout[-4000:]}\n{run.stderr[-6000:]}")
    found: dict[str, list[float]] = json.loads(output.read_text())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("python", nargs="*", default=[sys.executable], help="Python of pipeshard, of DeepSpeed")
    parser.add_argument("--target", choices=TARGETS)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    if args.target:
        rank(args.target, args.output)
    wrong = []
    with tempfile.TemporaryDirectory() as folder:
        pythons = {target: args.python[target == "deepspeed"] for target in TARGETS[: 3 + (len(args.python) > 1)]}
        found: dict[str, Any] = {t: losses_of(t, python, Path(folder)) for t, python in pythons.items()}
    for name in MODELS:
        for target, losses in found.items():
            pairs = zip(losses[name], found["one process"][name], strict=True)
            errors = [abs(ours - theirs) / theirs for ours, theirs in pairs]
            worst = max(errors)
            print(f"{name:6} {target:12} {' '.join(f'{loss:.6f}' for loss in losses[name])}  differs by {worst:.1e}")
            wrong += [f"{name} by {target}"] * (not all(error <= TOLERANCE for error in errors))
    if wrong:
        sys.exit(f"targets: losses differ from those of one process: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
