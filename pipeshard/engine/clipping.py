"""Clipping: the scale, the norm and the clipping of a model's gradients, which all its optimizers go by."""

import logging
from collections.abc import MutableMapping
from typing import Any

import torch
from torch import Tensor, nn

from pipeshard.distributed.collectives import gather_objects, local_grad
from pipeshard.distributed.mesh import Grid
from pipeshard.engine.grad_sync import clip_by_norm, grad_norm
from pipeshard.engine.mixed_precision import LossScale
from pipeshard.engine.parameters import Holdings
from pipeshard.errors import ConfigurationError, UsageError, listed

logger = logging.getLogger("pipeshard")


class ModelGradients:
    """The gradients of everything that this rank holds of a model, whichever optimizers it is trained by.

    They are those of the loss times the scale until the first of the optimizers steps: then they are clipped, if
    `max_norm > 0`, and brought back to the loss, once, and it is found whether all of them leave this step out.

    Attributes:
        names: of every parameter of the whole model, as it was and as it is.
        trained: the names of those that an optimizer of the model has.
        norm: that which they were clipped by.
    """

    def __init__(
        self,
        holdings: Holdings,
        names: MutableMapping[Any, str],
        grid: Grid,
        max_norm: float,
        scaling: LossScale | None,
    ) -> None:
        self.sync, self.weights, self.names = holdings.sync, holdings.weights, names
        self.grid, self.max_norm, self.scaling = grid, max_norm, scaling
        self.all, self.trained = frozenset(names.values()), set[str]()
        self.norm: Tensor | None = None
        self._holders = {weight.parameter: weight.holders for weight in holdings.weights.values()}
        self._factor = self._scale
        self._stepped: list[object] | None = None  # the optimizers that have, since gradients were made ready
        self._overflow = False
        self._made: dict[nn.Parameter, tuple[Tensor, int]] = {}
        self._warned = False

    def add_to(self) -> None:
        """Gradients are about to be added: the norm is theirs no more, and all are to have one scale."""
        self.norm, self._stepped = None, None
        self._rescale(self._scale)

    def added(self) -> None:
        """Know them again."""
        self._made = {p: (p.grad, p.grad._version) for p in self._holders if p.grad is not None}

    def ready(self, optimizer: object) -> bool:
        """Make gradients ready for a step of this optimizer, unless another one's step has: whether it is to be."""
        if self._stepped is None or optimizer in self._stepped:
            self._stepped, self._overflow, self.norm = [], False, None
            self._look_for_clipping()
            if self.max_norm > 0:
                self._refuse_untrained()
                self.clip(self.max_norm)
            elif self.scaling is not None:
                self.norm = self.total(2.0)
            if self.scaling is not None:
                self._overflow = self.norm is not None and not bool(torch.isfinite(self.norm))
                self._rescale(1.0)
                self.scaling.update(self._overflow)
        self._stepped.append(optimizer)
        return not self._overflow

    def clip(self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> Tensor:
        self.norm = self.total(norm_type)
        self._rescale(1.0)
        if error_if_nonfinite and not torch.isfinite(self.norm):
            raise ConfigurationError(f"the gradient norm is {self.norm.item()}, so gradients cannot be clipped")
        clip_by_norm(self._holders, self.norm, max_norm)
        self._made = {}
        return self.norm

    def total(self, norm_type: float) -> Tensor:
        """The norm over the whole model, on every rank; all of them call it."""
        norm = grad_norm(self._holders, self._holders.__getitem__, self.grid.world, norm_type)
        return norm / self._factor

    @property
    def _scale(self) -> float:
        return 1.0 if self.scaling is None else self.scaling.value

    def _rescale(self, factor: float) -> None:
        gradients = [gradient for p in self._holders if (gradient := local_grad(p)) is not None]
        if gradients and factor != self._factor:
            torch._foreach_mul_(gradients, factor / self._factor)
        self._factor = factor

    def _refuse_untrained(self) -> None:
        """Whether the norm is to have what no optimizer trains cannot be told."""
        if self.trained >= self.all:  # as every rank knows
            return
        held = {weight.name: weight.parameter for weight in self.weights.values()}
        rest = [name for name, p in held.items() if name not in self.trained and p.grad is not None]
        if rest := [name for names in gather_objects(rest, self.grid.world) for name in names]:
            raise UsageError(
                f"max_norm={self.max_norm} clips by the norm of the whole model, but of what has a gradient no boosted "
                f"optimizer has {listed(rest, 3)}: freeze it (requires_grad_(False)), give it to an optimizer, or pass "
                "max_norm=0 and call optimizer.clip_grad_by_norm(max_norm), which counts all gradients there are"
            )

    def _look_for_clipping(self) -> None:
        """By someone who sees one stage. torch.nn.utils.clip_grad_norm_ scales all gradients in place, if by one."""
        made, self._made = self._made, {}
        now = {p: p.grad for p in made if p.grad is not None}
        if self._warned or self.grid.pp_size == 1 or not now:
            return
        if all(grad is not made[p][0] or grad._version != made[p][1] for p, grad in now.items()):
            self._warned = True
            logger.warning(
                "all gradients of stage %d were changed between execute_pipeline and optimizer.step: if that was "
                "torch.nn.utils.clip_grad_norm_, it has clipped this stage by the norm of this stage alone. Use "
                "PipelinePlugin(max_norm=...) or optimizer.clip_grad_by_norm(max_norm), which know the whole model's",
                self.grid.stage,
            )
