"""Replay: on a stage, held units run and the others return what their stage sent."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from pipeshard.errors import TraceError, UsageError
from pipeshard.model.exits import RESULT, Exits, Source, answer
from pipeshard.model.randomness import Randomness
from pipeshard.model.recompute import recomputes_itself, run_again
from pipeshard.model.route import Route, Step
from pipeshard.model.shapes import TensorSpec
from pipeshard.model.taint import Value


class StageDone(BaseException):
    """Leaves the model's forward after the last unit whose result leaves the stage."""


@dataclass(slots=True)
class Run:
    """The state of one forward: what came in, what was made, and the next call."""

    route: Route
    received: Mapping[Value, Tensor]
    sizes: list[list[tuple[int, ...] | None]]
    made: dict[Value, Tensor] = field(default_factory=dict)
    opened: Any = None
    next: int = 0
    inside: bool = False


class Replay:
    """Answers the unit calls of one stage's model; `held` are the units this stage has parameters of."""

    def __init__(self, units: Mapping[str, nn.Module], held: frozenset[str], stage: int, device: torch.device) -> None:
        self.units, self.held, self.stage, self.device = units, held, stage, device
        self.randomness = Randomness(device)
        self.active: Run | None = None
        self.recomputing = False
        self.regions: Callable[[tuple[str, ...]], Callable[..., Any]]  # what runs units of these names in turn
        self._blanks: dict[tuple[tuple[int, ...], torch.dtype], Tensor] = {}

    def run(
        self, route: Route, deltas: Sequence[int], received: Mapping[Value, Tensor], forward: Callable[[], Any]
    ) -> tuple[Any, dict[Value, Tensor]]:
        """Run `forward` (the whole model) as this stage: its output (None before the last stage), what leaves."""
        self.active = run = Run(route, received, route.sizes(deltas))
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
            if unit in self.held or self.recomputing:
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
        if step.opens:
            run.opened = args[0]
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
        draw = self.randomness.at(2 * run.next - 1)
        if step.region:
            forward, args = self.regions(step.region), (run.opened, *args[1:])
        if step.again and torch.is_grad_enabled() and not recomputes_itself(self.units[step.unit]):
            forward = run_again(forward, step.unit, lambda: self._second(draw))
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

    @contextmanager
    def _second(self, draw: Callable[[], None]) -> Iterator[None]:
        """Around the second run of a unit: units that it calls are part of it, as in the first."""
        draw()
        self.recomputing = True
        try:
            yield
        finally:
            self.recomputing = False

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
            spec = run.route.flow.spec(value)
            tensor: Any = leaves[value.leaf] if value.leaf < len(leaves) else None
            self._refuse_stranger(tensor, value, spec, run)
            if tensor.requires_grad and not spec.requires_grad:
                raise TraceError(
                    f"result {value.leaf} of unit {step.unit} (stage {run.route.stage}) requires a gradient, which "
                    "it did not when the model was boosted: freeze or unfreeze parameters, and turn activation "
                    "recompute on, before booster.boost"
                )
            run.made[value] = tensor.clone() if value in run.route.flow.written else tensor

    def _refuse_stranger(self, tensor: Any, value: Value, spec: TensorSpec, run: Run) -> None:
        """The next stage expects what the trace has seen: anything else would break its connection, or be misread."""
        shape = run.sizes[value.call][value.leaf]
        if isinstance(tensor, Tensor) and tensor.shape == shape and tensor.dtype == spec.dtype:
            return
        got = f"{tuple(tensor.shape)} {tensor.dtype}" if isinstance(tensor, Tensor) else type(tensor).__name__
        raise TraceError(
            f"result {value.leaf} of unit {run.route.flow.calls[value.call].unit} is {got} where the trace has {shape} "
            f"{spec.dtype} (stage {run.route.stage}). Shapes and dtypes must follow from the batch's sizes: pass "
            "dry_run_input=<a batch like this one>, and have no hook or autocast around execute_pipeline change them"
        )

    def _lost(self, run: Run, what: str) -> TraceError:
        steps = run.route.steps
        expected = steps[run.next].unit if run.next < len(steps) else "the end"
        return TraceError(
            f"{what} where the trace has {expected} (unit call {run.next}, stage {run.route.stage}): the model's glue "
            "takes another way than it did in the trace, by chance (layerdrop?) or by what the batch holds. "
            "Turn that off, or pass dry_run_input=<a batch of this kind>"
        )
