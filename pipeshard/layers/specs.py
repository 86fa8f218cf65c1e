"""Specs: how the layers of a list are made, and which of their parameters are one."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from pipeshard.errors import ConfigurationError, hint
from pipeshard.split.ties import kept_tied, put_parameter


class LayerSpec:
    """How a layer is made: `typename(*module_args, **module_kwargs)`, when and where it is needed.

    Attributes:
        builds: how often this process has built it for real.

    Raises ConfigurationError for a `typename` that cannot be called.
    """

    def __init__(self, typename: Callable[..., nn.Module], *module_args: Any, **module_kwargs: Any) -> None:
        if not callable(typename):
            raise ConfigurationError(f"LayerSpec({typename!r}): give a class of modules, and then its arguments")
        self.typename, self.module_args, self.module_kwargs = typename, module_args, module_kwargs
        self.builds = 0

    def __repr__(self) -> str:
        return f"{type(self).__name__}({getattr(self.typename, '__name__', self.typename)})"

    def build(self) -> nn.Module:
        """The layer, with memory and values."""
        self.builds += 1
        return self.construct()

    def construct(self) -> nn.Module:
        """The same, without being counted: on meta only shapes are wanted."""
        return self.typename(*self.module_args, **self.module_kwargs)


class TiedLayerSpec(LayerSpec):
    """A LayerSpec of which some parameters are one with those of all others of the same `key`.

    Each occurrence is a module of its own. The parameters that it names in `tied_weight_attr` (one or a list, dotted
    names too) are, one by one, those that the first occurrence names, with its values; everything else is its own. With
    `forward_fn` the layer returns `forward_fn(module, x)` instead of `module(x)`.
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


def tie(tied: Mapping[int, tuple[TiedLayerSpec, nn.Module]]) -> None:
    """Put the parameters of each key's first occurrence into the others; `tied` has specs and modules by place.

    Raises ConfigurationError for names that a module does not have, and for parameters of other shapes.
    """
    originals: dict[str, tuple[int, list[str], list[nn.Parameter]]] = {}
    for place, (spec, module) in tied.items():
        own = [_parameter(module, name, place, spec) for name in spec.tied_weight_attr]
        first, names, parameters = originals.setdefault(spec.key, (place, spec.tied_weight_attr, own))
        where = f"layers {first} and {place}, tied by {spec.key!r}"
        if len(own) != len(parameters):
            raise ConfigurationError(f"{where}, name different numbers of parameters: {names}, {spec.tied_weight_attr}")
        for name, parameter, original in zip(spec.tied_weight_attr, own, parameters, strict=True):
            if (parameter.shape, parameter.dtype) != (original.shape, original.dtype):
                raise ConfigurationError(
                    f"{where}, have {name} of shape {tuple(original.shape)} {original.dtype} and of shape "
                    f"{tuple(parameter.shape)} {parameter.dtype}: tie parameters of one shape"
                )
            with kept_tied(module):
                put_parameter(module, name, original)


def _parameter(module: nn.Module, name: str, place: int, spec: TiedLayerSpec) -> nn.Parameter:
    parameters = dict(module.named_parameters(remove_duplicate=False))
    if name not in parameters:
        raise ConfigurationError(
            f"layer {place}, {spec!r} with the key {spec.key!r}, ties {name}, which is none of the parameters of "
            f"{type(module).__name__}: {hint(name, parameters)}"
        )
    return parameters[name]
