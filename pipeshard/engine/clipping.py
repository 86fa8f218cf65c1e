"""Clipping: computes the gradient norm of the full model, unscales the gradients, and clips them by this norm.

With a split model, torch.nn.utils.clip_grad_norm_ would clip each stage's gradients by the norm of that stage alone.
ModelGradients computes the norm over the gradients of all ranks. Each parameter counts once, even if several ranks hold
it. The first optimizer that steps computes the norm for all optimizers of the model.
"""

import logging
import math
import weakref
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from pipeshard.distributed.collectives import CPU, control, gather, gather_lists, gather_objects, local_grad
from pipeshard.distributed.mesh import Grid
from pipeshard.distributed.progress import own_progress
from pipeshard.engine.copies import WeightCopies
from pipeshard.engine.coupling import Coupling
from pipeshard.engine.hosted import stored_grad
from pipeshard.engine.mixed_precision import LossScale, MasterWeight
from pipeshard.engine.parameters import HeldParameters
from pipeshard.engine.updates import Updates
from pipeshard.errors import ConfigurationError, UsageError, listed
from pipeshard.ghost import Ghost
from pipeshard.graph.writes import stored
from pipeshard.options import LEAST_SCALE
from pipeshard.private import foreach_mul_, foreach_norm

logger = logging.getLogger("pipeshard")


class ModelGradients:
    """All gradients of one model on this rank, even if several optimizers train the model's parameters.

    The gradients are multiplied by the loss scale until `clip`, `unscale` or the first optimizer's step removes this
    factor. The first optimizer's step also clips the gradients if `max_norm > 0`, and decides whether all optimizers
    skip their step.

    Attributes:
        names: maps each parameter of the full model, including parameters that boost has replaced, to its name.
        trained: the names of the parameters that the model's optimizers train.
        updated: by name, the MasterWeights on this rank that an optimizer contains or once contained. Weights of
        optimizers that no longer exist stay in `updated`, since ranks may free optimizers at different times.
        copies: the WeightCopies of the weights in `updated`.
        norm: the last gradient norm of the full model (of order `norm_type`, before clipping), or None if this step has
        not computed a norm.
        overflow: whether the last step was skipped because a gradient overflowed.
        remedy: the advice in error messages on how to replace a call of torch's clipping functions.
        parts: the parameters of each stage on this rank, if the training loop has the stages' modules (interop).
    """

    def __init__(
        self,
        holdings: HeldParameters,
        names: MutableMapping[Any, str],
        grid: Grid,
        max_norm: float,
        scaling: LossScale | None,
    ) -> None:
        self.sync, self.weights, self.names = holdings.sync, holdings.weights, names
        self.grid, self.max_norm, self.scaling = grid, max_norm, scaling
        self._used = scaling  # the latest loss's LossScale, which may belong to another model
        self.all, self.trained = frozenset(names.values()), set[str]()
        self.updated: dict[str, MasterWeight] = {}
        self.copies = WeightCopies(self.updated, grid)
        self.norm: Tensor | None = None
        self.norm_type = 2.0
        self._holders = {weight.parameter: weight.holders for weight in holdings.weights.values()}
        self._factor = self._scale  # the factor by which the gradients are currently multiplied
        self._stepped: weakref.WeakSet[Any] | None = None  # the optimizers that have stepped with the current gradients
        self.updates = Updates(grid)
        self.advise(self.updates.clip)
        self.coupling = Coupling(self.weights, names, self.updates)
        self.overflow = False
        self._mixed: list[Tensor] = []  # parameters whose gradients may include gradients of a failed step
        self.parts: list[list[nn.Parameter]] = []
        self._trains_all = False  # whether the ranks have agreed that `trained` contains all parameters

    def advise(self, clip: str) -> None:
        """From now on, advise in messages to clip gradients in this way, such as "set this argument"."""
        self.updates.clip = clip
        self.remedy = REMEDY.format(clip=clip)

    @property
    def is_scaled(self) -> bool:
        """Whether gradients are currently multiplied by the loss scale."""
        return self._factor != 1.0

    def names_of(self, tensors: Iterable[Tensor]) -> dict[Tensor, str]:
        """Return the parameter name of each tensor in `tensors` that is a parameter of the model or a master weight in
        `updated`."""
        known: dict[Tensor, str] = {weight.master: name for name, weight in self.updated.items()}
        known.update(self.names)
        return {tensor: known[tensor] for tensor in tensors if tensor in known}

    def has(self, tensor: Tensor) -> bool:
        """Whether a tensor is a parameter of the model, or a tensor that an optimizer updates for one."""
        return tensor in self.names or any(tensor in optimizer.names for optimizer in self.optimizers)

    def trainables(self) -> list[Tensor]:
        """The tensors on this rank that may have gradients: the model's parameters and the master weights."""
        masters = [weight.master for weight in self.weights.values()]
        return [*self._holders, *masters]

    def shard_of(self, tensors: Sequence[Tensor]) -> str | None:
        """The parameter name of the first tensor in `tensors` that is only this rank's shard of a parameter, or
        None."""
        sharded = {
            id(w.master): w.name for w in self.weights.values() if isinstance(w.parameter, DTensor) and not w.plain
        }
        return next((sharded[id(tensor)] for tensor in tensors if id(tensor) in sharded), None)

    def wholes(self) -> list[tuple[list[Tensor], frozenset[str]]]:
        """The parameter lists that a training loop may mistake for lists of all the model's parameters: the parameters
        on this rank, the lists in `parts`, and the parameters in each optimizer group. Each list is paired with the
        names of the parameters that are missing from the list: other stages train these parameters or, with ZeRO, other
        replicas update them."""
        elsewhere = frozenset(n for p, n in self.names.items() if isinstance(p, Ghost) and p.pipeshard_trainable)
        wholes: list[tuple[list[Tensor], frozenset[str]]] = [(list(self._holders), elsewhere)]
        wholes += [(list(part), elsewhere) for part in self.parts]
        for optimizer in self.optimizers:
            away = [w for w in optimizer.weights.values() if w.master not in optimizer.names]
            lacking = elsewhere.union(weight.name for weight in away if weight.parameter.requires_grad)
            groups = zip(optimizer.optim.param_groups, optimizer.given)
            wholes += [(group["params"], names & lacking) for group, names in groups]
        return wholes

    def add_to(self, scaling: LossScale | None = None) -> None:
        """Prepare to accumulate gradients: record how the loop has changed the existing gradients, discard the cached
        norm, and rescale the gradients to the loss scale `scaling` (by default, this model's). Raises UsageError if the
        existing gradients include gradients of a failed step."""
        self._refuse_mixed()
        self._settle()
        self.updates.renew()
        self.updates.judge()
        self.norm = self._stepped = None
        self._used = scaling or self.scaling
        self._rescale(self._scale)

    @contextmanager
    def discarded_on_failure(self, foreign: Iterable[Tensor]) -> Iterator[None]:
        """Context manager for the actions of a step in one process. If an action fails, discards the gradients of
        parameters and `foreign` tensors that had no gradient before the step. If a trained parameter already had a
        gradient, the failed step's contribution cannot be removed: training steps and optimizer steps raise UsageError
        until the loop clears the gradient."""
        fresh = [leaf for leaf in (*self._holders, *foreign) if leaf.grad is None]
        try:
            yield
        except BaseException:
            for leaf in fresh:
                leaf.grad = None
            trained = [weight.parameter for name, weight in self.weights.items() if name in self.trained]
            self._mixed = [parameter for parameter in trained if parameter.grad is not None]
            raise

    def _refuse_mixed(self) -> None:
        """Raise UsageError if a failed step may have added to earlier gradients, and the loop has not cleared them
        since."""
        mixed = [p for p in self._mixed if p.grad is not None and bool(stored(p.grad).any())]
        if mixed:
            raise UsageError(
                "the last training step failed, and some of its microbatches may already have added to the gradients "
                f"of earlier steps (parameters: {listed([*self.names_of(mixed).values()], 3)}). Call "
                "optimizer.zero_grad() or model.zero_grad(), and then repeat all steps of this accumulation window"
            )
        self._mixed = []

    def complete(self) -> None:
        """Complete the gradients that were accumulated under `no_sync`: sum each gradient over the ranks that hold the
        parameter. Such gradients remain if an epoch ends within an accumulation window. Raises UsageError on every rank
        if the loop has modified these gradients on any rank. Call it on all ranks."""
        if self.sync.is_partial:
            self._settle()
            if modified := gather_lists(self.sync.modified(), self.grid.world):
                raise UsageError(modified[0])
            self.sync.begin()
            self.sync.finish(True)
            self.added()

    def unscale(self) -> None:
        """Divide the gradients by the loss scale. With a loss scale, infinite elements become NaN, so that clamping the
        elements does not hide an overflow."""
        self._rescale(1.0)
        for parameter in self._holders if self.scaling is not None else ():
            if (gradient := local_grad(parameter)) is not None:
                gradient.masked_fill_(gradient.isinf(), math.nan)

    def settle(self) -> None:
        """Make all copies of each weight equal, so that code outside a step can read the parameters. Call it on all
        ranks."""
        with self.coupling.paused():
            self.copies.follow(adopts=False)
            self.copies.share()

    def share_written(self) -> None:
        """As `settle`, but broadcast weights only if the loop has written to a weight on at least one replica. Call it
        on all ranks."""
        is_due = torch.tensor(self.copies.follow(adopts=False))
        if bool(gather(is_due, self.grid.replicas).any()):
            self.copies.share()

    def added(self) -> None:
        """Assign the new gradients to the master weights as well, and record the gradients to detect later changes."""
        self._lend()
        self.updates.added(self._holders)

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Context manager in which pipeshard changes all gradients: records how the loop has changed them before, and
        assigns the new gradients to the master weights."""
        self._settle()
        with self.updates.changing():
            yield
            self._lend()

    @contextmanager
    def clipped_by_torch(self, parameters: Iterable[Tensor]) -> Iterator[None]:
        """Context manager in which torch clips the gradients of these parameters, as in one process. Records how the
        loop has changed them before."""
        gradients = [gradient for p in parameters if (gradient := stored_grad(p)) is not None]
        if self.updates.is_lost_in(gradients):
            with self.coupling.paused(), self.changing():
                pass
        yield
        self.updates.ignore(gradients)

    @property
    def numbers(self) -> tuple[int, int]:
        """`Updates.numbers`, for the current gradients."""
        self._settle()
        return self.updates.numbers

    def _lend(self) -> None:
        for weight in self.weights.values():
            weight.lend_gradient()

    def _settle(self) -> None:
        """If the loop has replaced the gradient of a master weight, assign the new gradient to the parameter."""
        for weight in self.weights.values():
            weight.settle_gradient()

    def ready(self, optimizer: object) -> bool:
        """Clip and unscale the gradients, unless another optimizer's step has already clipped and unscaled them.
        Returns False if the optimizer must skip the step."""
        self._refuse_mixed()
        if self._stepped is None or optimizer in self._stepped:
            before = self.norm, self.norm_type  # from the loop's own clipping
            is_clipped = self._stepped is None and self.norm is not None
            self._stepped, self.overflow, self.norm = weakref.WeakSet(), False, None
            self._settle()
            self.updates.judge()
            if self.max_norm > 0:
                self._refuse_untrained()
                checked = self.clip(self.max_norm)
            elif self.scaling is not None:
                self.norm = checked = self.total(2.0)
                self.norm_type = 2.0
                if before[0] is None and not torch.isfinite(checked):  # a loop's own clipping counts all gradients
                    checked = self.total(2.0, self.updated)  # no optimizer uses or clears the other gradients
            if self.scaling is not None:
                self.overflow = not bool(torch.isfinite(checked))
                if self.overflow:
                    self.updates.skipped()
                self._rescale(1.0)
                self.scaling.update(self.overflow)
                if self.overflow and self._used is not None and self._used is not self.scaling:
                    self._used.update(True)
                if self.scaling.overflows == STUCK and self.grid.first:
                    logger.warning(SKIPPED, STUCK, LEAST_SCALE)
            if is_clipped:
                self.norm, self.norm_type = before
        self._stepped.add(optimizer)
        return not self.overflow

    def clip(self, max_norm: float, norm_type: float | str = 2.0, error_if_nonfinite: bool = False) -> Tensor:
        """Unscale the gradients, and then clip them to `max_norm` as torch.nn.utils.clip_grad_norm_ does. Returns the
        norm before clipping. Call it on all ranks."""
        order = order_of(norm_type)
        self.norm, self.norm_type = self.total(order), order
        self._rescale(1.0)
        if error_if_nonfinite and not torch.isfinite(self.norm):
            raise ConfigurationError(
                f"the gradient norm is {self.norm.item()}, and error_if_nonfinite=True. Skip this step, or "
                "pass check_finite=True to PipelinePlugin to find the stage that computes non-finite values"
            )
        if (factor := torch.clamp(max_norm / (self.norm + 1e-6), max=1.0)) != 1.0:  # also if the factor is NaN
            self._multiply(factor)
        return self.norm

    def total(self, norm_type: float, weights: Mapping[str, MasterWeight] | None = None) -> Tensor:
        """The norm of the full model's unscaled gradients, or of the gradients of `weights` only. The norm is the same
        on every rank. Call it on all ranks."""
        self._settle()
        counted = self._counted()
        if weights is not None:
            chosen = {weight.parameter for weight in weights.values()}
            counted = {parameter: count for parameter, count in counted.items() if parameter in chosen}
        return grad_norm(counted, self.grid.world, norm_type) / self._factor

    def _counted(self) -> dict[nn.Parameter, int]:
        """The parameters whose gradients this rank contributes to the norm, each mapped to the number of ranks that
        contribute the same gradient. With ZeRO, only the owner contributes the gradient of a parameter that an
        optimizer contains, since a loop can change this gradient only in the owner's optimizer groups."""
        counted = dict(self._holders)
        for weight in self.updated.values() if self.copies.zero else ():
            if weight.owner == self.grid.replica:
                counted[weight.parameter] = max(1, weight.holders // self.grid.dp_size)
            else:
                counted.pop(weight.parameter, None)
        return counted

    @property
    def optimizers(self) -> Iterable[Any]:
        """The boosted optimizers of this model that still exist."""
        return self.updates.in_use().values()

    @property
    def _scale(self) -> float:
        return 1.0 if self._used is None else self._used.value

    def _rescale(self, factor: float) -> None:
        if factor != self._factor:
            self._multiply(factor / self._factor)
        self._factor = factor

    def _multiply(self, factor: float | Tensor) -> None:
        if gradients := [gradient for p in self._holders if (gradient := local_grad(p)) is not None]:
            foreach_mul_(gradients, factor)

    def _refuse_untrained(self) -> None:
        """Raise UsageError on every rank if a parameter on any rank has a gradient but is in no optimizer: it is
        ambiguous whether the norm should include this gradient."""
        if self._trains_all:
            return
        untrained = [n for n, w in self.weights.items() if n not in self.trained and w.parameter.grad is not None]
        own = untrained, self.trained >= self.all  # differs between ranks if each trains only its own parameters
        told = gather_objects(own, self.grid.world)
        self._trains_all = all(trains_all for _, trains_all in told)
        if untrained := [name for names, _ in told for name in names]:
            raise UsageError(
                f"parameters that no boosted optimizer contains have gradients ({listed(untrained, 3)}), so it is "
                f"unclear whether the norm for max_norm={self.max_norm} should include these gradients. To exclude "
                "them, freeze the parameters (requires_grad_(False)) and clear their gradients (model.zero_grad()). To "
                "include them, add the parameters to an optimizer, or pass max_norm=0 and call "
                "optimizer.clip_grad_by_norm(max_norm), which counts all gradients"
            )


REMEDY = (
    "To clip by the norm of the whole model, {clip}, or call optimizer.clip_grad_by_norm(max_norm) on every rank "
    "before optimizer.step(). optimizer.get_grad_norm() returns the norm of the whole model"
)
STUCK = 10  # a warning is logged after this many consecutive skipped steps with the smallest loss scale
SKIPPED = (
    "the last %d steps were skipped because gradients were not finite, although the loss scale has already been "
    "reduced to %s. To find the non-finite gradients, check p.grad of model.named_parameters() on every rank, directly "
    "after execute_pipeline. If the loss is not finite, pass check_finite=True to PipelinePlugin to find the stage "
    "that computes non-finite values, or use precision='bf16'. clip_grad_by_norm also counts the gradients of "
    "parameters that no optimizer contains, and optimizer.zero_grad() does not clear these gradients: call "
    "model.zero_grad()"
)


def order_of(norm_type: float | str) -> float:
    """The order of a norm. Raises ConfigurationError unless `norm_type` is positive or "inf"."""
    try:
        order = float(norm_type)
    except (TypeError, ValueError):
        order = math.nan
    if not order > 0:
        raise ConfigurationError(f"norm_type must be a positive number or 'inf', got {norm_type!r}")
    return order


def grad_norm(holders: Mapping[nn.Parameter, int], group: dist.ProcessGroup, norm_type: float = 2.0) -> Tensor:
    """The norm of the model's gradients over all ranks of `group`. `holders` maps each of this rank's parameters to the
    number of ranks that have the same gradient of the parameter. Each of these ranks contributes an equal share."""
    is_max, group = math.isinf(norm_type), control(group)
    dtype = torch.float32
    counted: dict[torch.dtype, tuple[list[Tensor], list[int]]] = {}  # gradients, and the number of ranks with each
    for parameter, count in holders.items():
        if (gradient := local_grad(parameter)) is None:
            continue
        gradient = stored(gradient)
        if gradient.dtype is torch.float64:
            dtype = torch.float64
        if gradient.numel() == 0:  # an empty shard has no infinity norm
            continue
        gradients, counts = counted.setdefault(gradient.dtype, ([], []))
        gradients.append(gradient)
        counts.append(count)
    total = torch.zeros((), dtype=torch.float64)
    for kind, (gradients, counts) in counted.items():
        norms = foreach_norm(gradients, norm_type, dtype=torch.promote_types(kind, torch.float32))
        every = torch.stack(norms).to(CPU).double()  # one device sync, not one per parameter
        total = torch.maximum(total, every.max()) if is_max else total + (every**norm_type / torch.tensor(counts)).sum()
    if is_max:  # not all_reduce: gloo's maximum ignores a NaN of any rank but the first
        return gather(total, group).max().to(dtype)
    own_progress().wait_in(group, dist.all_reduce(total, group=group, async_op=True))
    return (total ** (1.0 / norm_type)).to(dtype)
