"""Build: the tiny model and the batch of an entry, from the general rules and the architecture's own requirements."""

from __future__ import annotations

import copy
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.parity.entries import Entry
from tests.parity.fixes import CONFIGS, config_fields, fix_batch
from tests.parity.inputs import make_batch
from tests.parity.tiny import OLD, SPECIAL, tiny


def build(entry: Entry, seed: int = 0, **fields: Any) -> nn.Module:
    """The entry's model with random weights, the same for the same seed, in training mode without dropout; `fields`
    are more of its config's."""
    entry, config_class = _of_model(entry)
    config = tiny(config_class, CONFIGS, **copy.deepcopy(config_fields(entry)), **fields)
    if OLD and getattr(config, "pad_token_id", None) is None:  # which classifiers ask for
        config.pad_token_id = SPECIAL["pad_token_id"]
    model_class: Any = getattr(transformers, entry.class_name)
    torch.manual_seed(seed)
    model: nn.Module = model_class(config).float().train()
    for parameter in model.parameters():
        if not parameter.any():  # zeros would stop the gradients of what is behind them
            nn.init.normal_(parameter, std=0.02)
    for module in model.modules():
        own: Any = getattr(module, "config", None)
        if getattr(own, "use_cache", False):
            own.use_cache = False
    return model


def batch(entry: Entry, model: nn.Module, seed: int = 0) -> dict[str, Tensor]:
    """A batch of four samples for the entry's model."""
    entry, _ = _of_model(entry)
    return fix_batch(entry, model, make_batch(entry.task, model, seed=seed), seed)


def _of_model(entry: Entry) -> tuple[Entry, type[PretrainedConfig]]:
    """The entry with the model type of the config its model takes: the text model's own, of a multimodal one."""
    config_class = CONFIG_MAPPING[entry.model_type]
    own: Any = getattr(transformers, entry.class_name).config_class
    parts = config_class.sub_configs
    if isinstance(parts, dict) and own in parts.values():
        return entry._replace(model_type=own.model_type), own
    return entry, config_class
