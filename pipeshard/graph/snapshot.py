"""Snapshot: all that code can reach from some objects and change, and what has become of it since.

What a unit or the glue leaves behind is found by difference: everything within reach is walked before, and compared
after. So there is no list of the ways in which models do that. Copies would not do: hooks, generators and shared
objects have to stay the same objects.
"""

import operator
from collections import deque
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipeshard.graph.places import (
    MISSING,
    PLAIN,
    Path,
    Step,
    constants_of,
    content_of,
    is_same,
    live_dict,
    put,
    put_content,
    ways_to_hold,
)

MOST = 200_000  # objects that are walked


class Change(NamedTuple):
    """At `path` from the root, `holder[key]` was `before` and is `now`; with `before is now`, a tensor that was written
    to. The whole content of a list or set counts as one place, of which `key` is None."""

    path: Path
    holder: Any
    key: Any
    before: Any
    now: Any

    @property
    def is_of_list(self) -> bool:
        """Whether it is the whole content of a list or a set."""
        return self.key is None and not isinstance(self.holder, MutableMapping)


class Holder(NamedTuple):
    """Something whose content can be changed, with that content, and the live dict in which it is, if it is in one."""

    path: Path
    object: Any
    how: str
    content: Any
    live: dict[Any, Any] | None
    values: list[Any]


class Snapshot:
    """All that is reached from `roots`, as it is now. The name of each root begins its paths.

    Attributes:
        paths: where each holder is, by its address.
        tensors: the place of each tensor (path, holder, key), the tensor, and how often it had been written to.
    """

    def __init__(self, roots: Mapping[str, Any]) -> None:
        self.holders: list[Holder] = []
        self.paths: dict[int, Path] = {}
        self.tensors: list[tuple[Path, Any, Any, Tensor, int]] = []
        self._seen: dict[int, Any] = {}  # kept alive: another object would get the address
        with torch._C.DisableTorchFunction():  # nothing here is an operator, and hundreds of tensors are looked at
            self._walk(deque(((Step("root", name),), root) for name, root in roots.items()))
        self._empty = [holder.live for holder in self.holders if holder.live is not None and not holder.values]
        self._full = [holder for holder in self.holders if holder.live is None or holder.values]

    def changes(self) -> Iterator[Change]:
        """What differs now, in the order of the walk: places with another value, then tensors that were written to."""
        yield from self.replaced()
        for path, holder, key, tensor, version in self.tensors:
            if tensor._version != version:
                yield Change(path, holder, key, tensor, tensor)

    def replaced(self, same: Callable[[Any, Any], bool] = is_same) -> Iterator[Change]:
        """The places that have another value now. Fast where nothing differs: in every step a whole model is compared.

        `same` is whether two values that are not the same object count as equal.
        """
        for path, holder, how, content, live, values in self.holders if any(self._empty) else self._full:
            if live is not None and len(live) == len(values) and all(map(operator.is_, live.values(), values)):
                continue
            now = content_of(holder, how)
            if not isinstance(now, dict):
                if len(now) != len(content) or not all(map(same, content, now)):
                    yield Change(path, holder, None, content, now)
                continue
            for key in dict.fromkeys((*content, *now)):
                old, new = content.get(key, MISSING), now.get(key, MISSING)
                if old is not new and not same(old, new):
                    yield Change((*path, _step(how, key)), holder, key, old, new)

    def restore(self) -> None:
        """Put back what every place held; the values of tensors are not looked at."""
        for change in list(self.replaced()):
            if change.is_of_list:
                put_content(change.holder, change.before)
            else:
                put(change.holder, change.path[-1].how, change.key, change.before)

    def _walk(self, queue: deque[tuple[Path, Any]]) -> None:
        seen = self._seen
        while queue and len(seen) < MOST:
            path, value = queue.popleft()
            if isinstance(value, PLAIN) or id(value) in seen:
                continue
            seen[id(value)] = value
            for how in ways_to_hold(value):
                self.paths[id(value)] = path
                content = content_of(value, how)
                live = live_dict(value, how)
                self.holders.append(Holder(path, value, how, content, live, list(live.values()) if live else []))
                for key, entry in content.items() if isinstance(content, dict) else enumerate(content):
                    if isinstance(entry, Tensor):
                        if id(entry) not in seen and not entry.is_inference():
                            seen[id(entry)] = entry
                            self.tensors.append(((*path, _step(how, key)), value, key, entry, entry._version))
                    elif not isinstance(entry, PLAIN):
                        queue.append(((*path, _step(how, key)), entry))
            queue.extend(((*path, step), child) for step, child in constants_of(value))


def _step(how: str, key: Any) -> Step:
    """From a holder to its entry `key`."""
    return Step("item" if how == "list" else how, key)
