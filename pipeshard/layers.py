"""Layers: a model as a list of modules, specs of modules, and functions, each given what the last returned."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pipeshard.errors import ConfigurationError, UsageError
from pipeshard.model.function import Function
from pipeshard.model.partition import Cuts
from pipeshard.model.skeleton import build, skeleton, skeletons
from pipeshard.model.ties import names_of
from pipeshard.model.units import Interception
from pipeshard.model.weights import check_partition
from pipeshard.specs import LayerSpec, TiedLayerSpec, tie
from pipeshard.wishes import Wishes


class PipelineModule(nn.Module):
    """The layers one after the other: `model(inputs, *labels)` is what the last one returns.

    Each gets what the one before it returned as one argument (a tuple stays one), the first gets `inputs`. No layer is
    cut. A layer of a spec is known by its shapes alone, on meta, until it is built: behind `booster.boost` by the ranks
    that hold it, else by `build()`, the first call, a move to a device or `load_state_dict`. Its values depend on
    `torch.initial_seed()` (in a pipeline the first rank's) and its place in the list only.

    Args:
        layers: modules, LayerSpecs, TiedLayerSpecs, and functions, lambdas, partials, bound methods or other callables
            of one argument.
        num_stages: refuse a pipeline of another number of stages (times the chunks on each process).
        loss_fn: `loss_fn(output, labels)`, a scalar; the criterion where `boost` gets none. Batches are then
            `(inputs, labels)`; there is no loss of `(inputs,)`.
        partition_method: as the `partition` of PipelinePlugin, which wins unless it is "auto".
        activation_checkpoint_interval: k > 0: every k layers keep what the first of them got, and run again in the
            backward pass; in a pipeline each layer does, unless the plugin says which.
        seed_layers: layer k of a spec is built after `seed_fn(base_seed + k)` instead, by default torch.manual_seed.

    Raises ConfigurationError for what is no layer, a constructor that does not run on meta, parameters that cannot be
    tied, or any other argument that cannot work.
    """

    def __init__(
        self,
        layers: Sequence[Any],
        num_stages: int | None = None,
        loss_fn: Callable[..., Tensor] | None = None,
        partition_method: Cuts = "parameters",
        activation_checkpoint_interval: int = 0,
        seed_layers: bool = False,
        base_seed: int = 1234,
        seed_fn: Callable[[int], Any] | None = None,
    ) -> None:
        super().__init__()
        _check(layers, num_stages, activation_checkpoint_interval)
        check_partition(partition_method)
        self.num_stages, self.loss_fn, self.partition_method = num_stages, loss_fn, partition_method
        self.activation_checkpoint_interval = activation_checkpoint_interval
        seeds = functools.partial(_seeded, seed_fn, base_seed) if seed_layers else None
        made = [_layer(place, entry, seeds) for place, entry in enumerate(layers)]
        tie({place: (spec, made[place]) for place, spec in enumerate(layers) if isinstance(spec, TiedLayerSpec)})
        self.layers = _Uncut(
            Function(spec.forward_fn, place, layer) if isinstance(spec, TiedLayerSpec) and spec.forward_fn else layer
            for place, (spec, layer) in enumerate(zip(layers, made, strict=True))
        )

    @property
    def pipeline_wishes(self) -> Wishes:
        criterion = None if self.loss_fn is None else LabelledLoss(self.loss_fn)
        return Wishes(self.num_stages, self.partition_method, self.activation_checkpoint_interval > 0, criterion)

    def forward(self, inputs: Any, *labels: Any) -> Any:
        """The last layer's output. Labels are for the loss alone."""
        if not self._is_cut:
            self.build()
        interval = self.activation_checkpoint_interval
        if self._is_cut or not interval or not torch.is_grad_enabled():
            return self._run(0, len(self.layers), inputs)
        for start in range(0, len(self.layers), interval):
            inputs = checkpoint(self._run, start, start + interval, inputs, use_reentrant=False)
        return inputs

    def build(self) -> Self:
        """Build here, for real, every layer that is not yet; returns the module itself.

        Raises UsageError for a stage of a pipeline, ConfigurationError for a layer that is not as it was on meta.
        """
        if self._is_cut:
            raise UsageError("this is one stage of a pipeline: pipeshard.to_sequential(model) has all layers built")
        for module in skeletons(self):
            build(module, torch.initial_seed() % 2**63)
        return self

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """As every module's, into layers that are built; of a tie one of its names is enough."""
        state = dict(state_dict)
        for names in names_of(self.build()).values():
            given = next((state[name] for name in names if name in state), None)
            if given is not None:
                state.update((name, state.get(name, given)) for name in names)
        return super().load_state_dict(state, *args, **kwargs)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Another dtype needs no values, another device does."""
        if skeletons(self):
            try:
                fn(torch.empty(0, device="meta"))
            except NotImplementedError:  # torch's own: what is on meta cannot be copied to a device
                self.build()
        return super()._apply(fn, recurse)

    def _run(self, start: int, end: int, x: Any) -> Any:
        for layer in list(self.layers)[start:end]:
            x = layer(x)
        return x

    @property
    def _is_cut(self) -> bool:
        """Whether a trace or a stage answers the calls of the layers."""
        return any(isinstance(vars(layer).get("forward"), Interception) for layer in self.layers)


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


def _check(layers: Any, num_stages: Any, interval: Any) -> None:
    if not isinstance(layers, Sequence) or not layers:
        raise ConfigurationError(f"PipelineModule wants a list of one layer or more, not {layers!r}")
    if num_stages is not None and (not isinstance(num_stages, int) or num_stages < 1):
        raise ConfigurationError(f"num_stages={num_stages!r} is no positive integer")
    if not isinstance(interval, int) or interval < 0:
        raise ConfigurationError(
            f"activation_checkpoint_interval={interval!r}: every k > 0 layers are recomputed, 0 none"
        )


def _layer(place: int, entry: Any, seeds: Callable[[int, LayerSpec], nn.Module] | None) -> nn.Module:
    if isinstance(entry, LayerSpec):
        make = entry.build if seeds is None else functools.partial(seeds, place, entry)
        return skeleton(entry.construct, make, place, repr(entry))
    if isinstance(entry, nn.Module):
        return entry
    if isinstance(entry, type) and issubclass(entry, nn.Module):
        name = entry.__name__
        raise ConfigurationError(f"layer {place} is the class {name}: give LayerSpec({name}, ...) or {name}(...)")
    if not callable(entry):
        raise ConfigurationError(
            f"layer {place} is a {type(entry).__name__}: give a module, a LayerSpec, or a function of one argument"
        )
    return Function(entry, place)


def _seeded(seed_fn: Callable[[int], Any] | None, base_seed: int, place: int, spec: LayerSpec) -> nn.Module:
    (seed_fn or torch.manual_seed)(base_seed + place)
    return spec.build()
