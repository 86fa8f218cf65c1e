"""Kinds: groups of unit calls that behave the same, so that a trace runs only one call of each group.

Most layers of a model behave the same for inputs of the same shape. One call of each kind is visited: its forward runs
on meta, where torch propagates shapes. The visit also finds the values that the forward writes to Python objects, and
the results that are inputs or share memory with inputs. Another call is of the same kind if everything that the visited
call has read, except values of tensors, is equal for both calls.
"""

import contextlib
import copy
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence, Set
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property, partial
from types import FunctionType, GeneratorType, MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pipeshard.batch.batch import Batch
from pipeshard.errors import TraceError, summary
from pipeshard.graph.flags import flagged
from pipeshard.graph.meter import Meter, Visit
from pipeshard.graph.nodes import reached
from pipeshard.graph.operators import CASTING, casting
from pipeshard.graph.places import PLAIN, REGISTERED, PathStep, PlacePath, entries_of, format_path, own
from pipeshard.graph.shapes import TensorSpec, blank_state, copy_to, has_values, is_trainable
from pipeshard.graph.snapshot import Hooks, Snapshot, noting_reads
from pipeshard.graph.storage import storage_of
from pipeshard.graph.taint import Hidden, Kept, Tag, Taint, Value
from pipeshard.graph.unit_outputs import (
    ARGUMENTS,
    LISTS,
    RESULT,
    UNIT,
    Known,
    Part,
    Source,
    changed,
    listened,
    opened,
    run_collecting,
)
from pipeshard.graph.units import unsliced
from pipeshard.private import (
    TreeSpec,
    disable_current_modes,
    reparametrized,
    tree_flatten,
    tree_leaves,
    tree_map_only,
    tree_unflatten,
)

Location = tuple[PlacePath, Any]  # the path of a holder, and a key of its content
Own = tuple[tuple[str, tuple[Any, ...]], ...]  # names and values of a unit's own tensors
Beside = tuple[int, PlacePath]  # the index of an argument, or OF_UNIT, and the path of a tensor that it reaches
OF_UNIT = -1
FEW = 16  # the maximum number of elements of a tensor in Own


def device_of_glue(model: nn.Module, batch: Batch) -> torch.device:
    """The device on which a trace runs the glue of `model`: the model's device, or the batch's device if the model is
    on meta."""
    devices = (*(parameter.device for parameter in model.parameters()), batch.device)
    return next(device for device in devices if device.type != "meta")


class Settings:
    """A comparable record of everything that code could read from a unit or an argument, except the values of tensors.

    Attributes:
        values: a comparable form of the value at each Location.
        modules: for each module that the unit or argument reaches, by id, the module and its path.
        hooks: the hooks of these modules.
    """

    def __init__(self, root: Any) -> None:
        self.root, self.snapshot = root, Snapshot({UNIT: root})
        self.values: dict[Location, Any] = {((), "class"): type(root)}
        self.modules: dict[int, tuple[nn.Module, PlacePath]] = {}
        for path, value, how, content, *_ in self.snapshot.holders:
            for key, entry in entries_of(content):
                self.values[path, key] = _comparable(entry)
            if how == "attr" and isinstance(value, nn.Module):
                self.modules[id(value)] = value, path
        self.hooks = Hooks((path, module) for module, path in self.modules.values())
        for path, _, hooks in self.hooks.recorded:
            if hooks:
                self.values[path[:-1], path[-1].key] = tuple(map(id, hooks.values()))

    @cached_property
    def own(self) -> frozenset[int]:
        """The ids of the modules inside the unit."""
        return frozenset(map(id, self.root.modules()))

    def computed(self, taint: Taint) -> Iterator[PlacePath]:
        """The paths of the tensors that now have tags, such as results of other units. Parameters are omitted. State
        that only this unit call writes is omitted, since no other call needs to know that this call reads the state."""
        for path, tensor in self.snapshot.current():
            tags = () if isinstance(tensor, nn.Parameter) else taint.of([tensor])
            if any(not (isinstance(tag, Kept) and tag.writer == taint.calls) for tag in tags):
                yield path

    def differences(self, other: "Settings") -> set[Location]:
        a, b = self.values, other.values
        return {at for at in a.keys() | b.keys() if at not in a or at not in b or a[at] != b[at]}


OF_ANY_COPY = (TensorSpec, Known, Enum, *PLAIN)  # leaves that do not refer to objects of one copy of the model


class UnitCall(NamedTuple):
    """A unit call that a trace answers, with its (args, kwargs) flattened into `leaves` and `tree`."""

    unit: str
    module: nn.Module
    forward: Callable[..., Any]
    leaves: Sequence[Any]
    tree: TreeSpec


@dataclass(frozen=True)
class CallKind:
    """The result of visiting one call.

    `watched` are the paths of the modules whose attribute reads were recorded, and `read` are the attributes that the
    call read. `leaves` are the leaves of all `parts`. For each leaf, `reached` lists the inputs that receive a gradient
    from the leaf, and `reached_aside` lists the other values that receive a gradient. `shares` are the pairs (leaf,
    input) that share memory, and `twins` are the pairs (leaf, earlier leaf) that do. `written` are the inputs to which
    the call writes. `met` are the tags of everything that the call reads except its tensor inputs and parameters. `own`
    contains the values of the unit's smallest tensors, on which sizes may depend, or is None for a visit on meta.
    `beside` are the places of tensors that had tags and that the call could read: if the call has met no tags, it has
    read none of these tensors.
    """

    settings: Settings
    watched: frozenset[PlacePath]
    read: frozenset[Location]
    parts: tuple[Part, ...]
    leaves: tuple[Any, ...]
    reached: tuple[frozenset[int], ...]
    reached_aside: tuple[frozenset[Value], ...]
    shares: tuple[tuple[int, int], ...]
    twins: tuple[tuple[int, int], ...]
    written: tuple[int, ...]
    met: frozenset[Tag]
    flops: int
    elements: int
    visit: Visit | None
    own: Own | None = None
    beside: frozenset[Beside] = frozenset()

    @property
    def is_shared(self) -> bool:
        """Whether other units may have this kind: the visited call used no state that units share, changed no list of
        the unit, and returned no opaque object."""
        common = any(step.how in ("cell", "global", "class") for part in self.parts for step in part.source.place)
        lists = any(p.source.how in LISTS and p.source.place[0].key == UNIT for p in self.parts)
        opaque = any(not isinstance(leaf, OF_ANY_COPY) for leaf in self.leaves)
        return not (self.met or common or lists or opaque)

    @cached_property
    def reads_outside(self) -> tuple[Location, ...]:
        """The attributes that the visited call has read from modules outside the unit."""
        outside = {path for address, (_, path) in self.settings.modules.items() if address not in self.settings.own}
        return tuple(at for at in self.read if at[0] in outside)

    def is_of(self, settings: Settings) -> bool:
        """Whether a unit with `settings` behaves like the visited unit: the two differ only in attributes that the
        visited call did not read, or in objects to which only such attributes lead."""
        return all(
            self._is_unread(path, key) or path in self._unreached for path, key in self.settings.differences(settings)
        )

    def _is_unread(self, path: PlacePath, key: Any) -> bool:
        return path in self.watched and (path, key) not in self.read

    @cached_property
    def _unreached(self) -> frozenset[PlacePath]:
        """The paths of objects, other than modules, that can be reached only through unread attributes. One example is
        the dict with the layer's name that peft keeps in every LoRA layer. The registered dicts of a module
        (REGISTERED) count as read, since the module reads the entries of these dicts as attributes. Objects to which a
        tuple or a function refers also count as read."""
        snapshot = self.settings.snapshot
        paths = {id(h.object): h.path for h in snapshot.holders if not isinstance(h.object, nn.Module)}
        leading: dict[int, list[tuple[PlacePath, Any, int]]] = defaultdict(list)  # by object: places, and their holders
        for path, holder, _, content, *_ in snapshot.holders:
            for key, entry in entries_of(content):
                if id(entry) in paths:
                    leading[id(entry)].append((path, key, id(holder)))
        unread = set(leading) - snapshot.constants()
        while reached := {
            value
            for value in unread
            for path, key, holder in leading[value]
            if holder not in unread and (key in REGISTERED or not self._is_unread(path, key))
        }:
            unread -= reached
        return frozenset(paths[value] for value in unread)


class Kinds:
    """The known kinds of a model's units, kept between runs. `meter` observes every visit. `device` is glue's device.
    `runs_on` is the device for units that do not run on meta: it may be a GPU while the model is on another device.
    `lent` maps each unit to the values (by name) of the unit's tensors that other ranks hold.

    Attributes:
        valued: the units whose kind was visited with values instead of on meta.
        settings: the settings of each unit at its last call.
    """

    def __init__(
        self,
        units: Mapping[str, nn.Module],
        device: torch.device,
        runs_on: torch.device,
        meter: Meter | None = None,
        lent: Mapping[str, Mapping[str, Tensor]] | None = None,
    ) -> None:
        self.device, self.runs_on, self.meter, self.lent = device, runs_on, meter, lent or {}
        self.valued: set[str] = set()
        self._own = {unit: set(map(id, module.parameters())) for unit, module in units.items()}
        self.reuse = True
        self._known: dict[Any, list[CallKind]] = {}
        self.settings: dict[str, Settings] = {}

    def of(self, call: UnitCall, taint: Taint) -> CallKind:
        """The kind of this call of a unit: cached, or found by a visit."""
        settings = self._settings_of(call)
        # Tensors with which glue replaces parameters (torch.func.functional_call) are specific to this call.
        if lent := taint.of(p for p in call.module.parameters() if id(p) not in self._own[call.unit]):
            visited = self._visit(call, taint, settings)
            self.valued |= {call.unit} if visited.own is not None else set()
            return replace(visited, met=visited.met | lent)
        objects = {k: Settings(leaf) for k, leaf in enumerate(call.leaves) if not isinstance(leaf, (Tensor, *PLAIN))}
        described = tuple(properties_of(leaf, objects.get(k)) for k, leaf in enumerate(call.leaves))
        reaching = ((OF_UNIT, settings), *objects.items())
        beside = frozenset((k, path) for k, reached in reaching for path in reached.computed(taint))
        known = self._known.setdefault((type(call.module), modes(), str(call.tree), described), [])
        alike = (kind for kind in known if beside <= kind.beside and self._is_of(kind, call, settings))
        kind = next(alike, None) if self.reuse else None
        if kind is None:
            kind = replace(self._visit(call, taint, settings), beside=beside)
            if kind.is_shared:
                known.append(kind)
        if kind.own is not None:
            self.valued.add(call.unit)
        return kind

    def _is_of(self, kind: CallKind, call: UnitCall, settings: Settings) -> bool:
        return kind.is_of(settings) and (kind.own is None or kind.own == self._values_of(call))

    def _values_of(self, call: UnitCall) -> Own:
        """The values of the unit's smallest tensors that are on this rank or in `lent`."""
        named = (*call.module.named_parameters(), *call.module.named_buffers())
        few = {name: tensor for name, tensor in named if tensor.numel() <= FEW}
        lent = self.lent.get(call.unit, {})
        known = {name: lent.get(name, tensor) for name, tensor in few.items() if name in lent or has_values(tensor)}
        with disable_current_modes():  # so that these reads do not count as decisions of the model
            values = {name: getattr(t, "pipeshard_values", t).detach().flatten().clone() for name, t in known.items()}
        return tuple((name, tuple(tensor.tolist())) for name, tensor in values.items())

    def _settings_of(self, call: UnitCall) -> Settings:
        """The current settings of a unit, cached until a setting changes."""
        settings = self.settings.get(call.unit)
        if settings is None or any(settings.hooks.changed()) or any(flagged(settings.snapshot)):
            settings = self.settings[call.unit] = Settings(call.module)
        return settings

    def _visit(self, call: UnitCall, taint: Taint, settings: Settings) -> CallKind:
        """Run a unit's own forward on meta. If the forward fails on meta (as it always does if autocast would cast),
        run the forward on a real device with temporary tensors."""
        try:
            return self._visit_on(torch.device("meta"), call, taint, settings)
        except TraceError:
            raise
        except Exception as on_meta:  # of any type: raised by the model's code without values
            kind = casting() or self.runs_on.type
            try:
                device = self.runs_on if kind == self.runs_on.type else torch.device(kind)
                visited = self._visit_on(device, call, taint, settings)
                return replace(visited, own=self._values_of(call))
            except Exception as error:  # of any type: raised by the model's code
                first = f" (the first attempt, on the meta device, failed with: {summary(on_meta)})"
                raise TraceError(
                    f"unit {call.unit} ({type(call.module).__name__}) failed in the trace: {summary(error)}"
                    f"{first if summary(on_meta) != summary(error) else ''}. The unit's inputs (for tensors: "
                    f"shape, dtype, requires_grad) were {[properties_of(leaf) for leaf in call.leaves]}"
                ) from error

    def _visit_on(self, device: torch.device, call: UnitCall, taint: Taint, settings: Settings) -> CallKind:
        module = call.module
        inputs, state = self._given(device, call, taint)
        of_buffers = set[Value]()
        for name, buffer in module.named_buffers():  # another unit may have written to the buffer
            if tags := taint.of([buffer]):
                taint.mark(state[name], tags)
                of_buffers |= {tag for tag in tags if isinstance(tag, Value)}
        arguments = tree_unflatten(inputs, call.tree)
        tensors = [(k, t) for k, t in enumerate(inputs) if isinstance(t, Tensor)]
        nodes = {t.grad_fn: frozenset({k}) for k, t in tensors if t.grad_fn is not None}
        positions = {storage_of(t): k for k, t in tensors}
        read: set[Location] = {((PathStep("root", UNIT),), "forward")}  # the call was intercepted after this read

        def note(module: nn.Module, name: str) -> None:
            read.add((settings.modules[id(module)][1], name))

        with _called_on(module, arguments, state) as before:
            with (
                taint.inside_call() as stores,
                noting_reads([module for module, _ in settings.modules.values()], note) as watched,
                self.meter.visit(module, inputs) if self.meter else contextlib.nullcontext() as visit,
            ):
                hooked = listened(module)
                (_, result), *heard = run_collecting(module, call.forward, arguments, hooked, silent=True)
            left = list(changed(before, but=inputs, stores=stores))
        contents = [(RESULT, opened(result, before.paths)), *heard, *left]
        results = [(source, *tree_flatten(content)) for source, content in contents]
        _refuse_generators(call, results)
        flat = [leaf for _, of_part, _ in results for leaf in of_part]
        if self.meter and visit is not None:
            self.meter.end(visit, flat, state.values())
        tensors = [(k, t) for k, t in enumerate(flat) if isinstance(t, Tensor)]
        first: dict[int, int] = {}
        passed_on = taint.of(t for _, t in tensors) - {Hidden(taint.calls)}  # of results that only pass through
        return CallKind(
            settings=settings,
            watched=frozenset(settings.modules[address][1] for address in watched),
            read=frozenset(read),
            parts=tuple(Part(source, tree) for source, _, tree in results),
            leaves=tuple(self._spec(leaf) for leaf in flat),
            reached=tuple(reached(leaf, nodes) for leaf in flat),
            reached_aside=tuple(_reached_aside(leaf, taint, of_buffers) for leaf in flat),
            shares=tuple((k, positions[storage_of(t)]) for k, t in tensors if storage_of(t) in positions),
            twins=tuple((k, n) for k, t in tensors if (n := first.setdefault(storage_of(t), k)) != k),
            written=tuple(sorted(positions[storage] for storage in positions.keys() & stores)),
            met=frozenset(taint.met | passed_on) - taint.of(module.parameters()),
            flops=taint.flops,
            elements=taint.elements,
            visit=visit,
        )

    def _given(self, device: torch.device, call: UnitCall, taint: Taint) -> tuple[list[Any], dict[str, Tensor]]:
        """Copies of the call's argument leaves for a visit on `device`, and new parameters and buffers for the unit."""
        with disable_current_modes():
            inputs = [_lent(leaf, device, taint) for leaf in call.leaves]
            state = blank_state(call.module, device, self.lent.get(call.unit))
        taint.note_made(state.values())
        return inputs, state

    def _spec(self, leaf: Any) -> Any:
        """The form in which a CallKind keeps a visit's leaf: a TensorSpec for a tensor, glue's device for the meta
        device, otherwise the leaf itself."""
        if isinstance(leaf, torch.device) and leaf.type == "meta":
            return self.device  # a cache stores its device
        return TensorSpec.of(leaf) if isinstance(leaf, Tensor) else leaf


def modes() -> tuple[Any, ...]:
    """The global torch modes that affect results, and that glue may switch between two calls."""
    casts = [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in CASTING]
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype(), *casts


def properties_of(leaf: Any, settings: Settings | None = None) -> Any:
    """The properties of an argument that determine how a unit behaves. Pass the `settings` of the argument if they are
    known."""
    if isinstance(leaf, Tensor):
        return tuple(leaf.shape), leaf.dtype, leaf.requires_grad
    if isinstance(leaf, PLAIN):
        return type(leaf), leaf if not isinstance(leaf, slice) else str(leaf)
    return _comparable(leaf), frozenset((settings or Settings(leaf)).values.items())


def _comparable(value: Any) -> Any:
    value = own(value)
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype, is_trainable(value)
    if isinstance(value, slice):
        return str(value)
    if isinstance(value, (*PLAIN, Enum)):
        return type(value), value
    if isinstance(value, tuple):
        return tuple(map(_comparable, value))
    if isinstance(value, partial):
        return _comparable(value.func), _comparable(value.args), repr(sorted(value.keywords))
    if isinstance(value, MethodType):
        return _comparable(value.__func__), type(value.__self__)
    if isinstance(value, FunctionType):
        return value.__code__, _comparable(value.__defaults__ or ())
    return type(value)


@contextlib.contextmanager
def _called_on(module: nn.Module, arguments: Any, state: dict[str, Tensor]) -> Iterator[Snapshot]:
    """Context manager in which the module has the parameters and buffers in `state`. Yields a Snapshot of the module
    and the arguments, and restores their Python state on exit."""
    with unsliced(), reparametrized(module, state):
        before = Snapshot({UNIT: module, ARGUMENTS: arguments})
        try:
            yield before
        finally:
            before.restore()


def _refuse_generators(call: UnitCall, results: Sequence[tuple[Source, Sequence[Any], TreeSpec]]) -> None:
    """Raise TraceError if the call has returned a generator, or has left a generator at a place."""
    for source, leaves, _ in results:
        if any(isinstance(leaf, GeneratorType) for leaf in leaves):
            place = format_path(source.place[1:])
            raise TraceError(
                f"unit {call.unit} ({type(call.module).__name__}) "
                f"{f'keeps a generator in {place}' if place else 'returns a generator'}, but a generator's code "
                f"runs only after the unit: {'keep' if place else 'return'} a list of the items instead"
            )


def _lent(leaf: Any, device: torch.device, taint: Taint) -> Any:
    """The argument for a visit: for a tensor or a mutable mapping, a copy with its tensors on `device`, otherwise
    `leaf` itself."""
    if isinstance(leaf, Tensor):
        return copy_to(leaf, device)
    if not isinstance(leaf, MutableMapping):
        return leaf
    lent = copy.copy(leaf)
    for key, value in leaf.items():
        lent[key] = tree_map_only(Tensor, lambda t: copy_to(t, device), value)
        for original, copied in zip(tree_leaves(value), tree_leaves(lent[key]), strict=True):
            taint.mark(copied, taint.of([original]))
            if copied.grad_fn is not None:
                taint.nodes[copied.grad_fn] = taint.reached(original)
    return lent


def _reached_aside(leaf: Any, taint: Taint, of_buffers: Set[Value]) -> frozenset[Value]:
    """The values that receive a gradient from a leaf of the result. Inputs are omitted. Values in the unit's buffers
    (`of_buffers`) are assumed to receive a gradient from every tensor."""
    return frozenset(taint.reached(leaf) | of_buffers) if isinstance(leaf, Tensor) else frozenset()
