"""Random state: the states of a process's random generators, saved for each rank."""

import random
from typing import Any

import numpy as np
import torch

from pipeshard.distributed.collectives import gather_objects
from pipeshard.distributed.mesh import Grid


def random_state() -> dict[str, Any]:
    """The states of torch's, CUDA's, Python's and NumPy's random generators. (torch's state includes the seed of
    dropout.)"""
    algorithm, keys, *rest = np.random.get_state()
    numpy = (algorithm, np.asarray(keys).tolist(), *rest)
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    return {"torch": torch.get_rng_state(), "cuda": cuda, "python": random.getstate(), "numpy": numpy}


def random_states(grid: Grid) -> dict[str, Any]:
    """The random states of all ranks, and the sizes of the grid to which they belong. Call it on all ranks."""
    return {"layout": _layout(grid), "ranks": gather_objects(random_state(), grid.world)}


def own_random_state(rest: dict[str, Any], grid: Grid) -> Any:
    """Return this rank's random state from the content of training.pt. If the sizes of the grid have changed, or an
    earlier version of pipeshard wrote the file, return the first rank's random state."""
    return rest["ranks"][grid.world.rank()] if rest.get("layout") == _layout(grid) else rest["random"]


def _layout(grid: Grid) -> list[int]:
    return [grid.dp_size, grid.pp_size, grid.tp_size]


def set_random_state(state: dict[str, Any]) -> None:
    """Set the random generators to the states that `random_state` returned. The generators may raise any exception for
    an invalid state."""
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    random.setstate(state["python"])
    if not 0 <= state["numpy"][2] <= len(state["numpy"][1]):  # NumPy does not check its position
        raise ValueError(f"NumPy's position is {state['numpy'][2]}, outside the generator's keys")
    np.random.set_state(state["numpy"])
