"""Optimizer checkpoints: states by the names of their parameters, which any number of stages can load."""

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from pipeshard.checkpoint.atomic import existing, new_file, new_folder, together
from pipeshard.checkpoint.optimizer_content import (
    FORMAT,
    OLDER,
    VALUE,
    Content,
    States,
    content_of,
    converted,
    flaw,
    has_slice,
    merged,
    numbered,
    on_meta,
)
from pipeshard.checkpoint.safe_load import load_plain
from pipeshard.checkpoint.safetensors_files import check_shards, read_shards, write_shards
from pipeshard.distributed.collectives import encode, gather_objects, is_packed, like, local, slice_like, whole
from pipeshard.engine.optimizer import PipelineOptimizer
from pipeshard.errors import CheckpointError, MessageError, listed

DESCRIPTION = "optimizer.pt"  # beside it are the tensors, in the files of every rank


def save_optimizer(optimizer: Optimizer, checkpoint: str | Path, shard: bool) -> None:
    """Write the optimizer's state by parameter name; every rank writes what it is the first to hold.

    With `shard` a folder of safetensors files, which torch.distributed.checkpoint's HuggingFaceStorageReader reads,
    else one file, which `torch.load(weights_only=True)` reads. What was there before stays until the new one is
    complete.

    Raises CheckpointError, on every rank, where that is impossible.
    """
    boosted, target = _boosted(optimizer), Path(checkpoint)
    with together(boosted.group):
        content = content_of(boosted)
        _check_readable(on_meta(content))
    description, owners = merged(gather_objects(on_meta(content), boosted.group))
    rank = boosted.group.rank()
    states = converted(content["state"], lambda _, tensor: tensor if shard and not is_packed(tensor) else whole(tensor))

    def writes(name: str, tensor: Tensor) -> bool:
        return owners[name] == rank or (isinstance(tensor, DTensor) and has_slice(boosted, name, owners[name]))

    written = {(name, key): tensor for (name, key), tensor in _tensors(states).items() if writes(name, tensor)}
    if shard:
        with new_folder(target, boosted.group, mark=DESCRIPTION) as folder:
            write_shards(_in_files(written), folder, rank)
            if rank == 0:
                torch.save(description, folder / DESCRIPTION)
        return
    with new_file(target, boosted.group) as folder:
        parts = [folder / f"{target.name}.stage{stage}" for stage in range(boosted.group.size())]
        with together(boosted.group):
            torch.save({place: _compact(tensor) for place, tensor in written.items()}, parts[rank])
        if rank == 0:
            for part in parts:
                for (name, key), tensor in load_plain(part, "a part of an optimizer", "save again").items():
                    description["state"][name][key] = tensor
            torch.save(description, folder / target.name)


def load_optimizer(optimizer: Optimizer, checkpoint: str | Path) -> None:
    """Give the optimizer the state that `save_optimizer` wrote with any number of stages.

    Raises CheckpointError, on every rank and with nothing changed, for anything but such a checkpoint, and for one of
    other parameters, shapes or groups.
    """
    boosted = _boosted(optimizer)
    with together(boosted.group):
        source = existing(Path(checkpoint))
        content = _read_content(source)
        held = content_of(boosted)
    present, _ = merged(gather_objects(on_meta(held), boosted.group))
    problems = list(_problems(content, present))
    if problems:
        raise CheckpointError(f"{checkpoint} does not fit this optimizer: {listed(problems)}")
    with together(boosted.group):
        states = _states(boosted, source, content, held["parameters"].keys())
    with together(boosted.group):
        _restore(boosted, content, states)


def _boosted(optimizer: Optimizer) -> PipelineOptimizer:
    if not isinstance(optimizer, PipelineOptimizer):
        raise CheckpointError(
            f"this {type(optimizer).__name__} was not boosted: pass the optimizer that booster.boost(...) returned"
        )
    return optimizer


def _check_readable(description: Content) -> None:
    """Refuse what torch.load(weights_only=True) would not read again."""
    try:
        encode(description)
    except MessageError as error:
        raise CheckpointError(f"the optimizer's options or states: {error}") from error


def _compact(tensor: Tensor) -> Tensor:
    """The tensor on the CPU, without the rest of a storage it is a part of."""
    tensor = tensor.detach().cpu()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def _tensors(states: States) -> dict[tuple[str, str], Tensor]:
    """The tensors among the states, by the name of the parameter and the key."""
    places = {(name, key): value for name, values in states.items() for key, value in values.items()}
    return {place: value for place, value in places.items() if isinstance(value, Tensor)}


def _in_files(tensors: Mapping[tuple[str, str], Tensor]) -> dict[str, Tensor]:
    return {f"state.{name}.{key}": tensor for (name, key), tensor in tensors.items()}


def _read_content(source: Path) -> Content:
    """What a folder says of itself, or all of a file; nothing that it says is larger than it is."""
    if not source.exists():
        raise CheckpointError(f"{source} cannot be read: there is no such file or folder")
    described = source.is_dir()
    advice = "pass what booster.save_optimizer wrote"
    content = load_plain(source / DESCRIPTION if described else source, "an optimizer checkpoint", advice)
    written = content.get("format") if isinstance(content, dict) else None
    if not isinstance(content, dict) or written not in ((FORMAT,) if described else (FORMAT, OLDER)):
        raise CheckpointError(f"{source} is not in the format {FORMAT!r}, which has names: {advice}")
    if problem := flaw(content, described):
        raise CheckpointError(f"{source} is damaged: {problem}")
    if described:
        check_shards(source, _in_files(_tensors(content["state"])))
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


def _states(optimizer: PipelineOptimizer, source: Path, content: Content, names: Collection[str]) -> States:
    """The saved states of these parameters, or of this rank's shards; the tensors are not views of a file."""
    states = {name: values for name, values in content["state"].items() if name in names}
    parameters = {name: optimizer.weights[name].parameter for name in states}

    def blank(name: str, tensor: Tensor) -> Tensor:
        """What the folder's files are read into: this rank's shard, or all of it where it is packed."""
        parameter = parameters[name]
        if tensor.shape != parameter.shape or not isinstance(parameter, DTensor) or is_packed(parameter):
            return torch.zeros(tensor.shape, dtype=tensor.dtype)
        part = torch.zeros(local(parameter).shape, dtype=tensor.dtype, device=parameter.device)
        return like(part, parameter)

    def part(name: str, tensor: Tensor) -> Tensor:
        if isinstance(tensor, DTensor):
            return local(tensor)
        sliced = slice_like(tensor, parameters[name]) if tensor.shape == parameters[name].shape else tensor
        return sliced if sliced is tensor and source.is_dir() else sliced.clone()

    if source.is_dir():
        states = converted(states, blank)
        read_shards(source, _in_files(_tensors(states)))
    return converted(states, part)


def _restore(optimizer: PipelineOptimizer, content: Content, states: States) -> None:
    for name, values in states.items():
        if VALUE in values:
            optimizer.weights[name].set_part(values.pop(VALUE))
    packed = optimizer.optim.state_dict()
    parameters = list(numbered(optimizer, packed))
    groups = [
        {**saved, "params": group["params"]}
        for saved, group in zip(content["param_groups"], packed["param_groups"], strict=True)
    ]
    state = {number: states[name] for number, name, _ in parameters if states.get(name)}
    optimizer.optim.load_state_dict({**packed, "state": state, "param_groups": groups})
    for _, name, parameter in parameters:  # torch has cast what is in another precision than the parameter on purpose
        if content["parameters"][name].dtype == parameter.dtype and states.get(name):
            loaded = optimizer.optim.state[parameter]
            for key, value in loaded.items():
                if isinstance(value, Tensor) and value.dtype != states[name][key].dtype:
                    loaded[key] = states[name][key].to(value.device)
