"""torch.distributed.pipelining: one of its schedules with hand-written stages."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class

from benchmarks.speed.stages import HandStage, causal_loss
from benchmarks.speed.work import LEARNING_RATE, Batch, Work

IN_A_V = ("ZBVZeroBubble", "DualPipeV")  # schedules with two stages on each rank


class Trainer:
    """`schedule` is torch's name of a schedule. `compile` is True, or options of torch.compile; each layer is compiled
    separately."""

    def __init__(
        self, work: Work, rank: int, size: int, schedule: str = "1F1B", compile: bool | dict[str, Any] = False
    ) -> None:
        several = schedule in IN_A_V
        total = size * (1 + several)
        model, share = work.model(), work.layers // total
        numbers = [rank, total - 1 - rank] if several else [rank]
        parts = [HandStage(model, k * share, (k + 1) * share) for k in numbers]
        options = dict(compile) if isinstance(compile, dict) else {}
        for layer in (layer for part in parts for layer in part.layers if compile):
            layer.compile(**options)
        stages = [PipelineStage(part, k, total, torch.device("cpu")) for part, k in zip(parts, numbers)]
        made: Any = get_schedule_class(schedule)
        self.tied = _untied(parts) if work.family == "gpt2" else []
        self.schedule = made(stages if several else stages[0], n_microbatches=work.microbatches, loss_fn=causal_loss)
        self.optimizer = torch.optim.AdamW(nn.ModuleList(parts).parameters(), lr=LEARNING_RATE)
        self.first, self.last = 0 in numbers, total - 1 in numbers

    def step(self, batch: Batch) -> float | None:
        losses: list[torch.Tensor] = []
        of_last: dict[str, Any] = {"target": batch["labels"], "losses": losses, "return_outputs": False}
        self.schedule.step(*[batch["input_ids"]] * self.first, **of_last if self.last else {})
        if len(self.tied) == 1:
            dist.all_reduce(self.tied[0].grad)
        for copy in self.tied[1:]:
            self.tied[0].grad = copy.grad = self.tied[0].grad + copy.grad
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(torch.stack(losses).mean()) if losses else None

    def report(self) -> dict[str, Any]:
        return {}


def _untied(parts: list[HandStage]) -> list[Any]:
    """Return this rank's weights of the embedding and the head, as separate copies. torch does not support ties, so the
    caller sums their gradients. (Two stages that share a parameter get a different gradient if a schedule has W.)"""
    ends = [end for part in parts for end in (part.tokens, part.head) if end is not None]
    for end in ends[1:]:
        end.weight = nn.Parameter(end.weight.detach().clone())
    return [end.weight for end in ends]
