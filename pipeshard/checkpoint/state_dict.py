"""State dict: a model's own tensors by name, and the entries that its hooks or overrides convert in `state_dict`."""

from collections.abc import Container
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from pipeshard.errors import CheckpointError
from pipeshard.private import EXTRA_STATE


def own_entries(model: nn.Module) -> dict[str, Any]:
    """The model's own parameters and persistent buffers under all their names, and its extra states, in the order of
    `state_dict`. Hooks and overrides (`_save_to_state_dict`, `state_dict`) are not called, since they may convert,
    rename or omit a tensor: training continues with the model's own tensors."""
    own: dict[str, Any] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        volatile = module._non_persistent_buffers_set
        buffers = {name: buffer for name, buffer in module._buffers.items() if name not in volatile}
        tensors = {**module._parameters, **buffers}
        own |= {f"{prefix}{name}": tensor for name, tensor in tensors.items() if tensor is not None}
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            own[f"{prefix}{EXTRA_STATE}"] = module.get_extra_state()
    return own


def given_entries(model: nn.Module) -> dict[str, Any]:
    """The result of the model's `state_dict`, with its hooks and overrides. Does not call a method that the user has
    set on the instance."""
    return type(model).state_dict(model, keep_vars=True)


def refuse_converted(model: nn.Module, held: Container[str] | None = None) -> None:
    """Raise CheckpointError if hooks or overrides add or rename an entry of the state dict, or convert one of the
    tensors `held` (default: all). A stage cannot call hooks, since they would convert tensors that it has released.
    Entries that hooks omit are accepted: the checkpoint contains them."""
    own, given = own_entries(model), given_entries(model)
    added = [name for name in given if name not in own]
    changed = [
        name
        for name in own
        if (held is None or name in held) and name in given and not _is_same(own[name], given[name])
    ]
    if not added and not changed:
        return
    name = (added or changed)[0]
    what = f"adds or renames {name}" if added else f"converts {name}"
    raise CheckpointError(
        f"the state_dict of {type(model).__name__} {what} (in a state_dict hook, or an override of state_dict or "
        "_save_to_state_dict), but stages save the model's own tensors, which the model would convert again when it "
        "loads them: remove the hook or the override. To save converted tensors, call to_sequential(model, rank=0) on "
        "every rank, and save the state_dict of its result on rank 0. save_training_state needs no conversion"
    )


def _is_same(own: Any, given: Any) -> bool:
    """Whether two entries are equal bit for bit. Extra states that are not tensors are not compared."""
    if own is given or not isinstance(own, Tensor):
        return True
    if not isinstance(given, Tensor) or isinstance(own, DTensor) != isinstance(given, DTensor):
        return False
    if (own.dtype, own.shape, own.layout) != (given.dtype, given.shape, given.layout):
        return False
    if own.is_meta or own.layout != torch.strided or own.is_quantized:
        return own.is_meta == given.is_meta
    return torch.equal(_bytes(own), _bytes(given))


def _bytes(tensor: Tensor) -> Tensor:
    """The content of a tensor, so that NaNs are equal to themselves."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
