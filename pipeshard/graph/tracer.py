"""Tracer: runs a model's glue with its units stood in for, and watches what depends on what."""

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import stateless
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from pipeshard.batch.batch import Batch
from pipeshard.batch.criterion import Criterion, loss_of
from pipeshard.batch.tree import flatten_with_names
from pipeshard.errors import TraceError
from pipeshard.graph.dataflow import Call, Dataflow, Use
from pipeshard.graph.flags import State
from pipeshard.graph.kinds import Settings, describe, differences, differing, modes, module_at, settings, watching
from pipeshard.graph.meter import Meter, Visit
from pipeshard.graph.question import Recipes
from pipeshard.graph.rng import Groups, Randomness, python_state
from pipeshard.graph.shapes import Axes, TensorSpec, as_trained, blank_state, copy_to, stand_in
from pipeshard.graph.snapshot import Snapshot
from pipeshard.graph.taint import Hidden, Input, Kept, Reading, Tag, Taint, Used, Value, casting, storage_of
from pipeshard.graph.unit_outputs import ARGUMENTS, LISTS, RESULT, UNIT, Exits, Part, answer, changed, listened, opened
from pipeshard.graph.units import CutPoint, check_aliases, check_call, find_units, handled, unsliced


@contextmanager
def backward_noted(taint: Taint) -> Iterator[None]:
    """Notes as a decision, in a trace, what no stage can do alone: of the graph that leads through units each stage has
    a part. Such gradients are zeros inside; what is computed inside one unit is that unit's own affair."""
    grad, backward = torch.autograd.grad, torch.autograd.backward

    def noted(*tensors: Any) -> bool:
        tags = frozenset(tag for tag in taint.of(tensors) if isinstance(tag, Value | Hidden))
        taint.decide(tags)
        return bool(tags) and taint.inside is None

    def grad_instead(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if not noted(*_listed(outputs)):
            return grad(outputs, inputs, *args, **kwargs)
        made = [torch.zeros_like(t, requires_grad=bool(kwargs.get("create_graph"))) for t in _listed(inputs)]
        for tensor in made:
            taint.mark(tensor, taint.of([*_listed(outputs), *_listed(inputs)]))
        return tuple(made)

    def backward_instead(tensors: Any, *args: Any, **kwargs: Any) -> None:
        if not noted(*_listed(tensors)):
            backward(tensors, *args, **kwargs)

    torch.autograd.grad, torch.autograd.backward = grad_instead, backward_instead
    try:
        yield
    finally:
        torch.autograd.grad, torch.autograd.backward = grad, backward


def _listed(tensors: Any) -> list[Any]:
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


SMALL = 4  # numbers a sample in an input of sizes (of images, patches, ...), at most


class _SeenOutside(Exception):
    """Something made inside a unit was met outside of it, so no unit may be skipped as one of a known kind."""


@dataclass
class _Kind:
    """What a unit's run on meta told: its result, the inputs it writes to, what it met by itself, and its cost.

    For each leaf `reached` has the inputs that get a gradient from it, `shares` those whose memory it is, and `twins`
    the other leaves of that memory. `unread` are attributes that units differ in, which it did not read.
    """

    settings: Settings
    unread: frozenset[tuple[str, str]]
    parts: tuple[Part, ...]
    leaves: tuple[Any, ...]
    reached: tuple[frozenset[int], ...]
    shares: tuple[tuple[int, int], ...]
    twins: tuple[tuple[int, int], ...]
    written: tuple[int, ...]
    met: frozenset[Tag]
    flops: int
    elements: int
    visit: Visit | None

    @property
    def is_shared(self) -> bool:
        """Whether another unit may do the same: nothing was met or left that units have in common."""
        common = any(step.how in ("cell", "global", "class") for part in self.parts for step in part.source.place)
        lists = any(p.source.how in LISTS and p.source.place[0].key == UNIT for p in self.parts)
        return not (self.met or common or lists)

    def is_of(self, now: Settings) -> bool:
        """Whether a unit with these settings does what this one did."""
        places = ((module_at(path), key) for path, key in differences(self.settings, now))
        return all(place in self.unread for place in places)


def unheard(call: int | None, is_through: bool) -> None:
    """Nothing is to be done before a call, or when it is through."""


class Tracer:
    """Runs the glue of one model; remembers the kinds of its units from run to run. A `meter` listens to every run."""

    def __init__(
        self,
        model: nn.Module,
        criterion: Criterion | None,
        sample: Batch,
        meter: Meter | None = None,
        cuts: Sequence[str] = (),
    ) -> None:
        self.model, self.criterion, self.meter = model, criterion, meter
        self.units = find_units(model, cuts)
        tensors = (*model.parameters(), *sample.tensors.values())
        self.device = next(t.device for t in tensors if not t.is_meta)
        self.kinds: dict[Any, list[_Kind]] = {}
        self.settings: dict[str, tuple[State, Settings]] = {}
        self.differing = differing({name: (type(unit), self._settings(name)) for name, unit in self.units.items()})
        self.reuse = True
        self.python_random = False
        self.reset: Callable[[], None] = lambda: None  # before every run
        self.listen = unheard  # told before and after each call what was called, and when the forward ends
        self.kept: Mapping[str, Sequence[Tensor]] = {}  # what is in places of these names

    def run(self, batch: Batch, real: Batch | None = None) -> Dataflow:
        """One run of the glue; shapes are those of `batch`, without slopes. Where glue asks for values in Python, it
        gets the answers of `real`."""
        batch = batch.to(self.device)
        try:
            return self._run(batch, real)
        except _SeenOutside:
            self.reuse = False
            return self._run(batch, real)

    def _run(self, batch: Batch, real: Batch | None) -> Dataflow:
        self.reset()
        batch = batch.copied(batch.tensors)  # glue may write to it
        self.taint = Taint(self.device, Recipes(self.device, batch, real))
        self.calls: list[Call] = []
        self.groups = Groups()
        self.rows = batch.rows
        for name, parameter in self.model.named_parameters():
            self.taint.mark(parameter, frozenset({Used(name)}))
        for path, leaf in batch.tensors.items():
            self.taint.mark(leaf, self.taint.of([leaf]) | {Input(path)})
            self.taint.recipes.leaf(leaf, path)
        for name, tensors in self.kept.items():
            for tensor in tensors:
                self.taint.mark(tensor, frozenset({Kept(name)}))
        versions = {path: leaf._version for path, leaf in batch.tensors.items()}
        with contextlib.ExitStack() as stack:
            stack.enter_context(as_trained(self.model))
            stack.enter_context(Randomness(self.device).step(0, 0))
            stack.enter_context(handled(self.units, self._answer))
            stack.enter_context(torch.enable_grad())  # whether a result requires grad is part of it
            if self.meter:
                stack.enter_context(self.meter.running(self.taint))
            stack.enter_context(self.taint)
            stack.enter_context(Reading(self.taint, self.calls))
            stack.enter_context(self._sealing())
            stack.enter_context(backward_noted(self.taint))
            state = python_state()
            try:
                output = batch.call(self.model)
            except (_SeenOutside, TraceError):
                raise
            except Exception as error:
                shapes = {path: tuple(tensor.shape) for path, tensor in batch.tensors.items()}
                last = f" after unit {self.calls[-1].unit}" if self.calls else ""
                raise TraceError(
                    f"tracing {type(self.model).__name__} failed{last}: {type(error).__name__}: {error}. "
                    f"The batch has {shapes}; if that is not what "
                    "the model takes, pass dry_run_input=<a batch>, and where another dimension than the first counts "
                    "the samples, batch_dims={<name>: <dimension>}"
                ) from error
            self.listen(None, False)
            loss = loss_of(output, self.criterion, batch)
            self.python_random |= python_state() != state  # by a unit of a kind too, which runs once for all
        named, _ = flatten_with_names(output)
        outputs = tuple(
            (name, Use.of(self.taint.of([leaf])), TensorSpec.of(leaf))
            for name, leaf in named
            if isinstance(leaf, Tensor)
        )
        sealed = frozenset(Hidden(call) for call in self.sealed[:1])  # from there on, all is one autograd function's
        used = None if loss is None else self._use(self.taint.of([loss]))
        if used is not None:
            used = replace(used, hidden=used.hidden | Use.of(sealed).hidden)
        for _, use, _ in outputs:
            self._use(frozenset(Hidden(call) for call in use.hidden))
        rewritten = {path for path, leaf in batch.tensors.items() if leaf._version != versions[path]}
        written, decisions = frozenset(self.taint.written), tuple(self.taint.decisions)
        consulted = frozenset(self.taint.consulted | rewritten)
        seen = {path for path in self.taint.seen | rewritten if batch.tensors[path].numel() <= SMALL * batch.rows}
        watched = frozenset(self.taint.shaping | seen | batch.entries.keys())
        check_aliases(self.calls, self.taint.written, [*(use for _, use, _ in outputs), *([used] if used else [])])
        seeded = self.taint.drawn or self.python_random or bool(self.groups.spans)  # Repeats go by seeds
        axes, random = Axes((), (), (), ()), (seeded, self.python_random)
        told = written, decisions, consulted, watched, axes, *random
        more = {
            "together": tuple(self.groups.spans),
            "tail": self.taint.of_glue,
            "hooks": tuple(self.taint.hooks),
            "touched": frozenset(self.taint.touched),
            "rewritten": frozenset(rewritten),
            "questions": tuple(question for question in self.taint.recipes.questions if not question.paths <= watched),
        }
        return Dataflow(tuple(self.calls), used, outputs, *told, **more)  # type: ignore[arg-type]

    @contextlib.contextmanager
    def _sealing(self) -> Iterator[None]:
        """Notes the units that are called inside a custom autograd function (reformer's reversible layers), whose
        backward calls them again in a way of its own."""
        self.sealed: list[int] = []
        original = torch.autograd.Function.__dict__["apply"]

        def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
            first = len(self.calls)
            result = original.__get__(None, cls)(*args, **kwargs)
            self.sealed += range(first, len(self.calls))
            return result

        torch.autograd.Function.apply = classmethod(apply)  # type: ignore[assignment, method-assign]
        try:
            yield
        finally:
            torch.autograd.Function.apply = original  # type: ignore[method-assign]

    def _use(self, tags: frozenset[Tag]) -> Use:
        use = Use.of(tags)
        if use.hidden and self.reuse:
            raise _SeenOutside
        return use

    def _answer(self, unit: str, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Stand in for one call of a unit."""
        taint = self.taint
        if taint.inside is not None:  # called by another unit: part of that one
            return original(*args, **kwargs)
        index = len(self.calls)
        self.listen(index, False)
        self.groups.note(index)
        is_cut = isinstance(self.units[unit], CutPoint)
        if is_cut:
            check_call(unit, args, self.calls, self.rows)
        leaves, tree = tree_flatten((args, kwargs))
        tags = taint.of(leaves)
        use = self._use(tags)
        kind = self._kind(unit, original, leaves, tree)
        use = self._use(tags | kind.met)
        for position in kind.written:
            taint.write(leaves[position], frozenset({Hidden(index)}))  # who reads it from here on sees the change
        differentiated = self._differentiated(kind, leaves)
        work, taint.of_glue, writes = (kind.flops + taint.of_glue, kind.elements), 0, bool(kind.written)
        told = {"writes": writes, "is_cut": is_cut}
        self.calls.append(Call(unit, use, differentiated, kind.parts, kind.leaves, *work, **told))
        result: list[Any] = []
        for position, leaf in enumerate(kind.leaves):
            if isinstance(leaf, TensorSpec):
                leaf = stand_in(leaf, self.device)
                taint.mark(leaf, frozenset({Value(index, position)}), home=Value(index, position))
            result.append(leaf)
        if self.meter and kind.visit:
            self.meter.add(kind.visit, leaves, tree, result)
        pairs = [(result[k], leaves[n]) for k, n in kind.shares] + [(result[k], result[n]) for k, n in kind.twins]
        for one, other in pairs if not is_cut else ():
            taint.alias(one, other, frozenset({Hidden(index)}))
        answered = answer(self.units[unit], kind.parts, result, (args, kwargs))
        self.listen(index, True)
        return answered

    def _differentiated(self, kind: _Kind, leaves: Sequence[Any]) -> tuple[frozenset[Value], ...]:
        """For each leaf of a call, the values that get a gradient if it does."""
        met = Use.of(kind.met).values
        if not torch.is_grad_enabled():  # inside a function with a backward of its own, which may be of anything
            every = met | Use.of(self.taint.of(t for t in leaves if isinstance(t, Tensor) and t.requires_grad)).values
            return (every,) * len(kind.leaves)
        inputs = {k: Use.of(self.taint.of([leaves[k]])).values for positions in kind.reached for k in positions}
        return tuple(met.union(*(inputs[k] for k in positions)) for positions in kind.reached)

    def _kind(self, unit: str, forward: Callable[..., Any], leaves: list[Any], tree: TreeSpec) -> _Kind:
        """What this call of a unit does, as far as it is known from one that was visited, else by a visit."""
        now = self._settings(unit)
        known = self.kinds.setdefault((type(self.units[unit]), modes(), str(tree), tuple(map(describe, leaves))), [])
        kind = next((kind for kind in known if kind.is_of(now)), None) if self.reuse else None
        if kind is None:
            kind = self._visit(unit, forward, leaves, tree, now)
            if kind.is_shared:
                known.append(kind)
        return kind

    def _settings(self, unit: str) -> Settings:
        """Those of a unit now; glue seldom changes any between two calls."""
        state, found = self.settings.get(unit, (None, None))
        if state is None or found is None or not state.is_same():
            snapshot = Snapshot({"unit": self.units[unit]})
            found = settings(self.units[unit], snapshot)
            self.settings[unit] = State(snapshot.holders), found
        return found

    def _visit(self, unit: str, forward: Callable[..., Any], leaves: list[Any], tree: TreeSpec, now: Settings) -> _Kind:
        """Run a unit's own forward on meta, or with throw-away values where it does not run there, or where torch
        casts by itself, which it does on the device that it casts for alone."""
        try:
            return self._visit_on(torch.device("meta"), unit, forward, leaves, tree, now)
        except Exception as on_meta:
            kind = casting() or self.device.type
            try:
                device = self.device if kind == self.device.type else torch.device(kind)
                return self._visit_on(device, unit, forward, leaves, tree, now)
            except Exception as error:
                raise TraceError(
                    f"unit {unit} ({type(self.units[unit]).__name__}) does not run: {type(error).__name__}: {error} "
                    f"(by shape alone: {type(on_meta).__name__}: {on_meta}). Its inputs were "
                    f"{[describe(leaf) for leaf in leaves]}"
                ) from error

    def _visit_on(
        self,
        device: torch.device,
        unit: str,
        forward: Callable[..., Any],
        leaves: list[Any],
        tree: TreeSpec,
        now: Settings,
    ) -> _Kind:
        taint, module = self.taint, self.units[unit]
        with _disable_current_modes():
            inputs = [self._lent(leaf, device) for leaf in leaves]
            own = blank_state(module, device)
        for name, buffer in module.named_buffers():  # one that another unit has moved
            if tags := taint.of([buffer]):
                taint.mark(own[name], tags)
        nodes = {t.grad_fn: k for k, t in enumerate(inputs) if isinstance(t, Tensor) and t.grad_fn is not None}
        arguments = tree_unflatten(inputs, tree)
        # While inside, a home says which input a storage is: what is written there is written to that input.
        positions = {storage_of(t): k for k, t in enumerate(inputs) if isinstance(t, Tensor)}
        homes, written = taint.homes, taint.written
        taint.homes, taint.written = {storage: Value(-1, k) for storage, k in positions.items()}, set()
        taint.inside, taint.met, taint.flops, taint.elements = len(self.calls), set(), 0, 0
        try:
            with unsliced(), stateless._reparametrize_module(module, own):
                before = Snapshot({UNIT: module, ARGUMENTS: arguments})
                try:
                    with (
                        watching(module, self.differing) as read,
                        Exits(module, listened(module), silent=True) as exits,
                        self.meter.visit(module, inputs) if self.meter else contextlib.nullcontext() as visit,
                    ):
                        (_, result), *heard = exits.run(forward, *arguments)
                    left = list(changed(before, but=inputs))
                finally:
                    before.restore()
        finally:
            taint.inside, changed_inputs = None, taint.written
            taint.homes, taint.written = homes, written
        results = [(RESULT, opened(result, before.paths)), *heard, *left]
        flat = [(source, *tree_flatten(content)) for source, content in results]
        tensors = [(k, t) for k, t in enumerate(t for _, leaves, _ in flat for t in leaves) if isinstance(t, Tensor)]
        if visit is not None:
            Meter.end(visit, [t for _, leaves, _ in flat for t in leaves])
        specs = tuple(self._spec(leaf) for _, leaves, _ in flat for leaf in leaves)
        first: dict[int, int] = {}
        passed_on = taint.of(t for _, t in tensors) - {Hidden(len(self.calls))}  # by no operator, from somewhere else
        return _Kind(
            settings=now,
            unread=frozenset((path, name) for path, names in self.differing.items() for name in names) - read,
            parts=tuple(Part(source, tree) for source, _, tree in flat),
            leaves=specs,
            reached=_reached(len(specs), tensors, nodes),
            shares=tuple((k, positions[storage_of(t)]) for k, t in tensors if storage_of(t) in positions),
            twins=tuple((k, n) for k, t in tensors if (n := first.setdefault(storage_of(t), k)) != k),
            written=tuple(value.leaf for value in changed_inputs),
            met=frozenset(taint.met | passed_on) - taint.of(module.parameters()),
            flops=taint.flops,
            elements=taint.elements,
            visit=visit,
        )

    def _spec(self, leaf: Any) -> Any:
        """What is kept of a leaf that a visit has left."""
        if isinstance(leaf, torch.device) and leaf.type == "meta":
            return self.device  # a cache remembers where it is
        return TensorSpec.of(leaf) if isinstance(leaf, Tensor) else leaf

    def _lent(self, leaf: Any, device: torch.device) -> Any:
        """An argument for a visit: a copy, and of a mapping one whose entries tell when they are read."""
        if isinstance(leaf, Tensor):
            return copy_to(leaf, device)
        if not isinstance(leaf, MutableMapping):
            return leaf
        lent = copy.copy(leaf)
        for key, value in leaf.items():
            lent[key] = tree_map_only(Tensor, lambda t: copy_to(t, device), value)
            for original, copied in zip(tree_leaves(value), tree_leaves(lent[key]), strict=True):
                self.taint.mark(copied, self.taint.of([original]))
        return lent


def _reached(count: int, tensors: Sequence[tuple[int, Tensor]], nodes: Mapping[Any, int]) -> tuple[frozenset[int], ...]:
    """For each of `count` leaves, which inputs (by the nodes of their graphs) get a gradient from it."""
    reached: list[frozenset[int]] = [frozenset()] * count
    for k, tensor in tensors:
        found, stack, seen = set(), [tensor.grad_fn], set()
        while stack:
            node = stack.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            if node in nodes:
                found.add(nodes[node])
            else:
                stack += [following for following, _ in node.next_functions]
        reached[k] = frozenset(found)
    return tuple(reached)
