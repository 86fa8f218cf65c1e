"""Policy: the units and parameters that a stage holds, shares and runs, derived from the Dataflow.

If models are split by hand, each architecture needs a class that lists the layers, ties and forwards. Here the trace
finds this information, so the base class works for every model. A custom policy overrides only decisions that a trace
cannot make: the costs of units, and the positions of the cuts.

The model's glue runs on every stage, but each stage has only some of the activations, parameters and generators. Glue
that branches on an activation, changes a parameter, or registers a gradient hook would behave differently on each
stage. At boost and for every new kind of batch, the functions below find such glue in the Dataflow and raise an error.
"""

import importlib
from collections.abc import Callable, Mapping, Sequence
from functools import cache, cached_property
from importlib import metadata, util
from typing import Any, ClassVar, TypeVar

import torch
from torch import nn

from pipeshard.errors import (
    ConfigurationError,
    PartitionError,
    TraceError,
    UsageError,
    counted,
    explained,
    summary,
    unknown,
)
from pipeshard.graph.dataflow import Dataflow, Wanted, has_one_updater
from pipeshard.graph.units import find_units, intercept
from pipeshard.hf import full_name, without_adapters
from pipeshard.private import has_global_backward_hooks
from pipeshard.split.balance import balance
from pipeshard.split.boundary import boundaries, forbidden_cuts
from pipeshard.split.partition import Cuts, Partition, call_costs, speeds_of, weights
from pipeshard.split.replay import Replay
from pipeshard.split.ties import Ownership, refuse_overlaps


class Policy:
    """The units and parameters that one stage of a model holds, shares and runs. Its main methods are
    `distribute_layers` (which balances `costs`), `get_held_layers`, `get_shared_params` and `replace_forward`.

    Args:
        stage: this process's rank in the pipeline, below `num_stages`.
        partition: the rule that balances the stages: "auto" (costs), "uniform" (number of unit calls), "parameters"
            (number of parameters), "profile" (measured costs), "type:REGEX" (number of calls of units whose class name
            matches, ignoring case), "speed:1.0,0.6" (costs divided by each rank's relative speed); or a list with the
            number of unit calls per stage, or with the names of the modules to cut after.
        scale: the size of a microbatch relative to the traced batch.
        placement: the process that runs each part of the model; by default, each process runs one part.
        costs: the costs of the unit calls, such as measured times; by default, estimated from the trace.

    Attributes:
        tp_plan: the tensor-parallel plan for a base model that has no plan of its own. The plan maps module names, with
            * for numbers, to styles.
        chunks: the indices of the parts of the model that this process runs.
        partition: the Partition.
        stages: for each call of `flow`, the part of the model that runs it.
        ownership: the processes that hold and own each parameter.
    """

    tp_plan: ClassVar[Mapping[str, str] | None] = None

    def __init__(
        self,
        model: nn.Module,
        flow: Dataflow,
        stage: int,
        num_stages: int,
        partition: Cuts = "auto",
        scale: float = 1.0,
        device: torch.device | None = None,
        placement: Sequence[int] | None = None,
        costs: Sequence[float] | None = None,
    ) -> None:
        self.model, self.flow, self.stage, self.num_stages = model, flow, stage, num_stages
        self.placement = tuple(range(num_stages) if placement is None else placement)
        self.chunks = [part for part, process in enumerate(self.placement) if process == stage]
        self.partition_by, self.scale, self.known_costs = partition, scale, costs
        self.device = device or torch.device("cpu")
        self.units = find_units(model, (call.unit for call in flow.calls))
        self.partition = self._partition()
        self.stages = self.partition.of_calls(flow)
        refuse_unsplittable(model, flow, self.stages, self.placement)
        self.ownership = Ownership(model, flow, self.partition, self.placement, self.units)
        refuse_overlaps(model, self.ownership.held)

    def distribute_layers(self, num_layers: int, num_stages: int) -> list[int]:
        """The number of consecutive unit calls that each stage runs. The sum of these numbers is `num_layers`."""
        by = self.partition_by
        if isinstance(by, str):
            weights, forbidden = self.weights(num_stages), forbidden_cuts(self.flow)
            ranks = self.placement if len(self.placement) == num_stages else None
            speeds = self.speeds if ranks else None
            if not self.flow.ends_in_cut:
                return balance(weights, num_stages, forbidden, ranks=ranks, speeds=speeds)
            # The last stage may run no unit, only the glue after the last CutPoint.
            tail = self.scale * 3 * self.flow.tail if by == "auto" and self.known_costs is None else 0.0
            *counts, last = balance([*weights, tail], num_stages, forbidden, ranks=ranks, speeds=speeds)
            return [*counts, last - 1]
        if all(isinstance(entry, int) for entry in by):
            return [int(entry) for entry in by]
        ends = sorted(self._calls_of(str(entry), "partition")[-1] + 1 for entry in by)
        return [end - start for start, end in zip([0, *ends], [*ends, num_layers], strict=True)]

    def get_held_layers(self) -> list[nn.Module]:
        """The units that this stage runs, in the order of registration."""
        return list(self.held_units.values())

    def get_shared_params(self) -> list[dict[int, nn.Parameter]]:
        """For each parameter that several stages hold, a dict that maps these stages to the parameter. The order is the
        same on every rank."""
        parameters = dict(self.model.named_parameters())
        return [dict.fromkeys(holders, parameters[name]) for name, holders in self.ownership.shared().items()]

    def replace_forward(self) -> None:
        """Let `replay` answer unit calls: held units run, and all other units return received values.

        Modules that the trace did not call as units are not intercepted: a head whose weights only glue reads remains
        part of the glue.
        """
        called = {call.unit for call in self.flow.calls}
        for interception in intercept({name: unit for name, unit in self.units.items() if name in called}):
            interception.handler = self.replay

    def costs(self) -> list[float]:
        """The relative time of each unit call."""
        return call_costs(self.flow, self.units, self.scale) if self.known_costs is None else list(self.known_costs)

    def weights(self, num_stages: int) -> list[float]:
        """The weight of each unit call. If the partition is a rule (a string), it balances these weights across the
        stages."""
        if str(self.partition_by).startswith("profile") and self.known_costs is None:
            raise ConfigurationError(
                f"partition={self.partition_by!r} requires measured costs: pass costs=profile.costs(flow)"
            )
        units = [self.units[call.unit] for call in self.flow.calls]
        return weights(str(self.partition_by), units, self.costs, num_stages)

    @property
    def speeds(self) -> list[float] | None:
        """The relative speed of each stage's rank, if the partition lists speeds, otherwise None."""
        speeds = speeds_of(self.partition_by, self.num_stages)
        return speeds and [speeds[rank] for rank in self.placement]

    def unit(self, name: str) -> nn.Module:
        """The unit with this name. Raises PartitionError with similar names if the model has no such unit."""
        name = full_name(self.model, name)
        if name not in self.units:
            raise PartitionError(unknown(type(self).__name__, name, type(self.model).__name__, self.units))
        return self.units[name]

    def calls_of(self, name: str) -> list[int]:
        """The indices, in `flow.calls`, of the calls of the unit `name`, or of all units inside the module `name`.

        Raises PartitionError with similar names if the model calls no such unit.
        """
        return self._calls_of(name, type(self).__name__)

    @cached_property
    def held_units(self) -> dict[str, nn.Module]:
        """The units that this stage runs, by name, in the order of registration."""
        running = {call.unit for call, part in zip(self.flow.calls, self.stages) if part in self.chunks}
        return {name: unit for name, unit in self.units.items() if name in running}

    @cached_property
    def replay(self) -> Replay:
        """The Replay that answers unit calls on this stage."""
        return Replay(self.model, self.units, frozenset(self.held_units), self.stage, self.device)

    def _partition(self) -> Partition:
        """The Partition with the numbers of calls that `distribute_layers` returns. Raises PartitionError if these
        numbers are invalid."""
        calls, parts = self.flow.calls, len(self.placement)
        counts = self.distribute_layers(len(calls), parts)
        nonempty = counts[:-1] if self.flow.ends_in_cut else counts
        is_empty = parts > 1 and min(nonempty, default=1) < 1  # a single stage may have no units
        if len(counts) != parts or sum(counts) != len(calls) or is_empty:
            chunks = f" ({len(self.chunks)} for each of {self.num_stages} ranks)" if parts > self.num_stages else ""
            raise PartitionError(
                f"partition {list(counts)} must contain the number of unit calls (at least 1) for each stage: "
                f"{counted(parts, 'number')}{chunks} with the sum {len(calls)}. The model's unit calls are "
                f"{[call.unit for call in calls]}"
            )
        forbidden, edge = forbidden_cuts(self.flow), 0
        for count in counts[:-1]:
            edge += count
            if edge in forbidden:
                raise PartitionError(
                    f"no cut is possible before unit {calls[edge].unit}: {forbidden[edge]}. If you do not want "
                    "to change the model, cut before another unit"
                )
        return Partition.of(self.flow, counts)

    def _calls_of(self, name: str, who: str) -> list[int]:
        name = full_name(self.model, name)
        calls = [k for k, call in enumerate(self.flow.calls) if f"{call.unit}.".startswith(f"{name}.")]
        if not calls:
            called = dict.fromkeys(call.unit for call in self.flow.calls)
            raise PartitionError(unknown(who, name, type(self.model).__name__, called))
        return calls


def refuse_unsplittable(model: nn.Module, flow: Dataflow, stages: Sequence[int], placement: Sequence[int]) -> None:
    """Raise TraceError for a model that stages cannot run exactly. `stages[k]` is the part of the model that runs call
    k, and `placement` lists the process of each part.

    Glue must not branch on activations or parameters, since each stage has only its own. The last stage also has the
    inputs of the loss and the outputs, so glue after the last unit may branch on these values. A forward must not leave
    state for the next forward if no single stage can update this state: parameters that glue changes, or generators,
    counters and buffers (of a shared batch norm) that several stages update.
    """
    if len(placement) == 1:
        return
    decisions = [*flow.decisions, *(() if _last_stage_can_decide(model, flow) else flow.late_decisions)]
    if on_results := [decision.line for decision in decisions if not decision.parameters]:
        raise TraceError(
            f"{type(model).__name__} branches in Python on a unit's result, or differentiates it, but only the stage "
            f"of the unit has this result: {'; '.join(on_results)}. Replace the branch with tensor operations "
            "(torch.where), move the branch into the forward of a separate module (together with any "
            "torch.autograd.grad call or dual_level that it depends on), or use one stage (pp_size=1). A forward hook "
            "may keep tensors (y.detach().mean()): read their values after the step"
        )
    if decisions:
        parameters = dict.fromkeys(name for decision in decisions for name in decision.parameters)
        several = "s" * (len(parameters) > 1)
        lines = dict.fromkeys(decision.line for decision in decisions)
        raise TraceError(
            f"{type(model).__name__} branches in Python on {'parameters' if len(parameters) > 1 else 'the parameter'} "
            f"{', '.join(parameters)}, which not every stage holds: {'; '.join(lines)}. Replace the branch with tensor "
            f"operations (torch.where), move the branch and the parameter{several} into a separate module, make an "
            "untrained parameter a buffer or a float, or use one stage (pp_size=1)"
        )
    is_chunked = len(placement) > len(set(placement))
    for place in flow.carried:
        names = [flow.calls[call].unit if call >= 0 else "the model's forward" for call in sorted(place.writers)]
        writers = {stages[call] if call >= 0 else -1 for call in place.writers}
        sources = [*sorted(place.uses.parameters), *(flow.calls[call].unit for call in sorted(place.makers))]
        is_repeated = is_chunked or (place.kind == "parameter" and model.training)
        if place.kind in ("parameter", "settled") and -1 in writers and (sources or is_repeated):
            raise TraceError(
                f"the forward of {type(model).__name__} changes the parameter {place.name} outside all "
                f"units{f', based on {sources[0]}' if sources else ''}, but no stage can update it for all stages: "
                "change the parameter after optimizer.step() or inside a unit, or use one stage (pp_size=1)"
            )
        if len(writers) > 1 and has_one_updater(place.name, place.path, place.uses, place.kind):
            raise TraceError(
                f"{names[0]} and {names[-1]} {'draw from' if place.kind == 'generator' else 'change'} {place.name}, "
                "but do not run on the same stages. Each stage has its own copy, so the copies would diverge: give "
                f"each layer its own {'generator' if place.kind == 'generator' else 'copy'}, move this code out of all "
                "layers into the model's forward, or use one stage (pp_size=1)"
            )


def _last_stage_can_decide(model: nn.Module, flow: Dataflow) -> bool:
    """Whether only the last stage runs the glue after the last call, and this glue cannot call a unit that the trace
    did not call."""
    if any(place.until is None for place in flow.carried):
        return False
    called = {call.unit for call in flow.calls}
    return all(name in called for name in find_units(model))


def refuse_hooks(flow: Dataflow, stages: Sequence[int], num_stages: int) -> None:
    """Raise TraceError for a gradient hook of glue that would not receive the full gradient exactly once. Every stage
    that uses the tensor registers the hook, and the stage that computed the tensor may also register it."""
    last, ends = num_stages - 1, {stage: k for k, stage in enumerate(stages)}
    for hook in flow.hooks:
        users = {(*stages, last)[call] for call in hook.users}
        registering = {last} | {stage for stage, end in ends.items() if end >= hook.calls}
        passing = set() if hook.home is None else registering & {*range(stages[hook.home.call], max(users, default=0))}
        if users and (len(users | passing) > 1 or not users <= registering):
            raise TraceError(
                f"the model registers a gradient hook on a tensor ({hook.line}), but no single stage that registers "
                "the hook has the tensor's full gradient. Register the hook on a tensor inside a layer, or cut "
                "elsewhere (partition=[...])"
            )


def refuse_backward_hooks(
    model: nn.Module,
    units: Mapping[str, nn.Module],
    around: Sequence[nn.Module],
    flow: Dataflow,
    partition: Partition,
    outputs: Wanted,
) -> None:
    """Raise UsageError for a module's backward hook if no single stage has all gradients that the hook receives. This
    applies to modules that contain units (`around`), and to units with a result that crosses a cut and has a
    gradient."""
    of_all = has_global_backward_hooks()
    hooked = {m for m in (*around, *units.values()) if of_all or m._backward_hooks or m._backward_pre_hooks}
    if not hooked or partition.num_stages == 1:
        return
    crossing = boundaries(flow, partition.of_calls(flow), partition.num_stages, outputs)
    sending = {flow.calls[value.call].unit for boundary in crossing for value in boundary.gradients}
    hooked -= {unit for name, unit in units.items() if name not in sending}
    for name, module in model.named_modules():
        if module in hooked:
            where = "is itself split into stages" if module in around else "returns a result to another stage"
            raise UsageError(
                f"{name or 'the model'} ({type(module).__name__}) has a backward hook (register_full_backward_hook, "
                "register_full_backward_pre_hook, or register_module_full_backward_hook for all modules), but "
                f"{where}, so no single stage has all of the gradients that the hook receives. Register the hook on a "
                "module inside a unit, or cut elsewhere (the partition argument of PipelinePlugin)"
            )


def is_plain(policy: type[Policy]) -> bool:
    """Whether a policy overrides no method of Policy. The policy may still define a tensor-parallel plan."""
    own = policy.__mro__[: policy.__mro__.index(Policy)]
    return not any(hasattr(Policy, name) and callable(value) for each in own for name, value in vars(each).items())


SHIPPED = "pipeshard.policies"  # the package with the tensor-parallel plans
ENTRY_POINTS = "pipeshard.policies"  # the group of the entry points that map a model type to a Policy
_REGISTRY: dict[str | type[nn.Module], type[Policy]] = {}
PolicyClass = TypeVar("PolicyClass", bound=type[Policy])


def register_policy(*keys: str | type[nn.Module]) -> Callable[[PolicyClass], PolicyClass]:
    """Class decorator that registers a Policy for models of these classes or with these `config.model_type`s.

    A registered policy takes precedence over policies from entry points and from the folder policies/.
    """

    def register(policy: PolicyClass) -> PolicyClass:
        _REGISTRY.update(dict.fromkeys(keys, _checked(policy, "register_policy")))
        return policy

    return register


def find_policy(model: nn.Module) -> type[Policy]:
    """The policy registered for the model's class, for one of its base classes, or for the model's `config.model_type`.
    Otherwise, the first of the following that exists: the policy of an installed package's entry point, the policy in
    pipeshard's folder policies/, or Policy itself. A PeftModel has the policy of its base model, unless a policy is
    registered for the PeftModel.

    Raises ConfigurationError if several entry points match, or if the entry point does not load a Policy.
    """
    model_type = str(getattr(getattr(model, "config", None), "model_type", ""))
    _, base = without_adapters(model)
    keys: tuple[Any, ...] = (*type(model).__mro__, *type(base).__mro__, model_type)
    registered = next((_REGISTRY[key] for key in keys if key in _REGISTRY), None)
    return registered or _advertised(model_type) or _shipped(model_type) or Policy


@cache
def _advertised(model_type: str) -> type[Policy] | None:
    points = {point.value: point for point in metadata.entry_points(group=ENTRY_POINTS, name=model_type)}
    if len(points) > 1:
        raise ConfigurationError(
            f"several packages provide a policy for {model_type!r}: {', '.join(points)}. Pass one of these policies to "
            "register_policy"
        )
    if not points:
        return None
    ((value, point),) = points.items()
    where = f"entry point {model_type} = {value} of group {ENTRY_POINTS}"
    with explained(
        lambda error: ConfigurationError(
            f"{where} does not load ({summary(error)}): fix or remove the package that provides it, or choose another "
            "policy with register_policy"
        )
    ):
        policy = point.load()
    return _checked(policy, where)


@cache
def _shipped(model_type: str) -> type[Policy] | None:
    """The policy in the folder policies/, or None. The folder is missing if pipeshard is not installed."""
    plans = importlib.import_module(SHIPPED).TP_PLANS if util.find_spec(SHIPPED) else {}
    if model_type not in plans:
        return None
    name = "".join(map(str.capitalize, model_type.replace("-", "_").split("_"))) + "Policy"
    return type(name, (Policy,), {"tp_plan": plans[model_type]})


def _checked(policy: Any, who: str) -> type[Policy]:
    if not (isinstance(policy, type) and issubclass(policy, Policy)):
        raise ConfigurationError(f"{who} needs a subclass of Policy, got {policy!r}")
    return policy
