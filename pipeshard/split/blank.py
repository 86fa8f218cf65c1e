"""Blank: parameters on meta, whose values are loaded or initialized later, on the stages that hold them."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pipeshard.errors import ConfigurationError, listed
from pipeshard.hf import without_adapters
from pipeshard.private import without_weakrefs
from pipeshard.split.base_names import base_names

NOTED = "pipeshard_noted"  # the attribute of a meta parameter that contains its NotedParameter
AFTER_BOOST = (
    ", or modify the parameters in model.unwrap().parameters() after boost, and skip each parameter for which "
    "pipeshard.split.materialize.is_released(parameter) is True"
)


class NotedParameter(NamedTuple):
    """The name and the version of a parameter when PipelinePlugin.from_pretrained created its model, and the folder of
    the model."""

    name: str
    version: int
    folder: str


def note_blank(model: Any) -> None:
    """Move to meta the parameters that a constructor has created on the CPU (`torch.Tensor(3)`, for example, ignores
    the default device). Record a `NotedParameter` for each parameter, for `refuse_changed_blank`."""
    with without_weakrefs(model):
        for name, parameter in model.named_parameters():
            if not parameter.is_meta:
                give(parameter, torch.empty_like(parameter, device="meta"))
            vars(parameter)[NOTED] = NotedParameter(name, parameter._version, model._pretrained)


def give(parameter: nn.Parameter, values: Tensor) -> None:
    """Replace a parameter's data, but keep its identity and class. `values` may be on another device."""
    kept = {key: value for key, value in parameter.__dict__.items() if key != "_is_hf_initialized"}
    kind = type(parameter)
    torch.utils.swap_tensors(parameter, nn.Parameter(values, requires_grad=parameter.requires_grad))
    parameter.__class__ = kind
    parameter.__dict__.update(kept)
    if NOTED in kept:
        vars(parameter)[NOTED] = kept[NOTED]._replace(version=parameter._version)


def is_blank(model: nn.Module) -> bool:
    """Whether the model has parameters on meta."""
    return any(parameter.is_meta for parameter in model.parameters())


def refuse_changed_blank(model: nn.Module) -> None:
    """Raise ConfigurationError if, since the call of `note_blank`, any parameters on meta were modified, or moved to
    another name or model."""
    noted = _noted(model)
    folder = getattr(model, "_pretrained", None)
    names = base_names(model) if noted and folder else {}
    written = [full for full, (parameter, at) in noted.items() if parameter._version > at.version]
    moved = [n for n, (_, at) in noted.items() if n in names and (names[n], folder) != (at.name, at.folder)]
    for changed, how, instead in ((written, "modified", AFTER_BOOST), (moved, "moved to another name or model", "")):
        if changed:
            these = "this parameter was" if len(changed) == 1 else "these parameters were"
            raise ConfigurationError(
                f"{these} {how} before boost: {listed(changed, 3)}. PipelinePlugin.from_pretrained creates parameters "
                "without values, and boost loads the checkpoint's values by name. Load the "
                f"{type(without_adapters(model)[1]).__name__} with its own class's from_pretrained, which reads all "
                f"weights in every process{instead}"
            )


def refuse_unloaded_blank(model: nn.Module) -> None:
    """Raise ConfigurationError if PipelinePlugin.from_pretrained created some parameters of `model`, but not `model`
    itself: boost loads the checkpoint only into the model that from_pretrained returned."""
    if (noted := _noted(model)) and not getattr(model, "_pretrained", None):
        raise ConfigurationError(
            f"PipelinePlugin.from_pretrained created parameters without values: {listed([*noted], 3)}. Boost loads "
            "the checkpoint only into the model that from_pretrained returned, not into a model that contains it "
            f"({type(model).__name__}). Load the contained model with its own class's from_pretrained, which reads "
            "all weights in every process, or pass init_weights=False to the plugin and load all weights with "
            "booster.load_model"
        )


def refuse_blank(model: nn.Module) -> None:
    """Raise ConfigurationError if PipelinePlugin.from_pretrained created some parameters of `model`. This function is
    for targets that do not call boost, since only boost loads the checkpoint."""
    if noted := _noted(model):
        raise ConfigurationError(
            f"PipelinePlugin.from_pretrained created parameters without values: {listed([*noted], 3)}. This "
            "target would initialize them randomly, because only boost loads the checkpoint. Load the model with its "
            "own class's from_pretrained, which reads all weights in every process, or use target='colossalai', which "
            "calls boost"
        )


def _noted(model: nn.Module) -> dict[str, tuple[nn.Parameter, NotedParameter]]:
    """The meta parameters that PipelinePlugin.from_pretrained created, each with its NotedParameter, keyed by their
    full names."""
    return {full: (p, vars(p)[NOTED]) for full, p in model.named_parameters() if p.is_meta and NOTED in vars(p)}
