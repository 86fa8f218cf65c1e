"""Optimizer checkpoints: states keyed by parameter name, which any number of stages can load.

`Optimizer.state_dict()` numbers the parameters by their positions in the groups, which differ between stages. Keyed by
name instead, the states of all ranks form one checkpoint that any number of stages, replicas and slices can load.
"""

import copy
import logging
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from pipeshard.checkpoint.files import existing, new_file, new_folder, together, writes
from pipeshard.checkpoint.safetensors_files import (
    RANK_FILES,
    FileContent,
    check_shards,
    file_contents,
    read_shards,
    write_files,
)
from pipeshard.checkpoint.untrusted import has_content, load_plain, plain
from pipeshard.distributed.collectives import (
    encode,
    gather_objects,
    is_packed,
    laid_out,
    like,
    local,
    slice_like,
    whole,
)
from pipeshard.engine.groups import is_compared
from pipeshard.engine.optimizer import PipelineOptimizer
from pipeshard.errors import CheckpointError, listed
from pipeshard.private import keystr, tree_map_with_path

logger = logging.getLogger("pipeshard")

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
# copies of the contents of the files that a rank writes to an optimizer's folder, and the folder's description (None
# except on the first rank)
OptimizerPart: TypeAlias = tuple[list[FileContent], Content | None]
ONLY_MODEL = (
    "save only the model: with booster.save_model, or in a Trainer with TrainingArguments(save_only_model=True)"
)
ENTRIES = "state", "param_groups"  # the entries of a state_dict() with torch's layout
ALIKE = "shared", "extra"  # the parts of a Content whose values are the same on every rank


def map_states(states: ParameterStates, convert: Callable[[StateKey, Tensor], Any]) -> ParameterStates:
    """A copy of `states` in which `convert(place, tensor)` replaces each tensor, also in nested states."""

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
    placements. The key VALUE contains the fp32 master weight of a 16-bit parameter. Raises CheckpointError for a
    state_dict() without torch's two entries, for a state whose key is neither a parameter in the optimizer's groups nor
    a string, and for values of types that a checkpoint cannot contain."""
    optimizer.copies.follow(adopts=True)
    packed, weights = optimizer.optim.state_dict(), optimizer.weights
    _refuse_other_layouts(optimizer, packed)
    names = {number: name for number, name, _ in numbered(optimizer, packed)}
    states = {name: dict(packed["state"].get(number, {})) for number, name in names.items()}
    shared = {key: value for key, value in packed["state"].items() if key not in names}
    extra = {key: value for key, value in packed.items() if key not in ENTRIES}
    if unnamed := [key for key in (*shared, *extra) if not isinstance(key, str)]:
        raise CheckpointError(
            f"the optimizer's state has the key {unnamed[0]!r}, which is not a parameter in the optimizer's groups. A "
            "checkpoint can contain only states of parameters, and states with string keys: use a string as the key"
        )
    for name, values in states.items():
        if weights[name].master.dtype != weights[name].parameter.dtype:
            values[VALUE] = weights[name].master.detach()

    def readable(value: Any, what: str) -> Any:
        return plain(value, f"{what} of {type(optimizer.optim).__name__}", f", or {ONLY_MODEL}")

    tensors = _state_tensors(states)  # `readable` encodes its argument, so it gets the tensors on meta, without values

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
    """Raise CheckpointError if the optimizer's own state_dict() lacks one of torch's two entries."""
    if missing := [key for key in ENTRIES if key not in packed]:
        raise CheckpointError(
            f"the state_dict() of {type(optimizer.optim).__name__} has no {missing[0]!r}, so its states cannot be "
            "saved by parameter name: return states and groups under the keys 'state' and 'param_groups', as "
            f"torch.optim.Optimizer does, or {ONLY_MODEL}"
        )


def has_slice(optimizer: PipelineOptimizer, name: str, owner: int) -> bool:
    """Whether this rank's coordinate in the mesh differs from that of `owner` only on axes that shard the parameter."""
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
    CheckpointError if the number of groups, the options of a group, or states that do not belong to a parameter differ
    between ranks."""
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
    for rank, count in enumerate(counts):
        if count != counts[0]:
            raise CheckpointError(
                f"the optimizer's number of parameter groups is {counts[0]} on rank 0, but {count} on rank {rank}: "
                "call optimizer.add_param_group on every rank, with the same parameters, including parameters that the "
                "rank does not hold"
            )


def _compared(group: Mapping[str, Any]) -> dict[str, str]:
    return {key: repr(value) for key, value in group.items() if is_compared(key, group)}


def content_flaw(content: Content, described: bool) -> str:
    """The reason why a dict from a file is not a valid Content, or "" if it is. With `described`, the tensors of
    "state" must be on meta. (For tensors in lists and dicts, `_refuse_older_folder` checks this.) Otherwise, the
    tensors must have values."""
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
        for (_, key), tensor in _state_tensors({name: values}).items():
            if described and not tensor.is_meta and key in values:
                return f"{key} of {name} is stored in the description"
            if not described and not has_content(tensor):
                return f"{key} of {name} is without values"
        if VALUE in values and getattr(values[VALUE], "shape", None) != parameters[name].shape:
            return f"{VALUE} of {name} does not have the parameter's shape"
    return ""


def _by_name(values: Any, kind: type) -> bool:
    return isinstance(values, dict) and all(isinstance(k, str) and isinstance(v, kind) for k, v in values.items())


DESCRIPTION = "optimizer.pt"  # in a folder that also contains each rank's files of tensors


def save_optimizer(optimizer: Optimizer, checkpoint: str | Path, shard: bool) -> None:
    """Write the optimizer's state by parameter name. The first rank that holds a tensor or slice writes it.

    With `shard`, writes a folder of safetensors files that torch.distributed.checkpoint's HuggingFaceStorageReader can
    read. Otherwise, writes one file that `torch.load(weights_only=True)` can read. The previous files remain until the
    new files are complete. Other files in the folder, such as those of the model, are kept.

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
    """Return a function that returns this rank's part of an optimizer's folder, without using collectives. Call
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

    return description, {place: tensor for place, tensor in _state_tensors(states).items() if writes(place[0], tensor)}


def load_optimizer(optimizer: Optimizer, checkpoint: str | Path) -> None:
    """Load the optimizer's state from a file or folder that `save_optimizer` wrote. The number of stages may differ.

    Raises CheckpointError, on every rank and before changing anything, for any other file or folder, and for a
    checkpoint with different parameters, shapes or groups.
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
                f"{checkpoint} does not fit this optimizer: {listed(problems)}. Load a checkpoint that was saved with "
                "the same parameters in the same groups"
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
            "weights are kept, and the fp32 values in this checkpoint are ignored. To use the fp32 values, load the "
            "model that was saved with this optimizer first",
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
    for (name, key), tensor in _state_tensors(states).items():
        if hasattr(local(tensor), "__tensor_flatten__"):
            raise CheckpointError(
                f"{key} of {name} in the optimizer's state cannot be saved: its class {type(local(tensor)).__name__} "
                "wraps several tensors. Instead of an 8-bit or 4-bit optimizer of torchao, use "
                f"bitsandbytes.optim.AdamW8bit (in a Trainer, TrainingArguments(optim='adamw_8bit')), or {ONLY_MODEL}"
            )


def _compact(tensor: Tensor) -> Tensor:
    """Return the tensor on the CPU, in a storage that contains only this tensor."""
    tensor = tensor.detach().cpu()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def _state_tensors(states: ParameterStates) -> dict[StateKey, Tensor]:
    """The tensors in `states`. Raises CheckpointError if two tensors have the same key (a state "Q[0]", and the first
    element of a list "Q")."""
    tensors: dict[StateKey, Tensor] = {}

    def add(place: StateKey, tensor: Tensor) -> None:
        if tensors.setdefault(place, tensor) is not tensor:
            raise CheckpointError(f"two tensors in the state of {place[0]} have the name {place[1]}: use other keys")

    map_states(states, add)
    return tensors


def _in_files(tensors: Mapping[StateKey, Tensor]) -> dict[str, Tensor]:
    return {f"state.{name}.{key}": tensor for (name, key), tensor in tensors.items()}


def _read_content(source: Path) -> Content:
    """Read the description in a folder, or the content of a file, and check that the files contain all declared
    data."""
    if not source.exists():
        raise CheckpointError(
            f"{source} cannot be read: it does not exist. Pass a file or folder that booster.save_optimizer wrote"
        )
    described = source.is_dir()
    advice = "pass a file or folder that booster.save_optimizer wrote"
    content = load_plain(source / DESCRIPTION if described else source, "an optimizer checkpoint", advice)
    written = content.get("format") if isinstance(content, dict) else None
    formats = (OPTIMIZER_FORMAT,) if described else (OPTIMIZER_FORMAT, OLDER)
    if not isinstance(content, dict) or written not in formats:
        raise CheckpointError(f"{source} is not in the format {OPTIMIZER_FORMAT!r}: {advice}")
    if problem := content_flaw(content, described):
        raise CheckpointError(f"{source} is damaged: {problem}. Load another checkpoint")
    if described:
        _refuse_older_folder(source, content["state"])
        check_shards(source, _in_files(_state_tensors(content["state"])))
    return content


def _refuse_older_folder(source: Path, described: ParameterStates) -> None:
    """Raise CheckpointError for a folder of version 0.2.0. Its description contains the values of tensors in lists and
    dicts, but for a sharded parameter only the first rank's values."""
    for (name, key), tensor in _state_tensors(described).items():
        if not tensor.is_meta:
            raise CheckpointError(
                f"{source} was saved with version 0.2.0, which stored {key} of {name} in the description. Load the "
                "folder with version 0.2.0, and save it as one file (booster.save_optimizer(..., shard=False)). If the "
                "folder belongs to a training state, call load_training_state(..., optimizer=None), and then "
                "load_optimizer with the new file"
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
        read_shards(source, _in_files(_state_tensors(states)))
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
    tensors = _state_tensors(states)
    optimizer.optim.load_state_dict({**packed, **extra, "state": state | shared, "param_groups": groups})

    def as_saved(place: StateKey, value: Tensor) -> Tensor:
        saved = tensors.get(place, value)
        return value if value.dtype == saved.dtype else saved.to(value.device)

    for _, name, parameter in parameters:  # torch casts states to the parameter's dtype: restore the saved dtypes
        if content["parameters"][name].dtype == parameter.dtype and states.get(name):
            values = optimizer.optim.state[parameter]
            values.update(map_states({name: values}, as_saved)[name])
