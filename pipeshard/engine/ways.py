"""Ways: the paths of a step's microbatches through the model, which must be the same on all ranks of a pipeline.

Messages have no header: the sender and the receiver compute the size of a message from their own traces. A unit that
cannot run on shapes alone is traced with values, but with zeros for parameters that another stage holds. If a shape or
a number that the unit returns depends on these parameters, ranks find different ways. At the beginning of every step,
ranks therefore compare a number that identifies their ways. If the numbers differ, ranks send each other the small
tensors of the units that were traced with values, and trace again. They then compare, line by line, the values that
cross cuts and the numbers that units store in attributes.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor, nn

from pipeshard.distributed.collectives import CPU, gather_objects
from pipeshard.errors import TraceError
from pipeshard.graph.dataflow import Call, Dataflow, Wanted
from pipeshard.graph.places import format_path, is_constant
from pipeshard.graph.shapes import Count, TensorSpec, blank_state, has_values
from pipeshard.split.boundary import boundaries
from pipeshard.split.policy import Policy
from pipeshard.split.route import is_read_far, observed_far

Way = tuple[Dataflow, tuple[int, ...]]  # a Dataflow, and the differences of a batch's sizes from the traced sizes
Lent = Mapping[str, Mapping[str, Tensor]]  # values of tensors that other ranks hold, by unit and by name in the unit
SMALL_TENSOR = 2**16  # tensors with at most this many elements are lent: sizes, ratios, thresholds, counts
SHOWN = 400  # characters of a value in an error
ROUNDS = 8  # rounds of lending: with lent tensors, units may take a different path, and need additional tensors
WAYS_REMEDY = (
    "A size, a number that a unit returns or stores in an attribute, or the presence of a result's gradient depends on "
    "the values of the unit's parameters or buffers, which only one stage has, or on parameters that a unit freezes in "
    "its forward. Make the size or number depend on an attribute or the config (self.keep = 4), return a tensor of a "
    "fixed size and a mask, detach a result in every forward or in none, freeze and unfreeze parameters between steps, "
    "or cut elsewhere (partition=...), so that one stage has the unit and all readers of its result"
)


def fingerprint(flow: Dataflow) -> str:
    """Return a digest of everything that determines the messages between stages. The digest is the same in every
    process."""
    calls = [
        (
            call.unit,
            sorted(call.reads.values),
            [sorted(values) for values in call.differentiated],
            [(x.shape, str(x.dtype), x.requires_grad, x.slopes) for x in call.leaves if isinstance(x, TensorSpec)],
            constants(call),
            _constants_at(call, [k for part, numbers in call.answered if part.source.place for k in numbers]),
        )
        for call in flow.calls
    ]
    loss = None if flow.loss is None else (sorted(flow.loss.values), sorted(flow.differentiated))
    outputs = [(path, sorted(use.values)) for path, use, _ in flow.outputs]
    content = repr((calls, loss, outputs, flow.axes.groups, flow.axes.sizes)).encode()
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def constants(call: Call) -> list[tuple[int, Any]]:
    """The constants that a call returns and that can be compared between processes, as (leaf index, constant)."""
    return _constants_at(call, range(call.parts[0].tree.num_leaves))


def _constants_at(call: Call, numbers: Iterable[int]) -> list[tuple[int, Any]]:
    return [(k, call.leaves[k]) for k in numbers if _is_constant(call.leaves[k])]


def _is_constant(leaf: Any) -> bool:
    return isinstance(leaf, Count) or is_constant(leaf)


def lend(held: Mapping[str, nn.Module], asked: Sequence[str], group: dist.ProcessGroup, ranks: Sequence[int]) -> Lent:
    """Gather the small tensors of the units in `asked`. The tensors of a unit come from the first of `ranks` that holds
    the unit, since buffers on later ranks may be stale. `held` are this rank's units. Call it on all ranks of `group`,
    with the same `asked`."""
    of_ranks = gather_objects({unit: _small(held[unit]) for unit in asked if unit in held}, group)
    lent: dict[str, dict[str, Tensor]] = {unit: {} for unit in asked}
    for rank in reversed(ranks):
        for unit, tensors in of_ranks[rank].items():
            lent[unit].update(tensors)
    return lent


def _small(unit: nn.Module) -> dict[str, Tensor]:
    named = (*unit.named_parameters(remove_duplicate=False), *unit.named_buffers(remove_duplicate=False))
    known = [name for name, tensor in named if has_values(tensor) and tensor.numel() <= SMALL_TENSOR]
    state = blank_state(unit, CPU)
    return {name: state[name].detach() for name in known}


class Line(NamedTuple):
    """One property of a microbatch that must be the same in the traces of all stages.

    In a line about a place, `is_left` is whether the traced forward has changed the value of the place. Such a line is
    compared only if both traces contain it and one of the forwards has changed the value, since a trace does not record
    a value that the place already has.
    """

    what: str
    value: str
    is_left: bool | None = None


def lines_of(way: Way, policy: Policy, outputs: Wanted) -> list[Line]:
    """Return the Lines of a microbatch: one for each value that crosses a cut (in order), for each constant (such as a
    number) that a unit returns, and for each constant in an attribute that a unit sets and other stages' code reads."""
    flow, deltas = way
    stages = policy.partition.of_calls(flow)
    crossing = boundaries(flow, stages, len(policy.placement), outputs)
    lines: list[Line] = []
    for stage, boundary in enumerate(crossing):
        returning = set(boundary.gradients)
        for value in boundary.values:
            spec = flow.spec(value)
            what = (
                f"result {value.leaf} of unit {flow.calls[value.call].unit} (call {value.call}), sent to stage {stage},"
            )
            gradient = "with" if value in returning else "without"
            lines.append(Line(what, f"is {tuple(spec.at(deltas))} {spec.dtype}, {gradient} a gradient"))
    return lines + list(_numbers_of(way)) + sorted(_attributes_of(way, stages))


def _numbers_of(way: Way) -> Iterator[Line]:
    flow, deltas = way
    for index, call in enumerate(flow.calls):
        for k, leaf in constants(call):
            yield Line(f"result {k} of unit {call.unit} (call {index})", _is_value(leaf, deltas))


def _attributes_of(way: Way, stages: Sequence[int]) -> Iterator[Line]:
    flow, deltas = way
    for index, call in enumerate(flow.calls):
        for place, numbers in observed_far(flow, index, stages):
            if values := [_is_value(leaf, deltas) for _, leaf in _constants_at(call, numbers or ())]:
                what = f"{format_path(place[1:])}, which unit {call.unit} (call {index}) stores,"
                yield Line(what, ", ".join(values), is_left=True)
    left = {(call.unit, part.source.place) for call in flow.calls for part in call.parts}
    of_units = {call.unit: stage for call, stage in zip(flow.calls, stages, strict=True)}
    for (unit, place, readers), text in flow.numbers:
        if is_read_far(readers, stages, of_units[unit]):
            what = f"{format_path(place[1:])}, which unit {unit} may change,"
            yield Line(what, f"is {text}", is_left=(unit, place) in left)


def _is_value(constant: Any, deltas: tuple[int, ...]) -> str:
    value = constant.at(deltas) if isinstance(constant, Count) else constant
    return f"is {value!r}"


class Said(NamedTuple):
    """A rank's report on its ways: their `numbers` and the `lines` of each way, or the message of a `failure`."""

    numbers: list[int]
    lines: list[list[Line]]
    failure: str


def compare(said: Said, group: dist.ProcessGroup, ranks: Sequence[int], named: Callable[[int], str]) -> list[int]:
    """Compare the ways of the `ranks` of this pipeline, and return the numbers that identify these ways from now on.
    Every rank of `group` raises TraceError if the ways of a pipeline's ranks differ in a line, or if a rank reports a
    failure."""
    own = [[*map(tuple, of_way)] for of_way in said.lines]
    told: list[Any] = gather_objects((said.numbers, own, said.failure), group)
    every = [
        Said(numbers, [[Line(*line) for line in lines] for lines in of_ways], failure)
        for numbers, of_ways, failure in told
    ]
    if failed := next((f"{named(rank)}: {other.failure}" for rank, other in enumerate(every) if other.failure), None):
        raise TraceError(failed)
    problems = gather_objects(_difference(every, ranks, named), group)
    if problem := next(filter(None, problems), None):
        raise TraceError(problem)
    return every[ranks[0]].numbers


def _difference(every: Sequence[Said], ranks: Sequence[int], named: Callable[[int], str]) -> str:
    """Return a message about the first line that differs between these ranks, or "" if no line differs."""
    first = ranks[0]
    for i, lines in enumerate(every[first].lines):
        for rank in ranks[1:]:
            mine, theirs = _first_difference(lines, every[rank].lines[i])
            if mine != theirs:
                return f"{_told(mine, theirs, named(first), named(rank))}, in microbatch {i}. {WAYS_REMEDY}"
    return ""


def _first_difference(mine: Sequence[Line], theirs: Sequence[Line]) -> tuple[Line | None, Line | None]:
    """The first pair of lines that differ, or (None, None)."""
    left = {line.what for line in (*mine, *theirs) if line.is_left}
    known = left & {line.what for line in mine} & {line.what for line in theirs}
    first, second = ([one for one in each if one.is_left is None or one.what in known] for each in (mine, theirs))
    return next(((a, b) for a, b in zip_longest(first, second) if (a and a[:2]) != (b and b[:2])), (None, None))


def _told(mine: Line | None, theirs: Line | None, here: str, there: str) -> str:
    if mine and theirs and mine.what == theirs.what:
        pairs = enumerate(zip(mine.value, theirs.value))
        equal = max(0, next((k for k, (one, other) in pairs if one != other), 0) - SHOWN // 2)
        values = [f"{'... ' * bool(equal)}{line.value[equal : equal + SHOWN]}" for line in (mine, theirs)]
        return f"{mine.what} {values[0]} in the trace on {here}, but {values[1]} on {there}"
    shown = [
        f"{line.what} {line.value:.{SHOWN}}" if line else "no other value crosses a cut" for line in (mine, theirs)
    ]
    return f"{shown[0]} in the trace on {here}, but {shown[1]} on {there}"
