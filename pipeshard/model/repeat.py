"""Repeat: unit calls that are run again by checkpoints of the model's own, around its units, in glue."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from pipeshard.model.randomness import Randomness

MOST = 1 << 16  # calls that are kept where no step has an end: under another runtime


def own_checkpoint() -> object:
    """What stands for the torch.utils.checkpoint (without use_reentrant) that runs now, if there is one."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return hooks[0] if hooks and getattr(hooks[0], "__qualname__", "").startswith("_checkpoint_hook.") else None


class Groups:
    """The calls that such checkpoints run again, the first and the last of each."""

    def __init__(self) -> None:
        self.spans: list[tuple[int, int]] = []
        self._last: object = None

    def note(self, call: int) -> None:
        """This call is made now."""
        now = own_checkpoint()
        if now is not None:
            first = self.spans.pop()[0] if now is self._last else call
            self.spans.append((first, call))
        self._last = now


@dataclass(slots=True)
class Repeat:
    """What a second run of a call takes: what brings the generators to where they were before the first and after it,
    and its result where another stage ran it."""

    before: Callable[[], object] = tuple
    after: Callable[[], object] = tuple
    result: Any = None


class Repeats:
    """Those of the calls that are made now. A checkpoint brings torch's generators back to where it began, and each
    microbatch has come to a unit with them in another state, so that this tells which call is repeated."""

    def __init__(self, randomness: Randomness) -> None:
        self.randomness = randomness
        self._kept: dict[tuple[str, bytes], Repeat] = {}

    def of(self, unit: str, reentrant: bool) -> Repeat:
        """That of a call of `unit` which is made now, to be filled. A `reentrant` checkpoint may be around it, too: it
        switches gradients off, and what is called from there on is on one stage."""
        repeat = Repeat()
        if own_checkpoint() is not None or (reentrant and not torch.is_grad_enabled()):
            self._kept[unit, self.randomness.state()] = repeat
            if len(self._kept) > MOST:
                del self._kept[next(iter(self._kept))]
        return repeat

    def pop(self, unit: str) -> Repeat | None:
        """That of the call that is repeated now; None for a user's own call."""
        return self._kept.pop((unit, self.randomness.state()), None)

    def clear(self) -> None:
        self._kept.clear()
