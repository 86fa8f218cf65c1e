"""Undisturbed: random generators, warnings and the log, which know nothing of a proof."""

import contextlib
import logging
import warnings
from collections.abc import Iterator
from typing import Any

import torch

from pipeshard.model.randomness import Randomness, python_state

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
