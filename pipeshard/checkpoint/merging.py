"""Merging: the adapters of a model, merged into its weights stage by stage."""

import copy
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from pipeshard.checkpoint.load import ties_name
from pipeshard.checkpoint.to_sequential import additions
from pipeshard.distributed.collectives import whole
from pipeshard.engine.fsdp import unsharded_classes
from pipeshard.errors import CheckpointError, explained, summary
from pipeshard.hf import is_of_peft
from pipeshard.split.base_names import base_names
from pipeshard.split.ties import first_names, names_of

WHOLE = "Call pipeshard.to_sequential(model, rank=0) on every rank. On rank 0, it returns the whole model: call its"


def merged(module: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Merge the active adapters into a stage's `tensors` (keyed by full name), and return the merged tensors, keyed by
    their names in the base model. A module that the active adapter trains in full (`modules_to_save`) is replaced by
    this adapter's copy. `module` and `tensors` do not change. Call it on all ranks, since sharded layers are gathered.

    Raises CheckpointError for adapters that cannot be merged into a weight, and for adapters of a weight that is tied
    to another weight.
    """
    if any(config.is_prompt_learning for config in module.peft_config.values()):
        raise CheckpointError(
            "merge=True does not support prompt learning (such as prompt or prefix tuning), which adapts no weights. "
            f"{WHOLE} save_pretrained"
        )
    tied = {name for names in names_of(module).values() if len(names) > 1 for name in names}
    made = dict(tensors)
    for path, layer in _layers(module).items():
        weights = _of_base(layer, path)
        if shared := sorted(tied.intersection(weights)):
            raise CheckpointError(
                f"merge=True would merge an adapter into {shared[0]}, which is tied to another weight. "
                f"{WHOLE} merge_and_unload"
            )
        if own := tensors.keys() & weights.keys():
            values = _merged(layer, path)
            made |= {name: values[name].to(tensors[name].device) for name in own}
    return _under_plain_names(module, made)


def _under_plain_names(module: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a stage's `tensors` under all of their names in the base model, except names that the architecture ties to
    another name of the same tensor. A trained copy takes the name of its original. The original keeps only its other
    names: for example, the original embedding may still be the weight of the head."""
    first, is_tied = first_names(module), ties_name(module)
    current = {plain: full for full, plain in base_names(module, active=True).items()}
    names = dict[str, list[str]]()
    for plain, full in current.items():
        names.setdefault(first.get(full, full), []).append(plain)
    made = dict[str, Tensor]()
    for full, tensor in tensors.items():
        of_tensor = names.get(first.get(full, full), [])
        untied = [name for name in of_tensor if not is_tied(name)]
        made |= {name: tensor.clone() if k else tensor for k, name in enumerate(untied or of_tensor)}
    return made


def _layers(module: nn.Module) -> dict[str, Any]:
    """The layers with adapters, by path with a trailing dot. Of nested adapter layers, only the outermost is
    included."""
    layers = {f"{path}.": layer for path, layer in module.named_modules() if is_of_peft(layer, "BaseTunerLayer")}
    return {path: layer for path, layer in layers.items() if not path.endswith("base_layer.")}


def _of_base(layer: Any, path: str) -> dict[str, nn.Parameter]:
    """The parameters of the base layer of the adapter layer `layer`, by full name."""
    while is_of_peft(layer, "BaseTunerLayer"):
        layer, path = layer.base_layer, f"{path}base_layer."
    return {f"{path}{name}": parameter for name, parameter in layer.named_parameters()}


def _merged(layer: Any, path: str) -> dict[str, Tensor]:
    """Merge the adapters with peft in an unsharded copy of the layer. Returns the parameters of the copy's base layer,
    by full name."""
    memo: dict[int, Any] = {
        id(parameter): nn.Parameter(whole(parameter.detach()), requires_grad=False)
        for parameter in layer.parameters()
        if isinstance(parameter, DTensor)
    }
    memo |= {id(addition): addition for module in layer.modules() for addition in additions(module)}
    with (
        explained(
            lambda error: CheckpointError(
                f"merge=True: peft cannot merge the adapters of {path[:-1]} ({summary(error)}). Save the adapters with "
                "booster.save_lora_as_pretrained instead"
            )
        ),
        unsharded_classes(layer),
    ):
        inner = made = copy.deepcopy(layer, memo)
        while is_of_peft(inner, "BaseTunerLayer"):
            inner.merge(safe_merge=True)
            inner = inner.base_layer
    return {name: parameter.detach() for name, parameter in _of_base(made, path).items()}
