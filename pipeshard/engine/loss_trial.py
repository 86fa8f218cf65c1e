"""Trial: a model's loss on a few samples and on their parts, with random numbers in the place of unit results."""

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pipeshard.batch.batch import Batch
from pipeshard.batch.criterion import Criterion, sum_and_count
from pipeshard.errors import TraceError
from pipeshard.graph.dataflow import Dataflow
from pipeshard.graph.preserve import untouched
from pipeshard.graph.rng import Randomness
from pipeshard.graph.shapes import Count, TensorSpec
from pipeshard.graph.taint import Value
from pipeshard.graph.trace import trace
from pipeshard.graph.unit_outputs import answer
from pipeshard.graph.units import find_units, handled
from pipeshard.split.materialize import is_released

logger = logging.getLogger("pipeshard")
Key = tuple[str, int, int]  # of a leaf of what leaves a unit: the unit, how many calls came before, the leaf
NORMAL, PROBABILITIES = range(2)  # kinds of random numbers; some losses take probabilities only


class Measured(NamedTuple):
    """A loss, or a sum, and what it is divided by, if the criterion says that."""

    value: float
    divisor: float | None
    dtype: torch.dtype


class Glue:
    """Runs the glue of a model and its criterion, with leaves that are given in the place of unit results."""

    def __init__(self, model: nn.Module, criterion: Criterion | None, device: torch.device) -> None:
        self.model, self.criterion, self.device, self.units = model, criterion, device, find_units(model)

    def run(
        self,
        batch: Batch,
        flow: Dataflow,
        deltas: Sequence[int],
        leaf: Callable[[Key, TensorSpec], Tensor],
        running: Collection[int] = (),
    ) -> Measured | None:
        """The loss of `batch`, or None without one; calls that are `running` are of units that run themselves.

        Nothing of model and criterion, nor of any generator, changes.
        """
        calls, inside = enumerate(flow.calls), False
        randomness = Randomness(self.device)

        def give(unit: str, original: Any, *arguments: Any) -> Any:
            nonlocal inside
            if inside:
                return original(*arguments[0], **arguments[1])
            index, call = next(calls)
            if index in running:
                inside = True
                result = original(*arguments[0], **arguments[1])
                inside = False
                return result

            def given(k: int, spec: Any) -> Any:
                if isinstance(spec, TensorSpec):
                    return leaf((*flow.occurrences[index], k), TensorSpec(spec.at(deltas), spec.dtype))
                return spec.at(deltas) if isinstance(spec, Count) else spec

            leaves = [given(k, spec) for k, spec in enumerate(call.leaves)]
            return answer(self.units[unit], call.parts, leaves, arguments)

        with ExitStack() as stack:
            stack.enter_context(untouched(self.model, self.criterion))
            stack.enter_context(randomness.step(0, 0))
            randomness.at(0)
            stack.enter_context(torch.no_grad())
            stack.enter_context(handled(self.units, give))
            private = batch.map(lambda path, tensor, dim: tensor.clone())  # which glue may write to
            value, count = sum_and_count(private.call(self.model), self.criterion, private)
        return None if value is None else Measured(float(value), None if count is None else float(count), value.dtype)

    def count(self, batch: Batch, flow: Dataflow, deltas: Sequence[int]) -> float:
        """What the criterion divides its sum by, which does not depend on unit results: zeros without memory."""

        def blank(key: Key, spec: TensorSpec) -> Tensor:
            return torch.zeros((), dtype=spec.dtype, device=self.device).expand(spec.shape)

        measured = self.run(batch, flow, deltas, blank)
        assert measured is not None and measured.divisor is not None
        return measured.divisor


class Trial:
    """A model's loss on all samples of `sample` and on two parts of them, after `at` of its samples.

    The unit results that the loss depends on are random, and have the samples of the parts in common; so is what glue
    draws. Those that leave a unit other than as its result are random too if `asides` says so, and zeros as all others
    are if not. A unit that makes a loss itself, of which every part has another one, runs.
    """

    def __init__(
        self, model: nn.Module, flow: Dataflow, sample: Batch, criterion: Criterion | None, asides: bool
    ) -> None:
        self.model, self.flow, self.sample, self.criterion, self.asides = model, flow, sample, criterion, asides
        self.glue = Glue(model, criterion, next(iter(sample.tensors.values())).device)
        self.failure: Exception | None = None  # that of the last trial that failed
        self._flows: dict[range, tuple[Dataflow, tuple[int, ...]]] = {}
        whole, deltas = self._flow(range(sample.rows))
        values = set(whole.loss.values) if whole.loss else set[Value]()
        own = [value for value in values if not whole.is_aside(value)]
        self.running = {value.call for value in own if not whole.spec(value).at(deltas)}
        for call in self.running:
            values |= whole.calls[call].reads.values
            name = whole.calls[call].unit
            if any(map(is_released, self.glue.units[name].parameters())):
                raise TraceError(f"the loss is made inside of unit {name}, which another stage holds")
        self.random = [value for value in sorted(values) if asides or not whole.is_aside(value)]

    def measure(self, batch: Batch, at: int, seed: int, kind: int = NORMAL) -> tuple[Measured, list[Measured]] | None:
        """The loss of the batch, which is `sample` with other values, and those of its parts; None if it has none, or
        does not take these values."""
        rows, drawn = range(batch.rows), Draws(self.glue.device)
        made = self._random(seed, kind)
        try:
            whole = self._measure(batch, rows, made, drawn)
            parts = [self._measure(batch, part, made, drawn) for part in (rows[:at], rows[at:])]
        except Exception as error:  # the model's own, or the criterion's, which may not take such labels
            logger.debug("a trial of the loss failed: %s: %s", type(error).__name__, error)
            self.failure = error
            return None
        found = [part for part in parts if part is not None]
        return None if whole is None or len(found) != len(parts) else (whole, found)

    def _measure(self, batch: Batch, rows: range, made: Mapping[Key, Tensor], drawn: "Draws") -> Measured | None:
        flow, deltas = self._flow(rows)
        part = batch if len(rows) == batch.rows else batch.take(torch.tensor(rows))

        def leaf(key: Key, spec: TensorSpec) -> Tensor:
            full = made.get(key)
            if full is None or full.ndim != len(spec.shape):
                return torch.zeros(spec.shape, dtype=spec.dtype, device=self.glue.device)
            return part_of(full, spec.shape, rows).clone()

        with drawn.of(rows):
            return self.glue.run(part, flow, deltas, leaf, self.running)

    def _flow(self, rows: range) -> tuple[Dataflow, tuple[int, ...]]:
        """The Dataflow of these samples, and how their sizes differ from what it was traced with."""
        if rows not in self._flows:
            part = self.sample.take(torch.tensor(rows))
            flow, deltas = self.flow, self.flow.axes.deltas(part)
            if deltas is None or not flow.watched.isdisjoint(part.paths):
                flow = trace(self.model, part, self.criterion, exact=True)
                deltas = flow.axes.deltas(part)
            assert deltas is not None
            self._flows[rows] = flow, deltas
        return self._flows[rows]

    def _random(self, seed: int, kind: int) -> dict[Key, Tensor]:
        whole, deltas = self._flow(range(self.sample.rows))
        generator = torch.Generator().manual_seed(seed)
        made = {}
        for value in self.random:
            spec = whole.spec(value)
            if spec.dtype.is_floating_point:
                drawn = torch.randn(spec.at(deltas), generator=generator)
                drawn = drawn * (1 if seed % 2 else 4) if kind == NORMAL else drawn.sigmoid()
                made[_key(whole, value)] = drawn.to(self.glue.device, spec.dtype)
        return made


class Draws(TorchDispatchMode):
    """Random numbers that glue draws: a part of the samples gets its own of those that all of them got."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.drawn: list[Tensor] = []
        self.rows: range | None = None

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # as in Taint: torch would import its compiler

    @contextmanager
    def of(self, rows: range) -> Iterator[None]:
        """Inside, these samples run; the first time, all of them."""
        self.rows = rows if self.rows is not None else None
        self.next = 0
        with self:
            yield
        self.rows = rows

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        if func is torch.ops.aten.native_dropout.default:
            return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
        if kwargs.get("generator") is not None:
            kwargs["generator"] = None  # the user's own is not to move
        result = func(*args, **kwargs)
        for tensor in tree_leaves(result):
            if self.rows is None:
                self.drawn.append(tensor.clone())
            else:
                tensor.copy_(part_of(self.drawn[self.next], tensor.shape, self.rows))
            self.next += 1
        return result


def part_of(full: Tensor, shape: Sequence[int], rows: range) -> Tensor:
    """What belongs to the first samples, or to the last ones: of each dimension in which it is smaller that end."""
    for dim, size in enumerate(shape):
        if size != full.shape[dim]:
            full = full.narrow(dim, 0 if rows.start == 0 else full.shape[dim] - size, size)
    return full


def _key(flow: Dataflow, value: Value) -> Key:
    return (*flow.occurrences[value.call], value.leaf)
