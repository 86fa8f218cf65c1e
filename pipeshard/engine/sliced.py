"""Sliced: a stage that runs microbatches slice by slice, and the slices of a microbatch.

    stage 0     F(0,0)  F(0,1)  F(0,2)                          B(0,2)  B(0,1)  B(0,0)
    stage 1             F(0,0)  F(0,1)  F(0,2) head    B(0,2)  B(0,1)  B(0,0)

The last stage concatenates the slices of each value that the loss needs. The head (the glue after the last unit, and
the loss) then runs once for the whole microbatch, as without slices. Labels, sums and counts therefore cover the whole
microbatch.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pipeshard.batch.batch import Batch
from pipeshard.batch.criterion import Criterion
from pipeshard.engine.outputs import Outputs
from pipeshard.engine.stage import Microbatch, Stage
from pipeshard.engine.ways import Way
from pipeshard.errors import ConfigurationError, TraceError
from pipeshard.graph.taint import Value
from pipeshard.slices.cut import Joint, SliceCall
from pipeshard.slices.states import Slice
from pipeshard.split.route import Route

OTHER = "Use num_slices=1 for this model"


@dataclass(frozen=True)
class SlicedRoutes:
    """The routes of microbatches through a rank's stages, and the route of the head. Each stage sends the values that
    later stages and the head need."""

    stages: Sequence[Route]
    head: Route


@dataclass(frozen=True)
class SlicedMicrobatch:
    """A microbatch on one stage: its `slices`, their lengths in positions (`sizes`), the microbatch on which the head
    runs (`head`), and the `joints` that combine the slices' results into the inputs of the head."""

    slices: Sequence[Microbatch]
    sizes: Sequence[int]
    head: Microbatch
    joints: Sequence[Joint]

    @classmethod
    def of(
        cls,
        whole: Microbatch,
        batch: Batch,
        sizes: Sequence[int],
        ways: Sequence[Way],
        routes: Sequence[SlicedRoutes],
        place: int,
        device: torch.device,
    ) -> "SlicedMicrobatch":
        """Split `whole` into slices on the stage at index `place` among this rank's stages. `ways` are the ways of the
        slices. `routes` are the routes of the slices, followed by the routes of `whole`. Raises TraceError if the loss
        reads different results from a slice than from `whole`, and ConfigurationError if results cannot be merged."""
        of_whole, total, states = routes[-1], sum(sizes), dict[Any, Any]()
        head = Microbatch(of_whole.head.feed(batch, device), of_whole.head, whole.deltas, whole.share, whole.summed)
        fed = of_whole.stages[place].feed(batch, device)
        slices, end = [], 0
        for size, (_, deltas), of_slice in zip(sizes, ways, routes):
            _refuse_other(of_slice.head, of_whole.head)
            call = SliceCall(fed, Slice(end, end + size, total, states))
            slices.append(replace(whole, sliced=call, route=of_slice.stages[place], deltas=deltas))
            end += size
        joints = [_joint(value, head, slices, batch.rows, sizes) for value in head.route.enters.values]
        return cls(slices, sizes, head, joints)


def _refuse_other(slice_: Route, whole: Route) -> None:
    if slice_.enters != whole.enters:
        raise TraceError(
            "num_slices: the loss reads different results from a slice than from the whole sequence, so slices are not "
            f"equivalent to the sequence. {OTHER}"
        )


def _joint(value: Value, head: Microbatch, slices: Sequence[Microbatch], rows: int, sizes: Sequence[int]) -> Joint:
    whole, parts = head.shape(value)[0], [part.shape(value)[0] for part in slices]
    joint = Joint.of(whole, parts, rows, sizes)
    if joint is None:
        unit = head.route.flow.calls[value.call].unit
        raise ConfigurationError(
            f"num_slices: the loss or a requested output needs result {value.leaf} of unit {unit}, but the result's "
            f"slices cannot be merged: their shapes are {', '.join(map(str, parts))}, and the shape for the whole "
            f"sequence is {whole}. {OTHER}"
        )
    return joint


class SlicedStage(Stage):
    """Runs forwards and backwards of slices. With n slices per microbatch, index i * n + s is slice s of microbatch i.
    On the last stage, `head` computes the loss."""

    head: Stage | None = None

    def listener(self, args: Any, kwargs: Any) -> None:
        """A Listener that does nothing. With a listener, calls with a cache are allowed, although their sizes differ
        from the sizes in the trace."""

    @property
    def end_of_loss(self) -> Stage:
        return self.head or self

    def begin_sliced(
        self,
        microbatches: Sequence[SlicedMicrobatch],
        criterion: Criterion | None,
        outputs: Outputs,
        scale: float,
        splits: Collection[int],
    ) -> None:
        """Prepare a training step; see `Stage.begin`."""
        self.whole, self.n = microbatches, len(microbatches[0].slices)
        slices = [part for microbatch in microbatches for part in microbatch.slices]
        self.begin(slices, criterion, True, outputs, scale, splits)
        self.left: dict[int, list[list[Tensor]]] = {}  # by microbatch: its slices' results for the head
        self.returned: dict[int, list[list[Tensor]]] = {}  # by microbatch: the gradients of these results, by slice
        if self.head is not None:
            self.head.begin([microbatch.head for microbatch in microbatches], criterion, True, outputs, scale)

    def end(self) -> None:
        super().end()
        self.whole = ()
        self.left, self.returned = {}, {}
        if self.head is not None:
            self.head.end()

    def forward(self, i: int, entering: Sequence[Tensor]) -> list[Tensor]:
        sent = super().forward(i, entering)
        call = self.microbatches[i].sliced
        assert call is not None
        self._refuse_other_shapes(i, sent)
        self.saved[i] = replace(self.saved[i], carried=list(call.now.left.values()))
        if self.head is None:
            return sent
        number, s = divmod(i, self.n)
        self.left.setdefault(number, []).append(sent)
        if s == self.n - 1:
            joints, parts = self.whole[number].joints, self.left.pop(number)
            joined = [joint.join(of_value) for joint, of_value in zip(joints, zip(*parts, strict=True), strict=True)]
            del parts
            self.head.forward(number, joined)
        return []

    def backward(self, i: int, gradients: Sequence[Tensor]) -> list[Tensor]:
        number, s = divmod(i, self.n)
        if self.head is not None:
            if s == self.n - 1:
                self.returned[number] = self._split(number, self.head.backward(number, ()))
            gradients = self.returned[number].pop()
        sent = super().backward(i, gradients)
        call = self.microbatches[i].sliced
        assert call is not None
        call.now.release()
        return sent

    def _split(self, number: int, gradients: Sequence[Tensor]) -> list[list[Tensor]]:
        """The gradients of the head's inputs, slice by slice."""
        whole = self.whole[number]
        enters = whole.head.route.enters
        of_value = dict(zip(enters.values, whole.joints, strict=True))
        parts = [of_value[value].split(g, whole.sizes) for value, g in zip(enters.gradients, gradients, strict=True)]
        return [list(of_slice) for of_slice in zip(*parts, strict=True)] or [[] for _ in whole.sizes]

    def _refuse_other_shapes(self, i: int, sent: Sequence[Tensor]) -> None:
        microbatch = self.microbatches[i]
        for value, tensor in zip(microbatch.route.leaves.values, sent, strict=True):
            shape, _ = microbatch.shape(value)
            if tuple(tensor.shape) != tuple(shape):
                raise TraceError(
                    f"num_slices: result {value.leaf} of unit {microbatch.route.flow.calls[value.call].unit} has shape "
                    f"{tuple(tensor.shape)} in a slice that is called with a cache, but {shape} without a cache. "
                    f"{OTHER}"
                )
