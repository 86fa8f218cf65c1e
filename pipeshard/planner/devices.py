"""Devices: the memory and the speed of each rank of a pipeline, and the links between the ranks."""

import itertools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Self, TypeVar

from pipeshard.errors import ConfigurationError, counted, hint
from pipeshard.planner.memory import Memory, format_bytes, parse_bytes

PREFIXES = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
BANDWIDTHS = {f"{prefix}B/s": size for prefix, size in PREFIXES.items()}
BANDWIDTHS |= {f"{prefix}bit/s": size / 8 for prefix, size in PREFIXES.items()}
LATENCIES = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}
T = TypeVar("T")


@dataclass(frozen=True)
class Link:
    """A connection between two ranks. `bandwidth` is in bytes per second in each direction. `latency` is the latency of
    a message, in seconds."""

    bandwidth: float
    latency: float = 0.0

    @classmethod
    def parse(cls, text: Any) -> Self:
        """Parse a string such as "50GB/s,10us" or "400Gbit/s". Return a Link unchanged. Raises ConfigurationError for
        other values."""
        if isinstance(text, cls):
            return text
        bandwidth, comma, latency = str(text).partition(",")
        link = cls(
            _quantity(text, "bandwidth", bandwidth, BANDWIDTHS),
            _quantity(text, "latency", latency, LATENCIES) if comma else 0.0,
        )
        if link.bandwidth <= 0 or link.latency < 0:
            raise ConfigurationError(f"link={text!r}: the bandwidth must be positive, and the latency non-negative")
        return link

    def time(self, size: float) -> float:
        """The time of a message of `size` bytes, in seconds."""
        return self.latency + size / self.bandwidth

    def __str__(self) -> str:
        return f"{format_bytes(self.bandwidth)}/s" + (f", {self.latency * 1e6:.4g} us" if self.latency else "")


def _quantity(link: Any, name: str, text: str, units: Mapping[str, float]) -> float:
    found = re.fullmatch(r"\s*([-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?)\s*(\D*?)\s*", text)
    if found is None:
        raise ConfigurationError(f"link={link!r}: {text!r} is not a {name}. Write a link as 50GB/s or 50GB/s,10us")
    number, unit = found.groups()
    if unit not in units:
        near = hint(unit if units is LATENCIES else unit[:1].upper() + unit[1:], units)
        raise ConfigurationError(f"link={link!r}: {unit!r} is not a unit of {name}: {near}")
    return float(number) * units[unit]


def _joined(links: Sequence[Link]) -> Link:
    """The link that is equivalent to these links in sequence."""
    return Link(min(link.bandwidth for link in links), sum(link.latency for link in links))


@dataclass(frozen=True)
class Devices:
    """The devices of a pipeline's ranks.

    `memory` contains the limit of each rank in bytes, and is empty without limits. `speeds` contains the relative speed
    of each rank. `links` contains either a single link, which connects any two ranks, or one link from each rank to the
    next. Without links, messages take no time.
    """

    memory: tuple[int, ...]
    speeds: tuple[float, ...]
    links: tuple[Link, ...] = ()

    @classmethod
    def parse(
        cls, ranks: int, memory: Any = None, speeds: Any = None, links: Any = None, limit: str = "device_memory"
    ) -> Self:
        """Parse the arguments of `plan` that describe devices. Errors use `limit` as the name of the argument `memory`.
        Raises ConfigurationError for invalid values."""
        return cls(
            () if memory is None else _each(limit, memory, ranks, partial(parse_bytes, name=limit)),
            (1.0,) * ranks if speeds is None else _each("device_speed", speeds, ranks, _speed),
            () if links is None else _links(links, ranks),
        )

    def __str__(self) -> str:
        parts = []
        if self.are_unequal:
            memory = map(format_bytes, self.memory) if self.memory else [""] * len(self.speeds)
            ranks = zip(memory, self.speeds, strict=True)
            parts += [
                f"rank {rank}: {size}{', ' if size else ''}speed {speed:g}" for rank, (size, speed) in enumerate(ranks)
            ]
        if self.links:
            parts.append(f"messages: {'; '.join(map(str, self.links))}")
        return "; ".join(parts)

    @property
    def are_unequal(self) -> bool:
        return len({*self.memory}) > 1 or len({*self.speeds}) > 1

    @property
    def partition(self) -> str:
        """The argument `partition` of PipelinePlugin for these speeds."""
        return f"speed:{','.join(map(str, self.speeds))}"

    @property
    def limits(self) -> str:
        """The memory limits of the ranks as text. If all limits are the same, the text contains only one value."""
        return ", ".join(map(format_bytes, self.memory if len({*self.memory}) > 1 else self.memory[:1]))

    def excess(self, memory: Sequence[Memory]) -> list[int]:
        """The bytes by which each rank exceeds its limit. Without limits, the total bytes of each rank."""
        return [each.total - limit for each, limit in zip(memory, self.memory or (0,) * len(memory), strict=True)]

    def transfers(self, placement: Sequence[int], sizes: Iterable[tuple[float, float]]) -> dict[str, list[float]]:
        """The durations of messages for `simulate_parts`, in seconds: `latency` for the message to each stage, and
        `returned` for the gradients that the stage sends back. Returns {} without links.

        For each stage, `sizes` contains the bytes of these two messages. A message passes through all links between its
        two ranks.
        """
        if not self.links:
            return {}
        times: dict[str, list[float]] = {"latency": [], "returned": []}
        for ends, pair in zip(itertools.pairwise([placement[0], *placement]), sizes, strict=True):
            passed = self.links if len(self.links) == 1 else self.links[min(ends) : max(ends)]
            for name, size in zip(times, pair, strict=True):
                times[name].append(_joined(passed).time(size) if size else 0.0)
        return times

    def of_stages(self, pp_size: int, dp_size: int, tp_size: int) -> "Devices":
        """The devices of a pipeline's stages, if these are the devices of all ranks of a job. A stage has the smallest
        memory and the lowest speed of its ranks. The link to the next stage has the lowest bandwidth and the highest
        latency of the links from the stage's ranks to the next stage."""
        replicas = [
            [(d * pp_size + s) * tp_size + t for d in range(dp_size) for t in range(tp_size)] for s in range(pp_size)
        ]
        links = self.links
        if len(links) > 1:
            ways = [[_joined(links[rank : rank + tp_size]) for rank in ranks] for ranks in replicas[:-1]]
            links = tuple(Link(min(way.bandwidth for way in each), max(way.latency for way in each)) for each in ways)
        return Devices(
            tuple(min(self.memory[rank] for rank in ranks) for ranks in replicas if self.memory),
            tuple(min(self.speeds[rank] for rank in ranks) for ranks in replicas),
            links,
        )


def _each(name: str, given: Any, ranks: int, parse: Callable[[Any], T]) -> tuple[T, ...]:
    """Parse one value for all ranks, or one value per rank. Returns the value of each rank."""
    values = given.split(",") if isinstance(given, str) else given if isinstance(given, Sequence) else [given]
    if len(values) not in (1, ranks):
        raise ConfigurationError(
            f"{name}={given!r} has {len(values)} values for {counted(ranks, 'rank')}: pass one value for all "
            "ranks, or one per rank"
        )
    return tuple(map(parse, values)) * (ranks // len(values))


def _speed(value: Any) -> float:
    try:
        speed = float(value)
    except (TypeError, ValueError):
        speed = math.nan
    if not 0 < speed < math.inf:
        raise ConfigurationError(
            f"device_speed: {value!r} is not a positive number. Pass one number per rank, as in 1.0,0.6"
        )
    return speed


def _links(given: Any, ranks: int) -> tuple[Link, ...]:
    links = tuple(map(Link.parse, given if isinstance(given, list | tuple) else [given]))
    if len(links) not in (1, ranks - 1):
        several = f", or {ranks - 1} links, one from each rank to the next" if ranks > 2 else ""
        raise ConfigurationError(
            f"link has {len(links)} links for {counted(ranks, 'rank')}: pass one link for all ranks{several}"
        )
    return links
