"""Gradient sync: the gradients of parameters that several ranks hold, summed once per step.

Tied weights are held by several stages, and every weight by all data-parallel replicas. DistributedDataParallel has
one group of ranks for a whole model, and sums in hooks of each backward pass. Here a step has a backward pass for
every microbatch and chunk, and each parameter has its own holders. So parameters are sorted into
buckets with the same holders, and each bucket is reduced as soon as the last stage that uses it has finished.
"""

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeshard.distributed.collectives import align_grad, gather_objects, local, local_grad, set_local_grad
from pipeshard.distributed.mesh import Grid
from pipeshard.distributed.progress import own_progress
from pipeshard.engine.fsdp import ShardedUnits
from pipeshard.split.policy import Policy

BUCKET = 25 * 2**20  # bytes of gradients that are reduced in one message

T = TypeVar("T")


class Bucket:
    """Parameters, by name, that all ranks of `group` hold: the stages of a tie, the replicas of data parallelism, or
    both. Their gradients have one dtype, and are sent as one flat tensor: those of a `tie` last, others when the
    `stages` of this rank that use them have finished."""

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], group: dist.ProcessGroup, stages: frozenset[int], tie: bool
    ) -> None:
        self.parameters, self.group, self.stages, self.tie = parameters, group, stages, tie
        self.trained: list[nn.Parameter] = []
        self.flat = torch.empty(0)
        self.work: dist.Work | None = None

    def start(self) -> None:
        """Start the reduction. A holder without a gradient sends zeros; the tensor ends with counts of the holders that
        have one."""
        self.trained = [parameter for parameter in self.parameters.values() if parameter.requires_grad]
        if not self.trained:
            return
        sizes, first = [local(parameter).numel() for parameter in self.trained], self.trained[0]
        self.flat = torch.zeros(sum(sizes) + len(sizes), dtype=grad_dtype(first), device=local(first).device)
        *parts, counts = self.flat.split([*sizes, len(sizes)])
        for parameter, part, count in zip(self.trained, parts, counts, strict=True):
            align_grad(parameter)
            if (gradient := local_grad(parameter)) is not None:
                count.fill_(1.0)  # on a GPU, where a tensor made of numbers would be waited for
                part.copy_((gradient.to_dense() if gradient.is_sparse else gradient).reshape(-1))
                set_local_grad(parameter, None)
        self.work = dist.all_reduce(self.flat, group=self.group, async_op=True)

    def wait(self) -> Tensor:
        """The sums of the counts, once all holders have joined."""
        assert self.work is not None
        own_progress().wait_in(self.group, self.work)
        self.work = None
        return self.flat[len(self.flat) - len(self.trained) :]

    def summed(self, counts: Iterator[float]) -> Iterator[tuple[nn.Parameter, Tensor | None]]:
        """Each parameter with its gradient summed over the holders, or None if no holder has one (by its count)."""
        flat, self.flat = self.flat, torch.empty(0)
        shapes = [local(parameter).shape for parameter in self.trained] if len(flat) else []
        *parts, _ = flat.split([*map(math.prod, shapes), len(shapes)])
        for parameter, part, shape in zip(self.trained, parts, shapes):
            yield parameter, part.view(shape) if next(counts) else None


def reduction_buckets(
    grid: Grid, policy: Policy, parameters: Mapping[str, nn.Parameter], axes: Callable[[str], Sequence[int]]
) -> list[Bucket]:
    """The buckets that this rank, which holds `parameters`, shares with others. Call it on every rank of the world.

    `axes` lists the mesh axes, in addition to the stage axis, along which a parameter's gradient is summed.
    """
    keys = {name: (tuple(axes(name)), tuple(policy.ownership.holders(name))) for name in parameters}
    wanted = sorted(set().union(*gather_objects(set(keys.values()), grid.world)))
    groups = {key: grid.sharing(*key) for key in wanted}  # created by all ranks in one order
    members: dict[tuple[Any, tuple[int, ...]], list[str]] = {}
    for name, key in keys.items():
        # A tie is summed at the end of a step, whichever stages use it: its holders differ in them.
        held = policy.ownership.held_by_parts
        stages = () if len(key[1]) > 1 else tuple(stage for stage in sorted(policy.chunks) if name in held[stage])
        members.setdefault((key, stages), []).append(name)
    buckets = []
    for key, stages in sorted(members):
        group, is_tie = groups[key], len(key[1]) > 1
        if group is None or group.size() == 1:
            continue
        # The last parameters first, which is about the order in which backward passes complete their gradients.
        names = sorted(members[key, stages]) if is_tie else members[key, stages][::-1]
        items = [(name, parameters[name]) for name in names]
        bundles = bundled(items, lambda i: grad_dtype(i[1]), lambda i: local(i[1]).numel() * grad_dtype(i[1]).itemsize)
        buckets += [Bucket(dict(bundle), group, frozenset(stages), is_tie) for bundle in bundles]
    return sorted(buckets, key=lambda bucket: bucket.tie)


class GradientSync:
    """Sums each shared gradient over the ranks that hold it, exactly once for every part of it.

    After a synced step, all of `p.grad` counts as summed, even if the user modifies it. The next step sets it aside,
    and reduces only what this rank adds. So gradients may be accumulated over several steps, with or without `no_sync`,
    and are complete after each synced one; after an unsynced step, `p.grad` is what this rank has added since the last
    synced one. Gradients of `sharded` units are reduce-scattered by the units, and summed here only over the stages of
    a tie; those of `tp_sharded` parameters are converted to the parameter's placement.
    """

    def __init__(
        self, buckets: Sequence[Bucket], tp_sharded: Sequence[nn.Parameter] = (), sharded: ShardedUnits | None = None
    ) -> None:
        self.tp_sharded, self.sharded = list(tp_sharded), sharded
        self.buckets = list(buckets)  # in one order on all ranks
        self.shared = [item for bucket in buckets for item in bucket.parameters.items()]
        self._summed: dict[nn.Parameter, Tensor] = {}  # set aside
        self._partial: dict[nn.Parameter, tuple[Tensor, int]] = {}  # what was added under no_sync, and its version then
        self._done: set[int] = set()

    @property
    def is_early(self) -> bool:
        """Whether any bucket can be reduced before a step has ended."""
        return self.sharded is not None or any(not bucket.tie for bucket in self.buckets)

    def problems(self) -> list[str]:
        """Hooks that would see a partial gradient although they expect the whole gradient."""
        problems = []
        for name, parameter in self.shared:
            if has_hooks(parameter):
                problems.append(
                    f"{name}, which several ranks hold (tied stages, or replicas), has a gradient hook, which would "
                    "see only each rank's part of the gradient: remove the hook, and modify the gradient between "
                    "execute_pipeline and optimizer.step, after it has been summed"
                )
            elif parameter in self._summed and parameter in self._partial and parameter.grad is not None:
                before, version = self._partial[parameter]
                if parameter.grad is not before or parameter.grad._version != version:
                    problems.append(
                        f"the gradient of {name} was modified before it was summed over the ranks (no_sync): call "
                        "plugin.sync_grads(model) first, or set it to None, as optimizer.zero_grad() does"
                    )
        return problems

    def begin(self) -> None:
        """Set the summed part aside, so that `p.grad` accumulates only what this rank adds."""
        if self.sharded is not None:
            self.sharded.begin()
        self._done.clear()
        for bucket in self.buckets:
            bucket.flat, bucket.work = torch.empty(0), None  # of a step that failed
        for _, parameter in self.shared:
            before = local_grad(parameter)
            if before is None:  # zero_grad
                self._forget(parameter)
            elif parameter not in self._partial:
                self._summed[parameter] = before
                set_local_grad(parameter, None)

    def stage_done(self, stage: int) -> None:
        """Start to reduce the buckets to which no stage of this rank adds any more; ties wait for `finish`."""
        self._done.add(stage)
        if self.sharded is not None:
            self.sharded.stages_done(self._done)
        for bucket in self.buckets:
            if not bucket.tie and bucket.work is None and bucket.stages <= self._done:
                bucket.start()

    def finish(self, sync: bool) -> None:
        """Sum this rank's parts over the holders and add what was set aside; without `sync` they stay separate."""
        if self.sharded is not None:
            self.sharded.finish(sync)
        if sync:
            self._reduce()
        else:
            self._partial |= {p: (p.grad, p.grad._version) for _, p in self.shared if p.grad is not None}
        for parameter in [parameter for parameter in self._summed if parameter.grad is None]:  # nothing was added
            set_local_grad(parameter, self._summed.pop(parameter))

    def _reduce(self) -> None:
        for parameter in self.tp_sharded:
            align_grad(parameter)
        for bucket in self.buckets:
            if bucket.work is None:
                bucket.start()
        waited = [bucket.wait().double() for bucket in self.buckets if bucket.work is not None]
        counts = iter(torch.cat(waited).tolist() if waited else ())  # a GPU is waited for once, not for each bucket
        for bucket in self.buckets:
            for parameter, total in bucket.summed(counts):
                self._partial.pop(parameter, None)
                if total is not None:
                    before = self._summed.pop(parameter, None)
                    set_local_grad(parameter, total if before is None else total.add_(before))

    def reset(self, parameters: Collection[nn.Parameter]) -> None:
        """Forget the parts of these gradients: they were set to zero."""
        for parameter in parameters:
            self._forget(parameter)
        if self.sharded is not None:
            self.sharded.reset(parameters)

    def _forget(self, parameter: nn.Parameter) -> None:
        self._summed.pop(parameter, None)
        self._partial.pop(parameter, None)


def bundled(items: Iterable[T], key: Callable[[T], Any], nbytes: Callable[[T], int]) -> list[list[T]]:
    """Bundle the items of each key, in order, into at most BUCKET bytes each; a larger item is a bundle of its own."""
    bundles: dict[Any, list[list[T]]] = {}
    filled: Counter[Any] = Counter()  # bytes in the last bundle of each key
    for item in items:
        of_key, size = bundles.setdefault(key(item), []), nbytes(item)
        if not of_key or filled[key(item)] + size > BUCKET:
            of_key.append([])
            filled[key(item)] = 0
        of_key[-1].append(item)
        filled[key(item)] += size
    return [bundle for of_key in bundles.values() for bundle in of_key]


def grad_dtype(parameter: Tensor) -> torch.dtype:
    """The dtype in which the gradient is kept, which may differ from the parameter's."""
    return getattr(parameter, "grad_dtype", None) or parameter.dtype


def has_hooks(parameter: Tensor) -> bool:
    """Whether hooks observe or change the parameter's gradient as it is accumulated."""
    return bool(parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None))
