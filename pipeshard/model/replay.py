"""Replay: on a stage, held units run and the others return what their stage sent."""

import bisect
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from pipeshard.errors import TraceError, UsageError
from pipeshard.model.batch import Batch
from pipeshard.model.dataflow import Dataflow
from pipeshard.model.exits import RESULT, Exits, Part, Source, answer
from pipeshard.model.partition import Boundary
from pipeshard.model.randomness import Randomness
from pipeshard.model.shapes import TensorSpec
from pipeshard.model.taint import Value

LENGTHS = 64  # batch shapes whose sizes a route keeps


class StageDone(BaseException):
    """Leaves the model's forward after the last unit whose result leaves the stage."""


@dataclass(frozen=True, slots=True)
class Step:
    """What one unit call does on this stage.

    `leaves` holds for each leaf of what leaves the unit a constant, a TensorSpec of nothing that matters, or the
    Value that was received. `keeps` are those later stages or the boundary need, `modules` the ones inside the unit
    that make some of them, `aside` says whether any leave it other than as its result; `plain` is a unit that nothing
    leaves but its result, one tensor.
    """

    unit: str
    held: bool
    parts: tuple[Part, ...]
    leaves: tuple[Any, ...]
    keeps: tuple[Value, ...] = ()
    modules: frozenset[str] = frozenset()
    aside: bool = False
    plain: bool = False


@dataclass(frozen=True)
class Route:
    """One stage's way through one Dataflow: a step per unit call, after which one the stage is done, and the leaves of
    the batch whose values it needs."""

    stage: int
    steps: tuple[Step, ...]
    stop: int | None
    enters: Boundary
    leaves: Boundary
    inputs: frozenset[str]
    flow: Dataflow
    _sizes: dict[Sequence[int], list[list[tuple[int, ...] | None]]] = field(default_factory=dict, compare=False)

    @classmethod
    def of(
        cls, flow: Dataflow, stages: Sequence[int], stage: int, crossing: Sequence[Boundary], outputs: bool = False
    ) -> Self:
        nothing = Boundary((), ())
        enters, leaves = crossing[stage], crossing[stage + 1] if stage + 1 < len(crossing) else nothing
        received, leaving = set(enters.values), set(leaves.values)
        steps = []
        for index, call in enumerate(flow.calls):
            values = [Value(index, k) for k in range(len(call.leaves))]
            held = stages[index] == stage
            result = tuple(v if v in received else leaf for v, leaf in zip(values, call.leaves, strict=True))
            keeps = tuple(v for v in values if held and v in leaving)
            ends = list(itertools.accumulate(part.tree.num_leaves for part in call.parts))
            sources = {call.parts[bisect.bisect_right(ends, value.leaf)].source for value in keeps}
            makers = frozenset(source.module for source in sources) - {""}
            plain = len(call.parts) == 1 and call.parts[0].tree.is_leaf()
            steps.append(Step(call.unit, held, call.parts, result, keeps, makers, bool(sources - {RESULT}), plain))
        is_last = stage == len(crossing) - 1
        stop = None if is_last else max((k + 1 for k, step in enumerate(steps) if step.held), default=0)
        uses = [call.reads for call, s in zip(flow.calls, stages, strict=True) if s == stage]
        uses += [flow.needed(outputs)] if is_last else []
        inputs = flow.consulted.union(*(use.inputs for use in uses))
        return cls(stage, tuple(steps), stop, enters, leaves, inputs, flow)

    def sizes(self, deltas: Sequence[int]) -> list[list[tuple[int, ...] | None]]:
        """For each step, the shapes of what leaves its unit: those of the leaves that are TensorSpecs."""
        if deltas not in self._sizes:
            if len(self._sizes) >= LENGTHS:
                self._sizes.clear()
            self._sizes[deltas] = [
                [leaf.at(deltas) if isinstance(leaf, TensorSpec) else None for leaf in step.leaves]
                for step in self.steps
            ]
        return self._sizes[deltas]

    def feed(self, batch: Batch, device: torch.device) -> Batch:
        """The batch on the stage's device; of images and the like that it does not need, only the shape is there."""

        def place(path: str, leaf: Tensor, dim: int | None) -> Tensor:
            if path in self.inputs or not leaf.is_floating_point():
                return leaf.to(device, non_blocking=True)
            return torch.full((), float("nan"), dtype=leaf.dtype, device=device).expand(leaf.shape)

        return batch.map(place)


@dataclass(slots=True)
class Run:
    """The state of one forward: what came in, what was made, and the next call."""

    route: Route
    deltas: Sequence[int]
    received: Mapping[Value, Tensor]
    sizes: list[list[tuple[int, ...] | None]]
    made: dict[Value, Tensor] = field(default_factory=dict)
    next: int = 0
    inside: bool = False


class Replay:
    """Answers the unit calls of one stage's model; `held` are the units this stage has parameters of."""

    def __init__(self, units: Mapping[str, nn.Module], held: frozenset[str], stage: int, device: torch.device) -> None:
        self.units, self.held, self.stage, self.device = units, held, stage, device
        self.randomness = Randomness(device)
        self.active: Run | None = None
        self._blanks: dict[tuple[tuple[int, ...], torch.dtype], Tensor] = {}

    def run(
        self, route: Route, deltas: Sequence[int], received: Mapping[Value, Tensor], forward: Callable[[], Any]
    ) -> tuple[Any, dict[Value, Tensor]]:
        """Run `forward` (the whole model) as this stage: its output (None before the last stage), what leaves."""
        self.active = run = Run(route, deltas, received, route.sizes(deltas))
        self.randomness.python = route.flow.python_random
        self.randomness.at(0)
        try:
            output = forward() if route.stop != 0 else None  # with this batch, nothing of the stage is called
        except StageDone:
            output = None
        finally:
            self.active = None
        if run.next < (len(route.steps) if route.stop is None else route.stop):
            raise self._lost(run, "the forward ended")
        return output, {
            value: run.made[value] if value in run.made else received[value] for value in route.leaves.values
        }

    def __call__(self, unit: str, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        run = self.active
        if run is None:  # recomputation during backward, or a user's own call
            if unit in self.held:
                return original(*args, **kwargs)
            raise UsageError(
                f"unit {unit} is not on stage {self.stage}: a model split into stages cannot be called directly, "
                "use booster.execute_pipeline(...)"
            )
        if run.inside:  # called by another unit: part of that one
            return original(*args, **kwargs)
        number, steps = run.next, run.route.steps
        if number >= len(steps) or steps[number].unit != unit:
            raise self._lost(run, f"the forward called {unit}")
        step = steps[number]
        run.next = number + 1
        if step.held:
            result = self._run_unit(step, run, original, args, kwargs)
            if run.next == run.route.stop:
                raise StageDone
        else:
            sizes = run.sizes[number]
            if step.plain:
                result = self._leaf(step.leaves[0], sizes[0], run)
            else:
                own = step.parts[0].tree.num_leaves
                pairs = enumerate(zip(step.leaves, sizes))
                leaves = [self._leaf(leaf, size, run, aside=k >= own) for k, (leaf, size) in pairs]
                result = answer(self.units[unit], step.parts, leaves, (args, kwargs))
        if run.route.flow.glue_random:
            self.randomness.at(2 * run.next)  # the glue after this call, on whichever stages it runs
        return result

    def _run_unit(self, step: Step, run: Run, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        self.randomness.at(2 * run.next - 1)
        run.inside = True
        try:
            if step.aside:
                with Exits(self.units[step.unit], step.modules) as exits:
                    results = exits.run(forward, args, kwargs)
            else:
                results = [(RESULT, forward(*args, **kwargs))]
        finally:
            run.inside = False
        if step.keeps:
            self._keep(step, results, run)
        return results[0][1]

    def _leaf(self, leaf: Any, shape: tuple[int, ...] | None, run: Run, aside: bool = False) -> Any:
        if isinstance(leaf, Value):
            tensor = run.received[leaf]
            return tensor.clone() if leaf in run.route.flow.written else tensor
        if shape is None:
            return leaf
        # Nobody writes to what leaves other than as a result, so that takes no memory: attentions may be large.
        return self._blank((), leaf.dtype).expand(shape) if aside else self._blank(shape, leaf.dtype)

    def _blank(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor nothing that matters depends on: not-a-number, so that a mistake would not stay silent."""
        blank = self._blanks.get((shape, dtype))
        if blank is None:
            if len(self._blanks) >= 16:
                self._blanks.clear()
            fill = float("nan") if dtype.is_floating_point or dtype.is_complex else 0
            blank = torch.full(shape, fill, dtype=dtype, device=self.device)
            self._blanks[shape, dtype] = blank
        return blank.detach()  # glue may write to it, and must not leave its graph in ours

    def _keep(self, step: Step, results: list[tuple[Source, Any]], run: Run) -> None:
        made = {source: tree_leaves(content) for source, content in results}
        leaves: list[Any] = []
        for source, tree in step.parts:
            leaves += made.get(source, [None] * tree.num_leaves)
        for value in step.keeps:
            tensor, spec = leaves[value.leaf] if value.leaf < len(leaves) else None, run.route.flow.spec(value)
            shape = spec.at(run.deltas)
            if not isinstance(tensor, Tensor) or tensor.shape != shape or tensor.dtype != spec.dtype:
                got = f"{tuple(tensor.shape)} {tensor.dtype}" if isinstance(tensor, Tensor) else type(tensor).__name__
                raise TraceError(
                    f"result {value.leaf} of unit {step.unit} is {got} where the trace has {shape} {spec.dtype} "
                    f"(stage {run.route.stage}). The unit's shapes or dtypes depend on more than the batch's sizes "
                    "(autocast around execute_pipeline?); pass dry_run_input=<a batch like this one>"
                )
            if tensor.requires_grad and not spec.requires_grad:
                raise TraceError(
                    f"result {value.leaf} of unit {step.unit} (stage {run.route.stage}) requires a gradient, which "
                    "it did not when the model was boosted: freeze or unfreeze parameters, and turn activation "
                    "recompute on, before booster.boost"
                )
            run.made[value] = tensor.clone() if value in run.route.flow.written else tensor

    def _lost(self, run: Run, what: str) -> TraceError:
        steps = run.route.steps
        expected = steps[run.next].unit if run.next < len(steps) else "the end"
        return TraceError(
            f"{what} where the trace has {expected} (unit call {run.next}, stage {run.route.stage}): the model's glue "
            "takes another way than it did in the trace, by chance (layerdrop?) or by what the batch holds. "
            "Turn that off, or pass dry_run_input=<a batch of this kind>"
        )
