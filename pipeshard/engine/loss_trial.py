"""Loss trial: measures a model's loss on a few samples and on two parts of them, with random inputs to the loss.

Real values would prove too little: labels of one class, weights that are all 1 or a hinge that is 0 fit rules that do
not hold for the next batch. So integers are drawn from the batch's values and the values between them, and masks,
weights and unit results are random. Random unit results are cheap, since units do not run. Some losses change their
form at small values (flooding, a free allowance) or at large values (a ceiling). To detect such a change, unit results
of some samples are moved to reduce or increase these samples' loss.
"""

import logging
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pipeshard.batch.batch import Batch
from pipeshard.batch.criterion import Criterion, sum_and_count
from pipeshard.engine.loss_values import SPAN, Values, fillers_of
from pipeshard.graph.dataflow import Dataflow
from pipeshard.graph.indices import checking_indices
from pipeshard.graph.preserve import Before, preserving, without_tf32
from pipeshard.graph.rng import Randomness, SharedDraws, part_of
from pipeshard.graph.shapes import Count, TensorSpec, blank_state
from pipeshard.graph.taint import Value
from pipeshard.graph.trace import trace
from pipeshard.graph.unit_outputs import answer
from pipeshard.graph.units import find_units, handled
from pipeshard.hf import is_target, special_tokens
from pipeshard.private import reparametrized
from pipeshard.split.differences import END, other_way
from pipeshard.split.materialize import is_released

logger = logging.getLogger("pipeshard")
ROWS, LENGTH = 4, 8  # samples and positions in a trial
UNLABELLED = 255  # the label of pixels without a class in segmentation datasets
EVERYTHING, READ, LABELS, NOTHING = range(4)  # how much of the batch is random
NORMAL, PROBABILITIES = range(2)  # the distribution of unit results; some losses only accept probabilities
ROUNDING = 4e-6  # relative difference of two fp32 losses that may be rounding
MOST_FILLERS = 8  # at most this many fillers of a leaf are drawn as often as special tokens, and tried as marks
REPEATED = 2**20 + 7  # prime, so that no two samples have the same values
SHORT = torch.float16, torch.bfloat16
LeafKey = tuple[str, int, int]  # leaf of a unit's result: the unit, the number of its earlier calls, the leaf's index


class FewSamples:
    """Takes `count` evenly spaced samples (`few`) from `source`, and replaces their values with random values. `source`
    is `batch` itself, or a batch with other lengths.

    `read` contains the paths of the leaves that the loss reads, and `consulted` the paths of the leaves on whose values
    Python branches. Integers are drawn from the batch's values and, if a leaf's largest class is below SPAN, from
    all values up to this class. Masks remain masks. Other floating-point values are moved towards 0 or towards the
    highest value, or drawn from the batch's values and from possible marks of missing values. If the loss `is_known`
    (one of transformers' own), these values are only scaled. Complex values are always scaled.
    """

    def __init__(
        self,
        model: nn.Module,
        batch: Batch,
        source: Batch,
        read: Collection[str],
        consulted: Collection[str],
        count: int = ROWS,
        is_known: bool = False,
    ) -> None:
        rows = source.rows
        self.few = source.take(torch.arange(count) * rows // count if rows >= count else torch.arange(count) % rows)
        by_sample = {p for p, dim in zip(batch.paths, batch.row_dims) if dim is not None or batch.owners.get(p)}
        paths = [path for path in batch.tensors if path in by_sample and self.few.tensors[path].numel()]
        self.floats = [path for path in paths if batch.tensors[path].is_floating_point()]
        self.integers = [path for path in paths if not (path in self.floats or batch.tensors[path].is_complex())]
        self.drawn = {
            EVERYTHING: {path for path in paths if path in read or path in consulted},
            READ: {path for path in paths if path in read},
            LABELS: {path for path in paths if path in read and is_target(path)},
            NOTHING: set[str](),
        }
        special = torch.tensor(special_tokens(model)).long()
        self.fillers = {path: fillers_of(batch.tensors[path])[:MOST_FILLERS] for path in self.integers}
        self.pools = {
            path: _pool(batch.tensors[path], torch.cat([special, torch.tensor(self.fillers[path]).long()]))
            for path in self.integers
        }
        self.values = {path: Values(batch.tensors[path]) for path in self.floats if path in read and not is_known}

    @property
    def draws(self) -> int:
        """The number of draws after which each mark, and each value of a leaf with few values, has occurred, but at
        least ROWS and at most SPAN // ROWS."""
        most = [
            -(-len(pool) // self.few.tensors[path].numel())
            for path, pool in self.pools.items()
            if path in self.drawn[READ] and len(pool) <= SPAN
        ]
        marks = [2 * len(values.drawn) for values in self.values.values()]
        return min(max([ROWS, *most, *marks]), SPAN // ROWS)

    def draw(self, level: int, number: int, valid: bool = False) -> Batch:
        """The samples with the random values of draw `number`. The `level` determines which leaves are random. With
        `valid`, no random integer is negative."""
        generator = torch.Generator().manual_seed(number)

        def redraw(path: str, leaf: Tensor, dim: int | None) -> Tensor:
            if path not in self.drawn[level]:
                return leaf
            if path not in self.pools:
                return self._draw_floats(path, leaf, number, generator)
            if leaf.ndim > 1 and (leaf.dtype == torch.bool or self.pools[path].tolist() == [0, 1]):
                return _random_mask(leaf, generator)
            pool = self.pools[path][self.pools[path] >= 0] if valid else self.pools[path]
            return _chosen(pool, leaf.numel(), number, generator).view(leaf.shape).to(leaf)

        return self.few.map(redraw)

    def marks(self, path: str) -> list[float]:
        """The values that may mark a missing value in the floating-point leaf `path`."""
        return self.values[path].marks if path in self.values else []

    def _draw_floats(self, path: str, leaf: Tensor, number: int, generator: torch.Generator) -> Tensor:
        scale = torch.rand(leaf.shape, generator=generator).mul_(0.8).add_(0.2).to(leaf)
        values = self.values.get(path)
        is_mask = number % 2 and bool(((leaf == 0) | (leaf == 1)).all())
        if is_mask:
            return _random_mask(leaf, generator)
        if values is None:
            return leaf * scale
        if number % 2:
            return values.draw(leaf, number, generator)
        return values.moved(values.filled(leaf, generator), scale, up=number % 4 == 2)

    def with_invalid(self, batch: Batch, path: str, ignore: float, number: int) -> Batch:
        """`batch` with a random number of valid labels in each sample, and all other labels set to `ignore`. A sample
        with three or more labels has at least two valid labels. With one label per sample, all samples but one have a
        valid label. In every second draw, the valid labels of a long sample are spread over the sample, with fewer
        labels towards the end, since code that processes chunks of positions may fail for a chunk without labels."""
        generator = torch.Generator().manual_seed(number)

        def relabel(leaf: Tensor) -> Tensor:
            valid = 2 if ignore == 1 else 1
            is_invalid = leaf.isnan() if math.isnan(ignore) else leaf < 0 if ignore < 0 else leaf == ignore
            leaf = torch.where(is_invalid, valid, leaf)
            if leaf.ndim == 1 or leaf.shape[1] == 1:
                leaf[-1 if number % 2 else len(leaf) // 2] = ignore
            elif leaf.shape[1] > LENGTH and number % 2 == 0:
                ends = torch.linspace(0.95, 0.4, leaf.shape[1])
                of_samples = torch.linspace(1.0, 0.6, len(leaf)).unsqueeze(1)
                is_valid = torch.rand(leaf.shape[:2], generator=generator) < ends * of_samples
                is_valid[:, :2] = True
                leaf[~is_valid.to(leaf.device)] = ignore
            else:
                fewest = min(2, leaf.shape[1] - 1)
                keep = torch.randint(fewest, leaf.shape[1] + 1, (batch.rows,), generator=generator).tolist()
                for k, row in enumerate(leaf):  # a sample's rows (codebooks) have equally many valid labels
                    row[keep[k * batch.rows // len(leaf)] :] = ignore
            return leaf

        return _relabelled(batch, path, relabel)


def without_valid(batch: Batch, path: str, ignore: float, at: int) -> Batch:
    """`batch` with all labels at `path` set to `ignore` in the samples from index `at` on."""

    def relabel(leaf: Tensor) -> Tensor:
        leaf[at * len(leaf) // batch.rows :] = ignore
        return leaf

    return _relabelled(batch, path, relabel)


def _relabelled(batch: Batch, path: str, relabel: Callable[[Tensor], Tensor]) -> Batch:
    """`batch` with the leaf at `path` replaced by `relabel(copy)`. The first dimension of this copy counts samples."""

    def map_leaf(name: str, leaf: Tensor, dim: int | None) -> Tensor:
        return leaf if name != path else relabel(leaf.movedim(dim or 0, 0).clone()).movedim(0, dim or 0)

    return batch.map(map_leaf)


def _pool(leaf: Tensor, special: Tensor) -> Tensor:
    """The values from which an integer leaf is drawn. If the leaf's largest class is below SPAN, the values are the
    leaf's negative values, the leaf's mark, and all values from 0 to the largest class (at least 1), except `special`
    tokens that the leaf does not contain. Otherwise, the values are the leaf's own, with `special` tokens and the
    largest class repeated, since a loss may omit these values or weight them differently."""
    pool = leaf.detach().long().cpu().unique()
    present = pool[torch.isin(pool, special)]
    classes = pool[:-1] if is_marked(pool) else pool
    last = int(classes[-1])
    if last >= SPAN:
        repeated = torch.cat([present, pool[-1:]]).unique()
        return torch.cat([pool, repeated.repeat(len(pool) // SPAN)])
    fill = torch.arange(max(last, 1) + 1)
    if leaf.ndim > 1 and last > 1:  # tokens; zeros and ones may be a mask
        fill = fill[~torch.isin(fill, special) | torch.isin(fill, present)]
    return torch.cat([pool[pool < 0], fill, pool[len(classes) :]])


def is_marked(values: Tensor) -> bool:
    """Whether the highest of these sorted labels is UNLABELLED and marks a missing label: a gap separates this value
    from the classes."""
    return len(values) > 1 and int(values[-1]) == UNLABELLED and int(values[-2]) < UNLABELLED - 1


def _chosen(pool: Tensor, count: int, number: int, generator: torch.Generator) -> Tensor:
    """Choose `count` values from the pool. If the pool has more than `count` values, but at most SPAN, successive draws
    cycle through the whole pool."""
    if count < len(pool) <= SPAN:
        order = torch.randperm(len(pool), generator=torch.Generator().manual_seed(0))
        return pool[order[(torch.arange(count) + number * count) % len(pool)]]
    return pool[torch.randint(len(pool), (count,), generator=generator)]


def _random_mask(leaf: Tensor, generator: torch.Generator) -> Tensor:
    """Random zeros and ones. In a leaf with several dimensions, each row of the last dimension has at least one 1."""
    mask = torch.rand(leaf.shape, generator=generator).gt(0.4)
    if leaf.ndim > 1:
        mask[..., 0] |= ~mask.any(-1)
    return mask.to(leaf)


def _normal(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Normally distributed values. After REPEATED elements, the values repeat: repeating values takes a tenth of the
    time of generating them."""
    count = math.prod(shape)
    if count <= REPEATED:
        return torch.randn(tuple(shape), generator=generator)
    drawn = torch.randn(REPEATED, generator=generator)
    return drawn.repeat(-(-count // REPEATED))[:count].view(tuple(shape))


class Measured(NamedTuple):
    """A measured loss (`value`). If the criterion returns (sum, count), `value` is the sum and `denominator` is the
    count. `slopes` contains the gradients, if requested."""

    value: float
    denominator: float | None
    dtype: torch.dtype
    slopes: tuple[Tensor | None, ...] = ()


class Losses(NamedTuple):
    """The loss of some samples (`whole`), the losses of two `parts` of these samples, and the parts' `batches`."""

    whole: Measured
    parts: list[Measured]
    batches: list[Batch]

    @property
    def is_finite(self) -> bool:
        return all(math.isfinite(loss.value) for loss in (self.whole, *self.parts))

    @property
    def counts_add_up(self) -> bool:
        """Whether the counts of the parts sum to the count of the whole."""
        whole, *parts = (loss.denominator or 0.0 for loss in (self.whole, *self.parts))
        return abs(whole - sum(parts)) <= 1e-5 * max(map(abs, (whole, *parts)))


@contextmanager
def weighted(unit: nn.Module, device: torch.device) -> Iterator[None]:
    """Context manager that replaces released parameters of `unit` with fixed random values: the rule of the unit's loss
    does not depend on parameter values."""
    released = {name: p for name, p in unit.named_parameters(remove_duplicate=False) if is_released(p)}
    if not released:
        yield
        return
    generator = torch.Generator().manual_seed(0)
    state = blank_state(unit, device)
    with torch.no_grad():
        for name in released:
            if state[name].is_floating_point():
                drawn = _normal(state[name].shape, generator)
                drawn = drawn / math.sqrt(drawn.shape[-1]) if drawn.ndim > 1 else 1 + drawn / 4
                state[name].copy_(drawn)
    with reparametrized(unit, state):
        yield


class Glue:
    """Runs a model's glue and the criterion with given values instead of unit results. No other code may change the
    model between two runs."""

    def __init__(self, model: nn.Module, criterion: Criterion | None, device: torch.device) -> None:
        self.model, self.criterion, self.device, self.units = model, criterion, device, find_units(model)
        self.before: Before | None = None  # the state of the model before the first run

    def run(
        self,
        batch: Batch,
        flow: Dataflow,
        deltas: Sequence[int],
        result: Callable[[LeafKey, TensorSpec], Tensor],
        running: Collection[int] = (),
        times: int = 1,
        by: Sequence[Tensor] = (),
    ) -> Measured | None:
        """Measure the loss of `batch`, and the loss's gradients with respect to `by`. Returns None if no loss was
        computed. `result(key, spec)` returns a leaf of a unit's result. Only the calls in `running` run their units.
        The criterion is called `times` times. The state of the model, the criterion and the generators is restored
        afterwards."""
        calls, is_inside, randomness = enumerate(flow.calls), False, Randomness(self.device)

        def handle(unit: str, original: Any, *arguments: Any) -> Any:
            nonlocal is_inside
            if is_inside:
                return original(*arguments[0], **arguments[1])
            index, call = next(calls, (len(flow.calls), None))
            if call is None or call.unit != unit:
                expected = END if call is None else call.unit
                raise other_way(f"the forward called {unit}", f"{expected} (unit call {index})")
            if index in running:
                is_inside = True
                with weighted(self.units[unit], self.device):
                    output = original(*arguments[0], **arguments[1])
                is_inside = False
                return output

            def made(k: int, spec: Any) -> Any:
                if isinstance(spec, TensorSpec):
                    return result((*flow.occurrences[index], k), TensorSpec(spec.at(deltas), spec.dtype))
                return spec.at(deltas) if isinstance(spec, Count) else spec

            answered = list(call.answered)
            leaves = [made(k, call.leaves[k]) for _, numbers in answered for k in numbers]
            return answer(self.units[unit], tuple(part for part, _ in answered), leaves, arguments)

        with ExitStack() as stack:
            self.before = stack.enter_context(preserving(self.model, self.criterion, before=self.before))
            stack.enter_context(randomness.step(0, 0))
            randomness.at(0)
            stack.enter_context(torch.set_grad_enabled(bool(by)))
            stack.enter_context(handled(self.units, handle))
            stack.enter_context(checking_indices(self.device))
            stack.enter_context(without_tf32())
            private = batch.copied(batch.paths)  # glue may write to the batch
            output = private.call(self.model)
            if left := next(calls, None):
                raise other_way("the forward ended", f"{left[1].unit} (unit call {left[0]})")
            for _ in range(times):
                randomness.at(1)
                value, count = sum_and_count(output, self.criterion, private.copied(private.paths))
            slopes = torch.autograd.grad(value, by, allow_unused=True) if by and value is not None else ()
        if value is None:
            return None
        return Measured(float(value.detach()), None if count is None else float(count), value.dtype, slopes)

    def count(self, batch: Batch, flow: Dataflow, deltas: Sequence[int]) -> tuple[float, bool]:
        """The count that the criterion returns, and whether the count is 0 and the sum is NaN (a mean over nothing,
        times 0). The count does not depend on unit results, so each unit result is replaced with a single value,
        expanded to the result's shape."""

        def constant(key: LeafKey, spec: TensorSpec) -> Tensor:
            value = 0.5 if spec.dtype.is_floating_point else 0
            return torch.full((), value, dtype=spec.dtype, device=self.device).expand(spec.shape)

        measured = self.run(batch, flow, deltas, constant)
        assert measured is not None and measured.denominator is not None
        return measured.denominator, measured.denominator == 0 and math.isnan(measured.value)


class LossTrial:
    """Measures a model's loss on all samples and on two parts of them.

    The unit results on which the loss depends are random, and all other unit results are zeros. Side outputs of units
    are random only with `side_outputs`. The two parts reuse the unit results and glue's random numbers from the run on
    all samples. If a unit itself returns a loss, this unit also runs, with random weights if another stage holds it. If
    the trial is `precise`, fp32 replaces 16-bit dtypes, which would hide an error of 1 %. `kind` is the distribution of
    unit results.
    """

    def __init__(
        self,
        model: nn.Module,
        flow: Dataflow,
        samples: FewSamples,
        criterion: Criterion | None,
        side_outputs: bool,
        precise: bool,
    ) -> None:
        self.precise, self.kind = precise, NORMAL
        self.model, self.flow, self.samples, self.criterion = model, flow, samples, criterion
        self.glue = Glue(model, criterion, samples.few.device)
        self.failure: Exception | None = None  # the error of the last failed trial
        self._flows: dict[range, tuple[Dataflow, tuple[int, ...]]] = {}
        whole, deltas = self._flow(range(samples.few.rows))
        values = set(whole.loss.values) if whole.loss else set[Value]()
        self.running = {value.call for value in values if not (whole.is_aside(value) or whole.spec(value).at(deltas))}
        for call in self.running:
            values |= whole.calls[call].reads.values
        self.random = [value for value in sorted(values) if side_outputs or not whole.is_aside(value)]

    @property
    def elements(self) -> int:
        """The number of random elements in the unit results."""
        whole, deltas = self._flow(range(self.samples.few.rows))
        return sum(math.prod(whole.spec(value).at(deltas)) for value in self.random)

    def rounds(self, batch: Batch) -> bool:
        """Whether glue itself rounds to 16 bits. If it does, the loss does not change when unit results are first
        rounded to bf16."""
        results = self._random_results(0)
        rounded = {key: result.bfloat16().float() for key, result in results.items()}
        losses = [self._measure(batch, range(batch.rows), each, SharedDraws()) for each in (results, rounded)]
        return losses[0] == losses[1]

    def measure(self, batch: Batch, at: int, seed: int, fit: float = 0.0, sloping: bool = False) -> Losses | None:
        """Measure the loss of `batch` (the samples with random values), of its first `at` samples, and of the remaining
        samples. Returns None if any of the three measurements has no loss, or if the model or the criterion fails. With
        `fit`, unit results of the first `at` samples are moved by at most `abs(fit)`, to reduce these samples' loss or,
        if `fit` is negative, to increase it. With `sloping`, the losses have gradients with respect to all random unit
        results."""
        rows, draws = range(batch.rows), SharedDraws()
        halves = rows[:at], rows[at:]
        batches = [batch.take(torch.tensor(half)) for half in halves]
        results = self._random_results(seed)
        try:
            if fit:
                by = {key: t.requires_grad_() for key, t in results.items() if t.is_floating_point()}
                first = self._measure(batches[0], halves[0], results, draws, by=[*by.values()])
                pairs = zip(by, first.slopes if first is not None else ())
                slopes = {key: slope for key, slope in pairs if slope is not None}
                steepest = max([float(slope.abs().max()) for slope in slopes.values()], default=0.0) or 1.0
                results = {key: t.detach() for key, t in results.items()}
                results |= {key: results[key] - fit / steepest * slope for key, slope in slopes.items()}
            leaves = [t.requires_grad_() for t in results.values() if sloping and t.is_floating_point()]
            whole = self._measure(batch, rows, results, draws, by=leaves)
            parts = [self._measure(*half, results, draws, by=leaves) for half in zip(batches, halves)]
        except Exception as error:  # raised by the model or the criterion, which may reject such labels
            logger.debug("a trial of the loss failed: %s: %s", type(error).__name__, error)
            self.failure = error
            return None
        losses = [part for part in parts if part is not None]
        return None if whole is None or len(losses) != len(parts) else Losses(whole, losses, batches)

    def is_steady(self, batch: Batch) -> bool:
        """Whether the criterion returns the same loss when it is called again with the same output, except for rounding
        (a GPU kernel may add in a different order). Also returns True if no loss was computed, or if the loss is
        NaN."""
        results, rows = self._random_results(0), range(batch.rows)
        once, again = (self._measure(batch, rows, results, SharedDraws(), times) for times in (1, 3))
        if once is None or again is None or math.isnan(once.value):
            return True
        counts = once.denominator or 0.0, again.denominator or 0.0
        return all(math.isclose(*pair, rel_tol=ROUNDING) for pair in ((once.value, again.value), counts))

    def _measure(
        self, batch: Batch, rows: range, results: Any, draws: SharedDraws, times: int = 1, by: Sequence[Tensor] = ()
    ) -> Measured | None:
        flow, deltas = self._flow(rows)
        typed = batch.map(lambda path, tensor, dim: tensor.to(self._dtype(tensor.dtype)))

        def result(key: LeafKey, spec: TensorSpec) -> Tensor:
            full = results.get(key)
            if full is None or full.ndim != len(spec.shape):
                return torch.zeros(spec.shape, dtype=spec.dtype, device=self.glue.device)
            return part_of(full, spec.shape, rows).clone()

        with draws.of(rows):
            return self.glue.run(typed, flow, deltas, result, self.running, times, by)

    def _flow(self, rows: range) -> tuple[Dataflow, tuple[int, ...]]:
        """The Dataflow of the samples `rows`, and the differences between their sizes and the traced sizes."""
        if rows not in self._flows:
            part = self.samples.few.take(torch.tensor(rows))
            flow, deltas = self.flow, self.flow.deltas(part)
            if deltas is None or not flow.watched.isdisjoint(part.paths):
                flow = trace(self.model, part, self.criterion, exact=True)
                deltas = flow.axes.deltas(part)
            assert deltas is not None
            self._flows[rows] = flow, deltas
        return self._flows[rows]

    def _random_results(self, seed: int) -> dict[LeafKey, Tensor]:
        whole, deltas = self._flow(range(self.samples.few.rows))
        generator = torch.Generator().manual_seed(seed)
        results = {}
        for value in self.random:
            spec = whole.spec(value)
            if spec.dtype.is_floating_point:
                drawn = _normal(spec.at(deltas), generator)
                drawn = drawn * (1 if seed % 2 else 4) if self.kind == NORMAL else drawn.sigmoid()
                dtype = self._dtype(spec.dtype)
                results[(*whole.occurrences[value.call], value.leaf)] = drawn.to(self.glue.device, dtype)
        return results

    def _dtype(self, dtype: torch.dtype) -> torch.dtype:
        return torch.float32 if self.precise and dtype in SHORT else dtype
