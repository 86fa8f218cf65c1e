"""Carried: state that the glue of one forward leaves to the next: counters, running statistics, generators."""

from collections.abc import Callable, Iterator, Mapping, MutableMapping, MutableSequence, MutableSet
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn

from pipeshard.batch.batch import Batch
from pipeshard.graph.dataflow import Carried, Dataflow, Use
from pipeshard.graph.preserve import Before
from pipeshard.graph.snapshot import HOOKS, MISSING, PLAIN, Path, Snapshot, Step, is_generator, put, resolve, told
from pipeshard.graph.taint import storage_of
from pipeshard.graph.tracer import Tracer, unheard

REGISTERED = {"_modules", "_parameters", "_buffers"}  # of a module, by their names


class Held(NamedTuple):
    """What a place has at some time: the value, and the content of one that can be changed itself."""

    value: Any
    content: Snapshot | None

    @property
    def tensors(self) -> list[Tensor]:
        if isinstance(self.value, Tensor):
            return [self.value]
        return [tensor for *_, tensor, _ in self.content.tensors] if self.content else []


class Place:
    """Where a model's code keeps something: at the end of a path from the model."""

    def __init__(self, model: nn.Module, path: Path) -> None:
        self.path, self.holder = path, resolve(model, path[1:-1])

    def take(self) -> Held:
        try:
            value = resolve(self.holder, self.path[-1:])
        except (AttributeError, KeyError, IndexError):
            value = MISSING
        inside = not isinstance(value, (*PLAIN, Tensor)) and value is not MISSING
        return Held(value, Snapshot({"": value}) if inside else None)

    def put(self, held: Held) -> None:
        if self.take().value is not held.value:
            put(self.holder, self.path[-1].how, self.path[-1].key, held.value)
        if held.content:
            held.content.restore()

    def has(self, held: Held) -> bool:
        """Whether this is what is there."""
        value = self.take().value
        plain = isinstance(value, PLAIN) and type(value) is type(held.value) and value == held.value
        return (value is held.value or plain) and not (held.content and any(held.content.changes()))


def carrying(tracer: Tracer, batch: Batch, real: Batch | None, before: Before, flow: Dataflow) -> Dataflow:
    """`flow`, which the tracer has just found with `batch`, and what its glue has left changed since `before`.

    Where that is anything, another run from there tells where in a forward it changes, and one after that which units
    depend on it in the next forward.
    """
    places = {told(path): Place(tracer.model, path) for path in _changed(tracer.model, before)}
    if not places:
        return flow
    tracer.reset = before.restore
    before.restore()
    last = {name: place.take() for name, place in places.items()}
    seen = {name: _writes(held, before) for name, held in last.items()}
    until: dict[str, int | None] = {}
    writers: dict[str, set[int]] = {}  # the units that leave something there, -1 for glue

    def listen(call: int | None, is_through: bool) -> None:
        for name, place in places.items():
            if not place.has(last[name]) or seen[name] != _writes(last[name], before):
                until[name], last[name] = call, place.take()
                seen[name] = _writes(last[name], before)
                writers.setdefault(name, set()).add(call if is_through and call is not None else -1)

    tracer.listen = listen
    flow = tracer.run(batch, real)
    tracer.listen = unheard
    held = {name: places[name].take() for name in until}
    uses = {name: Use.of(tracer.taint.of(held[name].tensors)) for name in until}
    kinds = {name: _kind(held[name].value, before) for name in until}
    readers: dict[str, set[int]] = {name: set() for name in until}
    late = {name: places[name] for name, end in until.items() if end is None and not held[name].tensors}
    early: set[str] = set()
    if late or any(held[name].tensors or len(writers[name]) > 1 for name in until):
        tracer.reset = lambda: None
        tracer.kept = {name: held[name].tensors for name in until if kinds[name] != "parameter"}
        seen = {name: _writes(held[name], before) for name in until}
        with _watching(late, lambda: len(tracer.calls) < len(flow.calls)) as early:
            again = tracer.run(batch, real)
        tracer.kept, tracer.reset = {}, before.restore
        for name in until:
            uses[name] = uses[name].joined(Use.of(tracer.taint.of(places[name].take().tensors)))
            if isinstance(held[name].value, int | float) and not places[name].has(held[name]):
                kinds[name] = "number"
            if kinds[name] == "parameter" and seen[name] == _writes(held[name], before):
                kinds[name] = "settled"
        readers = _readers(again, uses)
        if [call.unit for call in again.calls] != [call.unit for call in flow.calls]:
            readers = {name: {-1, *range(len(flow.calls))} for name in until}  # the next forward takes another way
        refused = [name for name in tracer.taint.recalled if uses[name].values or uses[name].hidden]
        decisions = tuple(f"what {name} keeps of an earlier forward" for name in sorted(refused))
        flow = replace(flow, decisions=flow.decisions + decisions)
    carried = []
    for name, place in ((name, places[name]) for name in until):
        lasting = isinstance(held[name].value, Tensor) and (kinds[name] == "tensor" or name in uses[name].kept)
        if -1 in writers[name] and lasting and not readers[name]:
            readers[name] = {-1}  # the user looks at it, or it is saved
        alone = readers[name] <= writers[name] if len(writers[name]) == 1 else not readers[name]
        end = -1 if alone and -1 not in writers[name] else until[name]  # a unit's own
        if name in late and name not in early and places[name].has(held[name]):
            end = -1  # set once, and read where the last stage alone is
        if end == -1 and not any(tensor.is_floating_point() for tensor in held[name].tensors):
            kinds[name] = kinds[name].replace("tensor", "")  # of which no backward needs what there was
        made = replace(uses[name], parameters=uses[name].parameters - {name})
        sets = frozenset(writers[name]), end, made, frozenset(readers[name])
        carried.append(Carried(name, place.path, *sets, kinds[name]))
    return replace(flow, carried=tuple(carried))


@contextmanager
def _watching(places: Mapping[str, Place], is_early: Callable[[], bool]) -> Iterator[set[str]]:
    """Inside, the places that are read while it is early; what cannot be watched counts as read."""
    read: set[str] = set()
    classes: dict[Any, dict[tuple[int, Any], str]] = {}
    for name, place in places.items():
        if place.path[-1].how == "attr":
            classes.setdefault(type(place.holder), {})[id(place.holder), place.path[-1].key] = name
        else:
            read.add(name)
    with ExitStack() as stack:
        for kind, watched in classes.items():
            own, get = kind.__dict__.get("__getattribute__"), kind.__getattribute__

            def noting(self: Any, key: str, get: Any = get, watched: Any = watched, read: set[str] = read) -> Any:
                name = watched.get((id(self), key))
                if name is not None and is_early():
                    read.add(name)
                return get(self, key)

            try:
                kind.__getattribute__ = noting
            except TypeError:  # a class of C's
                read |= {*watched.values()}
            else:
                undo = partial(setattr, kind, "__getattribute__", own) if own else None
                stack.callback(undo or partial(delattr, kind, "__getattribute__"))
        yield read


def _writes(held: Held, before: Before) -> list[tuple[int, int]]:
    """Of each tensor, where its values are and how often they were written."""
    return [(key, before.writes.times[key]) for key in map(storage_of, held.tensors)]


def _kind(value: Any, before: Before) -> str:
    if isinstance(value, Tensor):
        written = "tensor" if before.writes.times[storage_of(value)] else ""
        return "parameter" if isinstance(value, nn.Parameter) else written
    return "generator" if is_generator(value) else ""


def _readers(flow: Dataflow, uses: Mapping[str, Use]) -> dict[str, set[int]]:
    """What depends on each place, by others too that are made of it."""
    ends = [use for use in (flow.loss, *(use for _, use, _ in flow.outputs)) if use is not None]
    reads = [*enumerate(call.reads for call in flow.calls), *((-1, use) for use in ends)]
    readers = {name: {index for index, use in reads if name in use.kept} for name in uses}
    for _ in uses:
        for name, use in uses.items():
            for other in use.kept & readers.keys():
                readers[other] |= readers[name]
    return readers


def informed(flow: Dataflow) -> Dataflow:
    """The same, where what depends on a place depends on what that is made of, as far as it is made before."""
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


def _changed(model: nn.Module, before: Before) -> list[Path]:
    """The places of the model's that are not as they were; of what is inside a list or a mapping, where that is."""
    paths = [_place(model, change.path) for change in before.changes() if change.path[0].key == ""]
    for name, module in model.named_modules():
        parts = name.split(".") if name else []
        way = [step for part in parts for step in (Step("attr", "_modules"), Step("item", part))]
        hooks = (key for key in HOOKS if before.has_other(module.__dict__.get(key)))
        paths += [(Step("root", ""), *way, Step("attr", key)) for key in hooks]
    return list(dict.fromkeys(paths))


def _place(model: nn.Module, path: Path) -> Path:
    value: Any = model
    for k, step in enumerate(path[1:], 2):
        try:
            value = resolve(value, [step])
        except (AttributeError, KeyError, IndexError):
            return path[:k]
        is_container = isinstance(value, MutableMapping | MutableSequence | MutableSet)
        if is_generator(value) or (is_container and step.key not in REGISTERED and not isinstance(value, nn.Module)):
            return path[:k]
    return path
