"""Function: a callable that is no module, as a module without tensors of its own."""

import functools
from collections.abc import Callable, Iterator
from types import FunctionType, MethodType
from typing import Any

from torch import nn

from pipeshard.errors import ConfigurationError


class Function(nn.Module):
    """Calls `fn(x)`, or `fn(module, x)` where it has a module.

    Modules that the callable carries with it (a method's own, arguments of a partial) are registered, so that their
    parameters are known. Raises ConfigurationError for parameters that could not be: those of a closure, or bare ones.
    """

    def __init__(self, fn: Callable[..., Any], place: int, module: nn.Module | None = None) -> None:
        super().__init__()
        self.fn, self.module = fn, module
        self.place = place  # no two functions are units of one kind, of which the trace would run only one
        carried = [value for value in _carried(fn) if isinstance(value, nn.Module)]
        self.carried = nn.ModuleList(dict.fromkeys(carried)) if carried else None
        self._refuse_hidden()

    @property
    def pipeshard_type(self) -> str:
        """The name of the function, or of the class whose instance is called."""
        return _name(self.fn) if self.module is None else type(self.module).__name__

    def forward(self, x: Any) -> Any:
        return self.fn(x) if self.module is None else self.fn(self.module, x)

    def extra_repr(self) -> str:
        return _name(self.fn)

    def _refuse_hidden(self) -> None:
        bare = [value for value in _carried(self.fn) if isinstance(value, nn.Parameter)]
        hidden = [value for value in _closed_over(self.fn) if isinstance(value, nn.Module | nn.Parameter)]
        for value in (*bare, *hidden):
            raise ConfigurationError(
                f"layer {self.place}, the function {_name(self.fn)}, brings a {type(value).__name__} along "
                f"{'in its closure or defaults' if hidden else 'as an argument'}, where it cannot be followed: "
                "use a method of the module, functools.partial with the module as an argument, or "
                "TiedLayerSpec(..., forward_fn=...)"
            )


def _name(fn: Any) -> str:
    if isinstance(fn, functools.partial):
        return _name(fn.func)
    return str(getattr(fn, "__name__", type(fn).__name__))


def _carried(fn: Any) -> Iterator[Any]:
    """What is copied with a callable."""
    if isinstance(fn, nn.Module):
        yield fn
    elif isinstance(fn, functools.partial):
        yield from (*_carried(fn.func), *fn.args, *fn.keywords.values())
    elif isinstance(fn, MethodType):
        yield from _carried(fn.__self__)
    elif isinstance(getattr(fn, "__self__", None), nn.Parameter):  # a tensor's own method, as weight.mul
        yield fn.__self__
    elif not isinstance(fn, FunctionType | type):
        yield from getattr(fn, "__dict__", {}).values()


def _closed_over(fn: Any) -> Iterator[Any]:
    """What a function keeps that is not copied with it."""
    if isinstance(fn, functools.partial | MethodType):
        yield from _closed_over(fn.func if isinstance(fn, functools.partial) else fn.__func__)
    elif isinstance(fn, FunctionType):
        cells = zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=False)
        # a method's __class__, for super(), is a cell too; a cell that names the function itself may be empty
        yield from (cell.cell_contents for name, cell in cells if name != fn.__name__)
        yield from (*(fn.__defaults__ or ()), *(fn.__kwdefaults__ or {}).values())
