"""Stages: the stages that one rank runs, for whole microbatches and for slices."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import TypeVar

import torch
from torch import nn

from pipeshard.batch.criterion import Criterion
from pipeshard.config import PipelineConfig
from pipeshard.engine.mixed_precision import Precision
from pipeshard.engine.offload import Offload, transfer_of
from pipeshard.engine.outputs import Outputs
from pipeshard.engine.running_state import Carry, deferred
from pipeshard.engine.sliced import SlicedMicrobatch, SlicedStage
from pipeshard.engine.stage import Microbatch, NaNCheck, Stage
from pipeshard.engine.weight_grad import Deferral
from pipeshard.graph.dataflow import Dataflow
from pipeshard.schedule.program import Program
from pipeshard.split.policy import Policy

S = TypeVar("S", bound=Stage)


class Stages:
    """The stages of this rank, and the objects that they share: the Deferral of weight gradients, the Carry of running
    state and the Offload of activations. `held` contains the parameters of this rank, by name."""

    def __init__(
        self,
        config: PipelineConfig,
        policy: Policy,
        precision: Precision,
        held: Mapping[str, nn.Parameter],
        device: torch.device,
    ) -> None:
        self.config, self.policy, self.precision, self.held = config, policy, precision, held
        self.deferral = Deferral(policy.get_held_layers())
        self.carry = Carry(policy.model)
        transfer = transfer_of(device) if config.offloads("activations") else None
        self.offload = None if transfer is None else Offload(transfer, device)
        head = len(policy.placement)  # the index of a stage after the last one
        self.whole = [self._stage(Stage, index, index == head - 1) for index in policy.chunks]
        self.sliced: list[SlicedStage] = []
        if config.has_slices:
            self.sliced = [self._stage(SlicedStage, index, False) for index in policy.chunks]
            if self.whole[-1].is_last:
                self.sliced[-1].head = self._stage(Stage, head, True)
        self.running: Sequence[Stage] = ()

    def _stage(self, kind: type[S], index: int, is_last: bool) -> S:
        of_stage = self.policy.ownership.held_by_parts
        stage = kind(
            self.policy.replay,
            index,
            is_last,
            self.deferral,
            around=self.precision.running,
            finite=self.finite(index, of_stage[index] if index < len(of_stage) else ()),
            carry=self.carry.around,
        )
        stage.offload = self.offload
        return stage

    def finite(self, stage: int, names: Collection[str]) -> NaNCheck | None:
        """Return the NaNCheck of a stage for the parameters in `names` that this rank holds, or None without
        check_finite."""
        held = {name: parameter for name, parameter in self.held.items() if name in names}
        return NaNCheck(stage, held, gradients=not self.precision.scales) if self.config.check_finite else None

    def begin(
        self,
        planned: Sequence[Sequence[Microbatch]],
        sliced: Sequence[Sequence[SlicedMicrobatch]],
        criterion: Criterion | None,
        train: bool,
        outputs: Outputs,
        scale: float,
        program: Program,
    ) -> None:
        """Prepare a step that runs `program`, with slices if `sliced` is not empty. `planned` and `sliced` have one
        entry per stage of this rank."""
        self.running = self.sliced if sliced else self.whole
        if sliced:
            for slicing, of_stage in zip(self.sliced, sliced, strict=True):
                slicing.begin_sliced(of_stage, criterion, outputs, scale, program.splits(slicing.index))
        else:
            for stage, microbatches in zip(self.whole, planned, strict=True):
                stage.begin(microbatches, criterion, train, outputs, scale, program.splits(stage.index))
        self.carry.begin([microbatch.route for stage in self.running for microbatch in stage.microbatches])
        if train and self.offload is not None:
            held = [*self.held.values(), *self.policy.model.buffers()]
            self.offload.begin(program.ranks[self.policy.stage], held, self.precision.shares_casts(self._flows()))

    def end(self) -> None:
        """Discard all state of the step except its losses."""
        for stage in self.running:
            stage.end()
        if self.offload is not None:
            self.offload.end()

    def _flows(self) -> set[Dataflow]:
        """The distinct Dataflows of the step's forwards."""
        return {microbatch.route.flow for stage in self.running for microbatch in stage.microbatches}

    @contextmanager
    def deferring(self) -> Iterator[None]:
        """Context manager for a step's actions. Layers defer their weight gradients to W. In a step without W, only
        large embeddings defer their weight gradients, to the end of each B. Forwards share autocast's casts. On exit,
        the running state is written to the model, and then deferred batch norm updates its running statistics."""
        splits = any(stage.splits for stage in self.running)
        lookups = not splits and self.config.defers and torch.is_grad_enabled()
        later = self.config.deferred_batch_norm
        with (
            self.deferral.installed(lookups=lookups) if splits or lookups else nullcontext(),
            deferred(self.policy.held_units.values(), self.policy.replay) if later else nullcontext(),
            self.precision.sharing_casts(self._flows()),
        ):
            try:
                yield
            finally:
                self.carry.end()
