"""Pipeline modules: a model as a list of layers, each called with the result of the previous one.

DeepSpeed's `PipelineModule` is such a list, of which each rank builds its part, and which only its own engine trains.
This class takes the same arguments and is also an ordinary module: one process runs all layers, and the plugin cuts
between them as between those of any other model.
"""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pipeshard.config import PipelineHints
from pipeshard.errors import ConfigurationError, UsageError
from pipeshard.graph.units import Interception
from pipeshard.layers.specs import Function, LayerSpec, TiedLayerSpec, tie
from pipeshard.split.initialize import build, skeleton, skeletons
from pipeshard.split.partition import Cuts, check_partition
from pipeshard.split.ties import names_of


class PipelineModule(nn.Module):
    """The layers one after the other: `model(inputs, *labels)` is the result of the last one.

    Each receives the result of the previous one as one argument (a tuple stays one), the first receives `inputs`.
    Layers are never cut. A layer of a spec exists only as shapes on meta until it is built: in `booster.boost` on the
    ranks that hold it, otherwise by `build()`, the first call, a move to a device or `load_state_dict`. Its values
    depend only on `torch.initial_seed()` (in a pipeline the first rank's) and its place in the list.

    Args:
        layers: modules, LayerSpecs, TiedLayerSpecs, and functions, lambdas, partials, bound methods or other callables
            of one argument, in any iterable: also an nn.Sequential or nn.ModuleList.
        num_stages: refuse a pipeline of another number of stages (times the chunks on each process).
        topology: None; the plugin places the ranks.
        activation_checkpoint_func: None; recompute is pipeshard's own.
        loss_fn: `loss_fn(output, labels)`, a scalar; the criterion if `boost` receives none. Batches are then
            `(inputs, labels)`; `(inputs,)` has none.
        seed_layers: layer k of a spec is built after `seed_fn(base_seed + k)` instead, by default torch.manual_seed.
        partition_method: like `partition` of PipelinePlugin, which overrides it unless it is "auto".
        activation_checkpoint_interval: k > 0: every k layers keep only the input of the first, and run again in the
            backward pass; in a pipeline each layer does, unless the plugin selects them.
        checkpointable_layers: names of classes: with the interval, only layers of these run again.
        dynamic_shape: ignored; batches of any shape always run.

    Raises ConfigurationError for an entry that is not a layer, a constructor that does not run on meta, parameters that
    cannot be tied, or any other argument that cannot work.
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
                "activation_checkpoint_interval must be 0, or k > 0 to recompute every k layers, got "
                f"{activation_checkpoint_interval!r}"
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
            modules.append(_layer(place, entry, seed))
        tie(modules, {place: spec for place, spec in enumerate(entries) if isinstance(spec, TiedLayerSpec)})
        self.layers = _Uncut(
            Function(spec.forward_fn, place, layer) if isinstance(spec, TiedLayerSpec) and spec.forward_fn else layer
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
        """The last layer's output. Labels are only for the loss."""
        if not self._is_cut:
            self.build()
        interval = self.activation_checkpoint_interval
        if self._is_cut or not interval or not torch.is_grad_enabled():
            return _run_layers(self.layers, inputs)
        layers, allowed = list(self.layers), self.checkpointable_layers
        for start in range(0, len(layers), interval):
            part = layers[start : start + interval]
            if allowed is None or {type(layer).__name__ for layer in part} <= set(allowed):
                inputs = checkpoint(_run_layers, part, inputs, use_reentrant=False)
            else:
                inputs = _run_layers(part, inputs)
        return inputs

    def build(self) -> Self:
        """Build every layer that is not built yet; returns the module itself.

        Raises UsageError for a stage of a pipeline, ConfigurationError for a layer that differs from its form on meta.
        """
        if self._is_cut:
            raise UsageError(
                "this is one stage of a pipeline: call pipeshard.to_sequential(model) for a model with all layers"
            )
        for module in skeletons(self):
            build(module, torch.initial_seed() % 2**63)
        return self

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """As for any module, into built layers; one name of a tie suffices."""
        state = dict(state_dict)
        for names in names_of(self.build()).values():
            present = [name for name in names if name in state]
            for name in names if present else ():
                state.setdefault(name, state[present[0]])
        return super().load_state_dict(state, *args, **kwargs)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Another dtype needs no values, another device does."""
        if skeletons(self):
            try:
                fn(torch.empty(0, device="meta"))
            except NotImplementedError:  # torch's own: what is on meta cannot be copied to a device
                self.build()
        return super()._apply(fn, recurse)

    @property
    def _is_cut(self) -> bool:
        """Whether a trace or a stage answers the calls of the layers."""
        return any(isinstance(vars(layer).get("forward"), Interception) for layer in self.layers)


def _run_layers(layers: Iterable[nn.Module], x: Any) -> Any:
    for layer in layers:
        x = layer(x)
    return x


class _Uncut(nn.ModuleList):
    pipeshard_uncut = True


class LabelledLoss:
    """`loss_fn(output, labels)` of batches `(inputs, labels)` as a criterion."""

    def __init__(self, loss_fn: Callable[..., Tensor]) -> None:
        self.loss_fn = loss_fn

    def __call__(self, output: Any, batch: Any) -> Tensor:
        return self.loss_fn(output, *batch[1:])

    def of_batch(self, output: Any, data: Sequence[Any]) -> Tensor | None:
        """The loss; None for a batch without labels."""
        return self(output, data) if len(data) > 1 else None


def _layer_entries(layers: Any) -> list[Any]:
    """The entries of the layers, in order; of a Sequential its members, as in DeepSpeed."""
    if isinstance(layers, nn.Sequential):
        hooked = any(vars(layers)[name] for name in vars(layers) if name.endswith("_hooks"))
        if hooked or type(layers).forward is not nn.Sequential.forward or "forward" in vars(layers):
            raise ConfigurationError(
                f"the {type(layers).__name__} has {'hooks' if hooked else 'a forward'} of its own, which would not "
                "run, because its members become the layers. Pass it as one layer: PipelineModule([...])"
            )
    iterable = isinstance(layers, Iterable) and not isinstance(layers, str | Mapping | nn.ModuleDict | Tensor)
    entries = list(layers) if iterable else []
    if not entries:
        raise ConfigurationError(
            f"PipelineModule requires a list or another iterable of at least one layer, got {layers!r}"
        )
    return entries


def _refuse_unsupported(topology: Any, checkpoint_func: Any, checkpointable: Any) -> None:
    """Refuse DeepSpeed's arguments that are not supported, or mean something else here."""
    if topology is not None:
        raise ConfigurationError(
            f"topology={topology!r} is not supported: set PipelinePlugin(pp_size=, dp_size=, tp_size=) instead, and "
            "omit topology (loss_fn is the fourth argument, as in DeepSpeed)"
        )
    if checkpoint_func is not None:
        raise ConfigurationError(
            f"activation_checkpoint_func={checkpoint_func!r} is not supported: pipeshard recomputes layers itself, bit "
            "for bit. Omit this argument"
        )
    if isinstance(checkpointable, str) or not all(isinstance(name, str) for name in checkpointable or ()):
        raise ConfigurationError(f"checkpointable_layers must be a list of class names, got {checkpointable!r}")


def _layer(place: int, entry: Any, seed: Callable[[], Any] | None) -> nn.Module:
    """The module for an entry of the list; the module of a spec is not built yet."""
    if isinstance(entry, LayerSpec):
        return skeleton(entry.construct, functools.partial(entry.build, seed), place, repr(entry))
    if isinstance(entry, nn.Module):
        return entry
    if isinstance(entry, type) and issubclass(entry, nn.Module):
        name = entry.__name__
        raise ConfigurationError(f"layer {place} is the class {name}: pass LayerSpec({name}, ...) or {name}(...)")
    if not callable(entry):
        raise ConfigurationError(
            f"layer {place} is a {type(entry).__name__}: pass a module, a LayerSpec, or a function of one argument"
        )
    return Function(entry, place)


def _seed_torch(number: int) -> None:
    """torch.compile replaces torch's own function, which then cannot be pickled."""
    torch.manual_seed(number)
