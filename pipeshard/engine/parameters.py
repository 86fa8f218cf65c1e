"""Parameters: this rank's parameters, broadcast, cast and sharded for training."""

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from pipeshard.distributed.collectives import gather_lists, is_packed, share_tensor
from pipeshard.distributed.mesh import DP, TP, Grid
from pipeshard.engine.fsdp import ShardedUnits
from pipeshard.engine.grad_sync import Bucket, GradientSync, has_hooks, reduction_buckets
from pipeshard.engine.mixed_precision import MasterWeight, Precision, copy_attributes
from pipeshard.errors import ConfigurationError, UsageError
from pipeshard.split.initialize import InitWeights, initialize_tensors
from pipeshard.split.materialize import is_released
from pipeshard.split.policy import Policy
from pipeshard.split.tensor_parallel import slice_parameters
from pipeshard.split.ties import glue_parameters, kept_tied, put_parameter

logger = logging.getLogger("pipeshard")


class HeldParameters:
    """Broadcasts, casts and shards the parameters that this rank holds. Create it on all ranks.

    For each parameter, one holder broadcasts the values to the other holders. Then the parameters are cast to 16 bits
    (if `precision` requires it), sharded across tensor-parallel ranks (according to `plan`), and sharded across
    replicas (with `fsdp`). Sharding may replace parameters. `kind` is the class of the MasterWeights. If every
    slice of a stage computes the full gradient of an unsharded parameter, all slices use the first slice's gradient.
    The slices' own gradients would differ if kernels are not deterministic, as in attention's backward pass on GPUs.

    Attributes:
        held: the current parameters, by name (tied parameters: by their first name).
        weights: the MasterWeight of each parameter in `held`, by the parameter's name.
        sync: sums the gradients of the parameters over ranks.
    """

    def __init__(
        self,
        policy: Policy,
        grid: Grid,
        precision: Precision,
        fsdp: bool,
        plan: Mapping[str, str] | None = None,
        kind: type[MasterWeight] = MasterWeight,
    ) -> None:
        model = self.model = policy.model
        self.policy, self.grid, self.plan, self._warned = policy, grid, plan or {}, False
        self.units = policy.held_units
        before = self.held = {name: p for name, p in model.named_parameters() if not is_released(p)}
        self._share_values()
        self.lowers = precision.lowers
        lowered, dtype = precision.lowered(model), precision.dtype if self.lowers else None
        self.kept = {name for name, p in model.named_parameters() if p not in lowered} if self.lowers else set()
        is_sharded = fsdp and grid.dp_size > 1
        in_units = self._in_units() if is_sharded else set()
        for parameter in in_units:  # FSDP does not shard other layouts, such as channels_last
            parameter.data = parameter.data.contiguous()
        cast = lowered - in_units
        low = self._in_fp32(lowered - cast)
        full, low = precision.lower(cast), low | cast
        glue = glue_parameters(policy.flow)
        self.partial = slice_parameters(model, before, self.units, glue, grid.mesh.along(TP), plan) if plan else set()
        self.sharded = self._sharded(dtype) if is_sharded else None
        now = dict(model.named_parameters())
        self.held = {name: now[name] for name in before}
        for name, parameter in self.held.items():
            if parameter is not before[name]:
                copy_attributes(before[name], parameter)
        if self.sharded is not None and dtype is not None:
            for parameter in [p for name, p in self.held.items() if name not in self.kept]:
                parameter.pipeshard_dtype = dtype  # type: ignore[attr-defined]  # its compute dtype, for traces
        self._refuse_hooks(before)
        self.dtypes = {name: parameter.dtype for name, parameter in self.held.items()}
        self.weights = {
            name: kind(name, p, self._holders(name), full.get(before[name]), before[name] in low)
            for name, p in self.held.items()
        }
        tp_sharded = [parameter for parameter in self.held.values() if grid.divides(parameter, TP)]
        unsharded = {name for name, parameter in self.held.items() if not grid.divides(parameter, TP)}
        self.copied = unsharded - self.partial if grid.tp_size > 1 else set()
        self.sync = GradientSync(self._buckets(self._summed_along, self.copied), tp_sharded, self.sharded)

    def refuse_cast(self) -> None:
        """Raise UsageError if a parameter has been cast since boost (`model.half()`). Traces contain the earlier
        dtypes, and an fp32 master weight is recognized by its dtype. A change to an integer dtype (quantization) is
        allowed."""
        for name, parameter in self.held.items():
            if parameter.dtype is not self.dtypes[name] and parameter.is_floating_point():
                raise UsageError(
                    f"the parameter {name} was {str(self.dtypes[name])[6:]} at boost, but is "
                    f"{str(parameter.dtype)[6:]} now: cast the model before boost, or pass precision='bf16' or 'fp16' "
                    "to PipelinePlugin. If you cast the model for an evaluation, cast it back before the next step"
                )

    def trained(self) -> dict[str, bool]:
        """Map each parameter's name to whether the parameter requires a gradient."""
        return {name: parameter.requires_grad for name, parameter in self.held.items()}

    def draw(self, names: Sequence[str], rule: InitWeights, seed: int) -> None:
        """Initialize the parameters in `names` that this rank holds, using `rule` and `seed`."""
        weights = [self.weights[name] for name in names if name in self.weights]
        shaped = [weight for weight in weights if not weight.plain]
        with kept_tied(self.model):  # initialize unsharded fp32 parameters, as in the unsplit model
            for weight in shaped:
                whole = torch.empty(weight.parameter.shape, device=weight.parameter.device)
                put_parameter(self.model, weight.name, nn.Parameter(whole, weight.parameter.requires_grad))
        initialize_tensors(self.model, [weight.name for weight in weights], {}, rule, seed)
        drawn = [self.model.get_parameter(weight.name).detach() for weight in shaped]
        with kept_tied(self.model):
            for weight, value in zip(shaped, drawn, strict=True):
                weight.set(value)
                put_parameter(self.model, weight.name, weight.parameter)

    def _share_values(self) -> None:
        for shared in self._buckets(lambda name: (DP, TP)):
            for name, parameter in shared.parameters.items():
                source = self.policy.ownership.initializer(name)
                share_tensor(parameter.data, shared.group, self.grid.at(source, shared.group))
        copies = self.grid.sharing((DP, TP), ())
        for buffer in self.model.buffers():
            share_tensor(buffer, copies)

    def _buckets(self, axes: Callable[[str], Sequence[int]], copied: Collection[str] = ()) -> list[Bucket]:
        return reduction_buckets(self.grid, self.policy, self.held, axes, copied)

    def _summed_along(self, name: str) -> tuple[int, ...]:
        """The axes of the grid along which a parameter's gradients must be summed after the backward passes. In a sum
        along TP, only slice 0 contributes the gradient of a parameter in `copied`."""
        along_slices = name in self.partial or name in self.copied
        return (DP,) * (not self.grid.divides(self.held[name], DP)) + (TP,) * along_slices

    def _holders(self, name: str) -> int:
        """The number of ranks that have the same gradient of a parameter."""
        holders = len(self.policy.ownership.holders(name))
        for axis, size in ((DP, self.grid.dp_size), (TP, self.grid.tp_size)):
            holders *= 1 if self.grid.divides(self.held[name], axis) else size
        return holders

    def _in_units(self) -> set[nn.Parameter]:
        """The parameters that FSDP shards: the parameters of held units, except parameters that glue reads, parameters
        without dimensions, parameters that keep their own precision, and parameters of `plan` whose number of rows is
        not divisible by tp_size. FSDP and DTensor shard uneven slices differently, so the shards could not be loaded or
        saved. FSDP reduces gradients of only one dtype per unit. Without a cast, trained parameters whose dtype is not
        the most frequent in their unit are therefore also excluded."""
        now = dict(self.model.named_parameters())
        apart = {now[name] for name in glue_parameters(self.policy.flow) | self.kept}
        named = self.model.named_parameters(remove_duplicate=False)
        apart |= {p for name, p in named if name in self.plan and p.ndim and len(p) % self.grid.tp_size}
        for unit in self.units.values() if not self.lowers else ():
            trained = [p for p in unit.parameters() if p.requires_grad and p not in apart]  # same order on all ranks
            sizes: Counter[torch.dtype] = Counter()
            for parameter in trained:
                sizes[parameter.dtype] += parameter.numel()
            usual = max(sizes, key=sizes.__getitem__, default=None)
            apart |= {p for p in trained if p.dtype is not usual}
        return {p for unit in self.units.values() for p in unit.parameters() if p.ndim} - apart

    def _in_fp32(self, sharded: set[torch.Tensor]) -> set[torch.Tensor]:
        """Cast trained parameters to fp32. The shards of these parameters are fp32 master weights, which FSDP casts to
        16 bits when it gathers them. Returns the frozen 16-bit parameters, which are not cast."""
        for parameter in sharded:
            if parameter.requires_grad:
                parameter.data, parameter.grad = parameter.data.float(), None
        return {p for p in sharded if p.dtype is not torch.float32}

    def _sharded(self, dtype: torch.dtype | None) -> ShardedUnits:
        packed = [name for name, parameter in self.model.named_parameters() if is_packed(parameter)]
        if packed:  # FSDP would shard the slice across replicas as if it were contiguous
            raise ConfigurationError(
                f"fsdp=True cannot shard {packed[0]} across replicas, because it is a fused weight, and "
                f"tp_size={self.grid.tp_size} already shards each of its parts. Use zero_stage=1, or tp_size=1"
            )
        calls = self.policy.partition.stages.items()
        used = {
            name: frozenset(part for (unit, _), part in calls if unit == name and part in self.policy.chunks)
            for name in self.units
        }
        apart = {p for unit in self.units.values() for p in unit.parameters()} - self._in_units()
        with kept_tied(self.model):
            return ShardedUnits(self.units, used, self.grid.mesh.along(DP), dtype, apart)

    def problems(self, is_whole: bool) -> list[str]:
        """Return error messages about hooks that would not run or would receive only a part of a gradient, about
        modified partial gradients, and about unfrozen shards whose dtype FSDP cannot reduce. `is_whole` means that a
        step has one microbatch and no slices. Warns once about gradient hooks, since a hook that runs on each
        microbatch's gradient is exact only if it is linear."""
        problems = self.sync.problems() + [
            f"{name} has a gradient hook that would not run: {why}. Remove the hook, and modify the gradient between "
            "execute_pipeline and optimizer.step"
            for name, why in self._silent_hooks()
        ]
        mixed = self.sharded.mixed() if self.sharded is not None else set()
        problems += [
            f"{name} has been unfrozen, but its shard is {parameter.dtype}, unlike other trained shards of its layer, "
            "and FSDP reduces gradients of only one dtype per layer. Unfreeze it before boost, or use zero_stage=1 "
            "instead of fsdp=True"
            for name, parameter in self.held.items()
            if parameter in mixed
        ]
        divided = {
            name: p for name, p in self.held.items() if has_hooks(p) and not (is_whole and self._is_in_one(name))
        }
        hooked = [name for name, parameter in divided.items() if parameter._backward_hooks]
        if hooked and not problems and not self._warned:
            self._warned = True
            logger.warning(
                "gradient hooks, such as the one on %s, run on the gradient of each microbatch separately: the result "
                "is exact if a hook is linear (scaling, masking), and wrong if it is nonlinear (clamping, "
                "normalizing). Apply nonlinear functions between execute_pipeline and optimizer.step",
                hooked[0],
            )
        return problems + [
            f"{name} has a hook (register_post_accumulate_grad_hook) that would be called after each microbatch, when "
            "only a part of the gradient has been accumulated. Remove the hook, and use the gradient between "
            "execute_pipeline and optimizer.step, or use one microbatch"
            for name, parameter in divided.items()
            if getattr(parameter, "_post_accumulate_grad_hooks", None)
        ]

    def _silent_hooks(self) -> Iterator[tuple[str, str]]:
        """Yield the name of each parameter with a hook that autograd never calls, and the reason."""
        for name, weight in self.weights.items():
            if isinstance(weight.parameter, DTensor) and weight.parameter._backward_hooks:
                yield name, "with fsdp, tp_size or ep_size, a step does not compute with the parameter's shard"
            if weight.master is not weight.parameter and has_hooks(weight.master):
                yield name, "the model does not compute with the tensor in the optimizer's groups"

    def _is_in_one(self, name: str) -> bool:
        """Whether only one of this rank's stages uses the parameter."""
        return sum(name in self.policy.ownership.held_by_parts[stage] for stage in self.policy.chunks) == 1

    def _refuse_hooks(self, before: Mapping[str, nn.Parameter]) -> None:
        replaced = [name for name, parameter in before.items() if self.held[name] is not parameter]
        hooked = [name for name in replaced if has_hooks(before[name])]
        if hooked := gather_lists(hooked, self.grid.world):
            raise ConfigurationError(
                f"{hooked[0]} has a gradient hook, but fsdp, tp_size or ep_size replaces the parameter with a sharded "
                "one: remove the hook, and modify gradients between execute_pipeline and optimizer.step"
            )
