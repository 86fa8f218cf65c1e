"""Optimizer checkpoints: states keyed by parameter name, which any number of stages can load."""

import copy
import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from pipeshard.checkpoint.files import existing, new_file, new_folder, together, writes
from pipeshard.checkpoint.optimizer_content import (
    ALIKE,
    OLDER,
    ONLY_MODEL,
    OPTIMIZER_FORMAT,
    VALUE,
    Content,
    ParameterStates,
    StateKey,
    content_flaw,
    has_slice,
    map_states,
    merged_description,
    numbered,
    on_meta,
    optimizer_content,
    state_tensors,
)
from pipeshard.checkpoint.safetensors_files import (
    RANK_FILES,
    FileContent,
    check_shards,
    file_contents,
    read_shards,
    write_files,
)
from pipeshard.checkpoint.untrusted import load_plain
from pipeshard.distributed.collectives import gather_objects, is_packed, laid_out, like, local, slice_like, whole
from pipeshard.engine.optimizer import PipelineOptimizer
from pipeshard.errors import CheckpointError, listed

logger = logging.getLogger("pipeshard")
# copies of the contents of the files that a rank writes to an optimizer's folder, and the folder's description (None
# except on the first rank)
OptimizerPart: TypeAlias = tuple[list[FileContent], Content | None]
DESCRIPTION = "optimizer.pt"  # in a folder that also contains each rank's files of tensors


def save_optimizer(optimizer: Optimizer, checkpoint: str | Path, shard: bool) -> None:
    """Write the optimizer's state, keyed by parameter name. The first rank that holds a tensor or slice writes it.

    With `shard`, writes a folder of safetensors files that torch.distributed.checkpoint's HuggingFaceStorageReader can
    read. Otherwise, writes one file that `torch.load(weights_only=True)` can read. The previous files remain until the
    new files are complete. Other files in the folder, such as the model's, are kept.

    Raises CheckpointError, on every rank, if the state cannot be written.
    """
    boosted, target = boosted_optimizer(optimizer), Path(checkpoint)
    description, written = _planned(boosted, shard)
    rank = boosted.group.rank()
    if shard:
        with new_folder(target, boosted.group, own=RANK_FILES) as folder:
            write_files(file_contents(_in_files(written)), folder, rank)
            if rank == 0:
                with writes(folder / DESCRIPTION):
                    torch.save(description, folder / DESCRIPTION)
        return
    with new_file(target, boosted.group) as folder:
        parts = [folder / f"{target.name}.stage{stage}" for stage in range(boosted.group.size())]
        with together(boosted.group), writes(parts[rank]):
            torch.save({place: _compact(tensor) for place, tensor in written.items()}, parts[rank])
        if rank == 0:
            tensors: dict[StateKey, Tensor] = {}
            for part in parts:
                tensors |= load_plain(part, "a part of an optimizer state", "save again")
            description["state"] = map_states(description["state"], lambda place, _: tensors[place])
            with writes(target):
                torch.save(description, folder / target.name)


def check_savable(optimizer: Optimizer) -> None:
    """Raise CheckpointError, on every rank, if `save_optimizer` could not write the optimizer's state. Call it on all
    ranks after a first step, which creates the state."""
    boosted = boosted_optimizer(optimizer)
    _, own = _described(boosted)
    merged_description(gather_objects(own, boosted.group))


def optimizer_part(optimizer: Optimizer) -> Callable[[], OptimizerPart]:
    """Return a function that returns this rank's part of an optimizer's folder. The function uses no collectives. Call
    `optimizer_part` on all ranks. Raises CheckpointError as `save_optimizer` does."""
    boosted = boosted_optimizer(optimizer)
    description, written = _planned(boosted, shard=True)

    def copied() -> OptimizerPart:
        own = copy.deepcopy(description) if boosted.group.rank() == 0 else None
        return list(file_contents(_in_files(written))), own

    return copied


def _described(boosted: PipelineOptimizer) -> tuple[Content, Content]:
    """The content of this rank's state, and the same content with its tensors on meta. Raises CheckpointError, on every
    rank, if a rank's content cannot be saved."""
    with together(boosted.group):
        content = optimizer_content(boosted)
        _refuse_wrappers(content["state"])
    return content, on_meta(content)


def _planned(boosted: PipelineOptimizer, shard: bool) -> tuple[Content, dict[StateKey, Tensor]]:
    """Gather the description of all ranks' states. Returns the description, and the tensors that this rank writes."""
    content, own = _described(boosted)
    description, owners = merged_description(gather_objects(own, boosted.group))
    rank = boosted.group.rank()
    states = map_states(
        content["state"], lambda _, tensor: tensor if shard and not is_packed(tensor) else whole(tensor)
    )

    def writes(name: str, tensor: Tensor) -> bool:
        return owners[name] == rank or (isinstance(tensor, DTensor) and has_slice(boosted, name, owners[name]))

    return description, {place: tensor for place, tensor in state_tensors(states).items() if writes(place[0], tensor)}


def load_optimizer(optimizer: Optimizer, checkpoint: str | Path) -> None:
    """Load the optimizer's state from a file or folder that `save_optimizer` wrote. The number of stages may have
    changed since the save.

    Raises CheckpointError, on every rank and before it changes anything, for any other file or folder, and for a
    checkpoint whose parameters, shapes or groups do not match the optimizer's.
    """
    boosted = boosted_optimizer(optimizer)
    with together(boosted.group):
        source = existing(Path(checkpoint))
        content = _read_content(source)
        held = optimizer_content(boosted)
    present, _ = merged_description(gather_objects(on_meta(held), boosted.group))
    with together(boosted.group):
        if problems := list(_problems(content, present)):
            raise CheckpointError(
                f"{checkpoint} does not match this optimizer: {listed(problems)}. Load a checkpoint that was saved "
                "with the same parameters in the same groups"
            )
        states = _saved_states(boosted, source, content, held["parameters"].keys())
    _keep_loaded_weights(boosted, states, checkpoint)
    with together(boosted.group):
        _restore_states(boosted, content, states)
    boosted.gradients.settle()  # with ZeRO, each replica has loaded only the values of its own weights


def _keep_loaded_weights(optimizer: PipelineOptimizer, states: ParameterStates, checkpoint: str | Path) -> None:
    """If the model's loaded weights differ from the weights that were saved with the optimizer, remove the fp32 values
    of the loaded weights from `states`, with a warning. The result is the same as if the optimizer had been loaded
    before the model. Call it on all ranks."""
    weights = optimizer.weights
    with together(optimizer.group):
        own = [name for name, values in states.items() if VALUE in values and weights[name].differs(values[VALUE])]
    others = [name for names in gather_objects(own, optimizer.group) for name in names]
    if not others:
        return
    for name, values in states.items():
        if weights[name].loaded_as is not None:
            values.pop(VALUE, None)
    if optimizer.grid.first:
        logger.warning(
            "%s was saved with weights that differ from the weights loaded into the model (such as %s). The loaded "
            "weights are kept, and the fp32 values in this checkpoint are ignored. To use the fp32 values, first load "
            "the model that was saved with this optimizer",
            checkpoint,
            others[0],
        )


def boosted_optimizer(optimizer: Optimizer) -> PipelineOptimizer:
    if not isinstance(optimizer, PipelineOptimizer):
        raise CheckpointError(
            f"this {type(optimizer).__name__} was not boosted: pass the optimizer that booster.boost(...) returned"
        )
    return optimizer


def _refuse_wrappers(states: ParameterStates) -> None:
    """Raise CheckpointError for states of tensor classes that wrap several tensors, which files cannot contain."""
    for (name, key), tensor in state_tensors(states).items():
        if hasattr(local(tensor), "__tensor_flatten__"):
            raise CheckpointError(
                f"{key} of {name} in the optimizer's state cannot be saved: its class {type(local(tensor)).__name__} "
                "wraps several tensors. Use bitsandbytes.optim.AdamW8bit (in a Trainer, "
                "TrainingArguments(optim='adamw_8bit')) instead of torchao's 8-bit and 4-bit optimizers, or "
                f"{ONLY_MODEL}"
            )


def _compact(tensor: Tensor) -> Tensor:
    """Return the tensor on the CPU, in a storage that contains only this tensor."""
    tensor = tensor.detach().cpu()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def _in_files(tensors: Mapping[StateKey, Tensor]) -> dict[str, Tensor]:
    return {f"state.{name}.{key}": tensor for (name, key), tensor in tensors.items()}


def _read_content(source: Path) -> Content:
    """Read the description in a folder, or the content of a file, and check that the files contain all declared
    data."""
    described, advice = source.is_dir(), "pass a file or folder that booster.save_optimizer wrote"
    content = load_plain(source / DESCRIPTION if described else source, "an optimizer checkpoint", advice)
    written = content.get("format") if isinstance(content, dict) else None
    formats = (OPTIMIZER_FORMAT,) if described else (OPTIMIZER_FORMAT, OLDER)
    if not isinstance(content, dict) or written not in formats:
        raise CheckpointError(f"{source} is not in the format {OPTIMIZER_FORMAT!r}: {advice}")
    if problem := content_flaw(content, described):
        raise CheckpointError(f"{source} is damaged: {problem}. Load another checkpoint")
    if described:
        _refuse_older_folder(source, content["state"])
        check_shards(source, _in_files(state_tensors(content["state"])))
    return content


def _refuse_older_folder(source: Path, described: ParameterStates) -> None:
    """Raise CheckpointError for a folder of pipeshard 0.2.0. The folder's description contains the values of tensors in
    lists and dicts, but for a sharded parameter only the first rank's values."""
    for (name, key), tensor in state_tensors(described).items():
        if not tensor.is_meta:
            raise CheckpointError(
                f"{source} was saved with pipeshard 0.2.0, which stored {key} of {name} in the description. For a "
                "sharded parameter, the description contains only the first rank's values. Load the folder with "
                "version 0.2.0, and save it as one file (booster.save_optimizer(..., shard=False)). If the folder "
                "belongs to a training state, call load_training_state(..., optimizer=None), and then load_optimizer "
                "with the new file"
            )


def _problems(saved: Content, present: Content) -> Iterator[str]:
    groups, others = saved["param_groups"], present["param_groups"]
    if len(groups) != len(others):
        yield f"its number of parameter groups is {len(groups)}, but the optimizer's is {len(others)}"
    home = {name: k for k, group in enumerate(groups) for name in group["params"]}
    for k, group in enumerate(others):
        for name in group["params"]:
            shape = tuple(present["parameters"][name].shape)
            if name not in home:
                yield f"{name} is missing"
            elif home[name] != k:
                yield f"{name} is in group {home[name]}, but in group {k} of the optimizer"
            elif tuple(saved["parameters"][name].shape) != shape:
                yield f"{name} has shape {tuple(saved['parameters'][name].shape)}, but {shape} in the optimizer"
    for name in sorted(home.keys() - present["parameters"].keys()):
        yield f"{name} is unexpected"


def _saved_states(
    optimizer: PipelineOptimizer, source: Path, content: Content, names: Collection[str]
) -> ParameterStates:
    """Read this rank's shards of the saved states of these parameters. The returned tensors do not share memory with a
    memory-mapped file."""
    states = {name: values for name, values in content["state"].items() if name in names}
    parameters = {name: optimizer.weights[name].parameter for name in states}

    def blank(place: StateKey, tensor: Tensor) -> Tensor:
        """A zero-filled tensor to read into: this rank's shard or, without contiguous shards, the full tensor."""
        parameter = parameters[place[0]]
        if tensor.shape != parameter.shape or not isinstance(parameter, DTensor) or is_packed(parameter):
            return torch.zeros(tensor.shape, dtype=tensor.dtype)
        part = torch.zeros(local(parameter).shape, dtype=tensor.dtype, device=parameter.device)
        return like(part, parameter)

    def part(place: StateKey, tensor: Tensor) -> Tensor:
        name = place[0]
        if isinstance(tensor, DTensor):
            return local(tensor)
        sliced = slice_like(tensor, parameters[name]) if tensor.shape == parameters[name].shape else tensor
        kept = sliced if sliced is tensor and source.is_dir() else sliced.clone()
        master = optimizer.weights[name].master
        return laid_out(kept, master) if kept.shape == master.shape else kept

    if source.is_dir():
        states = map_states(states, blank)
        read_shards(source, _in_files(state_tensors(states)))
    return map_states(states, part)


def _restore_states(optimizer: PipelineOptimizer, content: Content, states: ParameterStates) -> None:
    optimizer.complete(optimizer.weights[name] for name, values in states.items() if VALUE in values)
    for name, values in states.items():
        if VALUE in values:
            optimizer.weights[name].set_part(values.pop(VALUE))
    packed = optimizer.optim.state_dict()
    parameters = list(numbered(optimizer, packed))
    groups = [
        {**saved, "params": group["params"]}
        for saved, group in zip(content["param_groups"], packed["param_groups"], strict=True)
    ]
    state: dict[Any, Any] = {number: states[name] for number, name, _ in parameters if states.get(name)}
    shared, extra = (copy.deepcopy(content.get(part, {})) for part in ALIKE)  # load_state_dict does not copy these
    tensors = state_tensors(states)
    optimizer.optim.load_state_dict({**packed, **extra, "state": state | shared, "param_groups": groups})

    def as_saved(place: StateKey, value: Tensor) -> Tensor:
        saved = tensors.get(place, value)
        return value if value.dtype == saved.dtype else saved.to(value.device)

    for _, name, parameter in parameters:  # torch casts states to the parameter's dtype: restore the saved dtypes
        if content["parameters"][name].dtype == parameter.dtype and states.get(name):
            values = optimizer.optim.state[parameter]
            values.update(map_states({name: values}, as_saved)[name])
