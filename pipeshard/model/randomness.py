"""Randomness: random numbers that do not depend on which stage draws them."""

import hashlib
import random
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch


class Randomness:
    """Seeds all generators by (seed, step, microbatch, place in the forward), so that a mask is the same for every p.

    A place is a unit call, or the glue before one: each stage that runs it draws what the unsplit model would. Torch is
    always seeded, for dropout; `random` and numpy, which take longer, where `python` says that the model draws from
    them (layerdrop, masked features).
    """

    def __init__(self, device: torch.device) -> None:
        self.generators = [torch.default_generator]
        if device.type == "cuda":
            self.generators.append(torch.cuda.default_generators[device.index])
        self._key, self._first = (0, 0, 0), 0
        self.python = True

    @contextmanager
    def step(self, seed: int, step: int, first: int = 0) -> Iterator[None]:
        """Inside, forwards draw the numbers of this step; afterwards the user's generators are as they were.

        `first` is the number of the first microbatch, that of a replica comes after those of the replicas before.
        """
        states = [generator.get_state() for generator in self.generators]
        python, numpy = random.getstate(), np.random.get_state()
        self._key, self._first = (seed, step, first), first
        try:
            yield
        finally:
            for generator, state in zip(self.generators, states, strict=True):
                generator.set_state(state)
            random.setstate(python)
            np.random.set_state(numpy)

    def microbatch(self, i: int) -> None:
        """The next places are of microbatch i."""
        self._key = (*self._key[:2], self._first + i)

    def at(self, place: int) -> Callable[[], None]:
        """What is drawn from now on belongs to this place; returns what brings the generators back to it later."""
        key = struct.pack("<4q", *self._key, place)
        number = int.from_bytes(hashlib.blake2b(key, digest_size=4).digest(), "little")
        self._seed(number, self.python)
        return partial(self._seed, number, self.python)

    def state(self) -> bytes:
        """A digest of where torch's generators are."""
        states = b"".join(generator.get_state().numpy().tobytes() for generator in self.generators)
        return hashlib.blake2b(states, digest_size=16).digest()

    def _seed(self, number: int, python: bool) -> None:
        for generator in self.generators:
            generator.manual_seed(number)
        if python:
            random.seed(number)
            np.random.seed(number)


class Draws:
    """Random numbers that do not depend on what was drawn before: inside `of(*key)` generators are seeded by the key,
    `paused` are as they were outside, and are so again afterwards."""

    def __init__(self) -> None:
        self._other: Any = None  # the states that are not in use

    @contextmanager
    def of(self, *key: int) -> Iterator[None]:
        self._other = _states()
        number = int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=4).digest(), "little")
        torch.default_generator.manual_seed(number)
        random.seed(number)
        np.random.seed(number)
        try:
            yield
        finally:
            _restore(self._other)
            self._other = None

    @contextmanager
    def paused(self) -> Iterator[None]:
        if self._other is None:
            yield
            return
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _swap(self) -> None:
        now = _states()
        _restore(self._other)
        self._other = now


def _states() -> Any:
    return torch.default_generator.get_state(), random.getstate(), np.random.get_state()


def _restore(states: Any) -> None:
    torch.default_generator.set_state(states[0])
    random.setstate(states[1])
    np.random.set_state(states[2])


def python_state() -> tuple[object, ...]:
    """Changes when `random` or numpy's generator is drawn from."""
    of_numpy = np.random.get_state(legacy=False)
    return random.getstate(), str(of_numpy["state"]["key"].tobytes()), of_numpy["state"]["pos"]
