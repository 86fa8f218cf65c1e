"""LoRA: peft adapters, added to a model before it is boosted, and saved and loaded in peft's format."""

from __future__ import annotations

import logging
import shutil
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import CONFIG_NAME

from pipeshard.checkpoint.files import existing, new_folder, of_first, together
from pipeshard.checkpoint.hub import hub_name
from pipeshard.checkpoint.load import refuse_ignored_adapters
from pipeshard.checkpoint.safetensors_files import FILES
from pipeshard.checkpoint.untrusted import check_adapter
from pipeshard.distributed.collectives import broadcast_bytes, gather_objects, whole
from pipeshard.engine.engine import Pipeline
from pipeshard.engine.model import PipelineModel
from pipeshard.errors import CheckpointError, ConfigurationError, UsageError, explained, listed, summary
from pipeshard.hf import ADAPTER_CONFIG, is_of_peft, without_adapters
from pipeshard.split.adapters import adding_saved, put_adapters, refuse_changed_base, refuse_packed_base
from pipeshard.split.blank import is_blank
from pipeshard.split.packed import is_quantized
from pipeshard.split.ties import first_names

logger = logging.getLogger("pipeshard")

if TYPE_CHECKING:
    from peft import PeftModel  # the import takes a second, so only the functions that need peft import it


def enable_lora(
    model: nn.Module, pretrained_dir: str | None, lora_config: Any, bnb_quantization_config: Any
) -> PeftModel:
    """Add new adapters from `lora_config` to `model`, or load the adapters in `pretrained_dir` to continue their
    training. Call it before `model` is boosted.

    New adapters are initialized with torch's default generator, which must have the same seed on every rank. If the
    model is on meta (`PipelinePlugin.from_pretrained`), the adapters are initialized to the same values as for a loaded
    model: each stage computes adapters that depend on weights (DoRA, PiSSA, OLoRA) after it has loaded these weights.

    Raises UsageError if the model is boosted or has adapters. Raises ConfigurationError for `bnb_quantization_config`,
    and if this model (or any model on meta) does not support the `lora_config` or the saved adapters. Raises
    CheckpointError if `pretrained_dir` does not match the model, or if a model on meta was created from another folder
    that contains adapters.
    """
    from peft import get_peft_model

    if isinstance(model, PipelineModel):
        raise UsageError("the model is already boosted: call booster.enable_lora(model, ...) before booster.boost")
    if is_of_peft(model, "PeftModel"):
        loadable = "an unquantized model" if is_quantized(model) else "the model"
        more = f"load {loadable} with its weights, and " if is_blank(model) else ""
        raise UsageError(
            "the model already has adapters: pass a model without adapters, or boost this model without enable_lora. "
            f"To add more adapters, {more}call model.add_adapter(name, config)"
        )
    if bnb_quantization_config is not None:
        raise ConfigurationError(
            "booster.enable_lora does not quantize. Remove quantize=True and bnb_quantization_config, and create the "
            "model with PipelinePlugin.from_pretrained(cls, folder, "
            "quantization_config=BitsAndBytesConfig(load_in_4bit=True)): each stage then quantizes its own weights"
        )
    base = getattr(model, "_pretrained", None)
    if base and not _is_folder(pretrained_dir or "", Path(base)):
        refuse_ignored_adapters(model, Path(base))
    if pretrained_dir is not None:
        return _with_adapter_of(pretrained_dir, model)
    with explained(  # peft may raise any error for an unexpected model or config
        lambda error: ConfigurationError(
            f"peft cannot add adapters of this lora_config to {type(model).__name__}: {summary(error)}"
        )
    ):
        return (
            put_adapters(model, lora_config, get_peft_model) if is_blank(model) else get_peft_model(model, lora_config)
        )


def _with_adapter_of(folder: str, model: nn.Module) -> PeftModel:
    from peft import PeftConfig, PeftModel

    path = existing(Path(folder))
    with explained(
        lambda error: CheckpointError(
            f"{folder} has no adapter for this {type(model).__name__} ({summary(error)}): pass a folder "
            "that booster.save_lora_as_pretrained or peft's save_pretrained wrote for this model"
        ),
        but=(ConfigurationError,),
    ):
        if path.is_dir():
            check_adapter(path, model)
        if is_blank(model):
            saved = PeftConfig.from_pretrained(str(path))
            refuse_packed_base(model, saved)
            refuse_changed_base(model, saved)
        with warnings.catch_warnings(), adding_saved(model):
            warnings.filterwarnings("error", message="Found missing adapter keys")
            return PeftModel.from_pretrained(model, str(path), is_trainable=True, torch_device="cpu")


def save_lora(model: nn.Module, checkpoint: str) -> None:
    """Write every adapter of a boosted PeftModel to the folder `checkpoint`, as `save_pretrained` would for the unsplit
    model.

    `PeftModel.from_pretrained(base, checkpoint)` reads the folder. The first stage receives the adapters' tensors, one
    at a time, and writes them in the safetensors format. If a save is interrupted, the previous files remain. Other
    files in the folder, such as a tokenizer, are kept.

    Raises CheckpointError, on every rank, if `model` is not a boosted PeftModel, if `checkpoint` is a file, or if peft
    computes saved tensors from tensors that the first rank does not hold. Warns if the folder contains weights, but is
    not the folder of the adapters' base model.
    """
    module = model.unwrap() if isinstance(model, PipelineModel) else model
    if not isinstance(model, PipelineModel) or not is_of_peft(module, "PeftModel"):
        raise CheckpointError(
            f"this {type(module).__name__} is not a boosted model with adapters: call booster.enable_lora(model, "
            "lora_config=...), and pass the model that booster.boost(...) then returns"
        )
    grid = model.pipeline.grid
    warn_of_other_weights(model, Path(checkpoint))
    model.pipeline.gradients.settle()
    state = nn.Module.state_dict(module)
    # on one rank only, since peft may query the Hub for the vocabulary size
    saved = of_first(lambda: _saved(module, state), grid.world)
    with together(grid.world):
        state |= {name: whole(state[name]) for name in saved}
    with together(grid.world):
        if grid.leads:
            with new_folder(Path(checkpoint), model.pipeline.group, own="adapter_model.*") as folder:
                _gather(module, state, saved, model.pipeline)
                with together(model.pipeline.group):
                    if model.pipeline.rank == 0:
                        if (card := Path(checkpoint) / "README.md").is_file():  # peft adds to an existing model card
                            shutil.copy(card, folder)
                        module.save_pretrained(str(folder), state_dict=state)
                        _name_base(module, folder)


def warn_of_other_weights(model: PipelineModel, folder: Path) -> None:
    """Warn if `folder` contains weights, but is not the folder of the adapters' base model: transformers'
    `from_pretrained` will apply the adapters to these weights, although the weights may already contain merged
    adapters. This is only a warning, since an error would lose the result of a run."""
    base: Any = without_adapters(model.unwrap())[1]
    weights = [name for name in FILES if (folder / name).is_file()] if model.pipeline.grid.first else []
    is_read = isinstance(base, PreTrainedModel) and (folder / CONFIG_NAME).is_file()
    if weights and is_read and not _is_folder(base.name_or_path, folder):
        logger.warning(
            "%s contains weights (%s), to which from_pretrained will apply the adapters that are saved here. Unless "
            "these are the weights of the adapters' base model, move the adapters to another folder",
            folder,
            weights[0],
        )


def _is_folder(name: str, folder: Path) -> bool:
    """Whether `name`, a path or the name of a Hub model, is a path to `folder`."""
    return bool(name) and Path(name).is_dir() and Path(name).samefile(folder)


def _name_base(module: PeftModel, folder: Path) -> None:
    """In the files that peft has written, replace the base model's path in this machine's Hub cache with the model's
    Hub name, which works on any machine. (While saving, peft needs the path to read the model's config.)"""
    paths = {config.base_model_name_or_path for config in module.peft_config.values()}
    paths |= {getattr(module.get_base_model(), "name_or_path", None)}
    for file in (*folder.rglob(ADAPTER_CONFIG), folder / "README.md"):
        for path in filter(None, paths):
            file.write_text(file.read_text("utf-8").replace(path, hub_name(path)), "utf-8")


def load_lora(model: PipelineModel, folder: Path) -> None:
    """Load the adapters of a boosted PeftModel from a folder that `save_lora` or peft wrote. Call it on all ranks.

    Raises CheckpointError, on every rank, if the folder lacks one of the adapters, if the names or shapes of an
    adapter's tensors differ from those in the model, or if an encoder computes an adapter's prompts.
    """
    from peft import get_peft_model_state_dict, load_peft_weights

    module: Any = model.unwrap()
    holdings = model.pipeline.holdings
    with together(model.pipeline.grid.world):
        state = nn.Module.state_dict(module)
        names, first = {id(tensor): name for name, tensor in state.items()}, first_names(module)
        values: dict[str, Tensor] = {}
        for adapter in module.peft_config:
            within = folder if adapter == "default" else folder / adapter
            saved = load_peft_weights(str(within), device="cpu")
            if module.peft_config[adapter].is_prompt_learning:
                own = _prompts(module, state, adapter)
            else:
                own = get_peft_model_state_dict(module, state, adapter)
            if differing := sorted(own.keys() ^ saved.keys()):
                raise CheckpointError(
                    f"{within} does not match the adapter {adapter}: only one of the two has {listed(differing, 3)}. "
                    "Load a checkpoint of the same adapters"
                )
            if resized := [key for key, value in saved.items() if own[key].shape != value.shape]:
                shape, expected = (tuple(values[resized[0]].shape) for values in (saved, own))
                raise CheckpointError(
                    f"{within} does not match the adapter {adapter}: {resized[0]} has shape {shape} in the checkpoint, "
                    f"but {expected} in the model. Load a checkpoint of the same adapters"
                )
            values |= {names[id(own[key])]: value for key, value in saved.items() if id(own[key]) in names}
        buffers = dict(module.named_buffers(remove_duplicate=False))
        with torch.no_grad():
            for name, value in values.items():
                if (weight := holdings.weights.get(first.get(name, name))) is not None:
                    weight.set(value.to(weight.parameter.device))
                    weight.loaded_as = value.dtype
                elif name in buffers:  # batch-norm statistics of a trained copy
                    buffers[name].copy_(value)


def _prompts(module: PeftModel, state: dict[str, Tensor], adapter: str) -> dict[str, Tensor]:
    """The tensor that contains the prompts, as a dict with peft's key. Raises CheckpointError if an encoder computes
    the prompts."""
    tensors = [tensor for name, tensor in state.items() if name.startswith(f"prompt_encoder.{adapter}.")]
    if len(tensors) != 1:
        raise CheckpointError(
            f"peft saves the prompts of {module.peft_config[adapter].peft_type}, but not the {len(tensors)} tensors of "
            "the encoder that computes these prompts, so training cannot resume from a checkpoint: train without "
            "interruption"
        )
    return {"prompt_embeddings": tensors[0]}


def _gather(module: PeftModel, state: dict[str, Tensor], names: Sequence[str], pipeline: Pipeline) -> None:
    """Broadcast the tensors in `state` with these `names` from the stages that own them, and put the values into the
    first stage's `state`. A ghost's dtype may differ from the owner's dtype: with `fsdp` and a 16-bit precision, shards
    are in fp32."""
    first = first_names(module)
    owners = {name: pipeline.policy.ownership.owner(first.get(name, name)) for name in names}
    own = {name: state[name].dtype for name, owner in owners.items() if owner == pipeline.rank}
    dtypes = {name: dtype for of_stage in gather_objects(own, pipeline.group) for name, dtype in of_stage.items()}
    for name, owner in owners.items():
        if owner > 0:
            tensor = state[name]
            received = torch.empty(tensor.shape, dtype=dtypes[name], device=tensor.device)
            content = tensor.contiguous() if pipeline.rank == owner else received
            broadcast_bytes(content, pipeline.ranks[owner], pipeline.group)
            state[name] = content if pipeline.rank == 0 else tensor


def _saved(module: PeftModel, state: dict[str, Tensor]) -> list[str]:
    """The names, in `state`, of all adapters' tensors that peft saves. Prompts that peft computes with a prompt encoder
    on this rank are omitted. Raises CheckpointError if peft needs tensors that this rank does not hold."""
    from peft import get_peft_model_state_dict

    prompts = [adapter for adapter, config in module.peft_config.items() if config.is_prompt_learning]
    is_here = all(type(p) is nn.Parameter for name in prompts for p in module.prompt_encoder[name].parameters())
    names = {id(tensor): name for name, tensor in state.items()}
    chosen = set[str]()
    for adapter, config in module.peft_config.items():
        saved = get_peft_model_state_dict(module, state, adapter).values() if is_here else ()
        chosen |= {names[id(tensor)] for tensor in saved if id(tensor) in names}
        if not is_here or (adapter not in prompts and any(id(tensor) not in names for tensor in saved)):
            raise CheckpointError(
                f"to save adapters of this kind ({config.peft_type}), peft needs tensors that the first rank does not "
                "hold: call pipeshard.to_sequential(model, rank=0) on every rank, and then save_pretrained on the "
                "model that it returns on rank 0"
            )
    return sorted(chosen)
