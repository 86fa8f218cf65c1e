"""PipelineModule: a model that is a list of layers. Each layer is called with the output of the previous layer.

In DeepSpeed's `PipelineModule`, each rank builds its part of the list, and only DeepSpeed's engine can train the model.
This class takes the same arguments, but is an ordinary module: one process can run all layers, and the plugin cuts the
model between layers like any other model.
"""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn

from pipeshard.config import PipelineHints
from pipeshard.errors import ConfigurationError, UsageError
from pipeshard.graph.units import Interception
from pipeshard.layers.specs import Function, LayerSpec, TiedLayerSpec, tie
from pipeshard.split.partition import Cuts, check_partition
from pipeshard.split.skeleton import build_layer, skeleton, skeletons
from pipeshard.split.ties import names_of


class PipelineModule(nn.Module):
    """A sequence of layers: `model(inputs, *labels)` returns the output of the last layer.

    The first layer receives `inputs`, and every other layer receives the output of the previous layer. Tuples are not
    unpacked, so each layer receives a single argument. Layers are never cut. A layer given by a spec is on meta until
    it is built. `booster.boost` builds the layer on the ranks that hold it. Without `boost`, any of the following
    builds the layer: `build()`, the first call of the model, a move to a device, `load_state_dict` or `apply`. Without
    `seed_layers`, the layer's initial values depend only on the layer's index in the list and on
    `torch.initial_seed()` (in a pipeline, the seed of the first rank).

    Args:
        layers: an iterable (such as an nn.Sequential or nn.ModuleList) of modules, LayerSpecs, TiedLayerSpecs, and
            callables with one argument (functions, lambdas, partials, bound methods, ...).
        num_stages: the number of stages (ranks x chunks) that a pipeline must have. None allows any number.
        topology: must be None; the plugin assigns the ranks.
        activation_checkpoint_func: must be None; pipeshard recomputes layers itself.
        loss_fn: a function `loss_fn(output, labels)` that returns a scalar. `boost` uses it as the criterion if no
            other criterion is passed. Batches are then `(inputs, labels)`, or `(inputs,)` without labels.
        seed_layers: call `seed_fn(base_seed + k)` before layer k is built from a spec. The default `seed_fn` is
            torch.manual_seed.
        partition_method: like `partition` of PipelinePlugin. A plugin's `partition` other than "auto" takes precedence.
        activation_checkpoint_interval: if positive, each layer in a pipeline keeps only its input and runs again in the
            backward pass. Has no effect if the plugin's arguments select layers to recompute.
        checkpointable_layers: names of classes. With `activation_checkpoint_interval`, only layers of these classes run
            again.
        dynamic_shape: ignored, since every batch may have a different shape.

    Raises ConfigurationError if an entry is not a layer, if a constructor does not run on meta, if parameters cannot be
    tied, or if any other argument is invalid.
    """

    def __init__(
        self,
        layers: Iterable[Any],
        num_stages: int | None = None,
        topology: None = None,
        loss_fn: Callable[..., Tensor] | None = None,
        seed_layers: bool = False,
        seed_fn: Callable[[int], Any] | None = None,
        base_seed: int = 1234,
        partition_method: Cuts = "parameters",
        activation_checkpoint_interval: int = 0,
        activation_checkpoint_func: None = None,
        checkpointable_layers: Sequence[str] | None = None,
        dynamic_shape: bool = False,
    ) -> None:
        super().__init__()
        if num_stages is not None and (not isinstance(num_stages, int) or num_stages < 1):
            raise ConfigurationError(f"num_stages must be a positive integer, got {num_stages!r}")
        if not isinstance(activation_checkpoint_interval, int) or activation_checkpoint_interval < 0:
            raise ConfigurationError(
                "activation_checkpoint_interval must be 0 (no recomputation) or a positive integer (recompute every "
                f"layer), got {activation_checkpoint_interval!r}"
            )
        _refuse_unsupported(topology, activation_checkpoint_func, checkpointable_layers)
        check_partition(partition_method)
        self.num_stages, self.loss_fn, self.partition_method = num_stages, loss_fn, partition_method
        self.activation_checkpoint_interval = activation_checkpoint_interval
        self.checkpointable_layers = checkpointable_layers
        entries = _layer_entries(layers)
        modules = nn.ModuleList()
        for place, entry in enumerate(entries):
            seed = functools.partial(seed_fn or _seed_torch, base_seed + place) if seed_layers else None
            modules.append(_layer(place, entry, seed, self))
        tie(modules, {place: spec for place, spec in enumerate(entries) if isinstance(spec, TiedLayerSpec)})
        self.layers = _Uncut(
            Function(spec.forward_fn, place, layer, owner=self)
            if isinstance(spec, TiedLayerSpec) and spec.forward_fn
            else layer
            for place, (spec, layer) in enumerate(zip(entries, modules, strict=True))
        )

    @property
    def pipeline_hints(self) -> PipelineHints:
        criterion = None if self.loss_fn is None else LabelledLoss(self.loss_fn)
        return PipelineHints(
            num_stages=self.num_stages,
            partition=self.partition_method,
            recompute=self.activation_checkpoint_interval > 0,
            criterion=criterion,
            checkpointable=self.checkpointable_layers,
        )

    def forward(self, inputs: Any, *labels: Any) -> Any:
        """Return the last layer's output. Labels are ignored: only the loss uses them."""
        if not self._is_cut:
            self.build()
        for layer in self.layers:
            inputs = layer(inputs)
        return inputs

    def build(self) -> Self:
        """Build all layers that have not been built yet, and return the module itself.

        Raises UsageError if this module is a stage of a pipeline, and ConfigurationError if a built layer differs from
        its meta version.
        """
        if self._is_cut:
            raise UsageError(
                "this model was split into stages, so it lacks the layers of other ranks: call "
                "pipeshard.to_sequential(model) to get a model with all layers"
            )
        for module in skeletons(self):
            build_layer(module, torch.initial_seed() % 2**63)
        return self

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Build all layers, then load `state_dict`, as nn.Module does. For a tied parameter, the state dict may contain
        only one of the parameter's names."""
        state = dict(state_dict)
        for names in names_of(self.build()).values():
            present = [name for name in names if name in state]
            for name in names if present else ():
                state.setdefault(name, state[present[0]])
        return super().load_state_dict(state, *args, **kwargs)

    def apply(self, fn: Callable[[nn.Module], Any]) -> Self:
        """Build all layers, then call `fn` on each module, as nn.Module does. `fn` often sets initial values, which
        would be lost if it wrote them to meta tensors."""
        if not self._is_cut:
            self.build()
        return super().apply(fn)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Build all layers before a move to another device. A change of dtype works on meta and builds no layers."""
        if skeletons(self):
            try:
                fn(torch.empty(0, device="meta"))
            except NotImplementedError:  # from torch: a meta tensor cannot be copied to a device
                self.build()
        return super()._apply(fn, recurse)

    @property
    def _is_cut(self) -> bool:
        """Whether a trace or a stage intercepts the calls of the layers."""
        return any(isinstance(vars(layer).get("forward"), Interception) for layer in self.layers)


class _Uncut(nn.ModuleList):
    pipeshard_uncut = True


class LabelledLoss:
    """A criterion that calls `loss_fn(output, labels)` for batches `(inputs, labels)`."""

    def __init__(self, loss_fn: Callable[..., Tensor]) -> None:
        self.loss_fn = loss_fn

    def __call__(self, output: Any, batch: Any) -> Tensor:
        return self.loss_fn(output, *batch[1:])

    def of_batch(self, output: Any, data: Sequence[Any]) -> Tensor | None:
        """The loss, or None for a batch without labels."""
        return self(output, data) if len(data) > 1 else None


def _layer_entries(layers: Any) -> list[Any]:
    """The entries of `layers`, in order. If `layers` is a Sequential, its members are the entries, as in DeepSpeed."""
    if isinstance(layers, nn.Sequential):
        hooked = any(vars(layers)[name] for name in vars(layers) if name.endswith("_hooks"))
        if hooked or type(layers).forward is not nn.Sequential.forward or "forward" in vars(layers):
            raise ConfigurationError(
                f"the {type(layers).__name__} has {'hooks' if hooked else 'its own forward'}, which would not run: "
                "PipelineModule would run only the members of this module, as layers. Put the module into a list to "
                "make it one layer: PipelineModule([module])"
            )
    iterable = isinstance(layers, Iterable) and not isinstance(layers, str | Mapping | nn.ModuleDict | Tensor)
    entries = list(layers) if iterable else []
    if not entries:
        raise ConfigurationError(
            f"PipelineModule requires a list or another iterable of at least one layer, got {layers!r}"
        )
    return entries


def _refuse_unsupported(topology: Any, checkpoint_func: Any, checkpointable: Any) -> None:
    """Raise ConfigurationError for DeepSpeed arguments that are not supported, and for an invalid `checkpointable`."""
    if topology is not None:
        raise ConfigurationError(
            f"topology={topology!r} is not supported: omit topology, and set PipelinePlugin(pp_size=, dp_size=, "
            "tp_size=) instead. If this value is the loss function, pass it as loss_fn=...: the third positional "
            "argument is topology, as in DeepSpeed"
        )
    if checkpoint_func is not None:
        raise ConfigurationError(
            f"activation_checkpoint_func={checkpoint_func!r} is not supported: pipeshard recomputes layers itself, bit "
            "for bit. Omit this argument"
        )
    if isinstance(checkpointable, str) or not all(isinstance(name, str) for name in checkpointable or ()):
        raise ConfigurationError(f"checkpointable_layers must be a list of class names, got {checkpointable!r}")


def _layer(place: int, entry: Any, seed: Callable[[], Any] | None, owner: nn.Module) -> nn.Module:
    """The module for `entry`, an entry of the list of `owner`. For a spec, a module on meta that is built later."""
    if isinstance(entry, LayerSpec):
        return skeleton(entry.construct, functools.partial(entry.build, seed), place, repr(entry))
    if isinstance(entry, nn.Module):
        return entry
    if isinstance(entry, type) and issubclass(entry, nn.Module):
        name = entry.__name__
        raise ConfigurationError(
            f"layer {place} is the class {name}, not an instance: pass LayerSpec({name}, ...) or {name}(...)"
        )
    if not callable(entry):
        raise ConfigurationError(
            f"layer {place} has type {type(entry).__name__}, which is not callable: pass a module, a LayerSpec, or a "
            "function of one argument"
        )
    return Function(entry, place, owner=owner)


def _seed_torch(number: int) -> None:
    """Call torch.manual_seed. Unlike torch.manual_seed, this function can always be pickled: torch.compile replaces
    torch.manual_seed with a function that cannot."""
    torch.manual_seed(number)
