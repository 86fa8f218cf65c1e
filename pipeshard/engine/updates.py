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
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import numpy as np
from torch import Tensor
from torch.optim import Optimizer

from pipeshard.batch.tree import PLAIN_VALUES
from pipeshard.distributed.agreement import hash_of
from pipeshard.distributed.collectives import gather_objects, local
from pipeshard.distributed.mesh import Grid
from pipeshard.engine.gradient_snapshot import COARSE, NEAR, UNCHANGED, UNKNOWN, Factors, GradientSnapshot
from pipeshard.engine.groups import is_compared
from pipeshard.errors import UsageError
from pipeshard.graph.writes import stored

logger = logging.getLogger("pipeshard")

FIRST = 3  # the number of a model's first updates that are compared before they change a parameter
BITS = 61  # bits of the digest of the options, which is sent as a signed 64-bit integer
ODD = 3  # multiplies the digest of the used options, so that differences of the two summed digests do not cancel
ONE = 2**32  # the integer that is sent for a factor of 1
OTHER = -1  # the integer that is sent for a missing factor
CLOSE = 1e-6  # the tolerated relative difference of options
CLEARED, GONE = "optimizer {} was cleared", "gradients of optimizer {} are gone"  # keys of `Told.dropped`
CLIP = "pass max_norm=... to PipelinePlugin or pipeshard.initialize"
Options = dict[tuple[int, int], dict[str, Any]]  # each group's options, by (index of the optimizer, index of the group)


class Grouped(Protocol):
    """The attributes of a `PipelineOptimizer` that this module uses."""

    optim: Optimizer
    weights: Any  # dict[str, MasterWeight]
    names: dict[Tensor, str]
    given: list[frozenset[str]]
    options: list[tuple[str, ...]]


class Told(NamedTuple):
    """A rank's report on an update.

    Attributes:
        used: the options that the update applied, for each group with parameters on the rank. The key of a group
            contains a digest of the names in the group.
        options: the current options of these groups.
        factor, whole, has_others: see Factors. A factor is also None if the gradients do not exist.
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
    whole: float | None
    has_others: bool
    found: str
    numbered: dict[str, list[float]]
    dropped: tuple[dict[str, bool], ...]
    noise: str
    tolerance: float


class Updates:
    """Compares the updates of one model's optimizers across all ranks.

    Attributes:
        optimizers: weak references to the boosted optimizers, in the order in which they were boosted.
        count: the number of updates so far.
        found, numbered: findings about values that the training loop has written since the last step; see `Told`.
        drawn: a description of gradients to which the loop has written random numbers, generated for one parameter
            after another, or "". Cleared when changes to the gradients are recorded.
        clip: the advice in messages on how to clip gradients by the norm of the whole model.
        evaluated: whether execute_pipeline has run without an optimizer, with gradients enabled, since the last update.
    """

    def __init__(self, grid: Grid) -> None:
        self.grid = grid
        self.optimizers: list[weakref.ref[Grouped]] = []
        self.count = 0
        self.clip = CLIP
        self.found, self.numbered = "", dict[str, set[float]]()
        self.drawn = self._noise = ""  # `_noise`: `drawn` for changes that no factor explains, until ranks compare it
        self.evaluated = self._has_added = False  # `_has_added`: whether gradients were added since the last update
        self._graded: dict[int, list[Tensor]] = {}  # by optimizer: the parameters with gradients from the last step
        self._dropped: tuple[dict[str, bool], ...] = ()  # `_drops` at each update since then
        self._cleared = set[int]()  # the optimizers whose gradients zero_grad has cleared since then
        self._zeroed = set[int]()  # the optimizers whose gradients the loop or a hook has set to 0 since then
        self._has_cleared = False  # whether the loop has called zero_grad so far
        self._since: GradientSnapshot | None = None  # the gradients of the last step, or before an optimizer's hooks
        self._left: GradientSnapshot | None = None  # the gradients after the last update
        self._samples = False  # whether a training loop or a hook has changed gradients so far
        self._factors = UNCHANGED  # the factors by which the loop has multiplied the current gradients
        self._of_hooks: Factors | None = None  # the factors of the hooks of the update that is running
        self._told = UNKNOWN  # the factors of the last update, if it used the current gradients
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
        self._zeroed.clear()
        self._of_hooks = self._left = None
        if self.grid.size > 1:
            self._graded = {number: _graded(each) for number, each in self.in_use().items()}
            every, own = list(parameters), {p for graded in self._graded.values() for p in graded}
            others = [p for p in every if p not in own] if own else []
            self._since = self._snapshot([p for p in every if p in own or not own], others)

    def renew(self) -> None:
        """Discard the factors of the current gradients if an update has used these gradients. Call it before new
        gradients are computed. Until then, the factors apply to the updates of all optimizers."""
        self._of_hooks = None
        if self._is_used:
            self._factors, self._told = UNCHANGED, UNKNOWN
            self._is_used = self._has_hooks = False

    def judge(self) -> None:
        """Record how the training loop, or a hook of an optimizer's step, has changed the gradients since `added`, or
        since the hooks began. Call it before the gradients are used or changed."""
        factors, self._since = self._note(self._since), None
        if self._of_hooks is None:
            self._factors = self._factors.times(factors)
        else:
            self._of_hooks = self._of_hooks.times(factors)

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Context manager in which pipeshard changes the gradients, in the same way on every rank. Such changes do not
        count, and the loop's earlier changes stay recorded."""
        since = self._since
        self.judge()
        yield
        self._since = None if since is None else since.again()

    def is_lost_in(self, gradients: Iterable[Tensor]) -> bool:
        """Whether the loop has changed any of these gradients, and a change that does not count (see `ignore`) would
        hide the factor."""
        return self._since is not None and not self._is_unexplained and not self._since.has_kept(gradients)

    def ignore(self, gradients: Collection[Tensor]) -> None:
        """Record that torch has clipped these gradients, as in one process. This change does not count."""
        if self._since is not None and not self._is_unexplained:
            self._since.ignore(gradients)

    @property
    def _is_unexplained(self) -> bool:
        """Whether the loop, or a hook of the update that is running, has changed gradients other than by a factor."""
        return (self._factors if self._of_hooks is None else self._of_hooks).own is None

    def cleared(self, optimizer: Grouped | None) -> None:
        """Record a call of the zero_grad method of an optimizer or, if `optimizer` is None, of the model."""
        self._has_cleared = True
        self._cleared |= {number for number, each in self.in_use().items() if optimizer in (None, each)}

    def skipped(self) -> None:
        """Record that all ranks skip the update with the current gradients."""
        self._factors = UNCHANGED

    def hooks_begin(self, parameters: Iterable[Tensor], has_hooks: bool) -> None:
        """Record the gradients before the inner optimizer's step calls its hooks."""
        is_needed = has_hooks and self.grid.size > 1
        self._has_hooks |= is_needed
        self._of_hooks = UNCHANGED
        self._since = self._snapshot([*parameters]) if is_needed else None

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
        self.judge()
        factors = self._factors if self._of_hooks is None else self._factors.times(self._of_hooks)
        self._of_hooks, self._is_used = None, True
        if has_gradients:
            self._told = factors
        elif self._has_hooks:  # a hook's factor applies to one optimizer, whose gradients may be on another stage
            self._told = UNKNOWN
        self._stepped = self._options()
        self._dropped = self._drops
        is_first = self.is_compared
        self.count += 1
        if is_first:
            self.compare()

    def left(self) -> None:
        """Record the gradients at the end of an update, since the loop may set them to 0 afterwards."""
        if self.grid.size > 1:
            self._zeroed |= self._zeroed_since(self._left)
            self._left = GradientSnapshot([p for graded in self._graded.values() for p in graded])

    def _snapshot(self, own: Collection[Tensor], others: Collection[Tensor] = ()) -> GradientSnapshot:
        return GradientSnapshot(own, others, self._samples or self.count < FIRST)

    def _note(self, since: GradientSnapshot | None) -> Factors:
        """The factors by which the gradients have been multiplied since a snapshot."""
        drawn, self.drawn = self.drawn, ""
        if since is None or not since.is_changed:
            return UNCHANGED
        self._samples = True
        factors = since.factors()
        if since.rounding > NEAR:
            self._tolerance = COARSE
        if factors.own is None:
            self._noise = self._noise or drawn
            self._zeroed |= self._zeroed_since(since)
        return factors

    def _zeroed_since(self, since: GradientSnapshot | None) -> set[int]:
        """The optimizers whose gradients on this rank are all 0 (or gone), although they were not when `since` was
        taken."""
        if since is None or not since.is_changed or since.was_zero:
            return set()
        return {number for number, graded in self._graded.items() if graded and not any(map(_has_values, graded))}

    @property
    def numbers(self) -> tuple[int, int]:
        """The two numbers that are sent in the first message of a step. The first number is a digest of the last
        update's options, the current options and findings about the training loop. The second number is the last
        update's factor (`Factors.own`)."""
        used = self._digest_of(self._stepped)  # usually the current options, whose digest is cached
        now = self._digest_of(self._options())
        written = zlib.crc32(repr((self.found, self._numbers, self._drops, self._noise)).encode())
        factor = self._told.own
        return (used * ODD + now + written) % 2**BITS, OTHER if factor is None else round(factor * ONE)

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
        own = used, now, *self._told, self.found, self._numbers, dropped, self._noise, self._tolerance
        told = [Told(*others) for others in gather_objects(own, self.grid.world)]
        self._noise = ""
        for options in ([each.used for each in told], [each.options for each in told]):
            if problem := options_problem(options, self.grid.named):
                raise UsageError(problem)
        if noise := next((each.noise for each in told if each.noise), ""):
            raise UsageError(noise)
        # A loop that selects parameters of the model may change all of those that one replica updates with ZeRO.
        factors = [each.whole if any(of.has_others for of in told) else each.factor for each in told]
        if not alike(factors, max(each.tolerance for each in told)):
            raise UsageError(f"{_shown(factors, self.grid.named)}. {SCALED.format(clip=self.clip)}")
        self._warn_of(told)

    @property
    def _drops(self) -> tuple[dict[str, bool], ...]:
        """One dict for each update since the last step, and one for the current state: for each optimizer, whether the
        loop has cleared it, and whether its gradients are gone (None, or set to 0). If the last step has computed no
        gradients of an optimizer on this rank, the second value is inferred, since it is usually the same on every
        rank."""
        has_updated, now = bool(self._dropped), dict[str, bool]()
        zeroed = self._zeroed | self._zeroed_since(self._since) | self._zeroed_since(self._left)
        for number in self.in_use():
            graded, is_cleared = self._graded.get(number), number in self._cleared
            inferred = is_cleared if self._has_cleared else has_updated
            is_gone = is_cleared or number in zeroed or all(p.grad is None for p in graded or ())
            now[CLEARED.format(number)] = is_cleared
            now[GONE.format(number)] = is_gone if graded else inferred
        return *self._dropped, now

    @property
    def _numbers(self) -> dict[str, list[float]]:
        return {name: sorted(values) for name, values in self.numbered.items()}

    def _warn_of(self, told: Sequence[Told]) -> None:
        """Warn, once per kind of finding, if the training loop has written values that depend on one stage only, or has
        cleared gradients on only some ranks."""
        kinds = {
            "found": next((each.found for each in told if each.found), ""),
            "numbers": numbers_problem(told, self.grid.named, self.clip),
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
    "Stages then train differently: a factor must not be computed from the norm of one stage's gradients. To clip by "
    "the norm of the whole model, {clip}, or call optimizer.clip_grad_by_norm(max_norm) before optimizer.step(). For "
    "your own factor, get the norm from optimizer.get_grad_norm(), which every rank must call. If the factor is a "
    "constant, remove it, or set the lr of a parameter group instead"
)
TOGETHER = (
    "Stages then train differently. Call optimizer.zero_grad() on every rank. If the call depends on a value, use a "
    "value that all ranks have: the loss that execute_pipeline returns, or optimizer.get_grad_norm() on every rank. To "
    "leave some parameters unchanged, freeze them (requires_grad_(False)) instead of clearing their gradients"
)
EVALUATED = (
    "optimizer.step() updates nothing, since there are no gradients: execute_pipeline(batches, model) without an "
    "optimizer only evaluates the model. To train it, call execute_pipeline(batches, model, criterion, optimizer)"
)
NUMBERED = (
    "This is exact if these numbers are constants, and wrong if they are computed from gradients or weights. Each rank "
    "has only the gradients and weights of its stage. Sum the numbers over the ranks with torch.distributed.all_reduce "
    "or use optimizer.get_grad_norm(). If an optimizer clips gradients itself, turn off its clipping and {clip}"
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
                    return f"gradients were cleared (zero_grad, or set to None or 0) on only one of {pair}. {TOGETHER}"
    return ""


def numbers_problem(told: Sequence[Told], named: Any, clip: str) -> str:
    """Return a message if the numbers that the loop has used in writes differ between ranks, otherwise "". `clip` is
    the message's advice on how to clip gradients."""
    having = [(rank, each.numbered) for rank, each in enumerate(told) if each.numbered]
    written = [sorted({round(value, 6) for values in numbered.values() for value in values}) for _, numbered in having]
    other = next((k for k, values in enumerate(written) if not _is_close(tuple(values), tuple(written[0]))), 0)
    if other == 0:
        return ""
    firsts = [min({*written[k]} - {*written[o]}, default=written[k][0]) for k, o in ((0, other), (other, 0))]
    shown = (
        f"{min(numbered)} using {number:.6g} on {named(rank)}"
        for (rank, numbered), number in zip((having[0], having[other]), firsts)
    )
    return (
        "the training loop, or the optimizer's own step, modified parameters with numbers that differ between ranks, "
        "after it had read several parameters: "
        f"{' and '.join(shown)}. {NUMBERED.format(clip=clip)}"
    )


def alike(factors: Iterable[float | None], tolerance: float = NEAR) -> bool:
    """Whether these factors are equal up to rounding. None (no factor) is ignored."""
    known = [factor for factor in factors if factor is not None]
    return not known or max(known) - min(known) <= tolerance * max(known)


def has_one_factor(numbers: Iterable[int]) -> bool:
    """`alike` for serialized factors. If the result is False, `Updates.compare`, which knows the gradients' dtype,
    decides."""
    return alike(number / ONE for number in numbers if number != OTHER)


def _graded(optimizer: Grouped) -> list[Tensor]:
    """The parameters with gradients that an optimizer updates on this rank."""
    updated = (w.parameter for w in optimizer.weights.values() if w.master in optimizer.names)
    return [parameter for parameter in updated if parameter.grad is not None]


def _has_values(parameter: Tensor) -> bool:
    """Whether a parameter has a gradient that is not all 0."""
    return parameter.grad is not None and bool(stored(local(parameter.grad)).any())


def _shown(factors: Sequence[float | None], named: Any) -> str:
    known = [(factor, named(rank)) for rank, factor in enumerate(factors) if factor is not None]
    shown = ", ".join(f"{factor:.6g} on {rank}" for factor, rank in known[:8])
    return f"gradients were multiplied between execute_pipeline and the update by different factors: {shown}"


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
