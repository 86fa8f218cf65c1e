"""DeepSpeed: the stages as the layers of its PipelineModule, which its engine trains."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeshard.errors import BatchError, ConfigurationError, TraceError, UsageError
from pipeshard.interop.build import Split, Target, register_target
from pipeshard.interop.stage_module import StageModule, as_keywords


class StageLayer(nn.Module):
    """A stage for DeepSpeed, whose layers get one tuple of tensors: the microbatch itself goes along in its front."""

    def __init__(self, stage: StageModule, names: Sequence[str]) -> None:
        super().__init__()
        self.stage, self.names = stage, tuple(names)

    def forward(self, inputs: Tensor | tuple[Tensor, ...]) -> Any:
        tensors = inputs if isinstance(inputs, tuple) else (inputs,)
        batch, received = tensors[: len(self.names)], tensors[len(self.names) :]
        result = self.stage(*received, **dict(zip(self.names, batch, strict=True)))
        return result if self.stage.is_last else (*batch, *result)


class Tied(nn.Module):
    """One tied weight of a stage, for DeepSpeed to broadcast it and to add up its gradients; what flows passes by."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, inputs: Any) -> Any:
        return inputs


def loss_of_stage(output: Tensor, labels: Any) -> Tensor:
    """The last stage has computed it."""
    return output


class Deepspeed(Target):
    """`target="deepspeed"`: a PipelineModule for `deepspeed.initialize(model=...)`; ranks that are more than stages are
    replicas. Each stage is built by its own ranks, and is one layer; tied weights are TiedLayerSpecs beside them.

    Its engine is fed with `module.microbatches(batches)`, an iterator over microbatches as the model takes them: a
    dict, all tensors. `microbatch_names` are those of the batch that `build` was given.

    Args:
        module: further arguments of PipelineModule (dynamic_shape, ...).
    """

    def __init__(self, **module: Any) -> None:
        self.module = module

    def placed(self, num_stages: int) -> tuple[Sequence[int], int]:
        size = dist.get_world_size() if dist.is_initialized() else 0
        if not size or size % num_stages:
            raise ConfigurationError(
                f"{num_stages} stages and a world of {size} processes: call deepspeed.init_distributed first, in a "
                "world that is a multiple of the stages"
            )
        return range(num_stages), dist.get_rank() // (size // num_stages)

    def take(self, split: Split) -> Any:
        from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec  # type: ignore[import-not-found]

        if split.flow.loss is None:
            raise UsageError("there is no loss to train on: give the batch labels, or pass a criterion")
        batch = as_keywords(split.model, split.sample.data)
        _refuse_unsendable(split, batch)
        tied = split.policy.shared_names()
        layers: list[Any] = []
        parts = [0]
        for index in range(split.num_stages):
            for name in [name for name, stages in tied.items() if index in stages]:
                weight = split.model.get_parameter(name) if index in split.stages else None
                layers.append(TiedLayerSpec(name.replace(".", "/"), Tied, weight, tied_weight_attr="weight"))
            layers.append(LayerSpec(StageLayer, split.stages.get(index), tuple(batch)))
            parts.append(len(layers))

        class StagesModule(PipelineModule):
            """DeepSpeed's PipelineModule, cut where the stages end."""

            microbatch_names = tuple(batch)

            def _partition_layers(self, method: str = "") -> None:
                self.parts = parts
                self._set_bounds(start=parts[self.stage_id], stop=parts[self.stage_id + 1])

            def microbatches(self, batches: Iterable[Mapping[str, Tensor]]) -> Iterator[Any]:
                return _microbatches(self.microbatch_names, batches)

        return StagesModule(layers=layers, num_stages=split.num_stages, loss_fn=loss_of_stage, **self.module)


def _microbatches(names: Sequence[str], batches: Iterable[Mapping[str, Tensor]]) -> Iterator[Any]:
    for batch in batches:
        if set(batch) != set(names):
            raise BatchError(f"a microbatch has {sorted(batch)}, but the model was built for {sorted(names)}")
        yield tuple(batch[name] for name in names), torch.zeros(())


def _refuse_unsendable(split: Split, batch: Mapping[str, Any]) -> None:
    """DeepSpeed sends tensors alone, and a gradient back for each that has floating numbers."""
    for name, value in batch.items():
        if not isinstance(value, Tensor) or (value.is_floating_point() and split.num_stages > 1):
            what = f"a {type(value).__name__}" if not isinstance(value, Tensor) else f"a tensor of {value.dtype}"
            raise BatchError(
                f"the batch's {name} is {what}: between DeepSpeed's stages only tensors of whole numbers can go along "
                "with activations. Use target='torch' or 'colossalai'"
            )
    for stage, boundary in enumerate(split.live):
        for value in boundary.values:
            spec, unit = split.flow.spec(value), split.flow.calls[value.call].unit
            if spec.dtype.is_floating_point and value not in boundary.gradients:
                raise TraceError(
                    f"what unit {unit} makes enters stage {stage} and gets no gradient, but DeepSpeed sends one back "
                    "for every floating tensor: cut elsewhere, or use target='torch' or 'colossalai'"
                )


register_target("deepspeed", Deepspeed)
