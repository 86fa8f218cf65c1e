"""Mixed precision: parameters or operators in 16 bits, beside values and gradients in fp32."""

import contextlib
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from pipeshard.batch.batch import Batch
from pipeshard.config import PRECISIONS
from pipeshard.distributed.collectives import local, local_grad, slice_like
from pipeshard.distributed.progress import NOW
from pipeshard.errors import ConfigurationError
from pipeshard.ghost import Ghost
from pipeshard.split.materialize import storageless, twins

LEAST, MOST = 1.0, 2.0**32


class LossScale:
    """The factor that losses are multiplied with before backward, always a power of two.

    It is halved after a step in which a gradient overflowed, which is left out, and doubled after `interval` steps in
    a row without (Micikevicius et al. 2018, arXiv:1710.03740).
    """

    def __init__(self, initial: float = 2.0**16, interval: int = 1000) -> None:
        self.value, self.interval = initial, interval
        self.steps = 0  # in a row without an overflow

    def update(self, overflow: bool) -> None:
        if overflow:
            self.value, self.steps = max(LEAST, self.value / 2), 0
            return
        self.steps += 1
        if self.steps == self.interval:
            self.value, self.steps = min(MOST, self.value * 2), 0

    def state_dict(self) -> dict[str, float | int]:
        return {"value": self.value, "steps": self.steps}

    def load_state_dict(self, state: dict[str, float | int]) -> None:
        self.value, self.steps = float(state["value"]), int(state["steps"])


class Weight:
    """One parameter of a stage. `holders` is the number of ranks that have the same gradient of it, `full` are its
    values where the parameter itself has them in a lower precision, until an optimizer takes them."""

    def __init__(self, name: str, parameter: nn.Parameter, holders: int, full: Tensor | None = None) -> None:
        self.name, self.parameter, self.holders = name, parameter, holders
        self.full = None if full is None else slice_like(full, parameter)
        if full is not None:  # gradients are added up in the precision of the values, not of the parameter
            parameter.grad_dtype = full.dtype
        self.master: nn.Parameter | None = None

    def trained(self) -> nn.Parameter:
        """What the optimizer is given: the parameter, this rank's slice of it, or its values in full precision."""
        if self.master is None:
            if self.full is None and not isinstance(self.parameter, DTensor):
                return self.parameter
            value = local(self.parameter.detach()) if self.full is None else self.full
            self.master, self.full = nn.Parameter(value, requires_grad=self.parameter.requires_grad), None
        return self.master

    @property
    def plain(self) -> bool:
        """Whether the parameter is all there is."""
        return self.master is None and self.full is None and not isinstance(self.parameter, DTensor)

    def give_gradient(self) -> None:
        if self.master is not None:
            self.master.grad = local_grad(self.parameter)

    @torch.no_grad()
    def take_value(self) -> None:
        """After an optimizer step; a slice shares its memory with the parameter."""
        if self.master is not None and self.master.dtype != self.parameter.dtype:
            local(self.parameter).copy_(self.master)

    @torch.no_grad()
    def set(self, value: Tensor) -> None:
        """Load the whole tensor `value`."""
        self.set_part(slice_like(value, self.parameter))

    @torch.no_grad()
    def set_part(self, part: Tensor) -> None:
        """Load this rank's part of it."""
        local(self.parameter).copy_(part)
        for precise in (self.master, self.full):
            if precise is not None:
                precise.copy_(part)

    def zero_grad(self, set_to_none: bool) -> None:
        if set_to_none:
            self.parameter.grad = None
        elif self.parameter.grad is not None:
            self.parameter.grad.zero_()
        if self.master is not None:
            self.master.grad = None


def assign(weights: Iterable[Weight], replicas: int) -> dict[str, int]:
    """The replica that keeps the optimizer's state of each weight, so that each has about as much: the largest first,
    each to the one that has least (ZeRO stage 1, Rajbhandari et al. 2020, arXiv:1910.02054, by whole parameters)."""
    load, owners = [0] * replicas, {}
    for weight in sorted(weights, key=lambda w: (-local(w.parameter).numel(), w.name)):
        owners[weight.name] = load.index(min(load))
        load[owners[weight.name]] += local(weight.parameter).numel()
    return owners


@torch.no_grad()
def share_updates(weights: Iterable[Weight], owners: Mapping[str, int], group: dist.ProcessGroup) -> None:
    """Give each replica what the others have updated; one message for each owner and dtype."""
    bundles: dict[tuple[int, torch.dtype], list[Tensor]] = {}
    for weight in weights:
        bundles.setdefault((owners[weight.name], weight.parameter.dtype), []).append(local(weight.parameter))
    flats = {key: torch.cat([tensor.reshape(-1) for tensor in tensors]) for key, tensors in bundles.items()}
    ranks = dist.get_process_group_ranks(group)
    works = [dist.broadcast(flat, ranks[owner], group=group, async_op=True) for (owner, _), flat in flats.items()]
    for work, (key, flat) in zip(works, flats.items(), strict=True):
        NOW.wait_in(group, work)
        if key[0] != group.rank():
            for tensor, part in zip(bundles[key], flat.split([t.numel() for t in bundles[key]]), strict=True):
                tensor.copy_(part.view_as(tensor))


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
