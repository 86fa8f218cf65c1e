"""Torch: the stages as those of torch.distributed.pipelining, which its own schedules train."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeshard.errors import ConfigurationError
from pipeshard.grid import Grid
from pipeshard.runtime.gradients import GradientSync
from pipeshard.runtime.holdings import Holdings
from pipeshard.runtime.module import StageModule, as_keywords
from pipeshard.runtime.precision import Precision
from pipeshard.target import Target, register_target

if TYPE_CHECKING:
    from pipeshard.build import Split


@dataclass(frozen=True)
class TorchStages:
    """The `PipelineStage`s of this rank, one for each of its chunks, for Schedule1F1B, ScheduleInterleaved1F1B, ...

        built = pipeshard.build(model, cuts, target="torch", batch=microbatch)
        schedule = Schedule1F1B(built.stages[0], m, loss_fn=built.loss_fn)
        schedule.step(**batch, target=batch["labels"], losses=losses, return_outputs=False)   # on every rank
        built.sync_gradients()
        optimizer.step()                                # of built.parameters()

    Every rank passes the whole batch by keywords. What torch leaves to the user, `sync_gradients` does: it adds up the
    gradients of tied weights over the stages that hold them.
    """

    stages: list[Any]
    gradients: GradientSync

    def parameters(self) -> Iterator[nn.Parameter]:
        """What this rank trains, each parameter once."""
        return iter(dict.fromkeys(p for stage in self.stages for p in stage.submod.parameters()))

    def sync_gradients(self) -> None:
        """After a step, before the optimizer's; every rank calls it."""
        self.gradients.finish(True)

    def zero_grad(self) -> None:
        """As an optimizer's: gradients become None."""
        self.gradients.reset(set(self.parameters()))
        for parameter in self.parameters():
            parameter.grad = None

    @staticmethod
    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        """For the schedule, where the last stage computes the loss by itself."""
        return output


class Torch(Target):
    """`target="torch"`: TorchStages; a process group is there, of one rank for each stage (or `num_model_chunks`).

    Args:
        num_model_chunks: stages of each rank, in the order of torch's interleaved schedules: stage s is on rank s % p.
    """

    def __init__(self, num_model_chunks: int = 1) -> None:
        self.num_model_chunks = num_model_chunks

    def placed(self, num_stages: int) -> tuple[Sequence[int], int]:
        p, rest = divmod(num_stages, self.num_model_chunks)
        if rest or not dist.is_initialized():
            raise ConfigurationError(
                f"{num_stages} stages and num_model_chunks={self.num_model_chunks}, "
                f"{'a' if dist.is_initialized() else 'no'} process group: target='torch' wants whole stages "
                "for each rank of a group that is there (torch.distributed.init_process_group)"
            )
        self.grid = Grid(p, 1)
        return [stage % p for stage in range(num_stages)], self.grid.stage

    def take(self, split: "Split") -> TorchStages:
        from torch.distributed.pipelining import PipelineStage

        device = split.policy.replay.device
        holdings = Holdings(split.model, split.policy, self.grid, Precision("fp32", False, device), fsdp=False)
        batch = as_keywords(split.model, split.sample.data)
        group = self.grid.stages
        stages = [
            PipelineStage(stage, index, split.num_stages, device, *_shapes(stage, batch, split), group=group)
            for index, stage in split.stages.items()
        ]
        return TorchStages(stages, holdings.sync)


def _shapes(stage: StageModule, batch: dict[str, Any], split: "Split") -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Tensors like those that enter and leave the stage with this microbatch, so that torch need not find out."""
    microbatch = stage.microbatch(batch)
    route, receiving = microbatch.route, split.flow.receiving

    def like(values: Any) -> tuple[Tensor, ...]:
        shapes = [(*microbatch.shape(value), value in receiving) for value in values]
        return tuple(torch.empty(s, dtype=dtype, device="meta", requires_grad=grad) for s, dtype, grad in shapes)

    leaving = (torch.empty((), device="meta", requires_grad=True),) if stage.is_last else like(route.leaves.values)
    return like(route.enters.values), leaving


register_target("torch", Torch)
