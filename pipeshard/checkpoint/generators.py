"""Generators: the states of torch's, Python's and NumPy's random numbers on this rank."""

import random
from typing import Any

import numpy as np
import torch


def random_state() -> dict[str, Any]:
    """Also the seed by which dropout is drawn: torch keeps it in its state."""
    algorithm, keys, *rest = np.random.get_state()
    numpy = (algorithm, np.asarray(keys).tolist(), *rest)
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    return {"torch": torch.get_rng_state(), "cuda": cuda, "python": random.getstate(), "numpy": numpy}


def check_random_state(state: Any) -> None:
    """Raise what generators made for this raise, if this is no state of theirs, before any other is changed."""
    torch.Generator().set_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.Generator("cuda").set_state(state["cuda"])
    random.Random().setstate(state["python"])
    if not 0 <= state["numpy"][2] <= len(state["numpy"][1]):  # where NumPy reads next, which it does not check
        raise ValueError(f"NumPy's position is {state['numpy'][2]}")
    np.random.RandomState().set_state(state["numpy"])


def set_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
