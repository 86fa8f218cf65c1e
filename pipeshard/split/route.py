"""Route: a stage's path through a Dataflow, with the unit calls to run and recompute, and the values to keep.

torch.utils.checkpoint restores the global random state and assumes that arguments are unchanged. In a pipeline, the
microbatches of one stage interleave. Each recomputation therefore restores the random state of its own microbatch, and
the contents of lists and objects among the arguments. A tensor argument that was changed in place causes an error.

From the Dataflow and the partition, a Route determines which calls a stage runs, which values it receives for other
calls, and which values it keeps for later stages. It does so once, for all of its microbatches.
"""

import bisect
import itertools
import math
from collections import Counter
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pipeshard.batch.batch import Batch
from pipeshard.errors import ConfigurationError, UsageError
from pipeshard.graph.dataflow import Call, Carried, Dataflow, Wanted
from pipeshard.graph.places import PLAIN, PlacePath
from pipeshard.graph.shapes import Count, TensorSpec
from pipeshard.graph.snapshot import Snapshot
from pipeshard.graph.taint import Value
from pipeshard.graph.unit_outputs import Known, Part, Source
from pipeshard.hf import recomputes
from pipeshard.private import reparametrized, tree_tensors
from pipeshard.split.boundary import Boundary


@dataclass(frozen=True)
class Recompute:
    """The unit calls to recompute: the fraction `ratios[s]` of the calls of stage s or, if `interval` is not 0, every
    `interval`-th call of the model.

    A fraction is rounded up to whole calls. Repeated layers are selected first, in model order: when the first layers
    are recomputed, the memory of later layers has been freed. Units whose class occurs once (an embedding, a head) keep
    few activations, so they are selected last. With `classes`, only units whose class has one of these names are
    recomputed.
    """

    ratios: tuple[float, ...]
    interval: int = 0
    classes: Collection[str] | None = None

    @classmethod
    def of(cls, recompute: bool | float | Sequence[float], interval: int, num_stages: int) -> Self:
        """Create a Recompute from the plugin's arguments, for a model of `num_stages` parts. Raises ConfigurationError
        for invalid arguments."""
        if not isinstance(interval, int) or isinstance(interval, bool) or interval < 0:
            raise ConfigurationError(
                "activation_checkpoint_interval must be a non-negative integer (0: off; k > 0: recompute every k-th "
                f"unit call), got {interval!r}"
            )
        is_list = isinstance(recompute, Sequence) and not isinstance(recompute, str)
        ratios: list[Any] = list(recompute) if is_list else [recompute] * num_stages  # type: ignore[arg-type]
        if not all(isinstance(ratio, bool | int | float) and 0 <= ratio <= 1 for ratio in ratios):
            raise ConfigurationError(
                "recompute must be True, False, the fraction of each stage's unit calls to recompute (from 0 to 1), or "
                f"a list of such fractions, one per stage ({num_stages} in all), got {recompute!r}"
            )
        if len(ratios) != num_stages:
            raise ConfigurationError(
                f"recompute={recompute!r} must have one fraction for each stage, in model order: {num_stages} in all "
                "(pp_size times the number of model chunks per rank)"
            )
        if any(ratios) and interval:
            raise ConfigurationError(
                f"recompute={recompute!r} is not supported with activation_checkpoint_interval={interval}: pass only "
                "one of the two"
            )
        return cls(ratios=tuple(map(float, ratios)), interval=interval)

    def calls(
        self, flow: Dataflow, stages: Sequence[int], stage: int, units: Mapping[str, nn.Module]
    ) -> frozenset[int]:
        """The indices of the calls of `stage` that are recomputed. `stages[k]` is the stage of call k."""
        here = [k for k, s in enumerate(stages) if s == stage and not flow.calls[k].is_cut]
        able = [k for k in here if can_run_again(flow.calls[k], units[flow.calls[k].unit])]
        if self.classes is not None:
            able = [k for k in able if type(units[flow.calls[k].unit]).__name__ in self.classes]
        if self.interval:
            return frozenset(k for k in able if (k + 1) % self.interval == 0)
        repeated = Counter(type(units[unit]) for unit in dict.fromkeys(call.unit for call in flow.calls))
        able.sort(key=lambda k: repeated[type(units[flow.calls[k].unit])] == 1)
        share = math.ceil(round(self.ratios[stage] * len(here), 6))
        return frozenset(able[:share])


def can_run_again(call: Call, unit: nn.Module) -> bool:
    """Whether the call can be recomputed with the same result: it writes to no argument, and changes no state."""
    statistics = any(getattr(module, "track_running_stats", False) for module in unit.modules())
    return not (call.writes or call.moves or statistics)


def recomputes_itself(unit: nn.Module) -> bool:
    """Whether transformers' activation checkpointing now recomputes this unit, or a module inside it."""
    return unit.training and any(map(recomputes, unit.modules()))


MoveAway = Callable[[Tensor], Callable[[], Tensor]]  # moves a tensor away, and returns a function that brings it back


def run_again(
    forward: Callable[..., Any],
    name: str,
    unit: nn.Module,
    second: Callable[[], AbstractContextManager[None]],
    save: MoveAway | None = None,
) -> Callable[..., Any]:
    """Wrap the forward of `unit` so that it keeps only its arguments and is recomputed in the backward pass. Between
    the two runs, `save` may move tensor arguments elsewhere.

    `second` returns a context manager for the second run. This context manager must restore the random state of the
    first run. `run_again` restores the contents of lists, mappings and objects among the arguments, and the tensors
    with which glue had replaced parameters (torch.func.functional_call). The second run raises UsageError if a tensor
    argument has been modified in place.
    """

    def run(*given: Any, **named: Any) -> Any:
        saved: dict[Any, Callable[[], Tensor]] = {}
        if save is not None:
            items = [*enumerate(given), *named.items()]
            saved = {key: save(value) for key, value in items if type(value) is Tensor}
        args = [None if k in saved else value for k, value in enumerate(given)]
        kwargs = {key: None if key in saved else value for key, value in named.items()}
        tensors = [tensor for tensor in tree_tensors((args, kwargs)) if not tensor.is_inference()]
        versions = [tensor._version for tensor in tensors]
        before = Snapshot({"": (args, kwargs)})
        parameters = dict(unit.named_parameters(remove_duplicate=False))
        first = [(given, named)]
        del given, named  # only the first run keeps these alive

        def checked() -> Any:
            if first:
                given, named = first.pop()
                return forward(*given, **named)
            changes = list(before.changes())
            written = any(change.before is change.now for change in changes)
            try:
                again = {key: tensor() for key, tensor in saved.items()}
            except RuntimeError:
                written = True
            if written or [tensor._version for tensor in tensors] != versions:
                raise UsageError(
                    f"unit {name} cannot be recomputed: one of its arguments was modified in place after the unit's "
                    "forward. Modify a copy instead, or reduce PipelinePlugin's argument recompute, so that this "
                    "unit is not recomputed"
                )
            now = Snapshot({"": (args, kwargs)}) if changes else None
            before.restore()
            own = dict(unit.named_parameters(remove_duplicate=False))
            lent: dict[str, Tensor] = {key: tensor for key, tensor in parameters.items() if tensor is not own[key]}
            try:
                with reparametrized(unit, lent) if lent else nullcontext():
                    return forward(
                        *(again.get(k, value) for k, value in enumerate(args)),
                        **{key: again.get(key, value) for key, value in kwargs.items()},
                    )
            finally:
                if now is not None:
                    now.restore()

        contexts: Any = {"context_fn": lambda: (nullcontext(), second()), "preserve_rng_state": False}
        return checkpoint(checked, use_reentrant=False, **contexts)

    return run


LENGTHS = 64  # maximum number of batch shapes whose sizes a route caches


class Blank(NamedTuple):
    """A placeholder for an activation. No result may depend on it: `fill` is chosen to reveal a result that does."""

    dtype: torch.dtype
    fill: float

    @classmethod
    def of(cls, dtype: torch.dtype, is_touched: bool) -> Self:
        """A blank of this dtype: NaN for floating-point and complex dtypes, 0 for booleans and for integers with which
        glue computes (`is_touched`, see `Zeros`), and an invalid index and size for all other integers."""
        if dtype.is_floating_point or dtype.is_complex:
            return cls(dtype, float("nan"))
        return cls(dtype, 0 if is_touched or dtype is torch.bool else torch.iinfo(dtype).max - 1)

    @property
    def is_zero(self) -> bool:
        return self.fill == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """The behavior of one unit call on this stage: either the stage holds the unit and runs it, or it replays the call.

    A held step has an entry in `leaves` for each leaf of the call's outputs: a spec or a constant. A replayed step has
    entries only for the outputs that this stage reproduces: constants, received Values and Blanks.
    """

    unit: str
    held: bool
    parts: tuple[Part, ...]
    leaves: tuple[Any, ...]

    # Fields of a replayed step
    numbers: tuple[int, ...] = ()  # for each entry of `leaves`, its index among all leaves of the call
    plain: bool = False  # whether a result with one leaf is the only output

    # Fields of a held step
    keeps: tuple[Value, ...] = ()  # the values that leave the stage
    modules: frozenset[str] = frozenset()  # modules inside the unit that return kept values
    places: tuple[Source, ...] = ()  # where the unit stores kept values
    again: bool = False  # whether the call is recomputed in the backward pass
    alone: bool = False  # whether no other stage's forward reaches the call
    tensors: tuple[TensorSpec, ...] = ()  # the specs of a result that is a tensor, or a tuple of tensors
    observed: tuple[tuple[PlacePath, range | None], ...] = ()  # places that other stages' code reads, and their leaves

    @property
    def aside(self) -> bool:
        """Whether the unit leaves a kept value outside its result."""
        return bool(self.modules or self.places)


@dataclass(frozen=True)
class Route:
    """One stage's path through one Dataflow, with a step per unit call. The stage leaves the forward after `stop`
    steps, or at the end if `stop` is None. `inputs` are the batch's leaves whose values the stage reads. With `whole`,
    the stage keeps all leaves of the batch. `spoiled` names the state for the next forward that the stage's glue cannot
    compute because inputs are missing. `proven` contains the numbers of the held steps whose changes of state have been
    checked, and -2 once zeros have been tracked."""

    stage: int
    steps: tuple[Step, ...]
    stop: int | None
    enters: Boundary
    leaves: Boundary
    inputs: frozenset[str]
    flow: Dataflow
    spoiled: frozenset[str] = frozenset()
    whole: bool = False
    proven: set[int] = field(default_factory=set, compare=False)
    zeros: bool = False  # whether any blank is 0
    _sizes: dict[Sequence[int], list[list[Any]]] = field(default_factory=dict, compare=False)

    @classmethod
    def of(
        cls,
        flow: Dataflow,
        stages: Sequence[int],
        stage: int,
        crossing: Sequence[Boundary],
        outputs: Wanted = False,
        recomputed: Collection[int] = (),
    ) -> Self:
        enters = crossing[stage]
        leaves = crossing[stage + 1] if stage + 1 < len(crossing) else Boundary(values=(), gradients=())
        received, leaving = set(enters.values), set(leaves.values)
        # All glue before a call has run when the call is made.
        settled = [None if place.until is None else place.until + 1 for place in flow.carried]
        others = [k + 1 for k, at in enumerate(stages) if at != stage]
        reached = max([*others, *(len(stages) if end is None else end for end in settled)], default=0)
        steps = tuple(
            _held_step(flow, index, stages, leaving, index in recomputed, index >= reached)
            if at == stage
            else _replayed_step(flow, index, received)
            for index, at in enumerate(stages)
        )
        is_last = stage == len(crossing) - 1
        ends = [k + 1 for k, step in enumerate(steps) if step.held] + [end for end in settled if end is not None]
        needs = [call.reads for call, at in zip(flow.calls, stages, strict=True) if at == stage]
        needs += [flow.needed(outputs)] if is_last else []
        return cls(
            stage=stage,
            steps=steps,
            stop=None if is_last or None in settled else max(ends, default=0),
            enters=enters,
            leaves=leaves,
            inputs=flow.consulted.union(*(use.inputs for use in needs)),
            flow=flow,
            spoiled=frozenset(
                place.name for place in flow.carried if _is_spoiled(place, stages, stage, is_last, received)
            ),
            zeros=any(isinstance(x, Blank) and x.is_zero for step in steps if not step.held for x in step.leaves),
            whole=is_last and outputs is True,
        )

    def sizes(self, deltas: Sequence[int]) -> list[list[Any]]:
        """For each leaf of each unit call: the shape of a tensor, a number computed from the batch's sizes, or None for
        a constant."""
        if deltas not in self._sizes:
            if len(self._sizes) >= LENGTHS:
                del self._sizes[next(iter(self._sizes))]
            self._sizes[deltas] = [
                [leaf.at(deltas) if isinstance(leaf, TensorSpec | Count) else None for leaf in call.leaves]
                for call in self.flow.calls
            ]
        return self._sizes[deltas]

    def feed(self, batch: Batch, device: torch.device) -> Batch:
        """The batch on the stage's device, with copies of leaves that glue modifies. Floating-point leaves (such as
        images) that the stage does not need become NaN tensors of the same shape that store one element. With `whole`,
        all leaves are kept, since the user's function receives all outputs and the batch, and may read any leaf."""

        def place(path: str, leaf: Tensor, dim: int | None) -> Tensor:
            if self.whole or path in self.inputs or not leaf.is_floating_point():
                return leaf.to(device, non_blocking=True)
            return torch.full((), float("nan"), dtype=leaf.dtype, device=device).expand(leaf.shape)

        return batch.map(place).to(device).copied(self.flow.rewritten)


def _held_step(
    flow: Dataflow, index: int, stages: Sequence[int], leaving: Container[Value], again: bool, alone: bool
) -> Step:
    """The step of a unit call that this stage runs."""
    call = flow.calls[index]
    keeps = tuple(value for k in range(len(call.leaves)) if (value := Value(index, k)) in leaving)
    ends = list(itertools.accumulate(part.tree.num_leaves for part in call.parts))
    sources = dict.fromkeys(call.parts[bisect.bisect_right(ends, value.leaf)].source for value in keeps)
    return Step(
        unit=call.unit,
        held=True,
        parts=call.parts,
        leaves=call.leaves,
        keeps=keeps,
        modules=frozenset(source.module for source in sources) - {""},
        places=tuple(source for source in sources if source.place),
        again=again,
        alone=alone,
        tensors=_result_tensors(call),
        observed=() if alone else tuple(observed_far(flow, index, stages)),
    )


def observed_far(flow: Dataflow, index: int, stages: Sequence[int]) -> Iterator[tuple[PlacePath, range | None]]:
    """Yield the places within reach of this call's unit that code on other stages reads. With each place, yield the
    range of the plain values that the call leaves there, or None."""
    call = flow.calls[index]
    left = {part.source.place: numbers for part, numbers in call.answered}
    for unit, place, readers in flow.observed:
        numbers = left.get(place)
        is_plain = all(isinstance(call.leaves[k], (*PLAIN, Count)) for k in numbers or ())
        if unit == call.unit and is_plain and is_read_far(readers, stages, stages[index]):
            yield place, numbers


def is_read_far(readers: Collection[int], stages: Sequence[int], stage: int) -> bool:
    """Whether the `readers` of an Observed include code on a stage other than `stage`."""
    return any(reader < 0 or stages[reader] != stage for reader in readers)


def _result_tensors(call: Call) -> tuple[TensorSpec, ...]:
    """The specs of the call's result if it is a tensor or a tuple of tensors, otherwise ()."""
    tree = call.parts[0].tree
    leaves = call.leaves[: tree.num_leaves]
    is_plain = tree.is_leaf() or (tree.type is tuple and tree.num_children == tree.num_leaves)
    return leaves if is_plain and all(isinstance(leaf, TensorSpec) for leaf in leaves) else ()


def _replayed_step(flow: Dataflow, index: int, received: Container[Value]) -> Step:
    """The step of a unit call on another stage. The step repeats an in-place write only if this stage receives the
    written value."""
    parts: list[Part] = []
    leaves: list[Any] = []
    numbers: list[int] = []
    call = flow.calls[index]
    for part, indices in call.answered:
        values = [Value(index, k) for k in indices]
        if part.source.how == "written" and values[0] not in received:
            continue
        parts.append(part)
        for value in values:
            leaf = call.leaves[value.leaf]
            blank = Blank.of(leaf.dtype, value in flow.touched) if isinstance(leaf, TensorSpec) else leaf
            leaves.append(value if value in received else blank)
            numbers.append(value.leaf)
    plain = len(parts) == 1 and parts[0].tree.is_leaf() and not isinstance(leaves[0], Known)
    return Step(
        unit=call.unit, held=False, parts=tuple(parts), leaves=tuple(leaves), numbers=tuple(numbers), plain=plain
    )


def _is_spoiled(place: Carried, stages: Sequence[int], stage: int, is_last: bool, received: Container[Value]) -> bool:
    """Whether this stage cannot compute the value at this place, and does not read it."""
    is_read = any(stages[call] == stage if call >= 0 else is_last for call in place.readers)
    absent = any(stages[value.call] != stage and value not in received for value in place.uses.values)
    return not is_read and (absent or any(stages[call] != stage for call in place.unseen))
