"""Optimizer checkpoints: states by the names of their parameters, which any number of stages can load."""

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim import Optimizer

from pipeshard.checkpoint.beside import existing, new_file, new_folder, together
from pipeshard.errors import CheckpointError, listed
from pipeshard.runtime.agreement import gather_objects
from pipeshard.runtime.local import like, local, slice_like, whole
from pipeshard.runtime.optimizer import PipelineOptimizer
from pipeshard.runtime.weights import Weight

DESCRIPTION = "optimizer.pt"  # beside it are the tensors, in the files of torch.distributed.checkpoint
FORMAT = "pipeshard optimizer 1"
VALUE = "pipeshard.value"  # among the states of a parameter: itself, in full precision

# "format"; "parameters": name -> meta tensor; "param_groups": options and names ("params"); "state": name -> key ->
# value. In a description the tensors of "state" are on meta, too.
Content: TypeAlias = dict[str, Any]


def save_optimizer(optimizer: Optimizer, checkpoint: str | Path, shard: bool) -> None:
    """Write the optimizer's state by parameter name; every rank writes what it is the first to hold.

    With `shard` a folder, which torch.distributed.checkpoint reads, else one file, which
    `torch.load(weights_only=True)` reads. What was there before stays until the new one is complete.

    Raises CheckpointError, on every rank, where that is impossible.
    """
    boosted, target = _boosted(optimizer), Path(checkpoint)
    with together(boosted.group):
        content = _content(boosted)
        _check_readable(_on_meta(content))
    description, owners = _merged(gather_objects(_on_meta(content), boosted.group))
    rank = boosted.group.rank()
    state = {name: {k: v if shard else whole(v) for k, v in vs.items()} for name, vs in content["state"].items()}
    owned = _tensors(
        {n: vs for n, vs in state.items() if owners[n] == rank or (shard and _has_slice(boosted, n, owners[n]))}
    )
    if shard:
        with new_folder(target, boosted.group, mark=DESCRIPTION) as folder:
            save(_flat(owned), checkpoint_id=folder, process_group=boosted.group)
            if rank == 0:
                torch.save(description, folder / DESCRIPTION)
        return
    with new_file(target, boosted.group) as folder:
        parts = [folder / f"{target.name}.stage{stage}" for stage in range(boosted.group.size())]
        with together(boosted.group):
            torch.save({n: {k: _compact(v) for k, v in tensors.items()} for n, tensors in owned.items()}, parts[rank])
        if rank == 0:
            for part in parts:
                for name, tensors in _read(part).items():
                    description["state"][name].update(tensors)
            torch.save(description, folder / target.name)


def load_optimizer(optimizer: Optimizer, checkpoint: str | Path) -> None:
    """Give the optimizer the state that `save_optimizer` wrote with any number of stages.

    Raises CheckpointError, on every rank and with nothing changed, for what is no such checkpoint, and for one of
    other parameters, shapes or groups.
    """
    boosted = _boosted(optimizer)
    with together(boosted.group):
        source = existing(Path(checkpoint))
        content = _read_content(source)
        held = _content(boosted)
    whole, _ = _merged(gather_objects(_on_meta(held), boosted.group))
    problems = list(_problems(content, whole))
    if problems:
        raise CheckpointError(f"{checkpoint} does not fit this optimizer: {listed(problems)}")
    with together(boosted.group):
        states = _states(boosted, source, content, held["parameters"].keys())
    with together(boosted.group):
        _restore(boosted, content, states)


def _boosted(optimizer: Optimizer) -> PipelineOptimizer:
    if not isinstance(optimizer, PipelineOptimizer):
        raise CheckpointError(
            f"{type(optimizer).__name__} is no boosted optimizer: pass the one that booster.boost(...) returned"
        )
    return optimizer


def _numbered(optimizer: PipelineOptimizer, packed: Content) -> Iterator[tuple[int, str, nn.Parameter]]:
    """The number in `packed`, the optimizer's own state_dict(), and the name of each parameter."""
    for k, (group, numbers) in enumerate(zip(optimizer.param_groups, packed["param_groups"], strict=True)):
        for parameter, number in zip(group["params"], numbers["params"], strict=True):
            if parameter not in optimizer.names:
                raise CheckpointError(
                    f"group {k} has a parameter of shape {tuple(parameter.shape)} that is none of the model's, so it "
                    "has no name: give the optimizer parameters of the boosted model only"
                )
            yield number, optimizer.names[parameter], parameter


def _content(optimizer: PipelineOptimizer) -> Content:
    """The state this rank holds."""
    packed = optimizer.optim.state_dict()
    named = [(number, name, parameter) for number, name, parameter in _numbered(optimizer, packed)]
    names = {number: name for number, name, _ in named}
    groups = [
        {key: value for key, value in group.items() if key != "param_names"}
        | {"params": [names[number] for number in group["params"]]}
        for group in packed["param_groups"]
    ]
    return {
        "format": FORMAT,
        "parameters": {name: _like(parameter.detach(), optimizer.weights[name]) for _, name, parameter in named},
        "param_groups": groups,
        "state": {
            name: values for number, name in names.items() if (values := _state(optimizer, number, name, packed))
        },
    }


def _state(optimizer: PipelineOptimizer, number: int, name: str, packed: Content) -> dict[str, Any]:
    """What the optimizer keeps of a parameter, and its value in full precision, where the model has it in less."""
    weight = optimizer.weights[name]
    values = dict(packed["state"].get(number, {}))
    if weight.master is not None and weight.master.dtype != weight.parameter.dtype:
        values[VALUE] = weight.master.detach()
    return {key: _like(value, weight) for key, value in values.items()}


def _like(value: Any, weight: Weight) -> Any:
    """A state of this rank's slice of a parameter as the slice of a state that it is."""
    if isinstance(value, Tensor) and value.shape == local(weight.parameter).shape:
        return like(value, weight.parameter)
    return value


def _has_slice(optimizer: PipelineOptimizer, name: str, owner: int) -> bool:
    """Whether this rank has a slice of what the rank `owner` has one of, that no other rank has."""
    grid, parameter = optimizer.grid, optimizer.weights[name].parameter
    at, first = grid.mesh.coordinate(), grid.mesh.unravel(owner, grid.mesh.shape)
    assert isinstance(at, tuple)
    return all(a == b or grid.divides(parameter, axis) for axis, (a, b) in enumerate(zip(at, first, strict=True)))


def _on_meta(content: Content) -> Content:
    """The same without values of tensors: what the ranks tell each other, and what a folder's description has."""

    def meta(values: dict[str, Any]) -> dict[str, Any]:
        return {
            k: torch.empty(v.shape, dtype=v.dtype, device="meta") if isinstance(v, Tensor) else v
            for k, v in values.items()
        }

    state = {name: meta(values) for name, values in content["state"].items()}
    return content | {"parameters": meta(content["parameters"]), "state": state}


def _merged(descriptions: list[Content]) -> tuple[Content, dict[str, int]]:
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


def _check_readable(description: Content) -> None:
    """Refuse what torch.load(weights_only=True) would not read again."""
    buffer = io.BytesIO()
    try:
        torch.save(description, buffer)
        buffer.seek(0)
        torch.load(buffer, weights_only=True)
    except Exception as error:
        raise CheckpointError(
            f"the optimizer's options or states are not made of tensors, numbers and strings alone: {error}"
        ) from error


def _compact(tensor: Tensor) -> Tensor:
    """The tensor on the CPU, without the rest of a storage it is a part of."""
    tensor = tensor.detach().cpu()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def _tensors(states: dict[str, dict[str, Any]]) -> dict[str, dict[str, Tensor]]:
    return {n: {k: v for k, v in values.items() if isinstance(v, Tensor)} for n, values in states.items()}


def _flat(states: dict[str, dict[str, Tensor]]) -> dict[str, Any]:
    return {f"state.{name}.{key}": tensor for name, tensors in states.items() for key, tensor in tensors.items()}


def _read(file: Path) -> Content:
    return torch.load(file, map_location="cpu", weights_only=True, mmap=True)


def _read_content(source: Path) -> Content:
    if not source.exists():
        raise CheckpointError(f"{source} cannot be read: there is no such file or folder")
    file = source / DESCRIPTION if source.is_dir() else source
    try:
        content = _read(file)
    except Exception as error:
        raise CheckpointError(
            f"{source} is no optimizer checkpoint ({type(error).__name__}: {error}): pass what "
            "booster.save_optimizer wrote"
        ) from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise CheckpointError(
            f"{source} is not in the format {FORMAT!r}, which has names: pass what booster.save_optimizer wrote"
        )
    return content


def _problems(saved: Content, present: Content) -> Iterator[str]:
    groups, others = saved["param_groups"], present["param_groups"]
    if len(groups) != len(others):
        yield f"it has {len(groups)} parameter groups, the optimizer {len(others)}"
    home = {name: k for k, group in enumerate(groups) for name in group["params"]}
    for k, group in enumerate(others):
        for name in group["params"]:
            shape = tuple(present["parameters"][name].shape)
            if name not in home:
                yield f"{name} is missing"
            elif home[name] != k:
                yield f"{name} is in group {home[name]}, in the optimizer in group {k}"
            elif tuple(saved["parameters"][name].shape) != shape:
                yield f"{name} has shape {tuple(saved['parameters'][name].shape)}, in the optimizer {shape}"
    for name in sorted(home.keys() - present["parameters"].keys()):
        yield f"{name} is unexpected"


def _states(optimizer: PipelineOptimizer, source: Path, content: Content, names: Any) -> dict[str, dict[str, Any]]:
    """The saved states of these parameters, or of this rank's slices; the tensors are no views of a file."""

    def read(value: Any, parameter: nn.Parameter) -> Any:
        if not isinstance(value, Tensor):
            return value
        sliced = value.shape == parameter.shape and local(parameter) is not parameter
        if not value.is_meta:
            return slice_like(value, parameter).clone() if sliced else value.clone()
        shape = local(parameter).shape if sliced else value.shape
        empty = torch.empty(shape, dtype=value.dtype, device=parameter.device if sliced else "cpu")
        return like(empty, parameter) if sliced else empty

    states = {
        name: {key: read(value, optimizer.weights[name].parameter) for key, value in values.items()}
        for name, values in content["state"].items()
        if name in names
    }
    if source.is_dir():
        flat = _flat(_tensors(states))
        try:
            load(flat, checkpoint_id=source, process_group=optimizer.group)
        except CheckpointException as error:
            reasons = "; ".join(f"{type(failure).__name__}: {failure}" for failure, _ in error.failures.values())
            raise CheckpointError(f"{source} is damaged: {reasons}") from error
    return {
        name: {key: local(value) if isinstance(value, Tensor) else value for key, value in values.items()}
        for name, values in states.items()
    }


def _restore(optimizer: PipelineOptimizer, content: Content, states: dict[str, dict[str, Any]]) -> None:
    for name, values in states.items():
        if VALUE in values:
            optimizer.weights[name].set_part(values.pop(VALUE))
    states = {name: values for name, values in states.items() if values}
    packed = optimizer.optim.state_dict()
    numbered = list(_numbered(optimizer, packed))
    groups = [
        {**saved, "params": group["params"]}
        for saved, group in zip(content["param_groups"], packed["param_groups"], strict=True)
    ]
    state = {number: states[name] for number, name, _ in numbered if name in states}
    optimizer.optim.load_state_dict({**packed, "state": state, "param_groups": groups})
    for _, name, parameter in numbered:  # torch has cast what is in another precision than the parameter on purpose
        if content["parameters"][name].dtype == parameter.dtype:
            own = optimizer.optim.state[parameter] if name in states else {}
            for key, value in own.items():
                if isinstance(value, Tensor) and value.dtype != states[name][key].dtype:
                    own[key] = states[name][key].to(value.device)
