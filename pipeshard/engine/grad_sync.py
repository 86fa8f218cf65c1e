"""Gradient sync: gradients summed over the ranks that share a parameter, counted once in the norm."""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeshard.distributed.collectives import align_grad, device_of, gather_objects, local, local_grad, set_local_grad
from pipeshard.distributed.mesh import Grid
from pipeshard.distributed.progress import NOW
from pipeshard.engine.fsdp import ShardedUnits

BUCKET = 25 * 2**20  # bytes of gradients that are reduced in one message


@dataclass(frozen=True)
class Sharing:
    """Parameters, by name, that all ranks of `group` hold: the stages of a tie, the replicas of data parallelism, or
    both. A `tie` is reduced last, others when the `stages` of this rank that use them are done."""

    parameters: Mapping[str, nn.Parameter]
    group: dist.ProcessGroup
    stages: frozenset[int] = frozenset()
    tie: bool = False


class GradientSync:
    """Sums each shared gradient over the ranks that hold it, exactly once for every part of it.

    After a synced step all of `p.grad` is summed, whatever its user makes of it, and is set aside in the next one. What
    this rank adds is reduced alone, so gradients may pile up over several steps, with or without `no_sync`, and are
    right after each synced one; after one that was not, `p.grad` is what this rank has added since.
    Gradients travel in buckets, each as soon as the stages that use it are done with the step. Those of `sharded` units
    are reduced and scattered by these, and summed here over the stages of a tie alone; those of `sliced` parameters are
    brought into their form.
    """

    def __init__(
        self, sharings: Sequence[Sharing], sliced: Sequence[nn.Parameter] = (), sharded: ShardedUnits | None = None
    ) -> None:
        self.sharings, self.sliced, self.sharded = list(sharings), list(sliced), sharded
        buckets = [bucket for sharing in self.sharings for bucket in _buckets(sharing)]
        self.buckets = sorted(buckets, key=lambda bucket: bucket.tie)  # in one order on all ranks
        self.parameters = [parameter for sharing in self.sharings for parameter in sharing.parameters.values()]
        self._summed: dict[nn.Parameter, Tensor] = {}
        self._own: dict[nn.Parameter, tuple[Tensor, int]] = {}  # what was added under no_sync, and its version then
        self._done: set[int] = set()

    @property
    def is_early(self) -> bool:
        """Whether anything can be reduced before a step has ended."""
        return self.sharded is not None or any(not bucket.tie for bucket in self.buckets)

    def trained(self) -> dict[str, bool]:
        """Which of the shared parameters are."""
        return {name: p.requires_grad for sharing in self.sharings for name, p in sharing.parameters.items()}

    def problems(self) -> list[str]:
        """What would be done to a part of a gradient, though it was meant for all of it."""
        found = []
        for name, parameter in [item for sharing in self.sharings for item in sharing.parameters.items()]:
            if has_hooks(parameter):
                found.append(
                    f"{name}, which several ranks hold (stages that tie it, or replicas), has a gradient hook, which "
                    "would see each rank's part of its gradient: remove the hook, and change the gradient between "
                    "execute_pipeline and optimizer.step, where it is summed"
                )
            elif parameter in self._summed and parameter in self._own and parameter.grad is not None:
                before, version = self._own[parameter]
                if parameter.grad is not before or parameter.grad._version != version:
                    found.append(
                        f"the gradient of {name} was changed while parts of it were apart (no_sync): call "
                        "plugin.sync_grads(model) before, or set it to None, as optimizer.zero_grad() does"
                    )
        return found

    def begin(self) -> None:
        """Set the summed part aside, so that `p.grad` gathers this rank's own part alone."""
        if self.sharded is not None:
            self.sharded.begin()
        self._done.clear()
        for bucket in self.buckets:
            bucket.work = None  # of a step that failed
        for parameter in self.parameters:
            before = local_grad(parameter)
            if before is None:  # zero_grad
                self._summed.pop(parameter, None)
                self._own.pop(parameter, None)
            elif parameter not in self._own:
                self._summed[parameter] = before
                set_local_grad(parameter, None)

    def stage_done(self, stage: int) -> None:
        """Start to reduce what no stage of this rank adds to any more; what is tied over stages waits for `finish`."""
        self._done.add(stage)
        if self.sharded is not None:
            self.sharded.stages_done(self._done)
        for bucket in self.buckets:
            if not bucket.tie and bucket.work is None and bucket.stages <= self._done:
                bucket.start()

    def finish(self, sync: bool) -> None:
        """Sum the own parts over the holders and add what was set aside; without `sync` they stay apart.

        What is frozen has none, and costs nothing.
        """
        if self.sharded is not None:
            self.sharded.finish(sync)
        if sync:
            for parameter in self.sliced:
                align_grad(parameter)
            for bucket in self.buckets:
                if bucket.work is None:
                    bucket.start()
            for bucket in self.buckets:
                for parameter, added in bucket.finish():
                    self._own.pop(parameter, None)
                    if added is not None:
                        before = self._summed.pop(parameter, None)
                        set_local_grad(parameter, added if before is None else added.add_(before))
        else:
            self._own |= {p: (p.grad, p.grad._version) for p in self.parameters if p.grad is not None}
        for parameter in [parameter for parameter in self._summed if parameter.grad is None]:  # nothing was added
            set_local_grad(parameter, self._summed.pop(parameter))

    def reset(self, parameters: Collection[nn.Parameter]) -> None:
        """Forget what the gradients of these were made of: they were set to zero."""
        for parameter in parameters:
            self._summed.pop(parameter, None)
            self._own.pop(parameter, None)
        if self.sharded is not None:
            self.sharded.reset(parameters)


class _Bucket:
    """Some parameters of one Sharing, whose gradients are of one dtype, and travel as one flat tensor."""

    def __init__(self, parameters: Sequence[nn.Parameter], sharing: Sharing) -> None:
        self.parameters, self.group, self.stages, self.tie = parameters, sharing.group, sharing.stages, sharing.tie
        self.trained: list[nn.Parameter] = []
        self.flat = torch.empty(0)
        self.work: dist.Work | None = None

    def start(self) -> None:
        """A holder without a gradient sends zeros; at the end are counts of those that have one."""
        self.trained = [parameter for parameter in self.parameters if parameter.requires_grad]
        if not self.trained:
            return
        for parameter in self.trained:
            align_grad(parameter)
        gradients = [local_grad(parameter) for parameter in self.trained]
        sizes, first = [local(p).numel() for p in self.trained], self.trained[0]
        self.flat = torch.zeros(sum(sizes) + len(sizes), dtype=grad_dtype(first), device=local(first).device)
        for part, gradient, parameter in zip(
            self.flat[: sum(sizes)].split(sizes), gradients, self.trained, strict=True
        ):
            if gradient is not None:
                part.copy_((gradient.to_dense() if gradient.is_sparse else gradient).reshape(-1))
                set_local_grad(parameter, None)
        self.flat[sum(sizes) :] = torch.tensor([float(gradient is not None) for gradient in gradients])
        self.work = dist.all_reduce(self.flat, group=self.group, async_op=True)

    def finish(self) -> Iterable[tuple[nn.Parameter, Tensor | None]]:
        """Each parameter with its gradient summed over the holders, or None if no holder has one."""
        if self.work is None:
            return
        NOW.wait_in(self.group, self.work)
        flat, self.flat, self.work = self.flat, torch.empty(0), None
        shapes = [local(parameter).shape for parameter in self.trained]
        *parts, counts = flat.split([*map(math.prod, shapes), len(shapes)])
        for parameter, part, shape, count in zip(self.trained, parts, shapes, counts.tolist(), strict=True):
            yield parameter, part.view(shape) if count else None


def _buckets(sharing: Sharing) -> list[_Bucket]:
    """The last parameters first, which is about the order in which backward passes complete their gradients."""
    kinds: dict[torch.dtype, list[list[nn.Parameter]]] = {}
    for name in sorted(sharing.parameters) if sharing.tie else reversed(list(sharing.parameters)):
        parameter = sharing.parameters[name]
        lists = kinds.setdefault(grad_dtype(parameter), [[]])
        if lists[-1] and sum(local(p).numel() for p in lists[-1]) * grad_dtype(parameter).itemsize >= BUCKET:
            lists.append([])
        lists[-1].append(parameter)
    return [_Bucket(parameters, sharing) for lists in kinds.values() for parameters in lists]


def grad_dtype(parameter: Tensor) -> torch.dtype:
    """That in which the gradient is kept: it may be another than the parameter's."""
    return getattr(parameter, "grad_dtype", None) or parameter.dtype


def has_hooks(parameter: Tensor) -> bool:
    """Whether its gradient is listened to, or changed, as it is made."""
    return bool(parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None))


def grad_norm(
    parameters: Iterable[nn.Parameter],
    holders: Callable[[nn.Parameter], int],
    group: dist.ProcessGroup,
    norm_type: float = 2.0,
) -> Tensor:
    """The norm of all gradients of the model, over all ranks of `group`; `holders` says how many of them have the
    same gradient of a parameter, each of which counts for its part."""
    gradients = [(p, gradient) for p in parameters if (gradient := local_grad(p)) is not None]
    device = device_of(group)
    dtype = torch.float64 if any(g.dtype is torch.float64 for _, g in gradients) else torch.float32
    norms = [torch.linalg.vector_norm(_at_least_fp32(g), norm_type).to(device).double() for _, g in gradients]
    if math.isinf(norm_type):
        norm = torch.stack([*norms, torch.zeros((), dtype=torch.float64, device=device)]).max()
        NOW.wait_in(group, dist.all_reduce(norm, dist.ReduceOp.MAX, group=group, async_op=True))
        return norm.to(dtype)
    powers = [norm**norm_type / holders(p) for norm, (p, _) in zip(norms, gradients, strict=True)]
    power = torch.stack([*powers, torch.zeros((), dtype=torch.float64, device=device)]).sum()
    NOW.wait_in(group, dist.all_reduce(power, group=group, async_op=True))
    return (power ** (1.0 / norm_type)).to(dtype)


def clip_by_norm(parameters: Iterable[nn.Parameter], norm: Tensor, max_norm: float) -> None:
    """Scale the gradients so that their norm is `max_norm` at most, as torch.nn.utils.clip_grad_norm_ does."""
    coefficient = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    gradients = [gradient for p in parameters if (gradient := local_grad(p)) is not None]
    if gradients:
        torch._foreach_mul_(gradients, coefficient)


def _at_least_fp32(tensor: Tensor) -> Tensor:
    tensor = tensor.coalesce().values() if tensor.is_sparse else tensor
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def sharings(
    grid: Grid,
    parameters: Mapping[str, nn.Parameter],
    holders: Mapping[str, Sequence[int]],
    users: Callable[[str], Collection[int]],
    axes: Callable[[str], Sequence[int]],
) -> list[Sharing]:
    """Those of this rank, which holds `parameters`; every rank of the world calls it.

    `holders` has the stages (places in the pipeline) of each parameter, `users` says which of this rank's virtual
    stages use one, `axes` along which axes of the mesh, beside that of the stages, its gradients are added up.
    """
    keys = {name: (tuple(axes(name)), tuple(holders[name])) for name in parameters}
    wanted = sorted(set().union(*gather_objects(set(keys.values()), grid.world)))
    groups = {key: grid.sharing(*key) for key in wanted}  # made by all ranks in one order
    bundles: dict[tuple[Any, frozenset[int]], dict[str, nn.Parameter]] = {}
    for name, key in keys.items():
        # What stages tie is summed at the end of a step, in one bundle: its holders use it on different stages.
        stages = frozenset(users(name)) if len(key[1]) < 2 else frozenset()
        bundles.setdefault((key, stages), {})[name] = parameters[name]
    found = []
    for (key, stages), bundle in sorted(bundles.items(), key=lambda item: (item[0][0], sorted(item[0][1]))):
        group = groups[key]
        if group is not None and group.size() > 1:
            found.append(Sharing(bundle, group, stages, tie=len(key[1]) > 1))
    return found
