"""Conversion: between the tensors of a checkpoint and those of a model, where transformers names or fuses them anew."""

import copy
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from pipeshard.split.ties import names_of

try:
    from transformers import conversion_mapping, core_model_loading
except ImportError:  # transformers 4 has models in the layout of their checkpoints
    conversion_mapping = core_model_loading = None


@dataclass
class Piece:
    """Tensors of a checkpoint that become one or several of the model: experts that are stacked, a matrix cut in three.

    `sources` are their keys, each with the pattern of the transformation that it matched.
    """

    target: str
    transform: Any = None
    sources: list[tuple[str, str]] = field(default_factory=list)

    def convert(self, model: nn.Module, read: Callable[[str], Tensor]) -> dict[str, Tensor]:
        """The model's tensors by name; `read` gives one of the checkpoint."""
        if self.transform is None:
            return {self.target: read(self.sources[0][0])}
        transform = copy.deepcopy(self.transform)
        for key, pattern in self.sources:
            transform.add_tensor(self.target, key, pattern, lambda key=key: read(key))
        made = transform.convert(self.target, model=model, config=getattr(model, "config", None))
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


class Conversion:
    """What the keys of one checkpoint become in `model`: `pieces`, and the keys that are `unexpected`.

    `transforms` are those that were needed; `revert` undoes them, as `save_pretrained` does.
    """

    def __init__(self, model: nn.Module, keys: Iterable[str], names: Iterable[str]) -> None:
        self.pieces: dict[str, Piece] = {}
        self.unexpected: list[str] = []
        transforms = _transforms(model)
        renamings, converters = _sorted(transforms)
        by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
        known = dict.fromkeys(names, True)
        prefix = model.base_model_prefix or None if isinstance(model, PreTrainedModel) else None
        ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or []
        older = _older(model)
        for key in sorted(keys, key=_natural):
            target, pattern = _renamed(_replaced(key, older), renamings, converters, prefix, known)
            if target not in known and key in known:
                target, pattern = _renamed(key, [], [], prefix, known)
            if target not in known:
                if not any(re.search(expression, key) for expression in ignored):
                    self.unexpected.append(key)
                continue
            transform = by_pattern[pattern] if pattern is not None else None
            piece = self.pieces.setdefault(target, Piece(target, transform))
            piece.sources.append((key, pattern or key))
        self.transforms = [transform for transform in transforms if transform.was_used()]


def revert(model: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of one stage in the layout of its checkpoints, as `save_pretrained` would write them."""
    ignored = getattr(model, "_keys_to_ignore_on_save", None) or ()
    kept = {name: tensor for name, tensor in state.items() if name not in ignored}
    if core_model_loading is None:
        names = {
            re.sub(r"\(.*\)", "", new.lstrip("^")): re.sub(r"\(.*\)", "", old.lstrip("^")) for old, new in _older(model)
        }
        return {_replaced(name, names.items()): tensor for name, tensor in kept.items()}
    if not isinstance(model, PreTrainedModel):
        return kept
    return dict(core_model_loading.revert_weight_conversion(model, kept))


def saved_names(model: nn.Module) -> dict[str, str]:
    """The name under which each parameter is saved, by its first name: of tied ones, that which the architecture ties
    the others to."""
    patterns = _tied_patterns(model)

    def main(names: tuple[str, ...]) -> str:
        return next((name for name in names if not any(p.search(name) for p in patterns)), names[0])

    return {first: main(names) for first, names in names_of(model).items()}


def copied_names(model: nn.Module) -> dict[str, str]:
    """Further names under which a parameter is saved, each with the first one: those that transformers would not tie by
    itself when it loads the checkpoint, since the user tied them (`shared_weights`)."""
    if not isinstance(model, PreTrainedModel):
        return {}
    patterns, saved = _tied_patterns(model), saved_names(model)
    return {
        name: first
        for first, names in names_of(model).items()
        for name in names
        if name != saved[first] and not any(pattern.search(name) for pattern in patterns)
    }


def _tied_patterns(model: nn.Module) -> list[re.Pattern[str]]:
    """Of the names that the architecture ties to others."""
    tied = getattr(model, "all_tied_weights_keys", None)
    tied = tied if tied is not None else getattr(model, "_tied_weights_keys", None) or ()
    return [re.compile(key) for key in tied]


def _transforms(model: nn.Module) -> list[Any]:
    if conversion_mapping is None or not isinstance(model, PreTrainedModel):
        return []
    return list(conversion_mapping.get_model_conversion_mapping(model))


def _older(model: nn.Module) -> Iterable[tuple[str, str]]:
    """What transformers 4 renames in the checkpoints of some classes: patterns, and what takes their place."""
    mapping: dict[str, str] = getattr(model, "_checkpoint_conversion_mapping", None) or {}
    return mapping.items() if core_model_loading is None else ()


def _replaced(key: str, renamings: Iterable[tuple[str, str]]) -> str:
    """The key with the first that matches."""
    for pattern, name in renamings:
        renamed, count = re.subn(pattern, name, key)
        if count:
            return renamed
    return key


def _sorted(transforms: list[Any]) -> tuple[list[Any], list[Any]]:
    if core_model_loading is None:
        return [], []
    renamings = [t for t in transforms if isinstance(t, core_model_loading.WeightRenaming)]
    return renamings, [t for t in transforms if isinstance(t, core_model_loading.WeightConverter)]


def _renamed(
    key: str, renamings: list[Any], converters: list[Any], prefix: str | None, known: Mapping[str, bool]
) -> tuple[str, str | None]:
    if core_model_loading is not None:
        meta: Any = known
        return core_model_loading.rename_source_key(key, renamings, converters, prefix, meta)
    if key not in known and prefix:  # a head's model from a bare one's checkpoint, or the other way round
        shorter = key.removeprefix(f"{prefix}.")
        return next((name for name in (shorter, f"{prefix}.{key}") if name in known), key), None
    return key, None


def _natural(key: str) -> list[Any]:
    return [(part.isdigit(), int(part) if part.isdigit() else part) for part in key.split(".")]
