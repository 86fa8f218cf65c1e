"""Resumes: a run that is saved with one layout and resumed with another, compared with an uninterrupted run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import pipeshard
from pipeshard import load_training_state, save_training_state, to_sequential
from tests.hunt.nets import Block, H, Net, data

STEPS = 6
Recorded = tuple[list[float], dict[str, Tensor] | None]


class Norms(Block):
    """With running statistics, a counter, a buffer that is not saved, and dropout."""

    def __init__(self, place: int) -> None:
        super().__init__(place)
        self.norm, self.dropout = nn.BatchNorm1d(H, momentum=0.3), nn.Dropout(0.2)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("unsaved", torch.zeros(H), persistent=False)

    def forward(self, x: Tensor) -> Any:
        self.count += 1
        x = self.dropout(x)
        # beside the residual: a norm would leave biases without a gradient, and AdamW would go by what rounding leaves
        return super().forward(x) + 0.5 * self.norm(x.transpose(1, 2)).transpose(1, 2)


class Deep(Net):
    block = Norms

    def __init__(self, frozen: bool = False, tied: bool = False) -> None:
        super().__init__(6)
        if tied:
            self.head.weight = self.embed.weight
        if frozen:
            self.layers[1].requires_grad_(False)
            self.embed.weight.requires_grad_(False)


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Biases, the last one first, without weight decay; then all others."""
    biases = [p for name, p in model.named_parameters() if "bias" in name][::-1]
    others = [p for name, p in model.named_parameters() if "bias" not in name]
    return [{"params": biases, "lr": 0.02, "weight_decay": 0.0}, {"params": others, "weight_decay": 0.1, "tag": "main"}]


OPTIMIZERS: Mapping[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "AdamW": lambda m: torch.optim.AdamW(groups(m), lr=0.01),
    "SGD with momentum": lambda m: torch.optim.SGD(groups(m), lr=0.05, momentum=0.9, nesterov=True),
    "Adagrad": lambda m: torch.optim.Adagrad(m.parameters(), lr=0.01),
    "Rprop": lambda m: torch.optim.Rprop(m.parameters(), lr=0.001),
    "AMSGrad": lambda m: torch.optim.Adam(groups(m), lr=0.01, amsgrad=True),
    "ASGD": lambda m: torch.optim.ASGD(m.parameters(), lr=0.01),
    "RAdam": lambda m: torch.optim.RAdam(m.parameters(), lr=0.01),
    "NAdam": lambda m: torch.optim.NAdam(m.parameters(), lr=0.01),
}


@dataclass(frozen=True)
class Resume:
    """The sizes of the world before and after, the plugin's options in each, and what is trained by what."""

    sizes: Sequence[int] = (2, 3)
    before: Mapping[str, Any] = field(default_factory=dict)
    after: Mapping[str, Any] = field(default_factory=dict)
    optimizer: str = "AdamW"
    model: Mapping[str, bool] = field(default_factory=dict)
    stop: int = 3


REPLICAS: Mapping[str, Any] = {"dp_size": 2, "num_microbatches": 2}
ZERO: Mapping[str, Any] = {**REPLICAS, "zero_stage": 1}
FSDP: Mapping[str, Any] = {**REPLICAS, "fsdp": True}
FP16: Mapping[str, Any] = {"precision": "fp16", "initial_scale": 2.0**24}
BF16: Mapping[str, Any] = {"precision": "bf16"}
INTERLEAVED: Mapping[str, Any] = {"schedule": "interleaved", "num_model_chunks": 2}

RESUMES: Mapping[str, Resume] = {
    **{f"{name}, 2 stages to 3": Resume(optimizer=name) for name in OPTIMIZERS},
    "2 stages to 1": Resume((2, 1)),
    "before the first step": Resume(stop=0),
    "ZeRO-1 to replicas": Resume((4, 4), ZERO, REPLICAS),
    "replicas to FSDP": Resume((4, 4), REPLICAS, FSDP),
    "FSDP to ZeRO-1, tied and frozen": Resume((4, 4), FSDP, ZERO, model={"tied": True, "frozen": True}),
    "1f1b to interleaved, tied": Resume((2, 3), after=INTERLEAVED, model={"tied": True}),
    "zbv to 1f1b, tied and frozen": Resume((2, 3), {"schedule": "zbv"}, model={"tied": True, "frozen": True}),
    "bf16, 2 stages to 3": Resume((2, 3), BF16, BF16),
    "bf16, ZeRO-1 to FSDP": Resume((4, 4), {**ZERO, **BF16}, {**FSDP, **BF16}),
    "fp16, 2 stages to 3": Resume((2, 3), FP16, FP16),
    "fp16, ZeRO-1 to replicas": Resume((4, 4), {**ZERO, **FP16}, {**REPLICAS, **FP16}),
}


def engine_of(resume: Resume, options: Mapping[str, Any]) -> Any:
    torch.manual_seed(0)
    model = Deep(**resume.model)
    optimizer = OPTIMIZERS[resume.optimizer](model)
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1, 2)
    decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5)
    scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, [warmup, decay], [2])
    size = torch.distributed.get_world_size() // options.get("dp_size", 1)
    options = {"num_microbatches": 4, "verify": False, "max_norm": 1.0, **options}
    return pipeshard.initialize(
        model, optimizer, lr_scheduler=scheduler, pp_size=size, dry_run_input=data(rows=8), **options
    )


def train(engine: Any, steps: range) -> list[float]:
    grid, losses = engine.plugin.grid, []
    for step in steps:
        replicas = engine.plugin.dp_size
        replica = grid.replica if replicas > 1 else 0
        batch = {name: leaf.chunk(replicas)[replica] for name, leaf in data(step, rows=8).items()}
        losses.append(float(engine.execute_pipeline(iter([batch]))["loss"]))
        engine.optimizer.step()
        engine.lr_scheduler.step()
        engine.optimizer.zero_grad()
    return losses


def recorded(engine: Any, losses: list[float]) -> Recorded:
    model = to_sequential(engine.model, rank=0)
    return losses, None if model is None else {name: value.float() for name, value in model.state_dict().items()}


def saved(name: str, folder: str) -> Recorded:
    """Saves at `stop`, and goes on."""
    resume = RESUMES[name]
    engine = engine_of(resume, resume.before)
    train(engine, range(resume.stop))
    save_training_state(folder, resume.stop, engine.model, engine.optimizer, engine.lr_scheduler)
    return recorded(engine, train(engine, range(resume.stop, STEPS)))


def resumed(name: str, folder: str) -> Recorded:
    resume = RESUMES[name]
    engine = engine_of(resume, resume.after)
    torch.manual_seed(99 + torch.distributed.get_rank())
    step = load_training_state(folder, engine.model, engine.optimizer, engine.lr_scheduler)
    return recorded(engine, train(engine, range(step, STEPS)))
