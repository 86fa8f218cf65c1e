"""Tracer: runs a model's glue with its units stood in for, and watches what depends on what."""

import contextlib
import copy
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import stateless
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from pipeshard.errors import TraceError
from pipeshard.model.batch import Batch
from pipeshard.model.criterion import Criterion, loss_of
from pipeshard.model.cutpoint import CutPoint, check_aliases, check_call
from pipeshard.model.dataflow import Call, Dataflow, Use
from pipeshard.model.exits import Exits, Part, answer, listened
from pipeshard.model.kinds import describe, kind_name
from pipeshard.model.meter import Meter, Visit
from pipeshard.model.names import flatten_with_names
from pipeshard.model.randomness import Randomness, python_state
from pipeshard.model.region import Handed
from pipeshard.model.shapes import Axes, TensorSpec
from pipeshard.model.slicing import unsliced
from pipeshard.model.standin import blank_state, copy_to, stand_in
from pipeshard.model.taint import Hidden, Input, Reading, Tag, Taint, Used, Value
from pipeshard.model.units import find_units, handled
from pipeshard.model.untouched import untouched

SMALL = 4  # numbers a sample in an input of sizes (of images, patches, ...), at most


class _SeenOutside(Exception):
    """Something made inside a unit was met outside of it, so no unit may be skipped as one of a known kind."""


@dataclass
class _Kind:
    """What a unit's run on meta told: its result, the inputs it writes to, what it met by itself, and its cost."""

    parts: tuple[Part, ...]
    leaves: tuple[Any, ...]
    written: tuple[int, ...]
    met: frozenset[Tag]
    flops: int
    elements: int
    visit: Visit | None
    draws: bool

    @property
    def is_plain(self) -> bool:
        """Whether one tensor leaves it, as its result, and it does nothing else that anybody notices."""
        one = len(self.parts) == 1 and self.parts[0].tree.is_leaf() and isinstance(self.leaves[0], TensorSpec)
        return one and not self.written and not self.met and not self.draws


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
        self.kinds: dict[Any, _Kind] = {}
        self.names = {name: kind_name(unit) for name, unit in self.units.items()}
        self.reuse = True
        self.python_random = False

    def run(self, batch: Batch) -> Dataflow:
        """One run of the glue; shapes are those of `batch`, without slopes."""
        try:
            return self._run(batch.to(self.device))
        except _SeenOutside:
            self.reuse = False
            return self._run(batch.to(self.device))

    def _run(self, batch: Batch) -> Dataflow:
        self.taint = Taint(self.device)
        self.calls: list[Call] = []
        self.handed: Handed | None = None
        self.rows = batch.rows
        for name, parameter in self.model.named_parameters():
            self.taint.mark(parameter, frozenset({Used(name)}))
        for path, leaf in batch.tensors.items():
            self.taint.mark(leaf, self.taint.of([leaf]) | {Input(path)})
        versions = {path: leaf._version for path, leaf in batch.tensors.items()}
        noted: set[str] = set()
        batch = batch.noting(noted.add)
        with contextlib.ExitStack() as stack:
            stack.enter_context(Randomness(self.device).step(0, 0))
            stack.enter_context(handled(self.units, self._answer))
            stack.enter_context(torch.enable_grad())  # whether a result requires grad is part of it
            if self.meter:
                stack.enter_context(self.meter.running(self.taint))
            stack.enter_context(self.taint)
            stack.enter_context(Reading(self.taint))
            stack.enter_context(self._sealing())
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
        changed = {path for path, leaf in batch.tensors.items() if leaf._version != versions[path]}
        written, decisions = frozenset(self.taint.written), tuple(self.taint.decisions)
        consulted = frozenset(self.taint.consulted | changed)
        small = {path for path in consulted if batch.tensors[path].numel() <= SMALL * batch.rows}
        watched = frozenset(self.taint.shaping | small | noted)
        check_aliases(self.calls, self.taint.written, [*(use for _, use, _ in outputs), *([used] if used else [])])
        axes, random = Axes((), (), (), ()), (self.taint.drawn or self.python_random, self.python_random)
        told = written, decisions, consulted, watched, axes, *random
        touched = frozenset(self.taint.touched)
        return Dataflow(tuple(self.calls), used, outputs, *told, tail=self.taint.of_glue, touched=touched)

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
        is_cut = isinstance(self.units[unit], CutPoint)
        if is_cut:
            check_call(unit, args, self.calls, self.rows)
        leaves, tree = tree_flatten((args, kwargs))
        tags = taint.of(leaves)
        use = self._use(tags)
        key = (self.names[unit], str(tree), tuple(map(describe, leaves)))
        kind = self.kinds.get(key) if self.reuse else None
        if kind is None:
            kind = self._visit(unit, original, leaves, tree)
            if not kind.met:
                self.kinds[key] = kind
            use = self._use(tags | kind.met)
        for position in kind.written:
            taint.write(leaves[position], frozenset({Hidden(index)}))  # who reads it from here on sees the change
        differentiable = taint.of(t for t in leaves if isinstance(t, Tensor) and t.requires_grad) | kind.met
        differentiated = Use.of(differentiable).values
        work, taint.of_glue, writes = (kind.flops + taint.of_glue, kind.elements), 0, bool(kind.written)
        handed = Handed.of(args, leaves, tree) if kind.is_plain and not is_cut else None
        continues = handed is not None and handed.continues(self.handed)
        told = {"writes": writes, "is_cut": is_cut, "continues": continues}
        self.calls.append(Call(unit, use, differentiated, kind.parts, kind.leaves, *work, **told))
        result: list[Any] = []
        for position, leaf in enumerate(kind.leaves):
            if isinstance(leaf, TensorSpec):
                leaf = stand_in(leaf, self.device)
                taint.mark(leaf, frozenset({Value(index, position)}), home=Value(index, position))
            result.append(leaf)
        self.handed = handed.returning(result[0], self.handed if continues else None) if handed else None
        if self.meter and kind.visit:
            self.meter.add(kind.visit, leaves, tree, result)
        return answer(self.units[unit], kind.parts, result, (args, kwargs))

    def _visit(self, unit: str, forward: Callable[..., Any], leaves: list[Any], tree: TreeSpec) -> _Kind:
        """Run a unit's own forward on meta, or with throw-away values where it does not run there."""
        try:
            return self._visit_on(torch.device("meta"), unit, forward, leaves, tree)
        except Exception as on_meta:
            try:
                return self._visit_on(self.device, unit, forward, leaves, tree)
            except Exception as error:
                raise TraceError(
                    f"unit {unit} ({type(self.units[unit]).__name__}) does not run: {type(error).__name__}: {error} "
                    f"(by shape alone: {type(on_meta).__name__}: {on_meta}). Its inputs were "
                    f"{[describe(leaf) for leaf in leaves]}"
                ) from error

    def _visit_on(
        self, device: torch.device, unit: str, forward: Callable[..., Any], leaves: list[Any], tree: TreeSpec
    ) -> _Kind:
        taint, module = self.taint, self.units[unit]
        with _disable_current_modes():
            inputs = [self._lent(leaf, device) for leaf in leaves]
            own = blank_state(module, device)
        # While inside, a home says which input a storage is: what is written there is written to that input.
        positions = {t.untyped_storage()._cdata: Value(-1, k) for k, t in enumerate(inputs) if isinstance(t, Tensor)}
        homes, written = taint.homes, taint.written
        taint.homes, taint.written = positions, set()
        taint.inside, taint.met, taint.flops, taint.elements, taint.drew = len(self.calls), set(), 0, 0, False
        args, kwargs = tree_unflatten(inputs, tree)
        try:
            with (
                untouched(module),
                unsliced(),
                stateless._reparametrize_module(module, own),
                Exits(module, listened(module), silent=True) as exits,
                self.meter.visit(module, inputs) if self.meter else contextlib.nullcontext() as visit,
            ):
                results = exits.run(forward, args, kwargs)
        finally:
            taint.inside, changed = None, taint.written
            taint.homes, taint.written = homes, written
        flat = [(source, *tree_flatten(content)) for source, content in results]
        if visit is not None:
            Meter.end(visit, [t for _, leaves, _ in flat for t in leaves])
        parts = tuple(Part(source, tree) for source, _, tree in flat)
        specs = tuple(TensorSpec.of(t) if isinstance(t, Tensor) else t for _, leaves, _ in flat for t in leaves)
        met = frozenset(taint.met) - taint.of(module.parameters())
        writes, work = tuple(value.leaf for value in changed), (taint.flops, taint.elements)
        return _Kind(parts, specs, writes, met, *work, visit, taint.drew)

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
