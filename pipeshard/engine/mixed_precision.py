"""Mixed precision: 16-bit parameters or operators, with fp32 master weights and gradients.

torch.autocast casts per operator and keeps fp32 parameters, which need twice the memory and bandwidth of 16-bit
parameters. pipeshard instead casts a stage's parameters as `from_pretrained(dtype=...)` would cast them. Parameters
that an architecture keeps in fp32 stay in fp32. Optimizers update fp32 copies of the trained 16-bit parameters
(`MasterWeight.master`). Autocast is available as an option.
"""

import math
from collections.abc import Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from pipeshard.batch.batch import Batch
from pipeshard.distributed.collectives import local, local_grad, set_local_grad, slice_like
from pipeshard.errors import UsageError
from pipeshard.ghost import Ghost
from pipeshard.graph.dataflow import Dataflow
from pipeshard.graph.writes import SHARD_OF
from pipeshard.hf import kept_in_fp32
from pipeshard.options import LEAST_SCALE, MOST_SCALE, PRECISIONS
from pipeshard.split.materialize import rebuilt_models, storageless

State = tuple[int, int, int, int]  # the state of a tensor: see WeightCopies
States = tuple[State, State]  # the states of a parameter and of its `master`


class LossScale:
    """The factor by which losses are multiplied before backward.

    If a gradient overflows, the step is skipped and the factor is halved. The factor is doubled after `interval`
    consecutive steps without an overflow (Micikevicius et al. 2018, arXiv:1710.03740).
    """

    def __init__(self, initial: float = 2.0**16, interval: int = 1000) -> None:
        self.initial, self.value, self.interval = initial, initial, interval
        self.steps = 0  # consecutive steps without an overflow
        self.overflows = 0  # consecutive overflows with the smallest scale

    def reset(self) -> None:
        """Begin again with the initial factor, as for a new run."""
        self.value, self.steps, self.overflows = self.initial, 0, 0

    def update(self, overflow: bool) -> None:
        self.overflows = self.overflows + 1 if overflow and self.value == LEAST_SCALE else 0
        if overflow:
            self.value, self.steps = max(LEAST_SCALE, self.value / 2), 0
            return
        self.steps += 1
        if self.steps == self.interval:
            self.value, self.steps = min(MOST_SCALE, self.value * 2), 0

    def state_dict(self) -> dict[str, float | int]:
        return {"value": self.value, "steps": self.steps}

    def load_state_dict(self, state: dict[str, float | int]) -> None:
        self.value, self.steps = float(state["value"]), int(state["steps"])


def copy_attributes(parameter: nn.Parameter, other: nn.Parameter) -> None:
    """Copy the attributes that the user has set on a parameter to the parameter that replaces it."""
    vars(other).update({key: value for key, value in vars(parameter).items() if not key.startswith("pipeshard_")})


def computed_in(tensor: Tensor) -> torch.dtype:
    """The dtype in which the model computes with a parameter or buffer. FSDP shards may have another dtype, since FSDP
    casts the shards when it gathers the parameter."""
    dtype: torch.dtype = getattr(tensor, "pipeshard_dtype", tensor.dtype)
    return dtype


def filled_like(loss: Tensor, value: float) -> Tensor:
    """A gradient for `loss`, filled with `value`. In fp16, values above 65504 become inf, and the step is then skipped.
    torch.full_like itself would raise RuntimeError for such a value on CUDA."""
    return torch.full_like(loss, value, dtype=torch.promote_types(loss.dtype, torch.float32)).to(loss.dtype)


class MasterWeight:
    """The tensor that an optimizer updates for one parameter of a stage. `master` is the parameter itself, this rank's
    shard of a sharded parameter, or the fp32 master weight of a 16-bit parameter or shard. `full` is the unsharded fp32
    tensor from which the fp32 master weight is created.

    Attributes:
        holders: the number of ranks that have the same gradient of the parameter.
        plain: whether `master` is the parameter itself.
        owner: with ZeRO, the replica that updates the parameter for all replicas (only this replica has the fp32 master
        weight). None without ZeRO.
        noted: the states of the parameter and of `master`, by id, when they were last equal (see WeightCopies).
        shared: the states of both tensors after they were last sent to the other replicas.
        is_due: whether a write was copied between the parameter and `master`, but not yet sent to the other replicas.
        lowered: whether the parameter was cast to 16 bits. If the parameter was frozen at that time, the fp32 master
        weight is created when the parameter is first trained.
        loaded_as: the dtype of the weight in the model or adapter checkpoint that was loaded last. None if no
        checkpoint was loaded since boost, or if the optimizer has updated the weight since the load.
    """

    def __init__(
        self, name: str, parameter: nn.Parameter, holders: int, full: Tensor | None = None, lowered: bool = False
    ) -> None:
        self.name, self.parameter, self.holders, self.lowered = name, parameter, holders, lowered
        self.owner: int | None = None
        self.noted: dict[int, State] = {}
        self.shared: States | None = None
        self.is_due = False
        self.loaded_as: torch.dtype | None = None
        self._lent: Tensor | None = None  # the gradient that was assigned to `master`
        self.plain = full is None and not isinstance(parameter, DTensor)
        self.master: nn.Parameter = parameter
        if not self.plain:
            value = local(parameter.detach()) if full is None else slice_like(full, parameter)
            self.master = self._like(value, requires_grad=parameter.requires_grad)
        if isinstance(parameter, DTensor):
            for tensor in (parameter,) if self.is_double else (parameter, self.master):
                vars(tensor)[SHARD_OF] = name
        if lowered:  # accumulate gradients in fp32, even if the parameter is unfrozen later
            parameter.grad_dtype = self.master.grad_dtype = torch.float32

    def _like(self, value: Tensor, requires_grad: bool = True) -> nn.Parameter:
        """Return a parameter with this value and the attributes that the user has set on the model's parameter. An
        optimizer may read these attributes."""
        made = nn.Parameter(value, requires_grad)
        copy_attributes(self.parameter, made)
        return made

    @property
    def is_double(self) -> bool:
        """Whether `master` has its own memory. If it does, the optimizer updates `master`, and the model computes with
        the parameter."""
        return self.master.dtype != self.parameter.dtype

    @property
    def graded(self) -> Tensor:
        """The tensor whose gradient the next update uses."""
        return self.master

    @torch.no_grad()
    def follow(self, is_written: bool, is_master_written: bool, adopts: bool) -> bool:
        """Make the values of the parameter and of `master` equal after a loop has written to one of the two. Returns
        whether they are now equal. Raises UsageError if the loop has written different values to both.

        A write to `master` is always copied to the parameter. If `adopts`, a write to the parameter is copied to
        `master`, except for elements that equal `master` rounded to the parameter's dtype. `master` therefore keeps its
        precision if a loop replaces and then restores the values of a 16-bit parameter.
        """
        if self.is_double and is_written:
            value = local(self.parameter).to(self.master.device)
            rounded = self.master.to(value.dtype)
            if is_master_written and not torch.equal(value.nan_to_num(), rounded.nan_to_num()):
                raise UsageError(
                    f"the loop has written different values to the model's parameter {self.name} and to the "
                    "corresponding tensor in optimizer.param_groups. With precision='bf16' or 'fp16', and with "
                    "offload='optimizer', the two do not share memory, so one of the writes would be lost: write to "
                    "only one of the two between two calls of execute_pipeline or optimizer.step"
                )
            if not is_master_written:
                if not adopts:
                    return False
                self.master.copy_(torch.where(value == rounded, self.master, value.to(self.master)))
        self.take_value()
        return True

    @property
    def lacks_values(self) -> bool:
        """Whether `master` has no separate values yet, because the parameter was frozen when it was cast."""
        return self.lowered and self.master.dtype is self.parameter.dtype

    def complete(self) -> None:
        """Create `master` from the parameter's values. No precision is lost, since until now the parameter was frozen,
        or no optimizer contained the parameter."""
        self.master, self.plain = self._like(local(self.parameter.detach()).float()), False
        self._lent = None

    def leave(self) -> None:
        """Discard the fp32 master weight, which only the owner keeps."""
        self.master = self.parameter

    def settle_gradient(self) -> None:
        """If a loop has replaced the gradient of `master`, assign the new gradient to the parameter."""
        if self.master is not self.parameter and self.master.grad is not self._lent:
            set_local_grad(self.parameter, self.master.grad)
            self._lent = self.master.grad

    def lend_gradient(self) -> None:
        """Assign the parameter's gradient to `master` as well, so that a loop can change the gradient on either
        tensor."""
        if self.master is not self.parameter:
            self.master.requires_grad_(self.parameter.requires_grad)
            self.master.grad = self._lent = local_grad(self.parameter)

    @torch.no_grad()
    def take_value(self) -> None:
        """Copy the values of `master` to the parameter, unless the two share memory."""
        if self.is_double:
            local(self.parameter).copy_(self.master)

    @torch.no_grad()
    def set(self, value: Tensor) -> None:
        """Load this rank's shard of the full tensor `value`."""
        self.set_part(slice_like(value, self.parameter))

    @torch.no_grad()
    def load(self, value: Tensor) -> bool | None:
        """Load this rank's shard of `value`, a full tensor from a checkpoint. The current fp32 master weight is kept if
        it rounds to this shard, since it may have been loaded with the checkpoint's optimizer state. Returns whether
        the fp32 master weight was kept. Returns None if there is nothing to compare, because the model computes in the
        dtype of `master`, or because the checkpoint has another dtype (such as fp32, if saved with fsdp)."""
        part = slice_like(value, self.parameter).to(self.master.device)
        is_kept = None
        if self.is_precise and part.dtype is computed_in(self.parameter):
            is_kept = torch.equal(self.master.to(part.dtype), part)
        self.set_part(self.master.detach() if is_kept else part)
        return is_kept

    @torch.no_grad()
    def differs(self, value: Tensor) -> bool:
        """Whether this weight was loaded, but `value` does not round to the loaded weight. `value` is this rank's shard
        of an fp32 master weight."""
        if self.loaded_as is None:
            return False
        loaded = local(self.parameter).to(computed_in(self.parameter))
        return not torch.equal(value.to(loaded.device, self.loaded_as).to(loaded.dtype), loaded)

    def round(self) -> None:
        """Round the values to the precision in which the model computes."""
        self.set_part(self.master.detach().to(computed_in(self.parameter)))

    def blank(self) -> None:
        """Fill the fp32 master weight, which has not been loaded yet, with NaN: its memory may contain values of an
        earlier model."""
        if self.is_precise:
            self.master.data.fill_(math.nan)

    @property
    def is_blank(self) -> bool:
        """Whether the fp32 master weight is not loaded yet."""
        return self.is_precise and bool(self.master.isnan().all())

    @property
    def is_precise(self) -> bool:
        """Whether this rank has values of a higher precision than the model's compute dtype."""
        return computed_in(self.parameter) is not self.master.dtype

    @torch.no_grad()
    def set_part(self, part: Tensor) -> None:
        """Load `part`, this rank's shard of the values."""
        for tensor in (self.parameter, self.master):
            local(tensor).copy_(part)

    def zero_grad(self, set_to_none: bool) -> None:
        if self.master is not self.parameter:
            self.master.grad = self._lent = None
        if set_to_none:
            self.parameter.grad = None
        elif self.parameter.grad is not None:
            self.parameter.grad.zero_()


@cache
def casts_have_graphs() -> bool:
    """Whether autocast's cached casts have a grad_fn even if they were made under no_grad (in a reentrant checkpoint).
    Before torch 2.11, these casts have no grad_fn, and another microbatch that uses them would lose its gradients
    (pytorch#158232)."""
    layer, x = nn.Linear(1, 1), torch.zeros(1, 1)
    with torch.enable_grad(), torch.autocast("cpu", torch.bfloat16):
        with torch.no_grad():
            layer(x)
        return layer(x).requires_grad


def _rounded(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Cast `tensor` to a 16-bit dtype. Finite values beyond the dtype's range become its smallest or largest finite
    value. If they became -inf in an additive mask, the softmax of a fully masked row would be NaN."""
    assert dtype is not None
    low, high = torch.finfo(dtype).min, torch.finfo(dtype).max
    return torch.where(tensor.isfinite(), tensor.clamp(low, high), tensor).to(dtype)


class Precision:
    """The precision `name`: "fp32" (the model is not changed), "bf16" or "fp16".

    With "bf16" and "fp16", parameters have this dtype, their gradients are accumulated in fp32 over the microbatches,
    and the optimizer updates fp32 master weights (Micikevicius et al. 2018, arXiv:1710.03740). With `autocast`,
    parameters stay in fp32, and torch.autocast chooses the dtype of each operator.
    """

    def __init__(self, name: str, autocast: bool, device: torch.device) -> None:
        self.dtype, self.device = PRECISIONS[name], device
        self.autocasts = autocast and self.dtype is not None
        self.lowers = self.dtype is not None and not autocast
        self.scales = self.dtype is torch.float16

    def running(self) -> AbstractContextManager[object]:
        """Context manager for forwards: torch.autocast, if requested."""
        return torch.autocast(self.device.type, self.dtype) if self.autocasts else nullcontext()

    def shares_casts(self, flows: Collection[Dataflow]) -> bool:
        """Whether all forwards of a step share one autocast copy of each parameter. Returns False if autocast is off,
        if a forward writes to parameters, or if `casts_have_graphs()` is False."""
        if not self.autocasts:
            return False
        kinds = {place.kind for flow in flows for place in flow.carried}
        return not kinds & {"parameter", "settled"} and casts_have_graphs()

    @contextmanager
    def sharing_casts(self, flows: Collection[Dataflow]) -> Iterator[None]:
        """Context manager for a step's actions. If `shares_casts(flows)`, all forwards share one autocast copy of each
        parameter, instead of one copy for each microbatch in flight."""
        if not self.shares_casts(flows):
            yield
            return
        torch.autocast_increment_nesting()  # torch clears its cache of casts when the outermost context exits
        try:
            yield
        finally:
            torch.autocast_decrement_nesting()
            torch.clear_autocast_cache()  # also inside a user's autocast: the optimizer changes the parameters next

    @contextmanager
    def seeming(self, model: nn.Module) -> Iterator[None]:
        """Context manager for a trace. Inside it, tensors that will be cast already have their later dtype. Parameters
        keep their values in an attribute, for units that need these values to run."""
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
        """Permanently cast `tensors`, a subset of `lowered`. Returns the fp32 values of each trained parameter among
        these tensors."""
        full: dict[nn.Parameter, Tensor] = {}
        for tensor in tensors:
            if isinstance(tensor, Ghost):
                tensor.lower(self.dtype)
                continue
            tensor.data = (data := tensor.data).to(self.dtype)
            if isinstance(tensor, nn.Parameter) and tensor.requires_grad:
                full[tensor] = data.float()
                tensor.grad = None
        return full

    def of_batch(self, batch: Batch) -> Batch:
        """Cast the batch's fp32 tensors (images, audio) to the model's precision, except targets and leaves that only
        the criterion receives."""
        if not self.lowers:
            return batch

        def lowered(path: str, tensor: Tensor) -> Tensor:
            return _rounded(tensor, self.dtype) if tensor.dtype is torch.float32 and path not in batch.exact else tensor

        return batch.converted(lowered)

    def lowered(self, model: nn.Module) -> set[Tensor]:
        """The parameters and buffers to cast. In transformers models, these are the tensors that
        `from_pretrained(dtype=...)` would create in this dtype. In other models, these are all floating-point tensors,
        as in `model.bfloat16()`, except the buffers of their transformers layers, such as RoPE frequencies."""
        if not self.lowers:
            return set()
        dtypes, in_fp32 = self._constructed(model), kept_in_fp32(model, self.dtype)
        tensors: set[Tensor] = set()
        for path, module in model.named_modules():
            for key, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
                name = f"{path}.{key}" if path else key
                is_kept = not isinstance(tensor, nn.Parameter) and type(module).__module__.startswith("transformers.")
                is_low = dtypes[name] is self.dtype if name in dtypes else not is_kept
                if is_low and tensor.is_floating_point() and tensor not in in_fp32:
                    tensors.add(tensor)
        return tensors

    def _constructed(self, model: nn.Module) -> dict[str, torch.dtype]:
        """The dtypes, by name, of the tensors that transformers' constructors create with `self.dtype` as the default
        dtype."""
        dtypes: dict[str, torch.dtype] = {}
        for path, twin in rebuilt_models(model, self.dtype, partly=True):
            tensors = *twin.named_parameters(remove_duplicate=False), *twin.named_buffers(remove_duplicate=False)
            dtypes |= {path + name: tensor.dtype for name, tensor in tensors}
        return dtypes
