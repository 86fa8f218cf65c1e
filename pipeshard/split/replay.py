"""Replay: a stage's run of the model's forward, in which the units of other stages return received values.

If a model is split by hand, its forward is rewritten for every stage. Here the model's own forward runs on every stage,
and a Replay answers each call of a unit. A held unit runs. A call of any other unit returns received values, constants
of the trace, and blanks for values that this stage does not need. The results of held units are checked against the
trace, which defines the shapes and types that other stages receive.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from pipeshard.batch.batch import Batch
from pipeshard.errors import TraceError, UsageError
from pipeshard.graph.mentions import Outside
from pipeshard.graph.places import format_path, is_comparable
from pipeshard.graph.rng import Randomness, Repeat, Repeats
from pipeshard.graph.shapes import TensorSpec
from pipeshard.graph.snapshot import Snapshot
from pipeshard.graph.taint import Value
from pipeshard.graph.unit_outputs import (
    ARGUMENTS,
    UNIT,
    Known,
    Source,
    answer,
    changed,
    flattened,
    listened,
    opened,
    resolve_from,
    run_collecting,
    value_at,
)
from pipeshard.graph.units import Handler
from pipeshard.hf import is_cache
from pipeshard.private import disable_current_modes, tree_leaves, tree_tensors
from pipeshard.slices.cut import SliceCall
from pipeshard.split.differences import (
    CONSTANT,
    END,
    OF_A_LEAF,
    PLACE,
    PLAIN_TENSOR,
    SHAPES,
    UNFROZEN,
    WITH_CACHE,
    WRITES,
    WRITTEN,
    added,
    constant_text,
    described,
    differ,
    has_more,
    is_as,
    is_like,
    other_way,
    tree_text,
)
from pipeshard.split.route import Blank, MoveAway, Route, Step, recomputes_itself, run_again
from pipeshard.split.zeros import Zeros

Listener = Callable[[Any, Any], None]
ZEROS = -2  # in Route.proven: zeros have been tracked


class StageDone(BaseException):
    """Raised to leave the forward after the stage's last unit and the glue that updates state for the next forward."""


@dataclass(slots=True)
class Run:
    """The state of one forward: the values `received` by the stage, the values `leaving` it, and the number of the
    `next` call. `inside` is true while a unit runs. A `listener` receives the arguments of every unit call. A run with
    a listener may use a cache, so the sizes of results may differ from the trace, and units may write to arguments."""

    route: Route
    received: Mapping[Value, Tensor]
    sizes: list[list[Any]]
    leaving: dict[Value, Tensor] = field(default_factory=dict)
    next: int = 0
    inside: bool = False
    listener: Listener | None = None
    trains: bool = field(default_factory=torch.is_grad_enabled)


class Again:
    """Context manager for each recomputation of a unit. A unit that calls `autograd.grad` is recomputed several times.
    Inner units, which the recomputed unit calls, run as a part of it, as in the first run."""

    def __init__(self, replay: "Replay", draw: Callable[[], None]) -> None:
        self.replay, self.draw = replay, draw
        self.outer: list[bool] = []

    def __enter__(self) -> None:
        self.draw()
        self.outer.append(self.replay.recomputing)
        self.replay.recomputing = True

    def __exit__(self, *error: object) -> None:
        self.replay.recomputing = self.outer.pop()


class Replay:
    """Answers the unit calls of one stage's model. `held` contains the names of the units that this stage runs."""

    def __init__(
        self, model: nn.Module, units: Mapping[str, nn.Module], held: frozenset[str], stage: int, device: torch.device
    ) -> None:
        self.model = model
        self.criterion: Any = None
        self.units, self.held, self.stage, self.device = units, held, stage, device
        self.randomness = Randomness(device)
        self.active: Run | None = None
        self.outside: Handler | None = None  # the handler of calls outside of forwards
        self.recomputing, self.proves = False, True  # proves: compare the state that units leave with the trace
        self.repeats = Repeats(self.randomness)
        self.save: MoveAway | None = None  # moves the arguments of recomputed units elsewhere
        self._blanks: dict[tuple[Any, Blank], Tensor] = {}  # used in the last step
        self._used: dict[tuple[Any, Blank], Tensor] = {}  # used in this step
        self._zeros: Zeros | None = None  # set while zeros are tracked

    def free_blanks(self) -> None:
        """Discard the blanks that were not used since the last `free_blanks`. If no blank was used, keep all blanks."""
        self._blanks, self._used = (self._used or self._blanks), {}

    @contextmanager
    def following(self, route: Route) -> Iterator[Zeros | None]:
        """Context manager for the run of a microbatch on `route`. Tracks the zeros that replace unsent values, and
        yields the tracker, or None if no zeros are tracked. Zeros are tracked only in the route's first microbatch,
        unless code after the last unit branches on activations: a microbatch may then read results that the trace did
        not read."""
        has_branches = route.flow.has_branches and route.stop is None
        if not has_branches and (not route.zeros or ZEROS in route.proven):
            yield None
            return
        with Zeros(route.stage, has_branches) as self._zeros:
            try:
                yield self._zeros
            finally:
                self._zeros = None
        route.proven.add(ZEROS)

    def run(
        self,
        route: Route,
        deltas: Sequence[int],
        received: Mapping[Value, Tensor],
        batch: Batch | SliceCall,
        listener: Listener | None = None,
    ) -> tuple[Any, dict[Value, Tensor]]:
        """Run this stage's part of the model on a microbatch. Return the model's output (None if the stage leaves the
        forward early) and the values that leave the stage."""
        self.active = run = Run(route, received, route.sizes(deltas), listener=listener)
        self.repeats.stage = route.stage
        self.randomness.python = route.flow.python_random
        self.randomness.at(0)
        try:
            # The stage leaves the forward after `stop` calls. It runs to the end if `stop` is None, and does not start
            # the forward if `stop` is 0 (a stage without units).
            # set_grad_enabled restores the grad mode: the stage may leave the forward while gradients are disabled.
            with torch.set_grad_enabled(torch.is_grad_enabled()):
                output = batch.call(self.model) if route.stop != 0 else None
        except StageDone:
            output = None
        finally:
            self.active = None
        if run.next < (len(route.steps) if route.stop is None else route.stop):
            raise self._lost(run, "the forward ended")
        return output, {
            # Values that this stage has received for later stages are forwarded.
            value: run.leaving[value] if value in run.leaving else received[value]
            for value in route.leaves.values
        }

    def __call__(self, unit: str, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        run = self.active
        if run is None and self.outside is not None:
            return self.outside(unit, original, args, kwargs)
        if run is None:  # recomputation in the backward pass, or a user's own call
            return original(*args, **kwargs) if self.recomputing else self._repeated(unit, original, args, kwargs)
        if run.inside:  # called by another unit, and part of it
            return original(*args, **kwargs)
        number, steps = run.next, run.route.steps
        if number >= len(steps) or steps[number].unit != unit:
            raise self._lost(run, f"the forward called {unit}")
        step = steps[number]
        run.next = number + 1
        if run.listener is not None:
            run.listener(args, kwargs)
        repeat = self.repeats.of(unit, reentrant=step.held and run.trains)
        if step.held:
            result = self._run_unit(step, run, original, args, kwargs, repeat)
        else:
            result = repeat.result = self._answer(step, run, run.sizes[number], args, kwargs)
            repeat.is_answered = True
        if run.next == run.route.stop:
            raise StageDone
        if run.route.flow.glue_random:
            repeat.after = self.randomness.at(2 * run.next)  # for the glue after this call, on every stage
        return result

    def _answer(self, step: Step, run: Run, sizes: list[Any], args: Any, kwargs: Any) -> Any:
        """Return the result of another stage's unit, and reproduce the values that, in the trace, the unit left at
        other places."""
        if step.plain:
            return self._leaf(step.leaves[0], sizes[0], run)
        of_result = step.parts[0].tree.num_leaves
        pairs = zip(step.numbers, step.leaves)
        leaves = [self._leaf(leaf, sizes[k], run, aside=k >= of_result) for k, leaf in pairs]
        return answer(self.units[step.unit], step.parts, leaves, (args, kwargs))

    def _repeated(self, unit: str, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Answer a call outside a forward: from user code or, in the backward pass, from a torch.utils.checkpoint
        around the unit."""
        repeat = self.repeats.pop(unit)
        if unit not in self.held and repeat is None:
            raise UsageError(
                f"unit {unit} is not on rank {self.stage} of the pipeline: a model split into stages cannot be called "
                "directly. Call booster.execute_pipeline(...). To generate, call model.generate(...) on the model that "
                "boost returned. With a pipelined Trainer, call trainer.predict(...) or trainer.generate(...). Make "
                "these calls on every rank"
            )
        repeat = repeat or Repeat()
        repeat.before()
        result = repeat.result if repeat.is_answered else original(*args, **kwargs)
        repeat.after()
        return result

    def _run_unit(
        self, step: Step, run: Run, forward: Callable[..., Any], args: Any, kwargs: Any, repeat: Repeat
    ) -> Any:
        draw = repeat.before = self.randomness.at(2 * run.next - 1)
        if step.again and torch.is_grad_enabled() and not recomputes_itself(self.units[step.unit]):
            forward = run_again(forward, step.unit, self.units[step.unit], lambda: Again(self, draw), self.save)
        arguments = args, kwargs
        if self._zeros is not None:
            self._zeros.refuse(arguments, f"unit {step.unit}")
        before = self._observed(step, run) if step.observed else []
        with self._proving(step, run, arguments):
            result, asides = self._called(step, run, forward, arguments)
        if before:
            self._refuse_observed(step, run, before)
        leaves = self._checked(step, result, run, arguments)
        if step.keeps:
            self._keep(step, leaves, asides, run)
        return result

    def _called(
        self, step: Step, run: Run, forward: Callable[..., Any], arguments: Any
    ) -> tuple[Any, list[tuple[Source, Any]]]:
        """Run a held unit. Returns its result, and the values that it leaves at other places for other stages."""
        args, kwargs = arguments
        run.inside = True
        try:
            with disable_current_modes() if self._zeros is not None else nullcontext():
                if not step.aside:
                    return forward(*args, **kwargs), []
                unit = self.units[step.unit]
                (_, result), *asides = run_collecting(unit, forward, arguments, step.modules, step.places)
                return result, asides
        except RuntimeError as error:
            if OF_A_LEAF in str(error):
                raise self._differs(step, run, WRITES, "no such write", None, WRITTEN) from error
            raise
        finally:
            run.inside = False

    def _observed(self, step: Step, run: Run) -> list[Any]:
        """Called before a unit runs: return the values at the places that code on other stages reads."""
        if not self.proves or run.listener is not None:
            return []
        return [value_at(place, self.units[step.unit]) for place, _ in step.observed]

    def _refuse_observed(self, step: Step, run: Run, before: Sequence[Any]) -> None:
        """Raise TraceError unless, at the places that code on other stages reads, a unit leaves the same plain values
        as in the trace."""
        unit, expected = self.units[step.unit], self._expected(step, run)
        for (place, numbers), value in zip(step.observed, before):
            now = value_at(place, unit)
            seen = [value] if numbers is None else expected[numbers.start : numbers.stop]
            leaves = [now] if numbers is None else tree_leaves(opened(now))
            if differ(leaves, seen) and not listened(unit):  # `answer` repeats the calls of hooks inside
                what = f"leaves {constant_text(now)} in {format_path(place[1:])}"
                raise self._differs(step, run, what, ", ".join(map(constant_text, seen)), None, PLACE)

    def _expected(self, step: Step, run: Run) -> list[Any]:
        """The traced leaves of the current call, but with this batch's shapes and counts instead of the specs and
        counts."""
        return [leaf if size is None else size for leaf, size in zip(step.leaves, run.sizes[run.next - 1])]

    @contextmanager
    def _proving(self, step: Step, run: Run, arguments: Any) -> Iterator[None]:
        """Context manager for a unit call. In its first run on a route, checks that the unit changes the same state as
        in the trace."""
        number, unit, proven = run.next - 1, self.units[step.unit], run.route.proven
        # For a unit with hooks inside, `answer` repeats the hooks' calls instead.
        if not self.proves or run.listener is not None or number in proven or listened(unit):
            yield
            return
        before, versions = Snapshot({UNIT: unit, ARGUMENTS: arguments}), _versions(arguments)
        yield
        written = any(tensor._version != version for tensor, version in versions.items())
        if written and not run.route.flow.calls[number].writes:
            raise self._differs(step, run, WRITES, "no such write", None, WRITTEN)
        self._prove(step, before, arguments, run)
        proven.add(number)

    def _prove(self, step: Step, before: Snapshot, arguments: Any, run: Run) -> None:
        """Raise TraceError unless a unit leaves the same tensors and constants at the same places as in the trace.
        Constants that no other code could read may differ."""
        unit, traced, start = self.units[step.unit], {}, 0
        expected = self._expected(step, run)
        for source, tree in step.parts:
            traced[source.place] = expected[start : start + tree.num_leaves]
            start += tree.num_leaves
        tensors = tree_tensors(arguments)
        outside = Outside(unit, self.model, self.criterion)
        for source, content in changed(before, but=tensors):
            leaves, seen = tree_leaves(content), traced.get(source.place)
            if seen is None:
                differs, is_other = any(isinstance(leaf, Tensor) for leaf in leaves), any(map(is_comparable, leaves))
            else:
                differs = len(leaves) != len(seen)
                is_other = any(is_comparable(leaf) and not is_as(leaf, then) for leaf, then in zip(leaves, seen))
            is_other = is_other and not source.by_hook
            if differs or (is_other and outside.mentions(source.place[1:])):
                place = f"changes {format_path(source.place[1:]) or 'its arguments'}"
                raise self._differs(step, run, place, "no such change", None, PLACE)

    def _checked(self, step: Step, result: Any, run: Run, arguments: Any) -> list[Any]:
        """The leaves of a held unit's result. Raises TraceError if their structure, dtypes or constants differ from the
        trace, or if a leaf requires a gradient but did not in the trace."""
        tree = step.parts[0].tree
        if step.tensors:  # the most frequent case
            leaves = [result] if tree.is_leaf() else list(result) if type(result) is tuple else []
            if len(leaves) == len(step.tensors) and all(map(is_like, leaves, step.tensors)):
                return leaves
        if tree.is_leaf() and isinstance(result, Tensor):
            leaves = [result]
        else:
            if run.listener is not None and isinstance(result, tuple):
                result = tuple(None if is_cache(item) else item for item in result)  # as in the trace
            paths = [leaf.path for leaf in step.leaves if isinstance(leaf, Known)]
            known = {id(resolve_from(path, self.units[step.unit], arguments)): path for path in paths}
            leaves, structure = flattened(result, known)
            if structure != tree:
                remedy = WITH_CACHE if run.listener is not None else ""
                raise self._differs(step, run, f"returns {tree_text(structure)}", tree_text(tree), remedy=remedy)
        for k, (leaf, seen, expected) in enumerate(zip(leaves, step.leaves, self._expected(step, run))):
            if isinstance(seen, TensorSpec):
                if not isinstance(leaf, Tensor) or leaf.dtype != seen.dtype:
                    raise self._differs(step, run, f"is {described(leaf)}", f"{seen.dtype}", k)
                if leaf.requires_grad and not seen.requires_grad:
                    raise self._differs(step, run, "requires a gradient", "none", k, UNFROZEN)
            elif not step.alone and run.listener is None and not is_as(leaf, expected):
                raise self._differs(step, run, f"is {constant_text(leaf)}", constant_text(seen), k, CONSTANT)
        return leaves

    def _differs(
        self, step: Step, run: Run, now: str, seen: str, leaf: int | None = None, remedy: str = ""
    ) -> TraceError:
        which = f"result {leaf} of unit" if leaf is not None else "unit"
        return TraceError(
            f"{which} {step.unit} (stage {run.route.stage}, call {run.next - 1}) {now}, but the trace recorded {seen}. "
            + (remedy or "Other stages depend on the trace: pass dry_run_input=<a batch like this one>")
        )

    def _leaf(self, leaf: Any, shape: Any, run: Run, aside: bool = False) -> Any:
        if isinstance(leaf, Value):
            tensor = run.received[leaf]
            return tensor.clone() if leaf in run.route.flow.written else tensor
        if not isinstance(leaf, Blank):
            return leaf if shape is None else shape  # a constant, or a number computed from the batch's sizes
        # No code writes to values outside the result, so such blanks store one element: attention weights may be large.
        blank = self._blank((), leaf).expand(shape) if aside else self._blank(shape, leaf)
        if self._zeros is not None and (leaf.is_zero or self._zeros.has_branches):
            self._zeros.add(blank, run.route.steps[run.next - 1].unit)
        return blank

    def _blank(self, shape: Any, kind: Blank) -> Tensor:
        blank = self._used.get((shape, kind), self._blanks.get((shape, kind)))
        if blank is None:
            blank = torch.full(shape, kind.fill, dtype=kind.dtype, device=self.device)
        self._used[shape, kind] = blank
        return blank.detach()  # so that writes of glue do not extend the autograd graph of the kept blank

    def _keep(self, step: Step, of_result: list[Any], asides: list[tuple[Source, Any]], run: Run) -> None:
        """Check the values that leave the stage, then store them in `run.leaving`."""
        contents = {source: tree_leaves(content) for source, content in asides}
        leaves = list(of_result)
        for source, tree in step.parts[1:]:
            content = contents.get(source, [])
            leaves += content if len(content) == tree.num_leaves else [None] * tree.num_leaves
        for value in step.keeps:
            spec = run.route.flow.spec(value)
            tensor: Any = leaves[value.leaf] if value.leaf < len(leaves) else None
            self._refuse_stranger(tensor, value, spec, step, run)
            if tensor.requires_grad and not spec.requires_grad:
                raise self._differs(step, run, "requires a gradient", "none", value.leaf, UNFROZEN)
            run.leaving[value] = tensor.clone() if value in run.route.flow.written else tensor

    def _refuse_stranger(self, tensor: Any, value: Value, spec: TensorSpec, step: Step, run: Run) -> None:
        """Raise TraceError if a value is not a plain tensor, or if its dtype or shape differs from the trace: the next
        stage would misread the value, or fail to receive it."""
        shape = run.sizes[value.call][value.leaf]
        if isinstance(tensor, Tensor) and (type(tensor) not in (Tensor, nn.Parameter) or has_more(tensor)):
            more = ", ".join(added(tensor)) or type(tensor).__name__
            raise self._differs(step, run, f"has {more}", "a plain tensor", value.leaf, PLAIN_TENSOR)
        is_like = isinstance(tensor, Tensor) and tensor.dtype == spec.dtype and tensor.ndim == len(shape)
        if not is_like or (tensor.shape != shape and run.listener is None):
            raise self._differs(step, run, f"is {described(tensor)}", f"{shape} {spec.dtype}", value.leaf, SHAPES)

    def _lost(self, run: Run, what: str) -> TraceError:
        steps = run.route.steps
        expected = steps[run.next].unit if run.next < len(steps) else END
        return other_way(what, f"{expected} (unit call {run.next}, stage {run.route.stage})")


def _versions(arguments: Any) -> dict[Tensor, int]:
    return {tensor: tensor._version for tensor in tree_tensors(arguments) if not tensor.is_inference()}
