"""Boundary: the values that enter a stage, and the calls before which no cut is allowed.

Values such as skip connections and masks may be read beyond the next stage. Therefore, the reads of all unit calls, of
the loss and of the outputs determine which values cross a cut.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pipeshard.errors import TraceError
from pipeshard.graph.dataflow import Dataflow, Reads, Wanted
from pipeshard.graph.taint import Value
from pipeshard.graph.units import escaped


@dataclass(frozen=True)
class Boundary:
    """The `values` that enter a stage, in the order in which they are sent. `gradients` are the entries of
    `values` whose gradients are sent back."""

    values: tuple[Value, ...]
    gradients: tuple[Value, ...]


def boundaries(flow: Dataflow, stages: Sequence[int], num_stages: int, outputs: Wanted = False) -> list[Boundary]:
    """Return the Boundary of each stage. The Boundary of stage 0 is empty.

    A value crosses every boundary between the stage of its call and the stage of its last reader. The last stage reads
    the loss and the requested outputs. A stage sends back the gradient of a value if a reader on this stage or a later
    stage contributes to the gradient. Raises TraceError if an untracked value would have to cross a boundary,
    or if a torch.utils.checkpoint of the model contains a cut.
    """
    everything = flow.needed(outputs)
    readers = [(f"unit {call.unit}", call.reads, stage) for call, stage in zip(flow.calls, stages)]
    for name, use, stage in [*readers, ("the loss or a requested output", everything, num_stages - 1)]:
        for maker in use.hidden:
            if stages[maker] != stage and flow.calls[maker].is_cut:
                raise TraceError(f"with this batch, {name} (stage {stage}) {escaped(flow.calls[maker])}")
            if stages[maker] != stage:
                raise TraceError(
                    f"with this batch, {name} (stage {stage}) uses a value that escapes unit {flow.calls[maker].unit} "
                    f"(stage {stages[maker]}) untracked, so the value cannot be sent to stage {stage}. Return the "
                    "value from the unit, cut elsewhere (partition=[...]), or do not request it (output_attentions, "
                    "...)"
                )
    for first, last in flow.together:
        if stages[first] != stages[last]:
            raise TraceError(
                f"in this mode (training or evaluation), or with this batch, {_recomputed_together(flow, first, last)}"
            )
    live = live_values(flow, stages, num_stages, everything)
    returning = _crossing(zip(flow.gradients_from, [*stages, num_stages - 1], strict=True), stages, num_stages)
    return [Boundary(tuple(sorted(live[s])), tuple(sorted(live[s] & returning[s]))) for s in range(num_stages)]


def live_values(flow: Dataflow, stages: Sequence[int], num_stages: int, final: Reads) -> list[set[Value]]:
    """The values that enter each stage. `final` contains the reads of the last stage after its last call."""
    readers = [(call.reads.values, stage) for call, stage in zip(flow.calls, stages, strict=True)]
    return _crossing([*readers, (final.values, num_stages - 1)], stages, num_stages)


def _crossing(
    readers: Iterable[tuple[Iterable[Value], int]], stages: Sequence[int], num_stages: int
) -> list[set[Value]]:
    """The values that enter each stage. `readers` contains, for each reader, the values that it reads and its stage."""
    crossing: list[set[Value]] = [set() for _ in range(num_stages)]
    for values, reader in readers:
        for value in values:
            for stage in range(stages[value.call] + 1, reader + 1):
                crossing[stage].add(value)
    return crossing


def forbidden_cuts(flow: Dataflow) -> dict[int, str]:
    """The calls before which no cut is allowed, each mapped to the reason. A cut is not allowed in these cases: an
    untracked value would have to cross the cut; an earlier unit reads state that a later unit left in the previous
    forward; a torch.utils.checkpoint of the model contains the cut; the model has CutPoints elsewhere. The key
    `len(flow.calls)` stands for a cut at the end of the model."""
    forbidden: dict[int, str] = {}
    if flow.cut_points:
        reason = f"the model can be cut only at its CutPoints, and its forward calls {len(flow.cut_points)} of them"
        allowed = {k + 1 for k in flow.cut_points}
        forbidden.update((k, reason) for k in range(1, len(flow.calls) + 1) if k not in allowed)

    def keep_together(use: Reads, reader: int, name: str) -> None:
        for maker in use.hidden:
            reason = f"{name} {escaped(flow.calls[maker])}"
            forbidden.update(dict.fromkeys(range(maker + 1, min(reader, len(flow.calls) - 1) + 1), reason))

    for place in flow.carried:
        late = max(place.makers, default=0)
        for reader in place.readers - {-1}:
            what = f"unit {flow.calls[reader].unit} reads {place.name}, which the previous forward computed from"
            reason = f"{what} the result of a later unit, {flow.calls[late].unit}"
            forbidden.update(dict.fromkeys(range(reader + 1, late + 1), reason))
    for reader, call in enumerate(flow.calls):
        keep_together(call.reads, reader, f"unit {call.unit}")
    if flow.loss is not None:
        keep_together(flow.loss, len(flow.calls), "the loss")
    for first, last in flow.together:
        forbidden.update(dict.fromkeys(range(first + 1, last + 1), _recomputed_together(flow, first, last)))
    return forbidden


def _recomputed_together(flow: Dataflow, first: int, last: int) -> str:
    return (
        f"the model's own torch.utils.checkpoint reruns units {flow.calls[first].unit} to {flow.calls[last].unit} in "
        "the backward pass, so these units must be on one stage: checkpoint each unit separately, or remove the "
        "checkpoint and pass recompute=True to PipelinePlugin"
    )
