"""RNG: random numbers that depend neither on the stage that generates them nor on how often a unit runs."""

import copy
import hashlib
import random
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pipeshard.errors import TraceError
from pipeshard.private import DispatchMode, graph_task, saved_tensors_hooks, tree_leaves


def no_draw(place: int) -> None:
    """Seed nothing at this position."""


def generator_of(device: torch.device) -> torch.Generator:
    """torch's generator of a GPU (the current GPU if `device` has no index), or of the CPU for any other device."""
    if device.type != "cuda":
        return torch.default_generator
    torch.cuda.init()  # creates the generators of all GPUs
    return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]


class Randomness:
    """Seeds all generators with a hash of (seed, step, microbatch, position in the forward), so a dropout mask does not
    depend on the number of stages. In a forward-only call, the hash also contains the number of forward-only calls
    since the last training step. If `model` is not 0, the hash also contains `model`.

    A position is a unit call, the glue before a unit call, or the glue after the last unit call. At each position,
    every stage uses the same random numbers as a run with one stage. Torch is always seeded, for dropout. `random` and
    numpy take longer to seed, so they are seeded only if `python` is True, that is, if the model uses them (LayerDrop,
    masked features).
    """

    def __init__(self, device: torch.device) -> None:
        self.generators = [torch.default_generator]
        if device.type == "cuda":
            self.generators.append(generator_of(device))
        self.model = 0  # number of the model among the plugin's models
        self._key: tuple[int, ...] = (0, 0, 0)
        self._first = 0
        self.python = True

    @contextmanager
    def step(self, seed: int, step: int, first: int = 0, forwards: int = 0) -> Iterator[None]:
        """Context manager in which forwards use the random numbers of step `step`. The user's generators are restored
        on exit.

        `first` is the number of this replica's first microbatch: microbatches are numbered across replicas. `forwards`
        is 0 for a training step. For a forward-only call, it is the number of this call, counted from the last training
        step.
        """
        states = _states(self.generators)
        others = (forwards, self.model) if self.model else (forwards,) if forwards else ()
        self._key, self._first = (seed, step, first, *others), first
        try:
            yield
        finally:
            _restore(self.generators, states)

    def microbatch(self, i: int) -> None:
        """Use the random numbers of microbatch i, starting with the next call of `at`."""
        self._key = (*self._key[:2], self._first + i, *self._key[3:])

    def at(self, place: int) -> Callable[[], None]:
        """Seed the generators for the position `place`, and return a function that repeats this seeding."""
        number = _number(struct.pack(f"<{len(self._key) + 1}q", *self._key, place))
        _seed(self.generators, number, self.python)
        return partial(_seed, self.generators, number, self.python)

    def of(self, i: int, python: bool) -> Callable[[int], object]:
        """A function that seeds the generators for a position in microbatch i of this step. The function also works
        after the step has ended."""
        other = copy.copy(self)
        other.microbatch(i)
        other.python = python
        return other.at

    def state(self) -> bytes:
        """A digest of the states of torch's generators."""
        states = b"".join(generator.get_state().numpy().tobytes() for generator in self.generators)
        return hashlib.blake2b(states, digest_size=16).digest()


class Draws:
    """Context manager in which torch's CPU generator, `random` and numpy produce a separate stream of random numbers.
    The stream starts from the seed `key`, and continues when the context is entered again. The program's generators are
    restored on exit."""

    def __init__(self, *key: int) -> None:
        self._key, self._inside, self._generators = key, None, PROCESS
        self._outside: list[Any] = []  # a stack: contexts may be nested

    @classmethod
    def from_here(cls, device: torch.device) -> "Draws":
        """A stream that starts from the current state of the generators, including the generator of `device`."""
        made = cls()
        made._generators = Randomness(device).generators
        made._inside = _states(made._generators)
        return made

    def __enter__(self) -> None:
        self._outside.append(_states(self._generators))
        if self._inside is None:
            seed_process(*self._key)
        else:
            _restore(self._generators, self._inside)

    def __exit__(self, *error: object) -> None:
        self._inside = _states(self._generators)
        _restore(self._generators, self._outside.pop())


@contextmanager
def seeded(number: int) -> Iterator[None]:
    """Context manager in which torch's CPU generator, the current GPU's generator, `random` and numpy start from the
    seed `number`. All of these generators are restored on exit. Unlike this context manager, torch.manual_seed also
    seeds the generators of all other GPUs."""
    gpus = [torch.cuda.default_generators[torch.cuda.current_device()]] if torch.cuda.is_initialized() else []
    generators = [torch.default_generator, *gpus]
    before = _states(generators)
    try:
        _seed(generators, number)
        yield
    finally:
        _restore(generators, before)


PROCESS = [torch.default_generator]


def seed_process(*key: int) -> None:
    """Seed torch's CPU generator, `random` and numpy with a hash of `key`."""
    _seed(PROCESS, _number(repr(key).encode()))


def seed_generator(generator: Any, *key: int) -> None:
    """Seed a torch, `random` or numpy generator with a hash of `key`."""
    number = _number(repr(key).encode())
    if isinstance(generator, torch.Generator):
        generator.manual_seed(number)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = type(generator.bit_generator)(number).state
    else:
        generator.seed(number)


Generators = Sequence[torch.Generator]


def _states(generators: Generators) -> Any:
    """The states of these generators, `random` and numpy."""
    return [generator.get_state() for generator in generators], random.getstate(), np.random.get_state()


def _restore(generators: Generators, states: Any) -> None:
    for generator, state in zip(generators, states[0], strict=True):
        generator.set_state(state)
    random.setstate(states[1])
    np.random.set_state(states[2])


def _number(key: bytes) -> int:
    """A 32-bit hash of `key`, for use as a seed: numpy accepts seeds of at most 32 bits."""
    return int.from_bytes(hashlib.blake2b(key, digest_size=4).digest(), "little")


def _seed(generators: Generators, number: int, python: bool = True) -> None:
    for generator in generators:
        generator.manual_seed(number)
    if python:
        random.seed(number)
        np.random.seed(number % 2**32)


def python_state() -> tuple[object, ...]:
    """A value that changes when `random` or numpy's generator is used."""
    of_numpy = np.random.get_state(legacy=False)
    return random.getstate(), str(of_numpy["state"]["key"].tobytes()), of_numpy["state"]["pos"]


MOST_REPEATS = 1 << 16  # the maximum number of kept Repeats: other runtimes do not clear them at the end of a step


def own_checkpoint() -> object:
    """An object that identifies the innermost active non-reentrant torch.utils.checkpoint, or None if no such
    checkpoint is active."""
    hooks = saved_tensors_hooks(False)
    return hooks[0] if hooks and getattr(hooks[0], "__qualname__", "").startswith("_checkpoint_hook.") else None


class CheckpointSpans:
    """For each of the model's own non-reentrant checkpoints, the first and the last unit call that it recomputes."""

    def __init__(self) -> None:
        self.spans: list[tuple[int, int]] = []
        self._last: object = None

    def note(self, call: int) -> None:
        """Record that unit call `call` starts now."""
        now = own_checkpoint()
        if now is not None:
            first = self.spans.pop()[0] if now is self._last else call
            self.spans.append((first, call))
        self._last = now


@dataclass(slots=True)
class Repeat:
    """The state that a second run of a call needs. `before` and `after` restore the generators to their states before
    and after the first run. If `is_answered` is True, another stage (possibly of the same rank) ran the call, and
    `result` is the call's result."""

    before: Callable[[], object] = tuple
    after: Callable[[], object] = tuple
    is_answered: bool = False
    result: Any = None


class Repeats:
    """The Repeats of calls in checkpoints. A checkpoint restores torch's generators to their states at the start of the
    checkpoint. The state of the generators when a unit is called is different for each microbatch, so the unit and this
    state identify a repeated call. `stage` is part of the key, since several stages of a rank may call the unit with
    the same state."""

    def __init__(self, randomness: Randomness) -> None:
        self.randomness = randomness
        self.stage = 0  # the stage whose forward or backward runs now
        self.is_unknown = False  # whether another runtime runs backward passes of several stages in this process
        self._kept: dict[tuple[int, str, bytes], Repeat] = {}

    def of(self, unit: str, reentrant: bool) -> Repeat:
        """An empty Repeat for the current call of `unit`. The caller of this method fills in the fields. The Repeat is
        kept only if the call is in a checkpoint. With `reentrant`, a call without gradients counts as a call in a
        reentrant checkpoint. The first call in such a checkpoint and all later calls of the forward are on one
        stage."""
        repeat = Repeat()
        if own_checkpoint() is not None or (reentrant and not torch.is_grad_enabled()):
            self._kept[self.stage, unit, self.randomness.state()] = repeat
            if len(self._kept) > MOST_REPEATS:
                del self._kept[next(iter(self._kept))]
        return repeat

    def pop(self, unit: str) -> Repeat | None:
        """Remove and return the Repeat of the call that is being repeated. Returns None if user code makes the call. In
        a backward whose stage is unknown, raises TraceError."""
        if self.is_unknown and graph_task() != -1:
            raise TraceError(
                f"the model calls unit {unit} in its own torch.utils.checkpoint, but another runtime runs several "
                "stages in this process, so pipeshard cannot know for which stage the backward recomputes the unit. "
                "Run one stage per process, pass target=None or target='colossalai', or move the checkpoint into the "
                "unit"
            )
        return self._kept.pop((self.stage, unit, self.randomness.state()), None)

    def clear(self) -> None:
        self._kept.clear()


class SharedDraws(DispatchMode):
    """Mode in which a run of glue on some of the samples uses, for these samples, the same random numbers as the run on
    all samples. Dropout returns its input."""

    def __init__(self) -> None:
        super().__init__()
        self.whole: list[Tensor] = []
        self.rows = range(0)

    @contextmanager
    def of(self, rows: range) -> Iterator[None]:
        """Context manager for a run on the samples `rows`. The first run must be on all samples."""
        self.is_whole, self.rows, self.next = not self.rows, rows, 0
        with self:
            yield

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        if func is torch.ops.aten.native_dropout.default:
            return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
        if kwargs.get("generator") is not None:
            kwargs["generator"] = None  # the user's generator must not advance
        before = torch_states()
        result = func(*args, **kwargs)
        if all(map(torch.equal, before, torch_states())):
            return result  # attention without dropout uses no random numbers, despite its tag
        for tensor in tree_leaves(result):
            self.drawn(func, tensor)
        return result

    def drawn(self, func: Any, tensor: Tensor) -> None:
        """In the first run, record the random result of an operator. In later runs, overwrite the result with the
        corresponding part of the recorded values."""
        if self.is_whole:
            self.whole.append(tensor.clone())
        else:
            tensor.copy_(part_of(self.whole[self.next], tensor.shape, self.rows))
        self.next += 1


def torch_states() -> list[Tensor]:
    """The states of torch's CPU generator and, if CUDA is initialized, of the current GPU's generator."""
    on_device = [torch.cuda.get_rng_state()] if torch.cuda.is_initialized() else []
    return [torch.default_generator.get_state(), *on_device]


def part_of(full: Tensor, shape: Sequence[int], rows: range) -> Tensor:
    """The part of `full` that has shape `shape`. In each dimension in which `shape` is smaller than `full`, the part is
    taken from the start if `rows` starts at 0, otherwise from the end."""
    for dim, size in enumerate(shape):
        if size != full.shape[dim]:
            full = full.narrow(dim, 0 if rows.start == 0 else full.shape[dim] - size, size)
    return full
