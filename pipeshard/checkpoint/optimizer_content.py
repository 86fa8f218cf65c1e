"""Optimizer content: the states of an optimizer, keyed by parameter name.

`Optimizer.state_dict()` numbers the parameters by their positions in the groups. These positions differ between stages.
If keyed by name, the states of all ranks form one checkpoint that any number of stages, replicas and slices can load.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from pipeshard.checkpoint.untrusted import has_content, plain
from pipeshard.distributed.collectives import encode, like, local
from pipeshard.engine.groups import is_compared
from pipeshard.engine.optimizer import PipelineOptimizer
from pipeshard.errors import CheckpointError
from pipeshard.private import keystr, tree_map_with_path

OPTIMIZER_FORMAT = "pipeshard optimizer 2"
# The previous format: single files are the same, but folders use another torch.distributed.checkpoint layout.
OLDER = "pipeshard optimizer 1"
VALUE = "pipeshard.value"  # the key of a parameter's fp32 value among its states
# "format"; "parameters": name -> meta tensor; "param_groups": options and names ("params"); "state": name -> key ->
# value; "shared": key -> value, the states that belong to no parameter and are the same on every rank (a step counter);
# "extra": key -> value, the further entries of the optimizer's own state_dict(), also the same on every rank.
# In a description, the tensors of "state" are also on meta.
Content: TypeAlias = dict[str, Any]
ParameterStates: TypeAlias = dict[str, dict[str, Any]]  # the optimizer's states of each parameter: name -> key -> value
# A parameter's name, and the key of a tensor among the parameter's states. If the tensor is in a nested dict, list or
# tuple (bitsandbytes, SOAP), the key includes the inner keys: "Q['left'][0]".
StateKey: TypeAlias = tuple[str, str]
ONLY_MODEL = (
    "save only the model: with booster.save_model, or in a Trainer with TrainingArguments(save_only_model=True)"
)
ENTRIES = "state", "param_groups"  # the entries of a state_dict() with torch's layout
ALIKE = "shared", "extra"  # the parts of a Content whose values are the same on every rank


def map_states(states: ParameterStates, convert: Callable[[StateKey, Tensor], Any]) -> ParameterStates:
    """A copy of `states` in which `convert(place, tensor)` replaces each tensor, including tensors in nested states."""

    def replaced(name: str, key: str, path: Any, value: Any) -> Any:
        return convert((name, key + keystr(path)), value) if isinstance(value, Tensor) else value

    return {
        name: {
            key: tree_map_with_path(partial(replaced, name, key), value, is_leaf=_is_leaf)
            for key, value in values.items()
        }
        for name, values in states.items()
    }


def _is_leaf(value: Any) -> bool:
    is_dict = type(value) in (dict, OrderedDict) and all(type(key) is str for key in value)
    return not is_dict and type(value) not in (list, tuple)


def _meta(_: Any, tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def numbered(optimizer: PipelineOptimizer, packed: Content) -> Iterator[tuple[int, str, nn.Parameter]]:
    """Yield each parameter's number in `packed` (the optimizer's own state_dict()), its name, and the parameter."""
    for k, (group, numbers) in enumerate(zip(optimizer.param_groups, packed["param_groups"], strict=True)):
        for parameter, number in zip(group["params"], numbers["params"], strict=True):
            if parameter not in optimizer.names:
                raise CheckpointError(
                    f"group {k} has a parameter of shape {tuple(parameter.shape)} that does not belong to the model "
                    "and therefore has no name: pass only parameters of the boosted model to the optimizer"
                )
            yield number, optimizer.names[parameter], parameter


def optimizer_content(optimizer: PipelineOptimizer) -> Content:
    """The optimizer state that this rank holds. States of a sharded parameter are DTensors with the parameter's
    placements. The key VALUE contains the fp32 master weight of a 16-bit parameter. Raises CheckpointError for any of
    the following:

    - a state_dict() without "state" or "param_groups";
    - a parameter that does not belong to the model;
    - a state whose key is neither a parameter in the optimizer's groups nor a string;
    - two tensors with the same StateKey;
    - a value of a type that a checkpoint cannot contain.
    """
    optimizer.copies.follow(adopts=True)
    packed, weights = optimizer.optim.state_dict(), optimizer.weights
    _refuse_other_layouts(optimizer, packed)
    names = {number: name for number, name, _ in numbered(optimizer, packed)}
    states = {name: dict(packed["state"].get(number, {})) for number, name in names.items()}
    shared = {key: value for key, value in packed["state"].items() if key not in names}
    extra = {key: value for key, value in packed.items() if key not in ENTRIES}
    if unnamed := [key for key in (*shared, *extra) if not isinstance(key, str)]:
        raise CheckpointError(
            f"the optimizer's state has the key {unnamed[0]!r}, which is not a parameter in the optimizer's groups. In "
            "a checkpoint, all other keys must be strings: use a string as the key"
        )
    for name, values in states.items():
        if weights[name].master.dtype != weights[name].parameter.dtype:
            values[VALUE] = weights[name].master.detach()

    def readable(value: Any, what: str) -> Any:
        return plain(value, f"{what} of {type(optimizer.optim).__name__}", f", or {ONLY_MODEL}")

    tensors = state_tensors(states)  # `readable` encodes its argument, so it gets the tensors on meta, without values

    def as_parameter(place: StateKey, tensor: Tensor) -> Tensor:
        value, parameter = tensors.get(place, tensor), weights[place[0]].parameter
        return like(value, parameter) if value.shape == local(parameter).shape else value

    described = {
        name: {
            key: value if isinstance(value, Tensor) else readable(value, f"state {key!r} of {name}")
            for key, value in values.items()
        }
        for name, values in map_states(states, _meta).items()
        if values
    }
    return {
        "format": OPTIMIZER_FORMAT,
        "parameters": {name: like(weights[name].master.detach(), weights[name].parameter) for name in states},
        "param_groups": [
            {
                key: readable(value, f"option {key!r} of group {k}")
                for key, value in group.items()
                if key != "param_names"
            }
            | {"params": [names[number] for number in group["params"]]}
            for k, group in enumerate(packed["param_groups"])
        ],
        "state": map_states(described, as_parameter),
        "shared": {key: readable(value, f"state {key!r}") for key, value in shared.items()},
        "extra": {key: readable(value, f"{key!r} in the state_dict()") for key, value in extra.items()},
    }


def _refuse_other_layouts(optimizer: PipelineOptimizer, packed: Content) -> None:
    """Raise CheckpointError if the optimizer's own state_dict() has no "state" or no "param_groups"."""
    if missing := [key for key in ENTRIES if key not in packed]:
        raise CheckpointError(
            f"the state_dict() of {type(optimizer.optim).__name__} has no {missing[0]!r}, so its states cannot be "
            "saved by parameter name: return states and groups under the keys 'state' and 'param_groups', as "
            f"torch.optim.Optimizer does, or {ONLY_MODEL}"
        )


def has_slice(optimizer: PipelineOptimizer, name: str, owner: int) -> bool:
    """Whether this rank's coordinate in the mesh differs from `owner`'s only on axes that shard the parameter."""
    grid, parameter = optimizer.grid, optimizer.weights[name].parameter
    at, first = grid.mesh.coordinate(), grid.mesh.unravel(owner, grid.mesh.shape)
    assert isinstance(at, tuple)
    return all(a == b or grid.divides(parameter, axis) for axis, (a, b) in enumerate(zip(at, first, strict=True)))


def on_meta(content: Content) -> Content:
    """The `content` with the tensors of its parameters and their states on meta. This form is exchanged between ranks,
    and stored as a folder's description."""
    (parameters,) = map_states({"": content["parameters"]}, _meta).values()
    return content | {"parameters": parameters, "state": map_states(content["state"], _meta)}


def merged_description(descriptions: list[Content]) -> tuple[Content, dict[str, int]]:
    """The combined description of all ranks' states, and the first rank that holds each parameter. Raises
    CheckpointError if one of the following differs between ranks: the number of groups, the options of a group, or a
    state that belongs to no parameter."""
    whole: Content = {"format": OPTIMIZER_FORMAT, "param_groups": []}
    whole |= {part: {} for part in ("parameters", "state", *ALIKE)}
    owners: dict[str, int] = {}
    for rank, description in enumerate(descriptions):
        for name in description["parameters"]:
            owners.setdefault(name, rank)
        for part in ("parameters", "state"):
            whole[part] = description[part] | whole[part]
        alike = [(part, *item) for part in ALIKE for item in description.get(part, {}).items()]
        for part, key, value in alike:
            if encode(whole[part].setdefault(key, value)) != encode(value):
                raise CheckpointError(
                    f"the optimizer's state {key!r}, which belongs to no parameter, differs between rank {rank} and "
                    "an earlier rank. Compute this state from values that are the same on all ranks, or keep it in "
                    "the state of each parameter"
                )
    of_ranks = [description["param_groups"] for description in descriptions]
    _refuse_uneven([len(groups) for groups in of_ranks])
    for k, groups in enumerate(zip(*of_ranks, strict=True)):
        # An optimizer may set some options only in groups that have parameters.
        used = [rank for rank, group in enumerate(groups) if group["params"]] or [*range(len(groups))]
        first, *others = (_compared(groups[rank]) for rank in used)
        for rank, other in zip(used[1:], others, strict=True):
            if first != other:
                key = next(key for key in first.keys() | other.keys() if first.get(key) != other.get(key))
                raise CheckpointError(
                    f"{key} of group {k} is {first.get(key)} on rank {used[0]}, but {other.get(key)} on rank {rank}: "
                    "use the same options for a group on every rank"
                )
        params = dict.fromkeys(name for group in groups for name in group["params"])
        whole["param_groups"].append(groups[used[0]] | {"params": list(params)})
    return whole, owners


def _refuse_uneven(counts: list[int]) -> None:
    """Raise CheckpointError if the number of groups differs between ranks."""
    if len(set(counts)) > 1:
        raise CheckpointError(
            f"the optimizer's numbers of parameter groups on the ranks are {counts}: call optimizer.add_param_group on "
            "every rank, with the same parameters, including parameters that the rank does not hold"
        )


def _compared(group: Mapping[str, Any]) -> dict[str, str]:
    return {key: repr(value) for key, value in group.items() if is_compared(key, group)}


def content_flaw(content: Content, described: bool) -> str:
    """The reason why a dict from a file is not a valid Content, or "" if it is valid. With `described`, the tensors of
    "state" must be on meta (`_refuse_older_folder` checks this for tensors in lists and dicts). Otherwise, the tensors
    must have values."""
    parts: list[Any] = [content.get(part) for part in ("parameters", "param_groups", "state")]
    parameters, groups, states = parts
    if not _by_name(parameters, Tensor):
        return "its parameters are not a dict from names to tensors"
    if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
        return "its param_groups are not a list of dicts"
    if not all(isinstance(group.get("params"), list) for group in groups):
        return "one of its groups has no list of params"
    for part in ALIKE:
        values = content.get(part, {})
        if not _by_name(values, object) or not all(has_content(v) for v in values.values() if isinstance(v, Tensor)):
            return f"its {part} state is not a dict with string keys, or has tensors without values"
    names = [name for group in groups for name in group["params"]]
    if not all(isinstance(name, str) for name in names) or sorted(names) != sorted(parameters):
        return "the params of its groups are not exactly its parameters, each listed once"
    if not _by_name(states, dict) or not states.keys() <= parameters.keys():
        return "its state is not a dict of dicts, or belongs to unknown parameters"
    for name, values in states.items():
        if not _by_name(values, object):
            return f"the state of {name} is not a dict with string keys"
        for (_, key), tensor in state_tensors({name: values}).items():
            if described and not tensor.is_meta and key in values:
                return f"{key} of {name} is stored in the description"
            if not described and not has_content(tensor):
                return f"{key} of {name} has no values"
        if VALUE in values and getattr(values[VALUE], "shape", None) != parameters[name].shape:
            return f"{VALUE} of {name} does not have the parameter's shape"
    return ""


def _by_name(values: Any, kind: type) -> bool:
    return isinstance(values, dict) and all(isinstance(k, str) and isinstance(v, kind) for k, v in values.items())


def state_tensors(states: ParameterStates) -> dict[StateKey, Tensor]:
    """The tensors in `states`. Raises CheckpointError if two tensors have the same key (such as a state "Q[0]" and the
    first element of a list "Q")."""
    tensors: dict[StateKey, Tensor] = {}

    def add(place: StateKey, tensor: Tensor) -> None:
        if tensors.setdefault(place, tensor) is not tensor:
            raise CheckpointError(
                f"two tensors in the state of {place[0]} have the name {place[1]} in a checkpoint: use a different key "
                "for one of the tensors"
            )

    map_states(states, add)
    return tensors
