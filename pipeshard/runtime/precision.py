"""Precision: parameters or operators in 16 bits, beside values and gradients in fp32."""

import contextlib
import re
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, nn

from pipeshard.errors import ConfigurationError
from pipeshard.model.batch import Batch
from pipeshard.model.ghost import Ghost
from pipeshard.model.materialize import twins
from pipeshard.model.sharder import storageless

PRECISIONS = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


class Precision:
    """`name` is "fp32" (the model stays as it is), "bf16" or "fp16".

    In 16 bits the parameters are of this type, their gradients are added up in fp32 over the microbatches, and the
    optimizer updates fp32 values of them (Micikevicius et al. 2018, arXiv:1710.03740). With `autocast` the parameters
    stay in fp32, and torch.autocast decides for each operator.
    """

    def __init__(self, name: str, autocast: bool, device: torch.device) -> None:
        self.dtype, self.device = PRECISIONS[name], device
        self.autocasts = autocast and self.dtype is not None
        self.lowers = self.dtype is not None and not autocast
        self.scales = self.dtype is torch.float16

    def running(self) -> AbstractContextManager[object]:
        """Around forwards."""
        return torch.autocast(self.device.type, self.dtype) if self.autocasts else nullcontext()

    @contextmanager
    def seeming(self, model: nn.Module) -> Iterator[None]:
        """Inside, what is to be lowered has its later dtype, and parameters have their values beside them, for units
        that do not run without: to be traced."""
        before = {tensor: tensor.data for tensor in self.lowered(model)}
        for tensor, data in before.items():  # buffers are small, and may be written to
            if isinstance(tensor, nn.Parameter):
                tensor.pipeshard_values = data  # type: ignore[attr-defined]
                tensor.data = storageless(data, self.dtype, data.device)
            else:
                tensor.data = data.to(self.dtype)
        try:
            yield
        finally:
            for tensor, data in before.items():
                tensor.data = data
                vars(tensor).pop("pipeshard_values", None)

    def lower(self, tensors: Iterable[Tensor]) -> dict[nn.Parameter, Tensor]:
        """Lower these, which are `lowered`, for good; returns the fp32 values of the parameters that are trained."""
        full: dict[nn.Parameter, Tensor] = {}
        for tensor in tensors:
            if isinstance(tensor, Ghost):
                tensor.lower(self.dtype)
                continue
            tensor.data = (data := tensor.data).to(self.dtype)
            if isinstance(tensor, nn.Parameter) and tensor.requires_grad:
                full[tensor] = data.float() if data.dtype is self.dtype else data
                tensor.grad = None
        return full

    def of_batch(self, batch: Batch) -> Batch:
        """Images, sounds and the like in the model's precision; what is compared with its output as it is."""
        if not self.lowers:
            return batch

        def lowered(path: str, leaf: Tensor, dim: int | None) -> Tensor:
            is_target = "label" in path or "target" in path
            return leaf.to(self.dtype) if leaf.dtype is torch.float32 and not is_target else leaf

        return batch.map(lowered)

    def lowered(self, model: nn.Module) -> set[Tensor]:
        """The parameters and buffers that are of this type where the architecture is made in it, as by
        `from_pretrained(dtype=...)`; where nothing tells, parameters, and what is beside them (of batch norms)."""
        if not self.lowers:
            return set()
        kept = set(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
        kept |= set(getattr(model, "_keep_in_fp32_modules", None) or ()) if self.scales else set()
        pattern = re.compile("|".join(rf"(^|\.){re.escape(name)}($|\.)" for name in sorted(kept)) or r"(?!)")
        made = self._made(model)
        found: set[Tensor] = set()
        for path, module in model.named_modules():
            own = dict(module.named_parameters(recurse=False))
            for key, tensor in (*own.items(), *module.named_buffers(recurse=False)):
                name = f"{path}.{key}" if path else key
                is_low = made[name] is self.dtype if name in made else bool(own)
                if is_low and tensor.dtype in (torch.float32, self.dtype) and not pattern.search(name):
                    found.add(tensor)
        return found

    def _made(self, model: nn.Module) -> dict[str, torch.dtype]:
        """The dtypes of what transformers' constructors make where this type is the default."""
        found: dict[str, torch.dtype] = {}
        with contextlib.suppress(ConfigurationError):  # what cannot be made again
            for path, twin in twins(model, self.dtype):
                named = *twin.named_parameters(remove_duplicate=False), *twin.named_buffers(remove_duplicate=False)
                found |= {path + name: tensor.dtype for name, tensor in named}
        return found
