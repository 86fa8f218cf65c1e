"""Gradient sync: sums the gradients of parameters that several ranks hold, once per step.

Several stages hold a tied weight, and all data-parallel replicas hold every weight. DistributedDataParallel has one
process group for the whole model, and reduces gradients in hooks of each backward pass. In a pipeline, a step has a
backward pass for every microbatch and chunk, and different ranks hold different parameters. So each bucket contains
parameters that the same ranks hold. A bucket is reduced as soon as all stages of the rank that use the bucket's
parameters have finished. Buckets of ties or of FSDP shards are reduced at the end of the step.
"""

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeshard.distributed.collectives import align_grad, gather_objects, laid_out, local, local_grad, set_local_grad
from pipeshard.distributed.mesh import Grid
from pipeshard.distributed.progress import own_progress
from pipeshard.engine.fsdp import ShardedUnits
from pipeshard.graph.writes import Noted, is_written, note
from pipeshard.split.policy import Policy

BUCKET = 25 * 2**20  # bytes of gradients per all-reduce

T = TypeVar("T")


class Bucket:
    """A set of parameters, by name, that all ranks of `group` hold. These ranks are the holders of a tie, data-parallel
    replicas, tensor-parallel ranks, or a combination of these. The gradients have the same dtype, and are all-reduced
    as one flat tensor. A bucket of a `tie` or of FSDP shards is reduced at the end of a step. Any other bucket is
    reduced when the `stages` of this rank that use the parameters have finished. If `copies` ranks compute the same
    gradient, only one of these ranks contributes its gradient (`contributes`), and all receive the sum."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        group: dist.ProcessGroup,
        stages: frozenset[int],
        tie: bool,
        copies: int = 1,
        contributes: bool = True,
    ) -> None:
        self.parameters, self.group, self.stages, self.tie = parameters, group, stages, tie
        self.copies, self.contributes = copies, contributes
        self.trained: list[nn.Parameter] = []
        self.unsummed: set[nn.Parameter] = set()  # trained under no_sync since the last all-reduce; may be frozen now
        self.flat = torch.empty(0)
        self.work: dist.Work | None = None

    def start(self) -> None:
        """Start the all-reduce. A holder contributes zeros if it has no gradient, or if another holder contributes the
        same gradient. The flat tensor ends with one count per parameter: the number of contributed gradients."""
        self.trained = [p for p in self.parameters.values() if p.requires_grad or p in self.unsummed]
        self.unsummed = set()
        if not self.trained:
            return
        sizes, first = [local(parameter).numel() for parameter in self.trained], self.trained[0]
        self.flat = torch.zeros(sum(sizes) + len(sizes), dtype=grad_dtype(first), device=local(first).device)
        *parts, counts = self.flat.split([*sizes, len(sizes)])
        for parameter, part, count in zip(self.trained, parts, counts, strict=True):
            align_grad(parameter)
            gradient = local_grad(parameter)
            if gradient is not None and self.contributes:
                count.fill_(1.0)  # no device sync, unlike a tensor made from Python numbers
                part.copy_((gradient.to_dense() if gradient.is_sparse else gradient).reshape(-1))
            set_local_grad(parameter, None)
        self.work = dist.all_reduce(self.flat, group=self.group, async_op=True)

    def wait(self) -> Tensor:
        """Wait for the all-reduce. For each trained parameter, returns the number of gradients that were
        contributed."""
        assert self.work is not None
        own_progress().wait_in(self.group, self.work)
        self.work = None
        return self.flat[len(self.flat) - len(self.trained) :]

    def summed(self, counts: Iterator[float]) -> Iterator[tuple[nn.Parameter, Tensor | None]]:
        """Yield each trained parameter with its summed gradient, or with None if the parameter's entry in `counts` is 0
        (no holder has contributed a gradient)."""
        flat, self.flat = self.flat, torch.empty(0)
        shapes = [local(parameter).shape for parameter in self.trained] if len(flat) else []
        *parts, _ = flat.split([*map(math.prod, shapes), len(shapes)])
        for parameter, part, shape in zip(self.trained, parts, shapes):
            yield parameter, laid_out(part.view(shape), local(parameter)) if next(counts) else None


def reduction_buckets(
    grid: Grid,
    policy: Policy,
    parameters: Mapping[str, nn.Parameter],
    axes: Callable[[str], Sequence[int]],
    copied: Collection[str] = (),
) -> list[Bucket]:
    """Sort this rank's `parameters` into buckets. Call it on every rank of the world, since it creates process groups.

    `axes(name)` returns the mesh axes along which a parameter's gradient is summed, in addition to the stage axis. All
    slices of a stage compute the same gradients of the parameters in `copied`, so only slice 0 contributes these
    gradients.
    """
    keys = {name: (tuple(axes(name)), tuple(policy.ownership.holders(name)), name in copied) for name in parameters}
    wanted = sorted(set().union(*gather_objects(set(keys.values()), grid.world)))
    groups = {key: grid.sharing(*key[:2]) for key in wanted}  # created in the same order on all ranks
    members: dict[tuple[tuple[Any, tuple[int, ...], bool], tuple[int, ...]], list[str]] = {}
    for name, key in keys.items():
        # A tie is reduced at the end of a step, since its holders use it in different stages.
        held = policy.ownership.held_by_parts
        stages = () if len(key[1]) > 1 else tuple(stage for stage in sorted(policy.chunks) if name in held[stage])
        members.setdefault((key, stages), []).append(name)
    buckets = []
    for key, stages in sorted(members):
        group, is_tie = groups[key], len(key[1]) > 1
        if group is None or group.size() == 1:
            continue
        copies, contributes = (grid.tp_size, grid.slice == 0) if key[2] else (1, True)
        # Last parameters first: roughly the order in which backward passes complete gradients.
        names = sorted(members[key, stages]) if is_tie else members[key, stages][::-1]
        items = [(name, parameters[name]) for name in names]
        bundles = bundled(items, lambda i: grad_dtype(i[1]), lambda i: local(i[1]).numel() * grad_dtype(i[1]).itemsize)
        buckets += [Bucket(dict(each), group, frozenset(stages), is_tie, copies, contributes) for each in bundles]
    return sorted(buckets, key=lambda bucket: bucket.tie)


class GradientSync:
    """Sums each shared gradient over the ranks that hold the parameter, and counts each contribution exactly once.

    After a synced step, `p.grad` counts as fully summed, even if the user modifies it. The next step sets `p.grad`
    aside, and reduces only gradients that are added later. So gradients may be accumulated over several steps, with or
    without `no_sync`, and are complete after each synced step. After an unsynced step, `p.grad` contains only the
    gradients that this rank has added since the last synced step or, if the rank has added none, the summed gradient.
    The units in `sharded` reduce-scatter their own gradients. GradientSync only sums these gradients over the stages of
    a tie. The gradient of each `tp_sharded` parameter is converted to the parameter's placement.
    """

    def __init__(
        self, buckets: Sequence[Bucket], tp_sharded: Sequence[nn.Parameter] = (), sharded: ShardedUnits | None = None
    ) -> None:
        self.tp_sharded, self.sharded = list(tp_sharded), sharded
        self.buckets = list(buckets)  # in the same order on all ranks
        shards = frozenset[nn.Parameter]() if sharded is None else sharded.parameters
        self._early = [b for b in buckets if not b.tie and shards.isdisjoint(b.parameters.values())]
        self.shared = [item for bucket in buckets for item in bucket.parameters.items()]
        self._summed: dict[nn.Parameter, Tensor] = {}  # summed gradients, set aside
        self._partial: dict[nn.Parameter, tuple[Tensor, Noted]] = {}  # gradients added under no_sync
        self._done: set[int] = set()
        self.is_partial = False  # whether gradients were added under no_sync since the last synced step

    @property
    def is_early(self) -> bool:
        """Whether any gradients can be reduced before the end of a step."""
        return self.sharded is not None or bool(self._early)

    def problems(self) -> list[str]:
        """Error messages about hooks that would receive a partial gradient, and about modified partial gradients."""
        return [
            f"{name} has a gradient hook, but several ranks hold the parameter (because of a tie, replicas or slices), "
            "so the hook would see only one rank's part of the gradient: remove the hook, and modify the summed "
            "gradient before optimizer.step()"
            for name, parameter in self._of_several()
            if has_hooks(parameter)
        ] + self.modified()

    def modified(self) -> list[str]:
        """Error messages about partial gradients that the loop has modified. For example, a sum of clamped parts
        differs from a clamped sum."""
        return [
            f"the gradient of {name} was modified before it was summed over the ranks (no_sync postpones the sum): "
            "call plugin.sync_grads(model) before you modify the gradient, or set the gradient to None "
            "(optimizer.zero_grad())"
            for name, parameter in self._of_several()
            if parameter in self._partial and self._is_modified(parameter)
        ]

    def _of_several(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters whose gradient is a sum of several ranks' gradients."""
        for bucket in self.buckets:
            if bucket.group.size() > bucket.copies:
                yield from bucket.parameters.items()

    def _is_modified(self, parameter: nn.Parameter) -> bool:
        before, noted = self._partial[parameter]
        now = parameter.grad
        return now is not None and (now is not before or is_written(now, noted))

    def begin(self) -> None:
        """Begin a step: set summed gradients aside, so that `p.grad` accumulates only this rank's new gradients."""
        if self.sharded is not None:
            self.sharded.begin()
        self._done.clear()
        for bucket in self.buckets:
            bucket.flat, bucket.work = torch.empty(0), None  # left by a failed step
        for _, parameter in self.shared:
            before = local_grad(parameter)
            if before is None:  # zero_grad
                self._forget(parameter)
            elif parameter not in self._partial:
                self._summed[parameter] = before
                set_local_grad(parameter, None)

    def stage_done(self, stage: int) -> None:
        """Record that a stage has finished, and start to reduce each bucket whose stages on this rank have all
        finished. Ties and buckets of FSDP shards are reduced later, in `finish`: the reduce-scatter of shards only
        starts here."""
        self._done.add(stage)
        if self.sharded is not None:
            self.sharded.stages_done(self._done)
        for bucket in self._early:
            if bucket.work is None and bucket.stages <= self._done:
                bucket.start()

    def finish(self, sync: bool) -> None:
        """End a step. With `sync`, sum the new gradients over the holders and add the gradients that were set aside.
        Without `sync`, keep new and summed gradients separate."""
        if self.sharded is not None:
            self.sharded.finish(sync)
        self.is_partial = not sync
        if sync:
            self._reduce()
        else:
            for bucket in self.buckets:
                bucket.unsummed |= {p for p in bucket.parameters.values() if p.requires_grad}
            self._partial |= {p: (p.grad, note(p.grad)) for _, p in self.shared if p.grad is not None}
        for parameter in [parameter for parameter in self._summed if parameter.grad is None]:  # nothing was added
            set_local_grad(parameter, self._summed.pop(parameter))

    def _reduce(self) -> None:
        for parameter in self.tp_sharded:
            align_grad(parameter)
        for bucket in self.buckets:
            if bucket.work is None:
                bucket.start()
        waited = [bucket.wait().double() for bucket in self.buckets if bucket.work is not None]
        counts = iter(torch.cat(waited).tolist() if waited else ())  # one device sync, not one per bucket
        for bucket in self.buckets:
            for parameter, total in bucket.summed(counts):
                self._partial.pop(parameter, None)
                if total is not None:
                    before = self._summed.pop(parameter, None)
                    set_local_grad(parameter, total if before is None else total.add_(before))

    def reset(self, parameters: Collection[nn.Parameter]) -> None:
        """Discard the partial gradients of these parameters, and the gradients that were set aside. The caller clears
        `.grad`."""
        for parameter in parameters:
            self._forget(parameter)
        if self.sharded is not None:
            self.sharded.reset(parameters)

    def _forget(self, parameter: nn.Parameter) -> None:
        self._summed.pop(parameter, None)
        self._partial.pop(parameter, None)


def bundled(items: Iterable[T], key: Callable[[T], Any], nbytes: Callable[[T], int]) -> list[list[T]]:
    """Divide the items with the same key, in order, into bundles of at most BUCKET bytes. An item larger than BUCKET
    has its own bundle."""
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
    """The dtype of the parameter's gradient, which may differ from the parameter's dtype."""
    return getattr(parameter, "grad_dtype", None) or parameter.dtype


def has_hooks(parameter: Tensor) -> bool:
    """Whether hooks observe or change the parameter's gradient as it is accumulated."""
    return bool(parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None))
