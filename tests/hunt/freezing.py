"""Freezing: models with a stage that is frozen or unfrozen, in whole or in part, before boost and between steps."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

from tests.hunt.cases import Case, adamw
from tests.hunt.nets import Net, data

FIRST, LAST = ("embed", "layers.0", "layers.1"), ("layers.2", "layers.3", "head")
ALONE = {"verify": False, "partition": [3, 3]}
LENGTHS = [data(seed, length=length) for seed, length in enumerate((6, 6, 8, 5))]


def set_trained(model: nn.Module, names: tuple[str, ...], is_trained: bool) -> None:
    for name, parameter in model.named_parameters():
        if name.startswith(names):
            parameter.requires_grad_(is_trained)


def freeze_first(model: nn.Module) -> None:
    set_trained(model, FIRST, False)


def freeze_last(model: nn.Module) -> None:
    set_trained(model, LAST, False)


def freezes_first(step: int, model: nn.Module) -> None:
    set_trained(model, FIRST, step < 1)


def unfreezes_first(step: int, model: nn.Module) -> None:
    set_trained(model, FIRST, step > 0)


def freezes_for_a_step(step: int, model: nn.Module) -> None:
    set_trained(model, FIRST, step != 1)


def alternates(step: int, model: nn.Module) -> None:
    set_trained(model, FIRST if step % 2 else LAST, False)
    set_trained(model, LAST if step % 2 else FIRST, True)


def unfreezes_layer_by_layer(step: int, model: nn.Module) -> None:
    set_trained(model, tuple(f"layers.{k}" for k in range(3 - step, 4)), True)


def clipping(parameters: Any, lr: float) -> torch.optim.Optimizer:
    """Clips by the norm of what has a gradient, which one stage holds as a whole."""

    def clip(inner: torch.optim.Optimizer, *_: Any) -> None:
        clip_grad_norm_(inner.param_groups[0]["params"], 0.1)

    optimizer = torch.optim.SGD(parameters, lr=lr)
    optimizer.register_step_pre_hook(clip)
    return optimizer


class Masked(Net):
    """A batch with a mask is traced anew."""

    def forward(self, ids: Any, labels: Any, mask: Any = None) -> Any:  # type: ignore[override]
        x = self.body(self.embed(ids))
        return {"loss": self.loss(self.head(x if mask is None else x * mask.unsqueeze(-1)), labels)}


MASK = {"mask": torch.ones(4, 6)}
MASKED = [data(0), data(1), data(2) | MASK, data(3)]

CASES: dict[str, Case] = {
    "freezes the first stage": Case(
        Net,
        "The first stage is frozen after boost: a batch of another length was traced anew by ranks that knew of it "
        "and ranks that did not.",
        LENGTHS,
        ALONE,
        between=freezes_first,
        optimizer=adamw,
    ),
    "freezes, and is traced anew": Case(
        Masked, "The same with a batch of another kind.", MASKED, ALONE, between=freezes_first, optimizer=adamw
    ),
    "freezes and unfreezes": Case(
        Masked,
        "A new kind of batch came with the freeze: the rank traced it half frozen, and found this trace again once the "
        "stage was unfrozen.",
        [data(0), data(1) | MASK, data(2) | MASK],
        ALONE,
        between=freezes_for_a_step,
        optimizer=adamw,
    ),
    "unfreezes the first stage": Case(
        Net,
        "A stage that was frozen at boost was refused once it was unfrozen: nobody sent its gradient back.",
        LENGTHS,
        ALONE,
        prepare=freeze_first,
        between=unfreezes_first,
        optimizer=adamw,
    ),
    "unfreezes layer by layer": Case(
        Net,
        "The same for gradual unfreezing from the head on, in microbatches with deferred weight gradients.",
        LENGTHS,
        ALONE | {"num_microbatches": 2, "schedule": "zbv", "partition": "uniform"},
        prepare=lambda model: set_trained(model, (*FIRST, "layers.2", "layers.3"), False),
        between=unfreezes_layer_by_layer,
        optimizer=adamw,
    ),
    "alternates": Case(
        Masked, "Stages are trained in turn, as GAN-like loops do.", MASKED, ALONE, between=alternates, optimizer=adamw
    ),
    "clips what the last stage trains": Case(
        Net,
        "clip_grad_norm_ was refused where all that is trained is on one stage, since the other one's factor was 1.",
        LENGTHS,
        ALONE,
        prepare=freeze_first,
        optimizer=clipping,
    ),
    "clips what the first stage trains": Case(
        Net, "The same for the first stage.", LENGTHS, ALONE, prepare=freeze_last, optimizer=clipping
    ),
    "clips after the first stage is frozen": Case(
        Net,
        "Before that it is refused, since both stages train.",
        LENGTHS,
        ALONE,
        between=lambda step, model: freeze_first(model),
        optimizer=clipping,
    ),
}
