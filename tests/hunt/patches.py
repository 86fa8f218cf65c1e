"""Patches: layers that call functions of the user instead of their own, set on the object or on a package's class."""

from __future__ import annotations

import functools
import math
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import replace
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from tests.hunt.cases import Batch, Case
from tests.hunt.nets import Adding, Block, Net, data

PACKAGE = "transformers.models.llama.modeling_llama"
CONTEXT = threading.local()  # ranks of these tests are threads


def scaled(block: Any, x: Tensor) -> Any:
    """The first block leaves a number that depends on the length, and all blocks read it."""
    if block.place == 0:
        CONTEXT.scale = math.log(x.shape[1]) / 3
    return Block.forward(block, x * CONTEXT.scale)


def noting(block: Any, x: Tensor) -> Any:
    y = Block.forward(block, x)
    CONTEXT.seen.append(y.square().mean())
    return y


class OfPackage(Block):
    __module__ = PACKAGE


class Scaled(OfPackage):
    __module__ = PACKAGE
    forward = scaled


class Noting(OfPackage):
    __module__ = PACKAGE
    forward = noting


class ScaledNet(Net):
    block = Scaled


class NotingNet(Adding):
    block = Noting

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        CONTEXT.seen = []
        return super().forward(ids, labels)

    def extra(self) -> Any:
        return sum(CONTEXT.seen)


class Plain(Net):
    block = OfPackage


class PlainNoting(NotingNet):
    block = OfPackage


def bound(function: Callable[..., Any]) -> Callable[[Any], None]:
    """Sets the forward of every block."""

    def prepare(model: Any) -> None:
        for block in model.layers:
            block.forward = MethodType(function, block)

    return prepare


def wrapped(model: Any) -> None:
    """Decorates the forwards of layers in the blocks; the blocks share a number in a closure."""
    scale = 1.0

    def decorated(forward: Any, first: bool) -> Any:
        @functools.wraps(forward)
        def inner(x: Tensor) -> Any:
            nonlocal scale
            if first:
                scale = math.log(x.shape[1]) / 3
            return forward(x * scale)

        return inner

    for block in model.layers:
        block.a.forward = decorated(block.a.forward, block.place == 0)


def starts(embed: Any, ids: Tensor) -> Any:
    CONTEXT.is_blank = None
    return nn.Embedding.forward(embed, ids)


def answers(block: Any, x: Tensor) -> Any:
    """Leaves a flag that depends on values: it is true for zeros, with which a trace runs."""
    CONTEXT.is_blank = not bool(x.any())
    return Block.forward(block, x)


def heeds(head: Any, x: Tensor) -> Tensor:
    result: Tensor = nn.Linear.forward(head, x)
    return result if CONTEXT.is_blank else 2 * result


def answering(model: Any) -> None:
    for layer, function in ((model.embed, starts), (model.layers[0], answers), (model.head, heeds)):
        layer.forward = MethodType(function, layer)


def counts(block: Any, x: Tensor) -> Any:
    block.count += 1
    return x + block.b(torch.tanh(block.a(x))) * (block.count % 3)


def adds_loss(block: Any, x: Tensor) -> Any:
    y = x + block.b(torch.tanh(block.a(x)))
    block.aux = y.square().mean()
    return y


class AddingPlain(Adding):
    def extra(self) -> Any:
        return sum(layer.aux for layer in self.layers if hasattr(layer, "aux"))


def one(function: Callable[..., Any]) -> Callable[[Any], None]:
    """Sets the forward of one block, which is not the first of its class."""

    def prepare(model: Any) -> None:
        block = model.layers[1]
        block.forward, block.count = MethodType(function, block), 0

    return prepare


def timed(function: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator of the user that keeps the times of calls, as one sets it on several classes of a package."""

    @functools.wraps(function)
    def inner(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        result = function(*args, **kwargs)
        CONTEXT.times[function.__qualname__].append(time.perf_counter() - start)
        return result

    return inner


class Timed(OfPackage):
    __module__ = PACKAGE
    forward = timed(Block.forward)


class TimedNet(Net):
    __module__ = PACKAGE
    block = Timed
    forward = timed(Net.forward)


def starts_times(model: Any) -> None:
    CONTEXT.times = defaultdict(list)


def counted(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def inner(*args: Any, **kwargs: Any) -> Any:
        CONTEXT.calls[function.__qualname__] += 1
        return function(*args, **kwargs)

    return inner


class Counted(OfPackage):
    __module__ = PACKAGE
    forward = counted(Block.forward)


class CountedNet(Net):
    __module__ = PACKAGE
    block = Counted
    forward = counted(Net.forward)


def starts_calls(model: Any) -> None:
    CONTEXT.calls = Counter()


def of_lengths(*lengths: int) -> list[Batch]:
    return [data(seed, length=length) for seed, length in enumerate(lengths)]


def case(make: Callable[[], nn.Module], story: str, prepare: Any = None) -> Case:
    return Case(make, story, of_lengths(6, 9, 5), options={"partition": [3, 3]}, prepare=prepare)


CASES = {
    "a number of a patched class": case(
        ScaledNet,
        "The forward of a package's class is the user's, and leaves a number in a global: stages without the layer had "
        "an old one, as only the user's classes were walked.",
    ),
    "losses of a patched class": case(NotingNet, "The same with tensors, which was refused."),
    "a number of a patched layer": case(
        Plain,
        "Each layer has a forward of its own: it was behind the Interception, which was not walked.",
        bound(scaled),
    ),
    "losses of a patched layer": case(PlainNoting, "The same with tensors, which was refused.", bound(noting)),
    "a number of a decorated layer": case(
        Plain,
        "functools.wraps gives the user's function the module of torch's: it counted as torch's, with its closure.",
        wrapped,
    ),
    "times of patched classes": case(
        TimedNet,
        "A decorator on the classes of layers and model leaves times, which nothing else reads: the layers' times were "
        "refused, because the model's class has the same decorator.",
        starts_times,
    ),
    "counts of patched classes": case(CountedNet, "The same with numbers of calls.", starts_calls),
    "a count of one patched layer": replace(
        case(
            Plain,
            "One layer counts its calls. It was of the kind of the others, which count nothing, so it was recomputed "
            "and counted twice.",
            one(counts),
        ),
        options={"partition": [3, 3], "recompute": True, "verify": False},
    ),
    "a loss of one patched layer": case(
        AddingPlain,
        "One layer leaves a loss on itself: it was of the kind of the others, and refused for a change that the trace "
        "had not recorded.",
        one(adds_loss),
    ),
    "a flag for a patched head": replace(
        case(
            Plain,
            "A layer's new forward leaves a flag for the head's: no class mentions its name, so the flag was left "
            "unchecked.",
            answering,
        ),
        options={"partition": [3, 3], "verify": False},
        refused="changes .*is_blank, but the trace recorded no such change",
    ),
}
