"""Lookahead: an optimizer that returns to slow weights every other step; they are in its state or in a list."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.hunt.nets import data
from tests.remedies.training import Batch, Training, run

EVERY = 2  # steps between two returns to the slow weights
SHARE = 0.5  # of the way from them


class Lookahead(torch.optim.SGD):
    """Keeps the slow weights of a parameter in its state."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, lr=lr)
        self.remember([p for group in self.param_groups for p in group["params"]])

    def remember(self, parameters: list[nn.Parameter]) -> None:
        for parameter in parameters:
            self.state[parameter]["slow"] = parameter.detach().clone()
            self.state[parameter]["count"] = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["count"] += 1
                if state["count"] % EVERY == 0:
                    state["slow"].lerp_(parameter, SHARE)
                    parameter.copy_(state["slow"])
        return loss


class LookaheadOfLists(Lookahead):
    """Keeps them in a list, in the order of its groups."""

    def remember(self, parameters: list[nn.Parameter]) -> None:
        self.slow: list[Tensor] = [parameter.detach().clone() for parameter in parameters]
        self.count = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = torch.optim.SGD.step(self, closure)
        self.count += 1
        parameters = [p for group in self.param_groups for p in group["params"]]
        for slow, parameter in zip(self.slow, parameters) if self.count % EVERY == 0 else ():
            slow.lerp_(parameter, SHARE)
            parameter.copy_(slow)
        return loss


def six_steps() -> list[Batch]:
    return [data(seed) for seed in range(6)]


def trained(kind: type[Lookahead]) -> tuple[str, list[str]]:
    """The error, or what differs from the unsplit model after six steps, three of them returns."""
    try:
        return "", run(Training(optimizer=lambda model: kind(model.parameters()), batches=six_steps))
    except Exception as error:
        return f"{type(error).__module__}.{type(error).__name__}: {error}", []
