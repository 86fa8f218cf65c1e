"""Specs: layers that are built later (from a class and its arguments), and layers that call a function."""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FunctionType, MethodType
from typing import Any

from torch import nn

from pipeshard.errors import ConfigurationError, UsageError
from pipeshard.split.ties import share_weights


class LayerSpec:
    """A layer that is built later, with `typename(*module_args, **module_kwargs)`. Only the ranks that hold the layer
    build it.

    Attributes:
        builds: the number of times this process has built the layer with allocated parameters.

    Raises ConfigurationError if `typename` is not callable, and UsageError if `typename` is a module, or if an argument
    is a module with parameters or persistent buffers.
    """

    def __init__(self, typename: Callable[..., nn.Module], *module_args: Any, **module_kwargs: Any) -> None:
        if not callable(typename):
            raise ConfigurationError(
                f"LayerSpec requires a module class or a function that builds a module, got {typename!r}: pass a class "
                "or function, followed by its arguments"
            )
        modules = [value for value in (typename, *module_args, *module_kwargs.values()) if isinstance(value, nn.Module)]
        if built := next((module for module in modules if module is typename or module.state_dict()), None):
            raise UsageError(
                f"LayerSpec got an instance of {type(built).__name__}, but LayerSpec builds the whole layer itself, on "
                "the rank that holds the layer: pass a class and its arguments, as in LayerSpec(nn.Linear, 8, 8), or "
                "put the layer directly into the list of layers, as a module"
            )
        self.typename, self.module_args, self.module_kwargs = typename, module_args, module_kwargs
        self.builds = 0

    def __repr__(self) -> str:
        return f"{type(self).__name__}({getattr(self.typename, '__name__', self.typename)})"

    def build(self, seed: Callable[[], Any] | None = None) -> nn.Module:
        """Call `seed()` if it is given, then build the layer with allocated and initialized parameters."""
        self.builds += 1
        if seed is not None:
            seed()
        return self.construct()

    def construct(self) -> nn.Module:
        """Build the layer without seeding or counting. PipelineModule calls this method on meta to find the layer's
        shapes."""
        return self.typename(*self.module_args, **self.module_kwargs)


class TiedLayerSpec(LayerSpec):
    """A LayerSpec with parameters that are tied to the parameters of all other TiedLayerSpecs with the same `key`.

    Each occurrence is a separate module. `tied_weight_attr` is one parameter name or a list of names, which may contain
    dots. These parameters are tied, in order, to the parameters that the first occurrence names, and have the first
    occurrence's values. All other parameters are separate. With `forward_fn`, the layer returns `forward_fn(module, x)`
    instead of `module(x)`.
    """

    def __init__(
        self,
        key: str,
        typename: Callable[..., nn.Module],
        *module_args: Any,
        forward_fn: Callable[[Any, Any], Any] | None = None,
        tied_weight_attr: str | Sequence[str] = "weight",
        **module_kwargs: Any,
    ) -> None:
        super().__init__(typename, *module_args, **module_kwargs)
        self.key, self.forward_fn = key, forward_fn
        self.tied_weight_attr = [tied_weight_attr] if isinstance(tied_weight_attr, str) else list(tied_weight_attr)


def tie(layers: nn.ModuleList, specs: Mapping[int, TiedLayerSpec]) -> None:
    """For each key, tie the parameters of all occurrences to the parameters of the first occurrence. `specs` maps each
    TiedLayerSpec's index in `layers` to the spec.

    Raises ConfigurationError if a module lacks a parameter with a given name, or if the number of names, a shape or a
    dtype differs from the first occurrence.
    """
    originals: dict[str, list[str]] = {}
    for place, spec in specs.items():
        names = [f"{place}.{name}" for name in spec.tied_weight_attr]
        first = originals.setdefault(spec.key, names)
        if len(names) != len(first):
            raise ConfigurationError(
                f"layers with TiedLayerSpec({spec.key!r}) name different numbers of parameters: {first} and {names}. "
                "Pass the same number of names in each tied_weight_attr"
            )
        share_weights(layers, list(zip(first, names, strict=True)), argument=f"TiedLayerSpec({spec.key!r})")


class Function(nn.Module):
    """A layer that calls `fn(x)` or, with a module, `fn(module, x)`.

    The layer registers the modules to which `fn` refers (a bound method's instance, arguments of a partial), so that
    their parameters are found. `owner`, the model that contains the layer, is not registered, even if the layer is a
    method of the model. Raises ConfigurationError for modules and parameters in closures or defaults, and for
    parameters outside modules, since none of these can be registered.
    """

    def __init__(
        self, fn: Callable[..., Any], place: int, module: nn.Module | None = None, owner: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.fn, self.module = fn, module
        self.place = place  # makes each function its own kind of unit: the trace runs one unit of each kind
        carried = [value for value in _carried(fn) if isinstance(value, nn.Module) and value is not owner]
        self.carried = nn.ModuleList(dict.fromkeys(carried)) if carried else None
        bare = [value for value in _carried(fn) if isinstance(value, nn.Parameter)]
        hidden = [value for value in _closed_over(fn) if isinstance(value, nn.Module | nn.Parameter)]
        if bare or hidden:
            where = "in its closure or defaults" if hidden else "as an argument or attribute"
            raise ConfigurationError(
                f"layer {place}, the function {_function_name(fn)}, uses an instance of "
                f"{type([*hidden, *bare][0]).__name__} {where}, where pipeshard cannot track it. "
                "Instead of the function, pass a bound method of an nn.Module that holds the parameters, "
                "functools.partial with this module as an argument, or TiedLayerSpec(..., forward_fn=...)"
            )

    @property
    def pipeshard_type(self) -> str:
        """The name of the module's class. Without a module, the name of the function, or of the callable object's
        class."""
        return _function_name(self.fn) if self.module is None else type(self.module).__name__

    def forward(self, x: Any) -> Any:
        return self.fn(x) if self.module is None else self.fn(self.module, x)

    def extra_repr(self) -> str:
        return _function_name(self.fn)


def _function_name(fn: Any) -> str:
    if isinstance(fn, functools.partial):
        return _function_name(fn.func)
    return str(getattr(fn, "__name__", type(fn).__name__))


def _carried(fn: Any) -> Iterator[Any]:
    """The objects that are copied together with a callable."""
    if isinstance(fn, nn.Module):
        yield fn
    elif isinstance(fn, functools.partial):
        yield from (*_carried(fn.func), *fn.args, *fn.keywords.values())
    elif isinstance(fn, MethodType):
        yield from _carried(fn.__self__)
    elif isinstance(getattr(fn, "__self__", None), nn.Parameter):  # a tensor's bound method, such as weight.mul
        yield fn.__self__
    elif not isinstance(fn, FunctionType | type):
        yield from getattr(fn, "__dict__", {}).values()


def _closed_over(fn: Any) -> Iterator[Any]:
    """The objects in a function's closure and defaults, which are not copied together with the function."""
    if isinstance(fn, functools.partial | MethodType):
        yield from _closed_over(fn.func if isinstance(fn, functools.partial) else fn.__func__)
    elif isinstance(fn, FunctionType):
        cells = zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=False)
        # The __class__ of a method, for super(), is also a cell. A cell that names the function itself may be empty.
        yield from (cell.cell_contents for name, cell in cells if name != fn.__name__)
        yield from (*(fn.__defaults__ or ()), *(fn.__kwdefaults__ or {}).values())
