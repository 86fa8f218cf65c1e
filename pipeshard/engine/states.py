"""States: the state of a boosted optimizer, which a loop reads and writes by the model's parameters."""

import copy
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any


class States(MutableMapping[Any, Any]):
    """The state of a boosted optimizer, as `optimizer.state` returns it.

    A parameter of the model is a key for the state of the tensor that the optimizer updates. For a parameter that this
    rank does not update, `states[parameter]` is a new dict, which is not kept: `state_dict` requires that all keys are
    in the groups.

    Attributes:
        states: the state of the inner optimizer.
    """

    def __init__(self, states: Any, key: Callable[[Any], Any]) -> None:
        self.states, self._key = states, key

    def __getitem__(self, key: Any) -> Any:
        return {} if (own := self._key(key)) is None else self.states[own]

    def __setitem__(self, key: Any, value: Any) -> None:
        if (own := self._key(key)) is not None:
            self.states[own] = value

    def __delitem__(self, key: Any) -> None:
        if (own := self._key(key)) is not None:
            del self.states[own]

    def __contains__(self, key: Any) -> bool:
        return self._key(key) in self.states

    def __iter__(self) -> Iterator[Any]:
        return iter(self.states)

    def __len__(self) -> int:
        return len(self.states)

    def __repr__(self) -> str:
        return repr(self.states)

    def get(self, key: Any, default: Any = None) -> Any:
        return self.states.get(self._key(key), default)

    def pop(self, key: Any, *default: Any) -> Any:
        own = self._key(key)
        return self.states.pop(own, *default) if own is not None else default[0] if default else {}

    def copy(self) -> Any:
        return self.states.copy()

    def __reduce__(self) -> tuple[Any, ...]:
        return copy.copy, (self.states,)

    def setdefault(self, key: Any, default: Any = None) -> Any:
        return default if (own := self._key(key)) is None else self.states.setdefault(own, default)
