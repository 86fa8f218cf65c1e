"""Whole: compares the unsplit model on a whole batch with the unsplit model on the batch's microbatches."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from pipeshard.batch.batch import Batch
from pipeshard.batch.criterion import Criterion
from pipeshard.errors import summary
from pipeshard.graph.rng import Randomness, SharedDraws, python_state
from pipeshard.private import BatchNorm, tree_tensors
from pipeshard.verify.compare import Comparison, Results, attributes, difference_text, magnitude, recorded, size
from pipeshard.verify.local import Unproven
from pipeshard.verify.reference import Copies, NoLoss, Reference, Weights

WHOLE_SEED = 20261124
# Relative errors of the loss and of gradients. Matrix products of different shapes are rounded differently, and some
# layers always compute in fp32, so results in fp64 are not exact to the last digits.
LOSS_ERRORS, GRADIENT_ERRORS = {None: 1e-5, torch.float64: 1e-6}, {None: 1e-4, torch.float64: 1e-5}
ROUGH = 1e-3  # the least relative error that counts as a difference if a model does not run in fp64
# Errors are relative to at least this magnitude or, for a gradient, to at least this share of the largest gradient.
LOSS_FLOOR = 1e-3
# Random numbers: each sample has its own, equal on both sides (SHARED), or all samples have the same (CONSTANT).
SHARED, CONSTANT = "shared", "constant"
MOVES = "counters and running values of the model are updated once per microbatch, not once per batch"
PHASE = 0.5  # shifts the sine used as a loss, since subtracting a mean might not change a sum of odd functions

Make = Callable[[torch.dtype | None], tuple[Copies, Criterion | None]]


class Coupled(Exception):
    """Samples of a batch depend on each other. The message describes the difference and where it begins."""


@dataclass(frozen=True)
class RunMode:
    """The mode in which both sides run: `training` or evaluation mode, the random numbers, the dtype, and the loss or
    (`by_outputs`) an objective of the outputs. `apart`: each microbatch has its own copy of the model. `rough`: errors
    of up to ROUGH, and errors that the model's least precise dtype may cause, do not count as differences."""

    training: bool = True
    draws: str = ""
    dtype: torch.dtype | None = None
    by_outputs: bool = False
    apart: bool = False
    rough: bool = False


@dataclass(frozen=True)
class Side:
    """The loss and the gradients (by name) of some samples, summed over microbatches with the weights `shares`. `term`
    is the largest magnitude of a microbatch's term in the sum of losses."""

    loss: float
    term: float
    gradients: dict[str, Tensor | None]
    dtype: torch.dtype
    rows: int
    shares: Sequence[float]

    @classmethod
    def of(cls, reference: Reference, loss: Tensor, rows: int, weights: Weights) -> "Side":
        """The loss and gradients of a reference after a step."""
        gradients = dict[str, Tensor | None]()
        _add_gradients(gradients, reference)
        return cls(float(loss), abs(float(loss)), gradients, loss.dtype, rows, weights.shares)


@dataclass
class WholeFound:
    """The numbers of losses and gradients that were compared. `missing` is the reason why some were not compared.
    `moving` lists state that changes with each microbatch, as in gradient accumulation."""

    losses: int = 0
    gradients: int = 0
    missing: str = ""
    moving: list[str] = field(default_factory=list)


class WholeBatch:
    """Compares copies of the unsplit model on a whole batch and on the batch's microbatches. `make(dtype)` creates a
    copy. `draws` is whether the model uses random numbers.

    `note` is called regularly. `differs` is called after an apparent difference, before comparisons in other modes.
    """

    def __init__(
        self, make: Make, device: torch.device, draws: bool, note: Callable[[], None], differs: Callable[[], None]
    ) -> None:
        self.make, self.device, self.draws, self.note, self.differs = make, device, draws, note, differs
        self.drew = self.drew_in_python = False

    def compare(
        self, batch: Batch, weights: Weights, by_loss: bool = True, by_outputs: bool = True, units: Sequence[str] = ()
    ) -> WholeFound:
        """Compare `batch` with its microbatches, whose losses have these `weights`. With `by_loss`, compares the loss
        and its gradients. If these differ or are not compared, `by_outputs` compares an objective of the outputs, and
        its gradients. Raises Coupled for a difference in the last comparison.

        Both comparisons are needed if a part of the loss comes from side outputs of layers (router logits), since this
        part is computed per microbatch. Only the outputs can be compared if the weights are unknown.
        """
        self.parts = copied_microbatches(batch, len(weights.shares))
        self.batch, self.weights, self.units, self.found = batch, weights, units, WholeFound()
        if batch.rows < 2:
            self.found.missing = "the batch has only one sample"
            return self.found
        differences = self._differences(RunMode(draws=SHARED if self.draws else "")) if by_loss else ""
        if by_outputs and (differences or not by_loss):
            differences = self._by_outputs()
        if differences:
            raise Coupled(f"{differences}. {self._place()}")
        return self.found

    def _by_outputs(self) -> str:
        """The difference in the outputs, or "" if they are equal or no output is per sample."""
        self.chosen = self._choose()
        if not any(self.chosen):
            self.found.missing = "the model returns no per-sample outputs"
            return ""
        return self._differences(RunMode(draws=SHARED if self.draws else "", by_outputs=True))

    def _differences(self, way: RunMode) -> str:
        """A description of the difference between the two sides, or "" if they are equal in one of several modes, which
        are tried in turn."""
        why = self._attempt(way)
        if why and not way.draws:
            why = self._attempt(replace(way, draws=SHARED))
        if not why or not (self.drew or self.drew_in_python):
            return why
        if self.drew:  # samples may use the numbers in a different order, which is irrelevant if all numbers are equal
            why = self._attempt(replace(way, draws=CONSTANT))
        if not why or not self.drew_in_python:
            return why
        self.drew_in_python = False
        try:
            why = self._attempt(replace(way, training=False, draws=CONSTANT))
        except Unproven:
            raise
        except NoLoss:
            self.found.missing = "the model uses random or numpy in training mode, but has no loss in evaluation mode"
            return ""
        except Exception as error:  # a model may raise anything in evaluation mode
            self.found.missing = (
                f"the model uses random or numpy in training mode, but fails in evaluation mode: {summary(error)}"
            )
            return ""
        if why and not self.drew_in_python:
            return why
        where = "the model" if why else "in training mode, the model"
        self.found.missing = f"{where} uses random or numpy, whose numbers differ for the same samples"
        return ""

    def _attempt(self, way: RunMode) -> str:
        """The difference, or "" if it is not also found in fp64: a higher precision reduces rounding errors, but not
        other differences. If the model does not run in fp64, only a difference that rounding cannot cause counts."""
        try:
            why = self._once(way)
        except (Unproven, NoLoss):
            raise
        except Exception as error:
            if way.draws != SHARED:
                raise
            self.drew = True
            return summary(error)  # the whole batch's random numbers may not be valid for some samples
        if not why:
            return ""
        try:
            return self._once(replace(way, dtype=torch.float64))
        except Unproven:
            raise
        except Exception as error:  # of any type: not all operators support fp64
            failure = summary(error)
        if rough := self._once(replace(way, rough=True)):
            return rough
        self.found.missing = (
            f"they differ by no more than rounding may cause, and the model does not run in fp64: {failure}"
        )
        return ""

    def _once(self, way: RunMode) -> str:
        """A description of the difference between the two sides in one mode. If microbatches differ only because of
        state that an earlier microbatch leaves on the model, the difference counts only if the state depends on the
        samples."""
        self.way = way
        draws = _draws_of(way)
        whole = self._side(way, [self.batch], Weights([1.0]), draws)
        why = unlike(whole, self._side(way, self.parts, self.weights, draws), way)
        if not why:
            return self._count(whole)
        self.differs()
        apart = replace(way, apart=True)
        if len(self.parts) < 2 or unlike(whole, self._side(apart, self.parts, self.weights, draws), apart):
            return why
        if self._is_carried(way):
            return f"{why}: the forward of a microbatch changes state that the next microbatch reads"
        if MOVES not in self.found.moving:
            self.found.moving.append(MOVES)
        return self._count(whole)

    def _count(self, whole: Side) -> str:
        self.found.losses += 1
        self.found.gradients += len(whole.gradients)
        return ""

    def _is_carried(self, way: RunMode) -> bool:
        """Whether the result of the second microbatch changes if other samples run before it, instead of the first
        microbatch."""
        first, second = self.parts[:2]
        other = second.take(torch.arange(first.rows) % second.rows)
        after, expected = (
            self._side(way, [before, second], Weights([0.0, 1.0]), _draws_of(way)) for before in (first, other)
        )
        return bool(unlike(expected, after, way))

    def _side(self, way: RunMode, batches: Sequence[Batch], weights: Weights, draws: SharedDraws) -> Side:
        """Run the forward and the backward of each batch in turn, on one copy of the model or (`apart`) on a separate
        copy for each batch."""
        total, term, start, gradients, dtype = 0.0, 0.0, 0, dict[str, Tensor | None](), torch.float32
        reference = self._reference(way)
        for k, batch in enumerate(batches):
            if k and way.apart:
                _add_gradients(gradients, reference)
                reference = self._reference(way)
            weight = replace(weights, shares=weights.shares[k : k + 1])
            with self._run(way, batch, start, draws) as typed:
                loss, _ = reference.step([typed], weight, (WHOLE_SEED, 0), self.note)
            start += batch.rows
            total, term, dtype = total + float(loss), max(term, abs(float(loss))), loss.dtype
        self.drew |= bool(draws.whole)
        _add_gradients(gradients, reference)
        return Side(total, term, gradients, dtype, start, weights.shares)

    def _reference(self, way: RunMode) -> Reference:
        """A new copy of the model, with the dtype, mode and objective of the comparison."""
        own, criterion = self.make(way.dtype)
        if way.training:
            for module in own.model.modules():
                if (is_batch_norm(module) and has_statistics(module)) or is_dropout(module):
                    module.training = False
        else:
            own.model.eval()
        return Reference(own, self._objective if way.by_outputs else criterion, self.device)

    def _objective(self, output: Any, inputs: Any) -> Tensor:
        """An objective that depends on all per-sample outputs, and is a sum over the samples."""
        leaves = outputs_of(output)
        terms = [
            (leaf.nan_to_num(0.0, 0.0, 0.0) + PHASE).sin().sum() / count
            for leaf, count in zip(leaves, self.chosen, strict=True)
            if count
        ]
        return torch.stack(terms).sum() if terms else torch.zeros(())

    def _choose(self) -> list[int]:
        """For each output, the number of elements for the whole batch, or 0 if the microbatches' outputs have a
        different total. Empty if the number of outputs differs."""
        self.chosen = []
        sizes = [self._sizes(batch) for batch in (self.batch, *self.parts)]
        if len({len(one) for one in sizes}) > 1:
            return []
        whole, parts = sizes[0], zip(*sizes[1:], strict=True)
        return [count if count == sum(others) else 0 for count, others in zip(whole, parts, strict=True)]

    def _sizes(self, batch: Batch) -> list[int]:
        own, _ = self.make(None)
        randomness = Randomness(self.device)
        with torch.no_grad(), randomness.step(WHOLE_SEED, 0):
            randomness.at(0)
            return [leaf.numel() for leaf in outputs_of(batch.call(own.model))]

    def _place(self) -> str:
        """A sentence that names the first unit whose input or results differ for the same samples, or another
        location."""
        results: list[Results] = [{}, {}]
        draws = _draws_of(self.way)
        try:
            for batches, into in zip(([self.batch], self.parts), results, strict=True):
                self._record(batches, into, draws)
        except Unproven:
            raise
        except Exception:  # of any type: the difference is reported without its location
            return "The first difference could not be located"
        whole, parts = results
        for (unit, k, _), expected in whole.items():
            pieces = [parts.get((unit, k, i), []) for i in range(len(self.parts))]
            if any(len(piece) != len(expected) for piece in pieces):
                continue
            for leaf, *others in zip(expected, *pieces, strict=True):
                if isinstance(leaf, Tensor) and is_another(leaf, others, self.way.dtype):
                    return f"The first difference for the same samples is in the input or result of unit {unit}"
        return "All units return the same results: the difference begins after them, in the loss or the backward pass"

    def _record(self, batches: Sequence[Batch], into: Results, draws: SharedDraws) -> None:
        start, way = 0, replace(self.way, apart=False)
        reference = self._reference(way)
        with recorded(reference.model, list(self.units), into), torch.no_grad():
            for batch in batches:
                with self._run(way, batch, start, draws) as typed:
                    typed.call(reference.model)
                start += batch.rows

    @contextlib.contextmanager
    def _run(self, way: RunMode, batch: Batch, start: int, draws: SharedDraws) -> Iterator[Batch]:
        """Context manager for a run of the samples in `batch`, which begin at sample `start` of the whole batch. Yields
        the samples in the mode's dtype. If `way.draws` is not "", the random numbers come from `draws`."""
        typed = batch.map(lambda path, leaf, dim: _cast(leaf, way.dtype)) if way.dtype is not None else batch
        around = draws.of(range(start, start + batch.rows)) if way.draws else contextlib.nullcontext()
        randomness = Randomness(self.device)
        with randomness.step(WHOLE_SEED, 0):
            randomness.at(0)
            before = python_state()
            with around:
                yield typed
            self.drew_in_python |= before != python_state()


def unlike(whole: Side, parts: Side, way: RunMode) -> str:
    """A description of the difference between the two sides, or "" if there is none."""
    m = f"{len(parts.shares)} microbatches"
    dtypes = {gradient.dtype for gradient in whole.gradients.values() if gradient is not None}
    least = max(ROUGH, *(8 * torch.finfo(dtype).eps for dtype in (whole.dtype, *dtypes))) if way.rough else 0.0
    short = max(8 * torch.finfo(whole.dtype).eps, least)
    floor = 1.0 if way.by_outputs else LOSS_FLOOR
    if not abs(whole.loss - parts.loss) <= max(LOSS_ERRORS[way.dtype], short) * max(whole.term, parts.term, floor):
        what = "an objective computed from the outputs" if way.by_outputs else "the loss"
        counts = "" if way.by_outputs else f" with weights {', '.join(f'{share:.3g}' for share in parts.shares)}"
        return f"{what} of {whole.rows} samples is {whole.loss:.7g}, but {parts.loss:.7g} from {m}{counts}"
    sizes = {name: size(gradient) for name, gradient in whole.gradients.items() if gradient is not None}
    largest = max(sizes.values(), default=0.0)
    for name, expected in whole.gradients.items():
        gradient = parts.gradients[name]
        if expected is None and gradient is None:
            continue
        mine, theirs = _filled(gradient, expected), _filled(expected, gradient)
        relative = max(GRADIENT_ERRORS[way.dtype], 8 * torch.finfo(theirs.dtype).eps, least)
        if not magnitude(mine - theirs) <= relative * max(sizes.get(name, 0.0), LOSS_FLOOR * largest):
            return (
                f"the gradient of {name} differs between the batch of {whole.rows} samples and its {m}: "
                f"{difference_text(mine, theirs)}"
            )
    return ""


def moves(before: Copies, whole: Copies, parts: Copies, m: int) -> bool:
    """Whether a counter (an integer of a module or the criterion) or a buffer depends on the number of microbatches.
    `whole` has run one forward of a batch, and `parts` has run the batch's m microbatches. A counter or buffer is
    detected even if the loss of these runs does not depend on it."""
    start, of_whole, of_parts = (_counters(own) for own in (before, whole, parts))
    if any(of_parts.get(place, n) - n == m * (of_whole.get(place, n) - n) != 0 for place, n in start.items()):
        return True
    is_same, others = Comparison().same, dict(parts.model.named_buffers())
    buffers = dict(before.model.named_buffers())
    return any(
        name in others and buffer.shape == buffers[name].shape and not is_same(others[name], buffer)
        for name, buffer in whole.model.named_buffers()
        if name in buffers and not is_same(buffer, buffers[name].to(buffer.device))
    )


def _counters(own: Copies) -> dict[tuple[int, str], int]:
    """The integers among the attributes of modules and the criterion, by (number of the object, attribute name)."""
    criterion = own.criterion.modules() if isinstance(own.criterion, nn.Module) else [own.criterion]
    objects = [attributes(module) for module in own.model.modules()]
    objects += [dict(getattr(one, "__dict__", {})) for one in criterion]
    places = ((k, name, value) for k, held in enumerate(objects) for name, value in held.items())
    return {(k, name): value for k, name, value in places if type(value) is int}


class _Constant(SharedDraws):
    """Random numbers that are the same for all samples, so that they cannot cause a difference."""

    def drawn(self, func: Any, tensor: Tensor) -> None:
        name = str(func)
        if "attention" not in name:
            self.whole.append(tensor)
            kept = 1.0 if "bernoulli" in name or tensor.dtype is torch.bool else 0.5
            tensor.fill_(kept if tensor.is_floating_point() or tensor.dtype is torch.bool else 0)


def _draws_of(way: RunMode) -> SharedDraws:
    return _Constant() if way.draws == CONSTANT else SharedDraws()


def copied_microbatches(batch: Batch, m: int) -> list[Batch]:
    """The `m` microbatches of a batch, as copies instead of views."""
    parts, end = [], 0
    for part in batch.split(m):
        start, end = end, end + part.rows
        parts.append(batch.take(torch.arange(start, end)))
    return parts


def is_batch_norm(module: nn.Module) -> bool:
    """Whether a module is a batch norm, or has running statistics like a batch norm."""
    if isinstance(module, nn.InstanceNorm1d | nn.InstanceNorm2d | nn.InstanceNorm3d):
        return False  # normalizes each sample separately
    return isinstance(module, BatchNorm) or has_statistics(module)


def has_statistics(module: nn.Module) -> bool:
    return any(name.startswith("running_") for name, _ in module.named_buffers(recurse=False))


def is_dropout(module: nn.Module) -> bool:
    """Whether a module only drops activations or paths at random, judged by its class's name."""
    return "drop" in type(module).__name__.lower() and not any(True for _ in module.parameters())


def outputs_of(output: Any) -> list[Tensor]:
    """The tensors of an output that may belong to samples."""
    return [tensor for tensor in tree_tensors(output) if tensor.ndim and tensor.is_floating_point()]


def is_another(whole: Tensor, parts: Sequence[Any], dtype: torch.dtype | None) -> bool:
    """Whether the concatenation of the parts along one dimension has the shape of `whole` but different values."""
    if not whole.is_floating_point() or any(part.ndim != whole.ndim for part in parts):
        return False
    dims = [dim for dim, count in enumerate(whole.shape) if any(part.shape[dim] != count for part in parts)]
    if len(dims) != 1 or sum(part.shape[dims[0]] for part in parts) != whole.shape[dims[0]]:
        return False
    difference = (torch.cat(list(parts), dims[0]) - whole).nan_to_num(0.0, 0.0, 0.0).abs()
    return bool(difference.numel() and float(difference.max()) > GRADIENT_ERRORS[dtype] * max(size(whole), 1e-6))


def _cast(leaf: Tensor, dtype: torch.dtype | None) -> Tensor:
    return leaf.to(dtype) if leaf.is_floating_point() else leaf


def _add_gradients(gradients: dict[str, Tensor | None], reference: Reference) -> None:
    """Add to `gradients` the gradients of a model's parameters, and of other tensors that its optimizer trains."""
    for name, parameter in reference.own.trained().items():
        gradient, before = parameter.grad, gradients.get(name)
        if gradient is not None and gradient.layout is not torch.strided:
            gradient = gradient.to_dense()
        gradients[name] = gradient if before is None else before if gradient is None else before + gradient


def _filled(gradient: Tensor | None, like: Tensor | None) -> Tensor:
    """The gradient, or zeros for None. A gradient is None if no sample of a microbatch uses the parameter."""
    assert gradient is not None or like is not None
    return torch.zeros_like(like) if gradient is None else gradient.detach()  # type: ignore[arg-type]
