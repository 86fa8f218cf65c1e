"""Reference: the model as the user has it, called directly, and trained on the same microbatches by hand."""

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from pipeshard.batch.batch import Batch
from pipeshard.batch.criterion import Criterion, loss_of
from pipeshard.graph.rng import Randomness, python_state
from pipeshard.hf import disable_caches
from pipeshard.verify.copies import Copies

logger = logging.getLogger("pipeshard")


def generators(device: torch.device) -> tuple[Any, ...]:
    """Changes when torch's, Python's or numpy's generator is drawn from."""
    states = [torch.default_generator.get_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return *(state.numpy().tobytes() for state in states), python_state()


@contextlib.contextmanager
def undisturbed(device: torch.device) -> Iterator[None]:
    """Generators are as they were afterwards, and nothing is said inside: the boost itself says what has to be."""

    def quiet(record: logging.LogRecord) -> bool:
        return record.levelno < logging.INFO

    logger.addFilter(quiet)
    try:
        with Randomness(device).step(0, 0), warnings.catch_warnings(), torch.inference_mode(False), torch.enable_grad():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.removeFilter(quiet)


class NoLoss(Exception):
    """There is nothing to train on."""


class Reference:
    """One copy, of which nothing is intercepted. A model that draws random numbers is given those of the pipeline's
    units and places: around its units' forwards, `places` seeds the generators as every stage does."""

    def __init__(self, own: Copies, criterion: Criterion | None, device: torch.device) -> None:
        self.own, self.model, self.criterion, self.device = own, own.model, criterion, device
        self.places: Randomness | None = None
        disable_caches(self.model)

    def seed_places(self, units: Mapping[str, nn.Module], glue: bool, python: bool) -> None:
        """Let units, and where it says so the glue between them, draw what stages draw there."""
        self.places = places = Randomness(self.device)
        places.python = python
        self._calls, self._inside, self._again = 0, False, False
        self._numbers: dict[str, list[int]] = {}

        def placed(name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
            def run(*args: Any, **kwargs: Any) -> Any:
                if self._inside:
                    return forward(*args, **kwargs)
                numbers = self._numbers.setdefault(name, [])
                if not self._again:
                    self._calls += 1
                    numbers.append(self._calls)
                number = numbers.pop() if self._again else self._calls  # a checkpoint runs the last one again first
                self._inside = True
                places.at(2 * number - 1)
                try:
                    return forward(*args, **kwargs)
                finally:
                    self._inside = False
                    if glue:
                        places.at(2 * number)

            return run

        for name in units:
            unit: Any = self.model.get_submodule(name)
            unit.forward = placed(name, unit.forward)

    def step(
        self, batches: Sequence[Batch], weights: Sequence[float], at: tuple[int, int], note: Callable[[], None]
    ) -> tuple[Tensor, list[Any]]:
        """Forward and backward of each microbatch in turn: the loss, by these weights, and the outputs."""
        total, outputs = torch.zeros(()), []
        with self.places.step(*at) if self.places is not None else nullcontext():
            for i, (batch, weight) in enumerate(zip(batches, weights, strict=True)):
                if self.places is not None:
                    self._calls, self._again = 0, False
                    self._numbers.clear()
                    self.places.microbatch(i)
                    self.places.at(0)
                output = batch.call(self.model)
                loss = loss_of(output, self.criterion, batch)
                if loss is None:
                    raise NoLoss
                outputs.append(tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), output))
                share = torch.zeros_like(loss.detach())
                self._again = True
                if weight:
                    loss.backward(torch.full_like(loss, weight))
                    share = loss.detach() * weight
                total = share if i == 0 else total + share
                note()
        return total, outputs
