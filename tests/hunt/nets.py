"""Nets: a small model, and variants of it as users write them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.hunt import switches

H, V = 16, 23


class Block(nn.Module):
    def __init__(self, place: int = 0, h: int = H) -> None:
        super().__init__()
        self.a, self.b, self.place = nn.Linear(h, h), nn.Linear(h, h), place

    def forward(self, x: Tensor) -> Any:
        return x + self.b(torch.tanh(self.a(x)))


class Net(nn.Module):
    """An embedding, four blocks, a head; the loss is the mean over tokens."""

    block: Any = Block

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(V, H)
        self.layers = nn.ModuleList(self.block(k) for k in range(layers))
        self.head = nn.Linear(H, V)

    def body(self, x: Tensor) -> Any:
        for layer in self.layers:
            x = layer(x)
        return x

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.head(self.body(self.embed(ids)))
        return {"loss": self.loss(logits, labels), "logits": logits}


def data(seed: int = 0, rows: int = 4, length: int = 6) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randint(0, V, (rows, length), generator=generator) for name in ("ids", "labels")}


class Adding(Net):
    """Adds `extra()` to the loss."""

    def extra(self) -> Any:
        return sum(layer.aux for layer in self.layers)  # type: ignore[misc]

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        out = super().forward(ids, labels)
        out["loss"] = out["loss"] + 0.1 * self.extra()
        return out


class OnItself(Block):
    aux: Any = 0.0

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.aux = y.square().mean()
        return y


class OfFunc(Block):
    """Descends an energy of its own, whose gradient torch.func makes."""

    def forward(self, x: Tensor) -> Tensor:
        return x - torch.func.grad(lambda y: torch.tanh(self.a(y)).square().sum())(x) + torch.vmap(self.b)(x)


class Energies(Net):
    block = OfFunc


class Stashed(Adding):
    block = OnItself


class InList(Net):
    """Each layer is given what it puts its loss into."""

    class block(Block):
        def forward(self, x: Tensor, aux: Any) -> Tensor:  # type: ignore[override]
            y = super().forward(x)
            if isinstance(aux, list):
                aux.append(y.square().mean())
            elif isinstance(aux, dict):
                aux[f"layer {self.place}"] = y.square().mean()
            else:
                aux.total = aux.total + y.square().mean()
            return y

    container: Any = list

    def body(self, x: Tensor) -> Any:
        self.given = self.container()
        for layer in self.layers:
            x = layer(x, self.given)
        return x

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        out = super().forward(ids, labels)
        given = self.given
        aux = given if isinstance(given, list) else given.values() if isinstance(given, dict) else [given.total]
        out["loss"] = out["loss"] + 0.1 * sum(aux)
        return out


class InDict(InList):
    container = dict


class InNamespace(InList):
    container = staticmethod(lambda: SimpleNamespace(total=0.0))


SEEN: list[Tensor] = []
COUNT = 0


class InGlobal(Adding):
    class block(Block):
        def forward(self, x: Tensor) -> Tensor:
            global COUNT
            y = super().forward(x)
            COUNT += 1
            SEEN.append(y.square().mean() * COUNT)
            return y

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        global COUNT
        COUNT = 0
        SEEN.clear()
        return super().forward(ids, labels)

    def extra(self) -> Any:
        return sum(SEEN)


class Registry:
    """Losses of the whole model, of which every layer has a reference."""

    def __init__(self) -> None:
        self.losses: dict[int, Tensor] = {}


class InRegistry(Adding):
    class block(Block):
        registry: Registry

        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            self.registry.losses[self.place] = y.square().mean()
            return y

    def __init__(self) -> None:
        super().__init__()
        self.registry = Registry()
        for layer in self.layers:
            layer.registry = self.registry

    def extra(self) -> Any:
        return sum(self.registry.losses.values())


class RunningBuffer(Adding):
    """A running statistic of layer 0, which the loss reads."""

    class block(Block):
        def __init__(self, place: int) -> None:
            super().__init__(place)
            self.register_buffer("running", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            with torch.no_grad():
                self.running.mul_(0.5).add_(y.square().mean())
            return y

    def extra(self) -> Any:
        return self.layers[0].running * self.head.weight.square().mean()


@dataclass
class Context:
    total: Any = 0.0
    depth: int = 0
    seen: list[Any] = field(default_factory=list)


class ContextThrough(Net):
    """An object goes through all layers."""

    class block(Block):
        def forward(self, x: Tensor, context: Context) -> Any:  # type: ignore[override]
            y = super().forward(x)
            context.total = context.total + y.square().mean()
            context.depth += 1
            context.seen.append(y.mean())
            return y, context

    def body(self, x: Tensor) -> Any:
        first = context = Context()
        for layer in self.layers:
            x, context = layer(x, context)
        return x + 0.1 * context.total * context.depth + sum(first.seen)


class NewContext(ContextThrough):
    class block(Block):
        def forward(self, x: Tensor, context: Context) -> Any:  # type: ignore[override]
            y = super().forward(x)
            return y, Context(context.total + y.square().mean(), context.depth + 1, [*context.seen, y.mean()])

    def body(self, x: Tensor) -> Any:
        context = Context()
        for layer in self.layers:
            x, context = layer(x, context)
        return x + 0.1 * context.total * context.depth + sum(context.seen)


class OwnNumber(Net):
    """Each layer returns a number of its own."""

    class block(Block):
        def __init__(self, place: int) -> None:
            super().__init__(place)
            self.share = [0.1, 0.2, 0.4, 0.8][place]

        def forward(self, x: Tensor) -> Any:
            return super().forward(x), self.share

    def body(self, x: Tensor) -> Any:
        total: Any = 0.0
        for layer in self.layers:
            x, share = layer(x)
            total = total + share * x.square().mean()
        return x + total


class ValueAsked(Net):
    """Layers add what glue has for them, if its mask has anything."""

    class block(Block):
        def forward(self, x: Tensor, beside: Tensor, mask: Tensor) -> Tensor:
            return super().forward(x + beside if mask.any() else x)

    def body(self, x: Tensor) -> Tensor:
        beside, mask = x, torch.ones(len(x), dtype=torch.bool)
        for layer in self.layers:
            x = layer(x, beside, mask)
        return x


class DeviceKept(Net):
    """An object that goes through the layers keeps what they make, and where that is."""

    class block(Block):
        def forward(self, x: Tensor, cache: Any) -> Tensor:
            x = super().forward(x)
            cache.device, cache.last = x.device, x
            return x

    def body(self, x: Tensor) -> Tensor:
        cache = SimpleNamespace(device=None, last=None)
        for layer in self.layers:
            x = layer(x, cache)
        return x + cache.last.to(cache.device) + torch.ones(H, device=cache.device)


class NumberRead(Net):
    """Each layer returns a number that it reads off its activations."""

    class block(Block):
        def forward(self, x: Tensor) -> Any:
            y = super().forward(x)
            return y, y.detach().abs().max().item()

    def body(self, x: Tensor) -> Any:
        largest = 1.0
        for layer in self.layers:
            x, now = layer(x)
            largest = max(largest, now)
        return x / largest


class CountsRows(Net):
    """Layers keep the number of rows, under a name that other code has, too."""

    rows = 1

    class block(Block):
        rows: int | None = None

        def forward(self, x: Tensor) -> Any:
            if self.rows != len(x):
                self.rows = len(x)
            return super().forward(x)

    def body(self, x: Tensor) -> Any:
        return super().body(x) * self.rows


class Pyramid(nn.Module):
    """Keeps tensors between two calls of its methods."""

    def __init__(self) -> None:
        super().__init__()
        self.levels = [torch.tensor(0)]

    def build(self, x: Tensor) -> None:
        self.levels = [x, x.tanh()]

    def read(self) -> Tensor:
        return torch.stack(self.levels).sum(0)


class Pyramids(Net):
    """A module without parameters keeps the first layer's result for the code after the last."""

    def __init__(self) -> None:
        super().__init__()
        self.pyramid = Pyramid()

    def body(self, x: Tensor) -> Any:
        self.pyramid.build(self.layers[0](x))
        return super().body(x) + self.pyramid.read()


class ByPlace(Net):
    """The place among the layers decides what one does."""

    class block(Block):
        def forward(self, x: Tensor) -> Any:
            y = super().forward(x)
            return (y, y.square().mean()) if self.place % 2 else (y, None)

    def body(self, x: Tensor) -> Any:
        total: Any = 0.0
        for layer in self.layers:
            x, aux = layer(x)
            total = total if aux is None else total + aux
        return x + total


class DetachesByConfig(Net):
    class block(Block):
        def __init__(self, place: int) -> None:
            super().__init__(place)
            self.config = SimpleNamespace(detach=place == 2)

        def forward(self, x: Tensor) -> Any:
            y = super().forward(x)
            return y.detach() if self.config.detach else y


class Twin(nn.Module):
    """A target under no_grad and an online projection, of one class (BYOL)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layers = nn.Embedding(V, H), nn.ModuleList(Block() for _ in range(2))
        self.target, self.online = (nn.Sequential(nn.Linear(H, H), nn.Tanh()) for _ in range(2))

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        with torch.no_grad():
            target = self.target(x)
        return {"loss": 10 * (self.online(x) - target).square().mean()}


class Hooked(Adding):
    """A forward hook inside layer 1 keeps what the loss uses."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[str, Tensor] = {}
        inner = self.layers[1].a
        inner.register_forward_hook(lambda module, args, out: self.kept.__setitem__("a", out.square().mean()))

    def extra(self) -> Any:
        return self.kept["a"]


class Warming(Net):
    """The backbone is detached while a flag says so."""

    frozen = True

    def body(self, x: Tensor) -> Any:
        x = super().body(x)
        return x.detach() if self.frozen else x


class TwoTasks(Net):
    """Which of two heads there is a loss for depends on what the labels hold."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(H, V)

    def forward(self, ids: Tensor, labels: Tensor, others: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        first = self.layers[0](self.embed(ids))
        x = first
        for layer in self.layers[1:]:
            x = layer(x)
        loss = self.head(x).sum() * 0
        if (labels != -100).any():
            loss = loss + self.loss(self.head(x), labels)
        if (others != -100).any():
            loss = loss + self.loss(self.other(x + first), others)
        return {"loss": loss}


def two_tasks(seed: int, first: bool, second: bool) -> dict[str, Tensor]:
    ids, labels = data(seed).values()
    none = torch.full_like(labels, -100)
    return {"ids": ids, "labels": labels if first else none, "others": ids if second else none}


class Routed(Net):
    """Integers of early layers weigh the loss, once that is switched on."""

    use = False

    class block(Block):
        def forward(self, x: Tensor) -> Any:
            y = super().forward(x)
            return y, (y.sum(-1) > 0).long() + 1

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x, routes = self.embed(ids), []
        for layer in self.layers:
            x, route = layer(x)
            routes.append(route)
        loss = F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape)
        return {"loss": (loss * routes[0] if self.use else loss).mean()}


class Probe(Net):
    """The head detaches what it is given: the backbone gets no gradient at all."""

    class Head(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x.detach(), self.weight, self.bias)

    def __init__(self) -> None:
        super().__init__()
        self.head = self.Head(H, V)


class Aliases(Net):
    """A unit returns a tensor and a view of it; glue writes into the one and reads the other."""

    class block(Block):
        def forward(self, x: Tensor) -> Any:
            y = super().forward(x) * 1.0
            return y, y[:, :1]

    def body(self, x: Tensor) -> Any:
        for layer in self.layers:
            x, view = layer(x)
            view.mul_(1.5)
        return x


class ListeningGlue(nn.Module):
    """Glue scales a gradient by a hook on a value that several stages read."""

    class Reader(Block):
        def forward(self, x: Tensor, memory: Tensor) -> Any:  # type: ignore[override]
            return super().forward(x) + self.a(memory)

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(V, H), nn.Linear(H, V)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.readers = nn.ModuleList(self.Reader() for _ in range(4))

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        memory = self.embed(ids)
        for layer in self.layers:
            memory = layer(memory)
        if memory.requires_grad:
            memory.register_hook(lambda gradient: 0.1 * gradient)
        x = torch.ones_like(memory)
        for reader in self.readers:
            x = reader(x, memory)
        return {"loss": F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())}


class ListeningLate(Net):
    """Glue hooks a tensor of its own that the first layer has used, and the last layer uses."""

    def body(self, x: Tensor) -> Any:
        first = x * 2.0
        y = self.layers[0](first)
        if first.requires_grad:
            first.register_hook(lambda gradient: 0.1 * gradient)
        for layer in self.layers[1:]:
            y = layer(y)
        return y + first


class KeepsTwice(Net):
    """Layers keep a number of their last result; the first layer is also called after the last."""

    class block(Block):
        kept: Any = None

        def forward(self, x: Tensor) -> Any:
            y = super().forward(x)
            self.kept = y.square().mean()
            return y

    def body(self, x: Tensor) -> Any:
        return self.layers[0](super().body(x))


class HiddenViews(Net):
    """Layers read and set the tensor in an object; glue reads the first of these tensors again."""

    class block(Block):
        def forward(self, carried: Any) -> Any:
            carried.x = super().forward(carried.x)
            return carried

    def body(self, x: Tensor) -> Any:
        first = x.relu()
        carried = SimpleNamespace(x=first)
        for layer in self.layers:
            carried = layer(carried)
        return carried.x + first


class StepsByLabels(Net):
    """Glue reads a number off the labels, and goes another way by it."""

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = first = self.layers[0](self.embed(ids))
        for layer in self.layers[1:]:
            x = layer(x)
        if labels.sum().item() % 2 == 0:
            x = x + first
        return {"loss": self.loss(self.head(x), labels)}


class Measures(Net):
    """Layers keep a number for people to look at, which nothing reads."""

    class block(Block):
        largest = 0.0

        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            self.largest = float(y.detach().abs().max())
            return y


class MeasuresAndReads(Measures):
    """The same number scales the result."""

    def body(self, x: Tensor) -> Any:
        return super().body(x) / max(layer.largest for layer in self.layers)  # type: ignore[type-var]


class Flags(Net):
    """The first layer keeps whether the ids have no padding (or have some), and glue scales the result by that."""

    padded = False

    class block(Block):
        is_set = False

        def forward(self, x: Tensor, ids: Tensor, padded: bool) -> Any:  # type: ignore[override]
            self.is_set = bool((ids == 0).any()) == padded
            return super().forward(x)

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, ids, self.padded)
        return {"loss": self.loss(self.head(2 * x if self.layers[0].is_set else x), labels)}


class FlagsPadded(Flags):
    padded = True


class FlagsOfAGlobal(Flags):
    """The first layer keeps the flag in a global object, and each later layer is scaled by it."""

    shared = SimpleNamespace(is_set=True)

    class block(Block):
        def forward(self, x: Tensor, ids: Tensor, padded: bool) -> Any:  # type: ignore[override]
            shared = FlagsOfAGlobal.shared
            if self.place == 0:
                shared.is_set = not bool((ids == 0).any())
            return super().forward(2 * x if shared.is_set else x)

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, ids, self.padded)
        return {"loss": self.loss(self.head(x), labels)}


class CountsInAGlobal(Net):
    """All layers count their calls in one global object."""

    stats = SimpleNamespace(calls=0)

    class block(Block):
        def forward(self, x: Tensor) -> Any:
            CountsInAGlobal.stats.calls += 1
            return super().forward(x)


class Counts(Net):
    """Layers are scaled by the number of their calls, or by that of a layer before; glue has code that reads one."""

    readers: ClassVar[dict[int, int]] = {}

    class block(Block):
        calls = 0
        other: Any = ()

        def forward(self, x: Tensor) -> Any:
            self.calls += 1
            return super().forward(x) * sum(layer.calls for layer in self.other or [self])

    def __init__(self) -> None:
        super().__init__()
        for reader, place in self.readers.items():
            self.layers[reader].other = (self.layers[place],)

    def body(self, x: Tensor) -> Any:
        return super().body(x) if self.training else x * self.layers[0].calls


class CountsNear(Counts):
    readers: ClassVar[dict[int, int]] = {1: 0, 3: 2}


class CountsFar(Counts):
    readers: ClassVar[dict[int, int]] = {3: 1}


class ScaledByArray(Net):
    """Glue scales each sample by its number in a numpy array."""

    def forward(self, ids: Tensor, labels: Tensor, scales: Any) -> dict[str, Tensor]:  # type: ignore[override]
        logits = self.head(self.body(self.embed(ids) * torch.from_numpy(scales).view(-1, 1, 1)))
        return {"loss": self.loss(logits, labels)}


def with_array(seed: int) -> dict[str, Any]:
    return {**data(seed), "scales": np.arange(1, 5, dtype=np.float32) + seed}


class SwitchesGradients(Net):
    """A layer runs without gradients, by a switch that the forward turns back on."""

    def body(self, x: Tensor) -> Any:
        x = self.layers[0](x)
        torch.set_grad_enabled(False)
        y = self.layers[1](x)
        torch.set_grad_enabled(True)
        return self.layers[3](self.layers[2](x + y))


class Popping(Net):
    """Layers push onto and pop from one list (a U-Net's skip connections)."""

    class block(Block):
        def forward(self, x: Tensor, skips: list[Tensor]) -> Tensor:  # type: ignore[override]
            if self.place < 2:
                skips.append(x)
            else:
                x = x + skips.pop()
            return super().forward(x)

    def body(self, x: Tensor) -> Any:
        skips: list[Tensor] = []
        for layer in self.layers:
            x = layer(x, skips)
        assert not skips
        return x


class Sized(Net):
    """Each layer returns the number of positions beside its result."""

    class block(Block):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x), x.shape[1]

    def body(self, x: Tensor) -> Any:
        for layer in self.layers:
            x, count = layer(x)
            x = x / count
        return x


class Switched(Net):
    """What layer 0 has made is added at the end once a switch is on that is not the model's."""

    read: Callable[[], Any]

    def body(self, x: Tensor) -> Any:
        first = self.layers[0](x)
        x = super().body(x)
        return x + first if self.read() else x


class ByModule(Switched):
    read = staticmethod(lambda: switches.IS_ON)


class ByThread(Switched):
    read = staticmethod(lambda: switches.LOCAL.is_on)


class ByContext(Switched):
    read = staticmethod(lambda: switches.CONTEXT.get())


class ByFunction(Switched):
    read = staticmethod(lambda: switches.function())


class ByCache(Switched):
    read = staticmethod(lambda: switches.cached()["is_on"])


class ByCount(Switched):
    """By a count of its own forwards."""

    forwards = 0

    def body(self, x: Tensor) -> Any:
        self.forwards += 1
        return super().body(x)

    def read(self) -> Any:  # type: ignore[override]
        return self.forwards > 1


class Counting(Net):
    """The result is scaled by a number that comes from an iterator."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = itertools.count(1)

    def body(self, x: Tensor) -> Any:
        return super().body(x) * next(self.numbers)


class CountingLayers(Net):
    """The same in each layer."""

    class block(Block):
        def __init__(self, place: int) -> None:
            super().__init__(place)
            self.numbers = itertools.cycle([1.0, 0.5, 2.0])

        def forward(self, x: Tensor) -> Any:
            return super().forward(x) * next(self.numbers)


class Yielding(Net):
    """Layers are generators."""

    class block(Block):
        def forward(self, x: Tensor) -> Any:
            y = super().forward(x)
            yield y
            yield y.square().mean()

    def body(self, x: Tensor) -> Any:
        for layer in self.layers:
            x, aux = layer(x)
            x = x + aux
        return x


class CountingArray(Net):
    """A number of steps in a numpy array."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = np.zeros(1)

    def body(self, x: Tensor) -> Any:
        self.steps += 1
        return super().body(x) * float(self.steps[0])


MEASURED = np.zeros(4)


class MeasuringArray(Adding):
    """Layers keep numbers of their activations in an array, which the loss is scaled by."""

    class block(Block):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            MEASURED[self.place] = float(y.detach().square().mean())
            return y

    def extra(self) -> Any:
        return float(MEASURED.sum()) * self.head.weight.square().mean()


class Nested(Net):
    """The number of forwards under way, and what they have made so far, are put back at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.depth, self.sofar = 0, None

    def body(self, x: Tensor) -> Any:
        self.depth += 1
        x = x * self.depth if self.sofar is None else x + self.sofar
        self.sofar = x.detach().mean((0, 1))
        x = super().body(x)
        self.depth, self.sofar = self.depth - 1, None
        return x


def summing() -> tuple[Callable[[Tensor], None], Callable[[], Any]]:
    total: Any = 0.0

    def add(value: Tensor) -> None:
        nonlocal total
        total = total + value

    def take() -> Any:
        nonlocal total
        taken, total = total, 0.0
        return taken

    return add, take


class Taking(Adding):
    """Layers add to a sum in a closure, which is taken and set to zero at the end."""

    class block(Block):
        add: Any

        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            self.add(y.square().mean())
            return y

    def __init__(self) -> None:
        super().__init__()
        add, self.extra = summing()  # type: ignore[method-assign]
        for layer in self.layers:
            layer.add = add


class DetachesOnce(Net):
    """Layer 2 detaches what it is given, in its second forward alone."""

    class block(Block):
        forwards = 0

        def forward(self, x: Tensor) -> Tensor:
            self.forwards += 1
            return super().forward(x.detach() if self.place == 2 and self.forwards == 2 else x)


class SharesMemory(Net):
    """The head's weight is a parameter of its own, in the memory of the embedding's."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = nn.Parameter(self.embed.weight.data)


class OneMemory(Net):
    """Weights of all layers are parts of one memory, and the loss reads each of them."""

    def __init__(self) -> None:
        super().__init__()
        flat = torch.randn(4, H, H) / 4
        for k, layer in enumerate(self.layers):
            layer.a.weight = nn.Parameter(flat[k])

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        penalty = sum((k + 1) * layer.a.weight.square().sum() for k, layer in enumerate(self.layers))  # type: ignore[operator, union-attr]
        return super().loss(logits, labels) + 0.01 * penalty


class Labelled(Net):
    """Layers give their result an attribute, which the next one may read."""

    class block(Block):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x * getattr(x, "gain", 1.0))
            y.gain = 1 + 0.1 * self.place  # type: ignore[attr-defined]
            return y


class Conjugates(Net):
    """Complex numbers that are to be conjugated when they are read."""

    class block(Block):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x.real + 0.5 * x.imag if x.is_complex() else x)
            return torch.complex(y, 0.3 * y).conj()

    def body(self, x: Tensor) -> Any:
        x = super().body(x)
        return x.real - x.imag


class Distributions(Net):
    """Layers return distributions."""

    class block(Block):
        def forward(self, x: Tensor) -> Any:
            y = super().forward(x)
            return torch.distributions.Normal(y, F.softplus(y))

    def body(self, x: Tensor) -> Any:
        apart: Any = 0.0
        for layer in self.layers:
            made = layer(x)
            x = made.mean + 0.1 * made.stddev
            apart = apart + torch.distributions.kl_divergence(made, torch.distributions.Normal(0.0, 1.0)).mean()
        return x + 0.01 * apart


class ReturnsFunction(Net):
    """Layers return functions of their weights."""

    class block(Block):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x), lambda y: F.linear(y, self.a.weight)

    def body(self, x: Tensor) -> Any:
        for layer in self.layers:
            x, function = layer(x)
            x = x + 0.1 * function(x)
        return x


class ByFunctions(Net):
    """Calls its layers by functions in a list, which have them in a closure and in a default."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = [lambda x: self.layers[0](x), *(lambda x, layer=layer: layer(x) for layer in self.layers)]

    def body(self, x: Tensor) -> Any:
        for call in self.calls:
            x = call(x)
        return x


class Seeds(Net):
    """The model seeds torch, and its layers draw noise."""

    class block(Block):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + 0.1 * torch.randn_like(x)

    def body(self, x: Tensor) -> Any:
        torch.manual_seed(7)
        return super().body(x)


class Logits(Net):
    """No loss of its own: logits, and what layer 0 has made."""

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        first = self.layers[0](self.embed(ids))
        x = first
        for layer in self.layers[1:]:
            x = layer(x)
        return {"logits": self.head(x), "first": first}


class Criterion(nn.Module):
    """A mean, or a sum, of a loss with weights, to which something may be added."""

    reduction, adds = "mean", False

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.ones(V))

    def forward(self, outputs: Any, batch: Any) -> Tensor:
        logits, labels = outputs["logits"].flatten(0, 1), batch["labels"].flatten()
        loss = F.cross_entropy(logits, labels, self.weight, reduction=self.reduction)
        return loss + outputs["first"].square().mean() if self.adds else loss


class Ramps(Criterion):
    """Grows with the number of its calls."""

    calls = 0

    def forward(self, outputs: Any, batch: Any) -> Tensor:
        self.calls += 1
        return super().forward(outputs, batch) * min(1.0, self.calls / 3)


COLLECTED: list[Tensor] = []


class Collecting(Logits):
    """Layers append their losses to a list that only they and the criterion know."""

    class block(Block):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            COLLECTED.append(y.square().mean())
            return y


class Collects(Criterion):
    """Adds what layers have appended, and empties the list for the next microbatch."""

    def forward(self, outputs: Any, batch: Any) -> Tensor:
        total = super().forward(outputs, batch) + 0.1 * sum(COLLECTED)
        COLLECTED.clear()
        return total


class Logs(Criterion):
    """Keeps its losses, and their sum."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(()))
        self.losses: list[Tensor] = []

    def forward(self, outputs: Any, batch: Any) -> Tensor:
        loss = super().forward(outputs, batch)
        self.total += loss.detach()
        self.losses.append(loss.detach())
        return loss


class Rigid(Criterion):
    """Takes sequences of one length alone."""

    def forward(self, outputs: Any, batch: Any) -> Tensor:
        losses = F.cross_entropy(outputs["logits"].flatten(0, 1), batch["labels"].flatten(), reduction="none")
        return losses.view(len(batch["labels"]), 6).mean(1).mean()


class Ceiling(Criterion):
    """At most 10, which random results do not reach."""

    def forward(self, outputs: Any, batch: Any) -> Tensor:
        return super().forward(outputs, batch).clamp(max=10.0)


class Anchored(torch.optim.Optimizer):
    """Pulls parameters to where they were, which is in a list beside them."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})
        self.anchors = [p.detach().clone() for group in self.param_groups for p in group["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        parameters = (p for group in self.param_groups for p in group["params"])
        for parameter, anchor in zip(parameters, self.anchors):
            if parameter.grad is not None:
                parameter.sub_(0.1 * (parameter.grad + parameter - anchor))


class NormsLate(torch.optim.SGD):
    """Divides gradients by their norm from the fifth step on."""

    steps = 0

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        self.steps += 1
        if self.steps > 4:
            torch.nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 0.01)
        return super().step(closure)


class Lent(Net):
    """Each layer runs with weights that are mixed from its own and the next one's."""

    def body(self, x: Tensor) -> Any:
        for layer, other in zip(self.layers, [*self.layers[1:], self.layers[0]]):
            theirs = dict(other.named_parameters())
            mixed = {name: 0.7 * p + 0.3 * theirs[name] for name, p in layer.named_parameters()}
            x = torch.func.functional_call(layer, mixed, (x,))
        return x


class Swapped(Net):
    """Each layer runs with the weights of another one, half a model away."""

    def body(self, x: Tensor) -> Any:
        for layer, other in zip(self.layers, [*self.layers[2:], *self.layers[:2]]):
            x = torch.func.functional_call(layer, dict(other.named_parameters()), (x,))
        return x


class SharedNorm(Net):
    """All layers share one batch norm."""

    class block(Block):
        norm: nn.BatchNorm1d

        def forward(self, x: Tensor) -> Any:
            return super().forward(self.norm(x.transpose(1, 2)).transpose(1, 2))

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            layer.norm = self.layers[0].norm if layer.place else nn.BatchNorm1d(H)


class Recurrent(Net):
    """Layers with a hidden and a cell state, which go on from batch to batch as tuples in a list."""

    class block(Block):
        def forward(self, x: Tensor, state: Any) -> Any:  # type: ignore[override]
            hidden, cell = (x, x) if state is None else state
            y = super().forward(x + 0.1 * hidden)
            return y, (y, torch.tanh(cell + y))

    state: Any = None

    def body(self, x: Tensor) -> Any:
        states = []
        for layer in self.layers:
            x, state = layer(x, None if self.state is None else self.state[layer.place])
            states.append(tuple(part.detach() for part in state))
        self.state = states
        return x


class Optional(Block):
    """Keeps None where it has no norm."""

    def __init__(self, place: int) -> None:
        super().__init__(place)
        self.norms = nn.ModuleList([None, nn.LayerNorm(H)])  # type: ignore[list-item]

    def forward(self, x: Tensor) -> Any:
        for norm in self.norms:
            x = x if norm is None else norm(x)
        return super().forward(x)


class WithOptional(Net):
    block = Optional


class Slotted:
    __slots__ = ("scale", "steps")

    def __init__(self) -> None:
        self.steps = 0


class Fixed(Slotted):
    """Has a property in the place of the base's slot."""

    @property
    def scale(self) -> tuple[float, int]:  # type: ignore[override]
        return 2.0, self.steps


class Scaled(Block):
    def __init__(self, place: int) -> None:
        super().__init__(place)
        self.settings = Fixed()

    def forward(self, x: Tensor) -> Any:
        self.settings.steps += 1
        return super().forward(x) * self.settings.scale[0]


class WithSlots(Net):
    block = Scaled


class Clamping(Block):
    def forward(self, x: Tensor) -> Any:
        with torch.no_grad():
            self.a.weight.clamp_(-0.1, 0.1)
        return super().forward(x)


class Clamped(Net):
    block = Clamping
