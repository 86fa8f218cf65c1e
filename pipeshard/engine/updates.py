"""Updates: compares optimizer updates across ranks, since all stages of a model must be updated in the same way.

A training loop may set a learning rate from values of one rank, or scale gradients by a norm of one stage's gradients.
Stages would then silently apply different learning rates or factors. Ranks therefore compare the options of the
optimizers' groups, and the factor by which the loop on each rank has multiplied all gradients of that rank. Ranks
compare the first updates of a model before any parameter changes, and later updates in the first message of the next
step.
"""

import hashlib
import logging
import math
import weakref
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from pipeshard.batch.tree import PLAIN_VALUES
from pipeshard.distributed.agreement import hash_of
from pipeshard.distributed.collectives import gather_objects, local
from pipeshard.distributed.mesh import Grid
from pipeshard.engine.groups import is_compared
from pipeshard.errors import UsageError
from pipeshard.graph.writes import is_written, note

logger = logging.getLogger("pipeshard")

FIRST = 3  # the number of a model's first updates that are compared before they change a parameter
BITS = 61  # bits of the digest of the options, which is sent as a signed 64-bit integer
ODD = 3  # multiplies the digest of the used options, so that differences of the two summed digests do not cancel
ONE = 2**32  # the integer that is sent for a factor of 1
OTHER = -1  # the integer that is sent for a missing factor
LARGEST = 2.0**20  # only smaller factors are compared
TENSORS, VALUES = 8, 64  # at most this many gradients, and values of each, are sampled to find a factor
CLOSE, NEAR = 1e-6, 1e-3  # tolerated relative differences of options, and of factors
COARSE = 4e-3  # the tolerance for factors of gradients whose values are rounded by more than NEAR (bf16)
CLEARED, GONE = "optimizer {} was cleared", "gradients of optimizer {} are gone"  # keys of `Told.dropped`
Options = dict[tuple[int, int], dict[str, Any]]  # each group's options, by (index of the optimizer, index of the group)


class Grouped(Protocol):
    """The attributes of a `PipelineOptimizer` that this module uses."""

    optim: Optimizer
    weights: Any  # dict[str, MasterWeight]
    given: list[frozenset[str]]
    options: list[tuple[str, ...]]


class Told(NamedTuple):
    """A rank's report on an update.

    Attributes:
        used: the options that the update applied, for each group with parameters on the rank. The key of a group
            contains a digest of the names in the group.
        options: the current options of these groups.
        factor: the factor by which the loop has multiplied the gradients, or None if the gradients were changed in
            another way, or do not exist.
        found: a description of a value that the training loop has written and that depends on one stage only, or "".
        numbered: by parameter, the numbers that the loop or an optimizer has used in writes after it had read several
            parameters (engine/coupling.py).
        dropped: one dict for each update since the last step, and one for the current state: whether the loop has
            cleared each optimizer, and whether the gradients of each optimizer with gradients on the rank are gone.
        noise: a description of gradients that the loop has changed with random numbers, or "".
        tolerance: the largest relative difference that the gradients' dtype may cause between equal factors.
    """

    used: dict[str, dict[str, Any]]
    options: dict[str, dict[str, Any]]
    factor: float | None
    found: str
    numbered: dict[str, list[float]]
    dropped: tuple[dict[str, bool], ...]
    noise: str
    tolerance: float


class GradientSnapshot:
    """The gradients of some parameters at one time and, with `samples`, a sample of their values."""

    def __init__(self, parameters: Iterable[Tensor], samples: bool) -> None:
        self._of = {p: (p.grad, note(p.grad)) for p in parameters if p.grad is not None}
        dense = [p for p, (grad, _) in self._of.items() if not grad.is_sparse] if samples else []
        self._sampled = dense[:: -(-len(dense) // TENSORS)] if dense else []
        self._values = [_some(parameter).clone() for parameter in self._sampled]

    @property
    def is_changed(self) -> bool:
        """Whether gradients were replaced or modified in place since the snapshot."""
        return any(p.grad is not grad or is_written(grad, noted) for p, (grad, noted) in self._of.items())

    def factor(self) -> float | None:
        """The factor by which all gradients have been multiplied since the snapshot, or None if they were changed in
        another way."""
        if not self.is_changed:
            return 1.0
        present = [parameter.grad is not None for parameter in self._of]
        if not self._sampled or not all(present):
            return None
        before = torch.cat([values.double().cpu() for values in self._values])
        after = torch.cat([_some(parameter).double().cpu() for parameter in self._sampled])
        return _factor(before, after, self.rounding)

    @property
    def rounding(self) -> float:
        """The largest relative error of the sampled values."""
        return max((torch.finfo(values.dtype).eps for values in self._values), default=0.0)


def _some(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    flat = local(parameter.grad).detach().reshape(-1)
    return flat[:: max(1, flat.numel() // VALUES)][:VALUES]


def _factor(before: Tensor, after: Tensor, rounding: float) -> float | None:
    """Return the positive factor, below LARGEST, by which `before` must be multiplied to get `after`, or None if no
    such factor exists. The values have a relative error of up to `rounding`. If there are too few values to average out
    this error, return None."""
    ratios = (after / before)[before != 0]
    factor = float(ratios.mean())
    if not 0.0 < factor < LARGEST or rounding / math.sqrt(len(ratios)) > COARSE / 4:
        return None
    expected = before * factor
    fits = ((after - expected).abs() <= max(NEAR, rounding) * expected.abs()).all()
    return factor if bool(fits) else None


class Updates:
    """Compares the updates of one model's optimizers across all ranks.

    Attributes:
        optimizers: weak references to the boosted optimizers, in the order in which they were boosted.
        count: the number of updates so far.
        found, numbered: findings about values that the training loop has written since the last step; see `Told`.
        drawn: a description of gradients to which the loop has written random numbers, generated for one parameter
            after another, or "". Cleared when changes to the gradients are recorded.
        evaluated: whether execute_pipeline has run without an optimizer, with gradients enabled, since the last update.
    """

    def __init__(self, grid: Grid) -> None:
        self.grid = grid
        self.optimizers: list[weakref.ref[Grouped]] = []
        self.count = 0
        self.found, self.numbered = "", dict[str, set[float]]()
        self.drawn = self._noise = ""  # `_noise`: `drawn` for changes that no factor explains, until ranks compare it
        self.evaluated = self._has_added = False  # `_has_added`: whether gradients were added since the last update
        self._graded: dict[int, list[Tensor]] = {}  # by optimizer: the parameters with gradients from the last step
        self._dropped: tuple[dict[str, bool], ...] = ()  # `_drops` at each update since then
        self._cleared = set[int]()  # the optimizers whose gradients zero_grad has cleared since then
        self._has_cleared = False  # whether the loop has called zero_grad so far
        self._added: GradientSnapshot | None = None  # the gradients after the last step
        self._given: GradientSnapshot | None = None  # the gradients before the hooks of the inner optimizer's step
        self._samples = False  # whether a training loop or a hook has changed gradients so far
        self._factor: float | None = 1.0  # the factor by which the loop has multiplied the current gradients
        self._told: float | None = None  # the factor of the last update, if it used the current gradients
        self._is_used = False  # whether an update has used the current gradients
        self._has_hooks = False  # whether the optimizer of such an update has hooks, which may multiply its gradients
        self._tolerance = NEAR  # for factors of the coarsest gradients that a loop or a hook has changed so far
        self._stepped: Options = {}  # the options of the last update
        self._digest: tuple[Any, int] = (None, 0)  # the latest options that were hashed, and their digest
        self._has_told = False
        self._kinds_found = set[str]()  # the kinds of findings so far: the first rank has logged them

    @property
    def is_compared(self) -> bool:
        """Whether the next update is compared before it changes a parameter."""
        return self.grid.size > 1 and self.count < FIRST

    def boosted(self, optimizer: Grouped) -> None:
        self.optimizers.append(weakref.ref(optimizer))

    def added(self, parameters: Iterable[Tensor]) -> None:
        """Record that a step has computed the gradients of these parameters."""
        self._has_added = True
        self.found, self.numbered, self._dropped = "", {}, ()
        self._cleared.clear()
        if self.grid.size > 1:
            used = {number: (w.parameter for w in each.weights.values()) for number, each in self.in_use().items()}
            self._graded = {number: [p for p in each if p.grad is not None] for number, each in used.items()}
            self._added = GradientSnapshot(parameters, self._samples or self.count < FIRST)

    def renew(self) -> None:
        """Discard the factors of the current gradients if an update has used these gradients. Call it before new
        gradients are computed. Until then, the factors apply to the updates of all optimizers."""
        if self._is_used:
            self._factor, self._told = 1.0, None
            self._is_used = self._has_hooks = False

    def judge(self) -> None:
        """Record how the training loop has changed the gradients since `added`. Call it before the gradients are used
        or changed."""
        self._factor = _product(self._factor, self._note(self._added))
        self._added = None

    def cleared(self, optimizer: Grouped | None, to_none: bool) -> None:
        """Record a call of the zero_grad method of an optimizer or, if `optimizer` is None, of the model."""
        self._has_cleared = True
        of = {number for number, each in self.in_use().items() if optimizer in (None, each)}
        self._cleared |= of if to_none else set()

    def skipped(self) -> None:
        """Record that all ranks skip the update with the current gradients."""
        self._factor = 1.0

    def hooks_begin(self, parameters: Iterable[Tensor], has_hooks: bool) -> None:
        """Record the gradients before the inner optimizer's step calls its hooks."""
        is_needed = has_hooks and self.grid.size > 1
        self._has_hooks |= is_needed
        self._given = GradientSnapshot(parameters, self._samples or self.count < FIRST) if is_needed else None

    def hooks_end(self, parameters: Sequence[Tensor]) -> None:
        """Record the update of these parameters. Call it after the last hook that runs before the update. Compares the
        first updates across ranks (see `compare`)."""
        has_gradients = any(parameter.grad is not None for parameter in parameters)
        if self.evaluated and not (self._has_added or has_gradients or self._has_told) and self.grid.first:
            logger.warning(EVALUATED)
            self._has_told = True
        self.evaluated = self._has_added = False
        if self.grid.size == 1:
            return
        factor = _product(self._factor, self._note(self._given))
        self._given, self._is_used = None, True
        if has_gradients:
            self._told = factor
        elif self._has_hooks:  # a hook's factor applies to one optimizer, whose gradients may be on another stage
            self._told = None
        self._stepped = self._options()
        self._dropped = self._drops
        is_first = self.is_compared
        self.count += 1
        if is_first:
            self.compare()

    def _note(self, since: GradientSnapshot | None) -> float | None:
        """The factor by which the gradients have been multiplied since a snapshot, or None if they were changed in
        another way."""
        drawn, self.drawn = self.drawn, ""
        if since is None or not since.is_changed:
            return 1.0
        self._samples = True
        factor = since.factor()
        if since.rounding > NEAR:
            self._tolerance = COARSE
        if factor is None:
            self._noise = self._noise or drawn
        return factor

    @property
    def numbers(self) -> tuple[int, int]:
        """The two numbers that are sent in the first message of a step. The first number is a digest of the last
        update's options, the current options and findings about the training loop. The second number is the last
        update's factor."""
        used = self._digest_of(self._stepped)  # usually the current options, whose digest is cached
        now = self._digest_of(self._options())
        written = zlib.crc32(repr((self.found, self._numbers, self._drops, self._noise)).encode())
        return (used * ODD + now + written) % 2**BITS, OTHER if self._told is None else round(self._told * ONE)

    def _digest_of(self, options: Options) -> int:
        if options != self._digest[0]:
            self._digest = options, hash_of(repr(options))
        return self._digest[1]

    def in_use(self) -> dict[int, Grouped]:
        """The optimizers that still exist on this rank, by their index in the order of boosting."""
        every = enumerate(reference() for reference in self.optimizers)
        return {number: optimizer for number, optimizer in every if optimizer is not None}

    def _options(self) -> Options:
        return {
            (number, k): options_of(group, keys)
            for number, optimizer in self.in_use().items()
            for k, (group, keys) in enumerate(zip(optimizer.optim.param_groups, optimizer.options))
        }

    def compare(self) -> None:
        """Raise UsageError on every rank if the ranks' updates differ from a single device's update, or warn if they
        may differ. Call it on all ranks."""
        used, now = self._titled(self._stepped), self._titled(self._options())
        lacking = {GONE.format(number) for number in self.in_use() if not self._graded.get(number)}
        dropped = tuple({key: each[key] for key in each if key not in lacking} for each in self._drops)
        own = used, now, self._told, self.found, self._numbers, dropped, self._noise, self._tolerance
        told = [Told(*others) for others in gather_objects(own, self.grid.world)]
        self._noise = ""
        for options in ([each.used for each in told], [each.options for each in told]):
            if problem := options_problem(options, self.grid.named):
                raise UsageError(problem)
        if noise := next((each.noise for each in told if each.noise), ""):
            raise UsageError(noise)
        if not alike([each.factor for each in told], max(each.tolerance for each in told)):
            raise UsageError(f"{_shown(told, self.grid.named)}. {SCALED}")
        self._warn_of(told)

    @property
    def _drops(self) -> tuple[dict[str, bool], ...]:
        """One dict for each update since the last step, and one for the current state: for each optimizer, whether the
        loop has cleared it, and whether its gradients are gone. If the last step has computed no gradients of an
        optimizer on this rank, the second value is inferred, since it is usually the same on every rank."""
        has_updated, now = bool(self._dropped), dict[str, bool]()
        for number in self.in_use():
            graded, is_cleared = self._graded.get(number), number in self._cleared
            inferred = is_cleared if self._has_cleared else has_updated
            now[CLEARED.format(number)] = is_cleared
            now[GONE.format(number)] = all(p.grad is None for p in graded) if graded else inferred
        return *self._dropped, now

    @property
    def _numbers(self) -> dict[str, list[float]]:
        return {name: sorted(values) for name, values in self.numbered.items()}

    def _warn_of(self, told: Sequence[Told]) -> None:
        """Warn, once per kind of finding, if the training loop has written values that depend on one stage only, or has
        cleared gradients on only some ranks."""
        kinds = {
            "found": next((each.found for each in told if each.found), ""),
            "numbers": numbers_problem(told, self.grid.named),
            "drops": drops_problem(told, self.grid.named),
        }
        for kind, found in kinds.items():
            if found and kind not in self._kinds_found:
                self._kinds_found.add(kind)
                if self.grid.first:
                    logger.warning("%s", found)

    def _titled(self, options: Options) -> dict[str, dict[str, Any]]:
        """Map the title of each group with parameters on this rank to the group's options. The title contains a digest
        of the names in the group."""
        found: dict[str, dict[str, Any]] = {}
        for number, optimizer in self.in_use().items():
            for k, (group, names) in enumerate(zip(optimizer.optim.param_groups, optimizer.given)):
                if group["params"] and (number, k) in options:
                    digest = hashlib.blake2b("\n".join(sorted(names)).encode(), digest_size=8).hexdigest()
                    found[f"group {k} of {type(optimizer.optim).__name__} {number}:{digest}"] = options[number, k]
        return found


SCALED = (
    "Stages then train differently: a factor must not be computed from the norm of one stage's gradients. Clip by the "
    "norm of the whole model: PipelinePlugin(max_norm=...), or optimizer.clip_grad_by_norm(max_norm) before "
    "optimizer.step(). For your own factor, get the norm from optimizer.get_grad_norm(), which every rank must call. "
    "If the factor is a constant, remove it, or set the lr of a parameter group instead"
)
TOGETHER = (
    "Stages then train differently. Call optimizer.zero_grad() on every rank. If the call depends on a value, use a "
    "value that all ranks have: the loss that execute_pipeline returns, or optimizer.get_grad_norm() on every rank"
)
EVALUATED = (
    "optimizer.step() updates nothing, since there are no gradients: execute_pipeline(batches, model) without an "
    "optimizer only evaluates the model. To train it, call execute_pipeline(batches, model, criterion, optimizer)"
)
NUMBERED = (
    "This is exact if these numbers are constants, and wrong if they are computed from gradients or weights. Each rank "
    "has only the gradients and weights of its stage. Sum the numbers over the ranks with torch.distributed.all_reduce "
    "or use optimizer.get_grad_norm(). If an optimizer clips gradients itself, turn off its clipping and use max_norm"
)


def options_of(group: Mapping[str, Any], keys: Iterable[str]) -> dict[str, Any]:
    """Return the values of a group's options that must be the same on all ranks."""
    compared = {key: group.get(key) for key in keys if is_compared(key, group)}
    return {key: value if type(value) in PLAIN_VALUES else _plain(value) for key, value in compared.items()}


def options_problem(told: Sequence[Mapping[str, Mapping[str, Any]]], named: Any) -> str:
    """Return a message about the first option of a group that differs between the ranks with this group, or "" if all
    options agree."""
    for title in dict.fromkeys(title for of_rank in told for title in of_rank):
        having = [rank for rank, of_rank in enumerate(told) if title in of_rank]
        first = told[having[0]][title]
        for key, value in first.items():
            other = next((rank for rank in having if not _is_close(told[rank][title].get(key), value)), None)
            if other is not None:
                where = title.rpartition(" ")[0]
                return (
                    f"{key} of {where} is {value!r} on {named(having[0])}, but {told[other][title].get(key)!r} on "
                    f"{named(other)}, so these ranks would train differently. Compute this option from a value that "
                    "all ranks have: the loss that execute_pipeline returns, optimizer.get_grad_norm() (called on "
                    "every rank), or a value that you broadcast"
                )
    return ""


def warn_of_ranks(told: Sequence[Sequence[Mapping[str, Any]]], kind: type[Optimizer], grid: Grid) -> None:
    """Warn if an option has the same value in all groups of each rank, but differs between ranks. A loop may have
    computed such an option from its rank's parameters. `told` contains the options of each rank's groups."""
    pairs = [(of_rank[0], options) for of_rank in told for options in of_rank]
    keys = [key for key in told[0][0] if all(_is_close(options.get(key), one.get(key)) for one, options in pairs)]
    options = [{f"every group of {kind.__name__} 0": {key: of_rank[0].get(key) for key in keys}} for of_rank in told]
    if grid.first and (problem := options_problem(options, grid.named)):
        logger.warning("%s", problem)


def drops_problem(told: Sequence[Told], named: Any) -> str:
    """Return a message if one rank has cleared its gradients and another rank has kept its gradients, otherwise ""."""
    first: dict[tuple[int, str], tuple[int, bool]] = {}  # by update and key: the first rank, and what it reports
    for rank, each in enumerate(told):
        for update, dropped in enumerate(each.dropped):
            for key, is_gone in dropped.items():
                other, expected = first.setdefault((update, key), (rank, is_gone))
                if is_gone != expected:
                    pair = f"{named(other)} and {named(rank)}"
                    return f"gradients were cleared (zero_grad) on only one of {pair}. {TOGETHER}"
    return ""


def numbers_problem(told: Sequence[Told], named: Any) -> str:
    """Return a message if the numbers that the loop has used in writes differ between ranks, otherwise ""."""
    having = [(rank, each.numbered) for rank, each in enumerate(told) if each.numbered]
    written = [sorted({round(value, 6) for values in numbered.values() for value in values}) for _, numbered in having]
    other = next((k for k, values in enumerate(written) if not _is_close(tuple(values), tuple(written[0]))), 0)
    if other == 0:
        return ""
    shown = (
        f"{min(having[k][1])} using {_first_other(written[k], written[o]):.6g} on {named(having[k][0])}"
        for k, o in ((0, other), (other, 0))
    )
    return (
        "the training loop, or the optimizer's own step, modified parameters with numbers that differ between ranks, "
        "after it had read several parameters: "
        f"{' and '.join(shown)}. {NUMBERED}"
    )


def _first_other(values: Sequence[float], others: Sequence[float]) -> float:
    """The first of `values` that is not close to any of `others`. If there is none, the first of `values`."""
    return next((v for v in values if not any(_is_close(v, other) for other in others)), values[0])


def alike(factors: Iterable[float | None], tolerance: float = NEAR) -> bool:
    """Whether these factors are equal up to rounding. None (no factor) is ignored."""
    known = [factor for factor in factors if factor is not None]
    return not known or max(known) - min(known) <= tolerance * max(known)


def has_one_factor(numbers: Iterable[int]) -> bool:
    """`alike` for serialized factors. If the result is False, `Updates.compare`, which knows the gradients' dtype,
    decides."""
    return alike(number / ONE for number in numbers if number != OTHER)


def _product(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else one * other


def _shown(told: Sequence[Told], named: Any) -> str:
    known = [(each.factor, named(rank)) for rank, each in enumerate(told) if each.factor is not None]
    factors = ", ".join(f"{factor:.6g} on {rank}" for factor, rank in known[:8])
    return f"gradients were multiplied between execute_pipeline and the update by different factors: {factors}"


def _plain(value: Any) -> Any:
    """The value of an option if it can be compared between processes, otherwise None. A tensor on a GPU is not read,
    since the host would wait for the GPU."""
    if isinstance(value, Tensor):
        return value.item() if value.numel() == 1 and value.device.type == "cpu" else None
    if isinstance(value, list | tuple):
        return tuple(_plain(item) for item in value)
    value = value.item() if isinstance(value, np.generic) else value
    return value if type(value) in PLAIN_VALUES else None


def _is_close(one: Any, other: Any) -> bool:
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(_is_close, one, other))
    if isinstance(one, int | float) and isinstance(other, int | float):
        return math.isclose(one, other, rel_tol=CLOSE) or (one != one and other != other)
    return bool(one == other)


def is_sampled(count: int) -> bool:
    """Whether an expensive check runs after `count` steps: it runs if `count` < FIRST or `count` is a power of two."""
    return count < FIRST or count & (count - 1) == 0
