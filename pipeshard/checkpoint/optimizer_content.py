"""Content: what an optimizer keeps of each parameter, by the parameters' names, on one rank and on all together.

torch numbers the parameters in `Optimizer.state_dict()` by their places in the groups, which are others on every stage.
Under names the states of all ranks make one description, which any number of stages, replicas and slices can load.
"""

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from pipeshard.checkpoint.safe_load import has_content
from pipeshard.distributed.collectives import like, local
from pipeshard.engine.optimizer import PipelineOptimizer
from pipeshard.errors import CheckpointError

FORMAT = "pipeshard optimizer 2"
OLDER = "pipeshard optimizer 1"  # a file of it is the same; in a folder were torch.distributed.checkpoint's own files
VALUE = "pipeshard.value"  # among the states of a parameter: itself, in full precision
# "format"; "parameters": name -> meta tensor; "param_groups": options and names ("params"); "state": name -> key ->
# value. In a description the tensors of "state" are on meta, too.
Content: TypeAlias = dict[str, Any]
States: TypeAlias = dict[str, dict[str, Any]]  # what the optimizer keeps of each parameter: name -> key -> value


def converted(states: States, convert: Callable[[str, Tensor], Any]) -> States:
    """The same, with `convert(name of the parameter, tensor)` in the place of each tensor."""
    return {
        name: {key: convert(name, value) if isinstance(value, Tensor) else value for key, value in values.items()}
        for name, values in states.items()
    }


def numbered(optimizer: PipelineOptimizer, packed: Content) -> Iterator[tuple[int, str, nn.Parameter]]:
    """The number in `packed`, the optimizer's own state_dict(), and the name of each parameter."""
    for k, (group, numbers) in enumerate(zip(optimizer.param_groups, packed["param_groups"], strict=True)):
        for parameter, number in zip(group["params"], numbers["params"], strict=True):
            if parameter not in optimizer.names:
                raise CheckpointError(
                    f"group {k} has a parameter of shape {tuple(parameter.shape)} that is not in the model, so it has "
                    "no name: give the optimizer parameters of the boosted model only"
                )
            yield number, optimizer.names[parameter], parameter


def content_of(optimizer: PipelineOptimizer) -> Content:
    """The state this rank holds. That of a shard is a DTensor as the parameter is; VALUE is where this is in 16
    bits."""
    packed, weights = optimizer.optim.state_dict(), optimizer.weights
    names = {number: name for number, name, _ in numbered(optimizer, packed)}
    states = {name: dict(packed["state"].get(number, {})) for number, name in names.items()}
    for name, values in states.items():
        if weights[name].master.dtype != weights[name].parameter.dtype:
            values[VALUE] = weights[name].master.detach()

    def as_parameter(name: str, value: Tensor) -> Tensor:
        parameter = weights[name].parameter
        return like(value, parameter) if value.shape == local(parameter).shape else value

    return {
        "format": FORMAT,
        "parameters": {name: like(weights[name].master.detach(), weights[name].parameter) for name in states},
        "param_groups": [
            {key: value for key, value in group.items() if key != "param_names"}
            | {"params": [names[number] for number in group["params"]]}
            for group in packed["param_groups"]
        ],
        "state": converted({name: values for name, values in states.items() if values}, as_parameter),
    }


def has_slice(optimizer: PipelineOptimizer, name: str, owner: int) -> bool:
    """Whether this rank has a slice of what the rank `owner` has one of, that no other rank has."""
    grid, parameter = optimizer.grid, optimizer.weights[name].parameter
    at, first = grid.mesh.coordinate(), grid.mesh.unravel(owner, grid.mesh.shape)
    assert isinstance(at, tuple)
    return all(a == b or grid.divides(parameter, axis) for axis, (a, b) in enumerate(zip(at, first, strict=True)))


def on_meta(content: Content) -> Content:
    """The same without values of tensors: what the ranks tell each other, and what a folder's description has."""

    def meta(_: str, tensor: Tensor) -> Tensor:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")

    (parameters,) = converted({"": content["parameters"]}, meta).values()
    return content | {"parameters": parameters, "state": converted(content["state"], meta)}


def merged(descriptions: list[Content]) -> tuple[Content, dict[str, int]]:
    """What all ranks hold together, and which is the first to hold each parameter."""
    whole: Content = {"format": FORMAT, "parameters": {}, "param_groups": [], "state": {}}
    owners: dict[str, int] = {}
    for rank, description in enumerate(descriptions):
        for name in description["parameters"]:
            owners.setdefault(name, rank)
        for part in ("parameters", "state"):
            whole[part] = description[part] | whole[part]
    for k, groups in enumerate(zip(*(description["param_groups"] for description in descriptions), strict=True)):
        first, *others = ({key: repr(value) for key, value in group.items() if key != "params"} for group in groups)
        for rank, other in enumerate(others, start=1):
            if first != other:
                key = next(key for key in first.keys() | other.keys() if first.get(key) != other.get(key))
                raise CheckpointError(
                    f"{key} of group {k} is {first.get(key)} on stage 0, but {other.get(key)} on stage {rank}: the "
                    "options of a group have to be the same on all stages"
                )
        params = dict.fromkeys(name for group in groups for name in group["params"])
        whole["param_groups"].append(groups[0] | {"params": list(params)})
    return whole, owners


def flaw(content: Content, described: bool) -> str:
    """What makes a dict that somebody wrote another thing than a Content; "" for a Content. With `described`, tensors
    are to be on meta; else there are values for all of them."""
    parts: list[Any] = [content.get(part) for part in ("parameters", "param_groups", "state")]
    parameters, groups, states = parts
    if not _by_name(parameters, Tensor):
        return "its parameters are not tensors by name"
    if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
        return "its param_groups are not a list of dicts"
    if not all(isinstance(group.get("params"), list) for group in groups):
        return "a group has no params"
    names = [name for group in groups for name in group["params"]]
    if not all(isinstance(name, str) for name in names) or sorted(names) != sorted(parameters):
        return "the params of its groups are not its parameters, each once"
    if not _by_name(states, dict) or not states.keys() <= parameters.keys():
        return "its state is not of its parameters"
    for name, values in states.items():
        if not _by_name(values, object):
            return f"the state of {name} has no names"
        for key, value in values.items():
            if isinstance(value, Tensor) and not (value.is_meta if described else has_content(value)):
                return f"{key} of {name} is {'in its description' if described else 'without values'}"
        if VALUE in values and getattr(values[VALUE], "shape", None) != parameters[name].shape:
            return f"{VALUE} of {name} does not have its shape"
    return ""


def _by_name(values: Any, kind: type) -> bool:
    return isinstance(values, dict) and all(isinstance(k, str) and isinstance(v, kind) for k, v in values.items())
