"""Target: a runtime that takes the stages of a model and trains them."""

import importlib
import inspect
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, TypeVar

from pipeshard.errors import ConfigurationError

if TYPE_CHECKING:
    from pipeshard.build import Split

PACKAGE = "pipeshard.targets"  # with the shipped ones


class Target:
    """What `pipeshard.build(..., target=name, **options)` hands a model's stages to; made with the options.

    Attributes:
        whole_output: whether the last stage returns the model's output, and not the loss where there is one.
        shards_itself: whether it takes the model as it is, with the partition alone.
    """

    whole_output = False
    shards_itself = False

    def placed(self, num_stages: int) -> tuple[Sequence[int], int]:
        """The process that each stage is on, and which one this is; by default all are on this one."""
        return [0] * num_stages, 0

    def take(self, split: "Split") -> Any:
        """What `build` returns."""
        raise ConfigurationError(f"{type(self).__name__} has no method take(split)")


Kind = TypeVar("Kind", bound=type[Target])
_KINDS: dict[str | None, type[Target]] = {}


def register_target(name: str | None, kind: Kind) -> Kind:
    """Let `build(..., target=name)` use this class; ConfigurationError for a name that is taken, or for no Target."""
    if not (isinstance(kind, type) and issubclass(kind, Target)):
        raise ConfigurationError(f"register_target({name!r}, ...) wants a subclass of Target, not {kind!r}")
    importlib.import_module(PACKAGE)  # whose names are taken
    if _KINDS.get(name, kind) is not kind:
        raise ConfigurationError(f"there is a target {name!r} already, {_KINDS[name].__name__}: choose another name")
    _KINDS[name] = kind
    return kind


def find_target(name: str | None, options: Mapping[str, Any]) -> Target:
    """The target of this name, with these options; ConfigurationError where there is none, or it has none of these."""
    importlib.import_module(PACKAGE)
    if name not in _KINDS:
        names = sorted(known for known in _KINDS if known is not None)
        close = get_close_matches(str(name), names, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(map(repr, names))} and None"
        raise ConfigurationError(f"target={name!r} is unknown: {hint} (others are added by pipeshard.register_target)")
    kind = _KINDS[name]
    try:
        inspect.signature(kind).bind(**options)
    except TypeError as error:
        raise ConfigurationError(f"target={name!r} takes {kind.__name__}{inspect.signature(kind)}: {error}") from error
    return kind(**options)
