"""Build: splits a model into stages that are ordinary `nn.Module`s, for the runtime that trains them."""

import importlib
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from pipeshard.batch.batch import Batch
from pipeshard.batch.criterion import Criterion, loss_of
from pipeshard.batch.read import argument_names, dummy_inputs, read_batch, taken_by
from pipeshard.config import PipelineHints
from pipeshard.engine.refusals import refuse_blank_adapters, refuse_recomputed
from pipeshard.engine.running_state import Carry
from pipeshard.engine.stage import Microbatch
from pipeshard.engine.traces import Traces
from pipeshard.errors import ConfigurationError, TraceError, UsageError, counted, hint
from pipeshard.ghost import inside_pipeshard
from pipeshard.graph.carried import Place
from pipeshard.graph.dataflow import Dataflow
from pipeshard.graph.trace import trace
from pipeshard.graph.units import containers, find_units, paths_of
from pipeshard.graph.writes import is_written, note
from pipeshard.private import graph_task, tree_tensors
from pipeshard.split.blank import refuse_blank
from pipeshard.split.boundary import Boundary, boundaries
from pipeshard.split.materialize import shard
from pipeshard.split.partition import named_modules_of
from pipeshard.split.policy import Policy, find_policy
from pipeshard.split.route import Recompute
from pipeshard.split.ties import tie_on_meta

SHIPPED_TARGETS = "pipeshard.interop.targets"


class StageModule(nn.Module):
    """Stage `index` of a model, called as `stage(*received, **batch)`. The stages may be in one process or in several.

    `received` are the tensors that the previous stage returned (none for stage 0). On every stage, `batch` is the full
    microbatch, as keyword arguments of the model. For batches that are tuples, `names` are these keywords (see
    `as_keywords`). The call returns a tuple of tensors for the next stage. The tensors keep their autograd graph. The
    last stage returns the loss instead. Without a loss, or with `whole`, it returns the model's output.

    The module contains the units that the stage runs and the parameters that the stage's glue reads. They have the same
    names as in the model. Random numbers depend on torch's seed and on the number of forwards so far. The seed must be
    the same on every rank.
    """

    def __init__(
        self,
        model: nn.Module,
        policy: Policy,
        index: int,
        criterion: Criterion | None,
        whole: bool,
        names: Sequence[str],
        carry: Carry,
    ) -> None:
        super().__init__()
        self.index, self.num_stages, self.whole, self.names = index, len(policy.placement), whole, tuple(names)
        # A tuple, so that the model, which contains the modules of all stages, is not registered as a submodule.
        self._source = (model, policy, criterion)
        self._traces = Traces(policy, Recompute.of(False, 0, self.num_stages))
        self._forwards = 0
        self.carry, self.is_carried = carry, False  # is_carried: whether the caller begins and ends the Carry
        self.planned: Microbatch | None = None  # the microbatch of the next forward, if the caller has looked it up
        policy.replay.proves = False  # another runtime may use caches, which the trace disables
        calls = zip(policy.flow.calls, policy.stages, strict=True)
        running = dict.fromkeys(call.unit for call, stage in calls if stage == index)
        for unit in running:
            node, key = _node(self, unit)
            node.add_module(key, policy.units[unit])
        own = set(self.parameters())
        for name in sorted(policy.ownership.held_by_parts[index]):
            if (parameter := model.get_parameter(name)) not in own:  # read by glue
                node, key = _node(self, name)
                node.register_parameter(key, parameter)

    @property
    def is_last(self) -> bool:
        return self.index == self.num_stages - 1

    def train(self, mode: bool = True) -> "StageModule":
        """Set the mode of all modules of the model, not only of this stage's modules, since glue reads the mode of
        modules that contain units."""
        super().train(mode)
        self._source[0].train(mode)
        return self

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "StageModule":
        """Raise UsageError for a move to another device or a cast to another dtype: the rest of the model, such as its
        buffers outside all units, would be neither moved nor cast."""
        tensors: list[Tensor] = [*self.parameters()] or [*self.buffers()]
        for dtype, device in {(tensor.dtype, tensor.device) for tensor in tensors}:
            after = fn(torch.empty(0, dtype=dtype, device=device))
            if (after.dtype, after.device) != (dtype, device):
                raise UsageError(
                    f"stage {self.index} ({dtype} on {device}) cannot be converted to {after.dtype} on {after.device} "
                    "after build, since the rest of the model would keep its dtype and its device: call "
                    "model.to(dtype) before build, and pass the runtime's device to build (device=...)"
                )
        return super()._apply(fn, recurse)

    def microbatch(self, batch: Mapping[str, Any]) -> Microbatch:
        """The Microbatch of `batch` for this stage, with its route and the shapes of its inputs and outputs."""
        model, policy, criterion = self._source
        place = policy.chunks.index(self.index)
        data = tuple(batch[name] for name in self.names) if batch.keys() == set(self.names) else dict(batch)
        self._traces.look(criterion)
        return self._traces.on_stage(read_batch(model, data), criterion, self.whole, place)

    @inside_pipeshard()
    def forward(self, *received: Tensor, **batch: Any) -> Any:
        if graph_task() != -1:
            raise UsageError(
                f"stage {self.index} was called in the backward pass (by a checkpoint around the stage?), where its "
                "dropout masks would differ from the masks of the first forward. Remove the checkpoint. To recompute "
                "each layer instead, call model.gradient_checkpointing_enable() before build"
            )
        model, policy, criterion = self._source
        policy.replace_forward()  # again, since another build of the same model may have replaced it
        microbatch = self.planned or self.microbatch(batch)
        route = microbatch.route
        if len(received) != len(route.enters.values):
            got = counted(len(received), "tensor")
            raise UsageError(
                f"stage {self.index} got {got}, but takes {len(route.enters.values)}: pass the "
                f"tensors that stage {self.index - 1} returned for this microbatch, and the microbatch as keyword "
                "arguments"
                if self.index
                else f"stage 0 got {got}, but takes none: pass the microbatch as stage(**batch)"
            )
        if self.index == policy.chunks[0]:
            policy.replay.free_blanks()  # no runtime reports the end of a step
        randomness = policy.replay.randomness
        policy.replay.repeats.is_unknown = len(policy.chunks) > 1 and not self.is_carried
        is_again = self.index != policy.chunks[0] and not self.is_carried
        calls = {call for call, stage in enumerate(policy.stages) if stage == self.index}
        once = changed_once(model, route.flow, calls) if is_again else nullcontext()
        with randomness.step(torch.initial_seed() % 2**63, self._forwards), self.carry.around(route), once:
            randomness.microbatch(0)
            entering = dict(zip(route.enters.values, received, strict=True))
            output, made = policy.replay.run(route, microbatch.deltas, entering, microbatch.batch)
        if self.is_carried:
            self._watch_backward([output, *made.values()], received)
        self._forwards += 1
        self._traces.stepped()
        if not self.is_last:
            values = ((value, made[value].contiguous()) for value in route.leaves.values)
            return tuple(x if self.whole or value in route.leaves.gradients else x.detach() for value, x in values)
        loss = None if self.whole else loss_of(output, criterion, microbatch.batch)
        return output if loss is None else loss

    def _watch_backward(self, returned: Any, received: Sequence[Tensor]) -> None:
        """Register hooks that set `repeats.stage` (the stage whose checkpoints are recomputed) to this stage when the
        stage's backward begins. pipeshard does not call this backward itself. Autograd runs all nodes of a later stage
        before this stage's nodes, since it prefers the nodes that were created last."""
        repeats, passed = self._source[1].replay.repeats, set(map(id, received))

        def begin(_: Tensor) -> None:
            repeats.stage = self.index

        for tensor in tree_tensors(returned):
            if tensor.requires_grad and tensor.grad_fn is not None and id(tensor) not in passed:
                tensor.register_hook(begin)


@contextmanager
def changed_once(model: nn.Module, flow: Dataflow, calls: Collection[int]) -> Iterator[None]:
    """Context manager for the forward of a stage that is not the first stage in this process. `calls` are the unit
    calls that the stage runs. On exit, restores state that only units of other stages change. Raises TraceError if
    glue changes state for the next forward, since the first stage's glue has already changed this state."""
    of_others = [place for place in flow.carried if place.writers.isdisjoint(calls)]
    carried = [place for place in of_others if place.kind not in ("parameter", "settled")]
    before = [(place, at := Place(model, place.path), at.take()) for place in carried]
    noted = [[(tensor, note(tensor)) for tensor in held.tensors] for *_, held in before]
    yield
    for (place, at, held), tensors in zip(before, noted, strict=True):
        if at.has(held) and not any(is_written(*each) for each in tensors):
            continue
        if -1 not in place.writers:
            at.put(held)
        elif place.until != -1 and (place.kind or place.readers or isinstance(held.value, int | float)):
            raise TraceError(
                f"the forward of {type(model).__name__} changes {place.name} for the next forward, but several stages "
                f"in this process run this forward, and each of them would change {place.name}. Move the code "
                "that changes it into a layer (a module with parameters), or use one stage per process, target=None or "
                "target='colossalai'"
            )


def _node(root: nn.Module, path: str) -> tuple[nn.Module, str]:
    """The parent module of `path` and the last name in `path`. Missing parents are created as empty modules."""
    *above, key = path.split(".")
    for name in above:
        if name not in root._modules:
            root.add_module(name, nn.Module())
        root = root.get_submodule(name)
    return root, key


def as_keywords(model: nn.Module, data: Any) -> dict[str, Any]:
    """The batch as keyword arguments of a StageModule. Entries of a tuple that are arguments of forward have the
    arguments' names. All other entries (for the criterion or for `*args`) are named by their position,
    counted from 0: the second entry is `entry_1`."""
    if isinstance(data, Mapping):
        return dict(data)
    entries = Batch.of(data).data
    taken = taken_by(model, entries)
    names = argument_names(model)[: len(entries) if taken is None else taken]
    names += [f"entry_{place}" for place in range(len(names), len(entries))]
    return dict(zip(names, entries, strict=True))


@dataclass(frozen=True)
class Split:
    """A split model, as passed to a target.

    Attributes:
        model, sample, criterion: the arguments of `build`. `sample` is the argument `batch`, as a Batch.
        flow, policy: the Dataflow of the model, and the Policy of this process. `policy.ownership.shared()` lists the
            parameters that several processes hold: tied parameters, and parameters that glue reads.
        live: for each stage, the values that enter it.
        stages: the StageModules of this process, by index; empty if the target splits the model itself.
        became: the replacement of each meta parameter that `build` replaced in order to tie it.
    """

    model: nn.Module
    sample: Batch
    criterion: Criterion | None
    flow: Dataflow
    policy: Policy
    live: list[Boundary]
    stages: dict[int, StageModule]
    became: Mapping[nn.Parameter, nn.Parameter]

    @property
    def num_stages(self) -> int:
        return len(self.policy.placement)


class Target:
    """Base class of targets, which receive a model's stages from `pipeshard.build(..., target=name, **options)`.
    `build` passes the options to the target's constructor.

    Attributes:
        whole_output: whether the last stage returns the model's output instead of the loss.
        shards_itself: whether the target splits the model itself, and receives only the partition.
    """

    whole_output = False
    shards_itself = False

    def placed(self, num_stages: int) -> tuple[Sequence[int], int]:
        """The process of each stage, and the index of this process. By default, all stages are in this process."""
        return [0] * num_stages, 0

    def take(self, split: Split) -> Any:
        """Return the object that `build` returns."""
        raise ConfigurationError(f"{type(self).__name__} does not implement take(split)")


TargetClass = TypeVar("TargetClass", bound=type[Target])
_KINDS: dict[str | None, type[Target]] = {}


def register_target(name: str | None, kind: TargetClass) -> TargetClass:
    """Register `kind` for `build(..., target=name)`. Raises ConfigurationError if another target has this name, or if
    `kind` is not a Target."""
    if not (isinstance(kind, type) and issubclass(kind, Target)):
        raise ConfigurationError(f"register_target({name!r}, ...) requires a subclass of Target, got {kind!r}")
    importlib.import_module(SHIPPED_TARGETS)  # registers the built-in targets
    if _KINDS.get(name, kind) is not kind:
        raise ConfigurationError(
            f"the target {name!r} is already registered, as {_KINDS[name].__name__}: choose a different name"
        )
    _KINDS[name] = kind
    return kind


def find_target(name: str | None, options: Mapping[str, Any]) -> Target:
    """Create the target with this name and these options. Raises ConfigurationError for an unknown name or option."""
    importlib.import_module(SHIPPED_TARGETS)
    if name not in _KINDS:
        names = sorted(known for known in _KINDS if known is not None)
        known = hint(str(name), [*names, "None"])
        raise ConfigurationError(f"target={name!r} is unknown: {known} (pipeshard.register_target adds a target)")
    kind = _KINDS[name]
    try:
        inspect.signature(kind).bind(**options)
    except TypeError as error:
        raise ConfigurationError(
            f"target={name!r} does not accept these options: {error}. Pass the options of "
            f"{kind.__name__}{inspect.signature(kind)}"
        ) from error
    return kind(**options)


def build(
    model: nn.Module,
    cuts: int | Sequence[int] | Sequence[str],
    target: str | None = None,
    batch: Any = None,
    criterion: Criterion | None = None,
    device: torch.device | str = "cpu",
    **options: Any,
) -> Any:
    """Split `model` into stages, pass them to `target`, and return the target's object.

    Args:
        cuts: one of: the names of the modules to cut after, at any level of nesting (Slapo, Chen et al. 2023,
            arXiv:2302.08005); a list with the number of unit calls of each stage; or the number of stages, balanced by
            cost.
        target: the name of a target in `pipeshard.interop`, or of a target added with `register_target`. With None, all
            stages stay in this process, as one module that is called like the model.
        batch: a microbatch with the sizes used in training. For a transformers model, the default is dummy inputs.
        criterion: a function `criterion(output, batch)` that returns the loss, for a model whose output has no loss.
            For a PipelineModule, the default is its `loss_fn`.
        device: the device of the stages' tensors.
        options: the arguments of the target (see `pipeshard.interop`).

    Raises ConfigurationError for an invalid argument, for an unknown target or option, and for a model that
    PipelinePlugin.from_pretrained created (unless the target loads the model's checkpoint). Raises PartitionError for
    impossible cuts, and TraceError for a model that cannot be split. Raises BatchError if the batch is missing or not
    supported, and UsageError if the target needs a loss and finds none.
    """
    chosen = find_target(target, options)
    criterion = PipelineHints.of(model).criterion if criterion is None else criterion
    if not chosen.shards_itself:
        refuse_blank_adapters(model)
        refuse_blank(model)
    device = _with_index(torch.device(device))
    became = tie_on_meta(model)
    sample = read_batch(model, dummy_inputs(model) if batch is None else batch)
    flow, policy = partition(model, cuts, sample, criterion, chosen, device)
    if not chosen.shards_itself:
        shard(model, policy, device, seed=torch.initial_seed() % 2**63)
    whole = chosen.whole_output or flow.loss is None
    live = boundaries(flow, policy.stages, len(policy.placement), whole)
    names = () if isinstance(sample.data, Mapping) else tuple(as_keywords(model, sample.data))
    own = () if chosen.shards_itself else policy.chunks
    carry = Carry(model)
    stages = {index: StageModule(model, policy, index, criterion, whole, names, carry) for index in own}
    return chosen.take(Split(model, sample, criterion, flow, policy, live, stages, became))


def _with_index(device: torch.device) -> torch.device:
    """The device, with an explicit index if it is a CUDA device (as in `tensor.device`)."""
    is_current = device.type == "cuda" and device.index is None
    return torch.device("cuda", torch.cuda.current_device()) if is_current else device


def partition(
    model: nn.Module,
    cuts: int | Sequence[int] | Sequence[str],
    sample: Batch,
    criterion: Criterion | None,
    target: Target,
    device: torch.device,
) -> tuple[Dataflow, Policy]:
    """Trace the model, and assign unit calls to stages and stages to processes. Returns the Dataflow and this process's
    Policy."""
    if isinstance(cuts, str) or (isinstance(cuts, int) and cuts < 1):
        raise ConfigurationError(
            "cuts must be a list of module names to cut after, a list with the number of unit calls of each stage, or "
            f"a positive number of stages, got {cuts!r}"
        )
    names = [] if isinstance(cuts, int) else named_modules_of(cuts)
    parts = cuts if isinstance(cuts, int) else len(cuts) + bool(names or not cuts)
    refuse_recomputed(model, containers(model, find_units(model, paths_of(model, names))), is_boosted=False)
    flow = trace(model, sample, criterion, cuts=names)
    placement, rank = target.placed(parts)
    by = PipelineHints.of(model).partition if isinstance(cuts, int) or not cuts else cuts
    processes = max(placement) + 1
    return flow, find_policy(model)(model, flow, rank, processes, by, device=device, placement=placement)
