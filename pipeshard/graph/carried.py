"""Carried: state that one forward leaves in the model for the next, such as counters, statistics and generators.

In one process, such state needs no special handling. In a pipeline, every stage runs the glue. So for each place with
such state, a stage needs three facts: the call at which the place last changes in a forward, the unit results from
which the state is computed, and the readers of the state in the next forward. Up to two additional runs of the glue
determine these facts. The first run watches the places before and after every call. The second run starts from the
state that the first run left.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from pipeshard.batch.batch import Batch
from pipeshard.graph.dataflow import Carried, Dataflow, Reads, has_one_updater
from pipeshard.graph.flags import flagged, has_same_entries
from pipeshard.graph.places import (
    COLLECTIONS,
    HOOKS,
    MISSING,
    PLAIN,
    REGISTERED,
    PathStep,
    PlacePath,
    format_path,
    is_array,
    is_generator,
    is_same,
    put,
    resolve,
)
from pipeshard.graph.preserve import Before, put_hooks
from pipeshard.graph.snapshot import Snapshot, noting_reads
from pipeshard.graph.storage import storage_of
from pipeshard.graph.taint import Decision, Kept
from pipeshard.graph.tracer import Tracer
from pipeshard.replaced import replaced


class Held(NamedTuple):
    """The recorded content of a place: the value and, unless the value is plain or a tensor, a Snapshot of the value's
    content."""

    value: Any
    content: Snapshot | None

    @property
    def tensors(self) -> list[Tensor]:
        if isinstance(self.value, Tensor):
            return [self.value]
        return [tensor for *_, tensor, _ in self.content.tensors] if self.content else []


class Place:
    """A location where a model's code keeps a value, given by its path from the model."""

    def __init__(self, model: nn.Module, path: PlacePath) -> None:
        self.path, self.holder = path, resolve(model, path[1:-1])
        self.has_hooks = path[-1].key in HOOKS  # handles refer to this dict, so only its content is restored

    @property
    def value(self) -> Any:
        try:
            return resolve(self.holder, self.path[-1:])
        except (AttributeError, KeyError, IndexError):
            return MISSING

    def take(self) -> Held:
        value = self.value
        if self.has_hooks:
            return Held(dict(value), None)
        inside = not isinstance(value, (*PLAIN, Tensor)) and value is not MISSING
        return Held(value, Snapshot({"": value}) if inside else None)

    def put(self, held: Held) -> None:
        if self.has_hooks:
            put_hooks(self.value, held.value)
        elif self.value is not held.value:
            put(self.holder, self.path[-1].how, self.path[-1].key, held.value)
        if held.content:
            held.content.restore()

    def has(self, held: Held) -> bool:
        """Whether the place still contains the value of `held` (or a new collection with the same entries), and the
        content of this value has not changed."""
        if self.has_hooks:
            return bool(self.value.keys() == held.value.keys())
        is_there = is_same(self.value, held.value) or has_same_entries(self.value, held.value)
        return is_there and not (held.content and any(held.content.changes()))


class _Record:
    """Collects observations about one place during the runs of the glue. Its method `carried` returns these
    observations as a Carried."""

    def __init__(self, name: str, place: Place, before: Before) -> None:
        self.name, self.place, self.before = name, place, before
        self.until: int | None = None
        self.writers: set[int] = set()
        self.readers: set[int] = set()
        self.uses = Reads()
        self.kind = ""
        self.is_read_early = True  # read before the last call of the next forward; True if unknown
        self._take()

    @property
    def is_late(self) -> bool:
        """Whether the place last changes after the last unit call, and its value contains no tensor."""
        return self.until is None and not self.held.tensors

    @property
    def tag(self) -> Kept:
        is_by_one = len(self.writers) == 1 and -1 not in self.writers
        return Kept(self.name, min(self.writers) if is_by_one else None)

    def look(self, call: int | None, is_through: bool) -> None:
        """If the place has changed since the last look, record that it last changed at `call`. The writer is `call` if
        this call has just ended (`is_through`). Otherwise, the writer is glue."""
        if not self.place.has(self.held) or self.is_written:
            self._take()
            self.until = call
            self.writers.add(call if is_through and call is not None else -1)

    @property
    def is_written(self) -> bool:
        """Whether a tensor of the place has been written to since the content of the place was last recorded."""
        return self._writes() != self.writes

    def end_first(self, tracer: Tracer) -> None:
        """Record the state at the end of the watched forward."""
        self._take()
        self.uses = Reads.of(tracer.taint.of(self.held.tensors))
        value = self.held.value
        if isinstance(value, nn.Parameter):
            self.kind = "parameter"
        elif isinstance(value, Tensor):
            self.kind = "tensor" if self.before.writes.times[storage_of(value)] else ""
        else:
            self.kind = "generator" if is_generator(value) else ""

    def end_second(self, tracer: Tracer) -> None:
        """Record the state at the end of the next forward."""
        self.uses = self.uses.joined(Reads.of(tracer.taint.of(self.place.take().tensors)))
        if (is_array(self.held.value) or isinstance(self.held.value, int | float)) and not self.place.has(self.held):
            self.kind = "number"
        if self.kind == "parameter" and not self.is_written:
            self.kind = "settled"

    def carried(self) -> Carried:
        readers, end = self.readers, self.until
        if has_one_updater(self.name, self.place.path, self.uses, self.kind):
            readers = readers - (self.writers - {-1})  # boost refuses writers on several stages
        is_lasting = isinstance(self.held.value, Tensor) and (self.kind == "tensor" or self.name in self.uses.kept)
        if -1 in self.writers and is_lasting and not readers:
            readers = {-1}  # the user may read or save the tensor
        is_alone = readers <= self.writers if len(self.writers) == 1 else not readers
        if is_alone and -1 not in self.writers:
            end = -1  # no other reader needs the state
        if self.is_late and not self.is_read_early and self.place.has(self.held):
            end = -1  # set once, and read only on the last stage
        return Carried(
            name=self.name,
            path=self.place.path,
            writers=frozenset(self.writers),
            until=end,
            uses=replace(self.uses, parameters=self.uses.parameters - {self.name}),
            readers=frozenset(readers),
            kind=self.kind,
        )

    def _take(self) -> None:
        self.held = self.place.take()
        self.writes = self._writes()

    def _writes(self) -> list[tuple[int, int]]:
        """For each tensor of the place, the key of its storage and the number of writes to the storage."""
        return [(key, self.before.writes.times[key]) for key in map(storage_of, self.held.tensors)]


def run_watched(tracer: Tracer, batch: Batch, real: Batch | None, before: Before) -> Dataflow:
    """Run the glue on `batch`, and return the Dataflow. The Dataflow's `passing` lists the places of values and hooks
    that differ from `before` after a unit call, but no longer differ at the end of the run, because the forward or the
    criterion restores these places."""
    passing: dict[str, PlacePath] = {}
    hooks = -1  # the number of hooks that had been registered at the last look

    def changed(is_at_end: bool) -> dict[str, PlacePath]:
        nonlocal hooks
        changes = [change for change in flagged(before.snapshot) if change.path[0].key == ""]
        paths = [place_of(tracer.model, change.path) for change in changes]
        paths = [path for path in paths if not any("_hooks" in str(step.key) for step in path)]
        if is_at_end or hooks != RemovableHandle.next_id:
            hooks = RemovableHandle.next_id
            paths += [path for path, *_ in before.hooks.changed() if len(path) > 1]
        return {format_path(path): path for path in paths}

    def listen(call: int | None, is_through: bool) -> None:
        if is_through:
            passing.update(changed(is_at_end=False))

    with replaced(tracer, listen=listen):
        flow = tracer.run(batch, real)
    for name in changed(is_at_end=True):
        passing.pop(name, None)
    return replace(flow, passing=tuple(passing.values()))


def carrying(tracer: Tracer, batch: Batch, real: Batch | None, before: Before, flow: Dataflow) -> Dataflow:
    """Return `flow`, the tracer's Dataflow for `batch`, with `carried` set to the places of the model that have changed
    since `before`. If any place has changed, the tracer runs again."""
    paths = {format_path(path): path for path in _changed(tracer.model, before)}
    if not paths:
        return flow
    before.restore()
    records = [_Record(name, Place(tracer.model, path), before) for name, path in paths.items()]

    def listen(call: int | None, is_through: bool) -> None:
        for record in records:
            record.look(call, is_through)

    tracer.reset = before.restore
    with replaced(tracer, listen=listen):
        flow = replace(tracer.run(batch, real), passing=flow.passing)
    records = [record for record in records if record.writers]
    for record in records:
        record.end_first(tracer)
    if any(record.is_late or record.held.tensors or len(record.writers) > 1 for record in records):
        decisions = _run_next(tracer, batch, real, records, flow)
        flow = replace(flow, decisions=flow.decisions + decisions)
        tracer.reset = before.restore
    return replace(flow, carried=tuple(record.carried() for record in records))


def _run_next(
    tracer: Tracer, batch: Batch, real: Batch | None, records: Sequence[_Record], flow: Dataflow
) -> tuple[Decision, ...]:
    """Run the next forward, and record the readers of each place. Returns a Decision for each kept value on which glue
    branches, if the value was computed from unit results: only some stages can compute such a value."""
    tracer.reset = lambda: None
    tracer.kept = {record.tag: record.held.tensors for record in records if record.kind != "parameter"}
    with _noting_early(records, lambda: len(tracer.calls) < len(flow.calls)):
        again = tracer.run(batch, real)
    tracer.kept = {}
    for record in records:
        record.end_second(tracer)
    readers = _readers(again, {record.name: record.uses for record in records})
    is_same_way = [call.unit for call in again.calls] == [call.unit for call in flow.calls]
    for record in records:
        record.readers = readers[record.name] if is_same_way else {-1, *range(len(flow.calls))}
    refused = [r.name for r in records if r.name in tracer.taint.recalled and (r.uses.values or r.uses.hidden)]
    return tuple(Decision(f"a value that {name} keeps from an earlier forward") for name in sorted(refused))


@contextmanager
def _noting_early(records: Sequence[_Record], is_early: Callable[[], bool]) -> Iterator[None]:
    """Context manager that records which late places are read while `is_early()` is true. A place whose reads cannot be
    watched counts as read."""
    attributes = {
        (id(record.place.holder), record.place.path[-1].key): record
        for record in records
        if record.is_late and record.place.path[-1].how == "attr"
    }

    def note(holder: Any, name: str) -> None:
        record = attributes.get((id(holder), name))
        if record is not None and is_early():
            record.is_read_early = True

    with noting_reads((record.place.holder for record in attributes.values()), note) as watched:
        for record in attributes.values():
            record.is_read_early = id(record.place.holder) not in watched
        yield


def _readers(flow: Dataflow, uses: Mapping[str, Reads]) -> dict[str, set[int]]:
    """For each place, the calls that depend on the place, directly or through other places that are computed from this
    place. -1 stands for the loss or an output."""
    ends = [use for use in (flow.loss, *(use for _, use, _ in flow.outputs)) if use is not None]
    reads = [*enumerate(call.reads for call in flow.calls), *((-1, use) for use in ends)]
    readers = {name: {index for index, use in reads if name in use.kept} for name in uses}
    for _ in uses:
        for name, use in uses.items():
            for other in use.kept & readers.keys():
                readers[other] |= readers[name]
    return readers


def informed(flow: Dataflow) -> Dataflow:
    """Return `flow` with additional dependencies: each reader of a carried place also depends on the place's `uses`,
    except the results of the reader itself and of later calls. All stages receive the leaves of the batch in `uses`."""
    calls, loss, outputs, consulted = list(flow.calls), flow.loss, list(flow.outputs), flow.consulted
    for place in flow.carried:
        consulted |= place.uses.inputs
        for index in place.readers:
            if index >= 0:
                calls[index] = replace(calls[index], reads=calls[index].reads.joined(place.uses.until(index)))
                continue
            loss = loss and loss.joined(place.uses)
            outputs = [(path, use.joined(place.uses), spec) for path, use, spec in outputs]
    return replace(flow, calls=tuple(calls), loss=loss, outputs=tuple(outputs), consulted=consulted)


def _changed(model: nn.Module, before: Before) -> list[PlacePath]:
    """The paths of the places in the model that have changed since `before`."""
    return list(dict.fromkeys(place_of(model, change.path) for change in before.changes() if change.path[0].key == ""))


def place_of(model: nn.Module, path: PlacePath) -> PlacePath:
    """The path of the place to which the value at `path` belongs. If the value is inside a collection, a tuple, an
    array or a generator, the place is that object."""
    value: Any = model
    for k, step in enumerate(path[1:], 2):
        if step.how == "hooks":
            return *path[: k - 1], PathStep("attr", step.key)
        try:
            value = resolve(value, [step])
        except (AttributeError, KeyError, IndexError):
            return path[:k]
        is_container = isinstance(value, (*COLLECTIONS, tuple))
        is_whole = is_generator(value) or is_array(value)
        if is_whole or (is_container and step.key not in REGISTERED and not isinstance(value, nn.Module)):
            return path[:k]
    return path
