"""Names: of the leaves of a nested value, each its path as text, and of what is inside a model with adapters."""

import re
from collections import OrderedDict
from collections.abc import Collection, Iterable
from difflib import get_close_matches
from typing import Any

from torch import nn
from torch.utils._pytree import TreeSpec, keystr, tree_flatten, tree_flatten_with_path, tree_map

from pipeshard.errors import PartitionError


def flatten_with_names(tree: Any) -> tuple[list[tuple[str, Any]], TreeSpec]:
    """Each leaf with its name (such as "['logits']"), in torch's order, and what `tree_unflatten` takes."""
    leaves, spec = tree_flatten(tree)
    paths, _ = tree_flatten_with_path(as_dicts(tree))
    return [(keystr(path), leaf) for (path, _), leaf in zip(paths, leaves, strict=True)], spec


def field_of(name: str) -> str:
    """The field of a model's output that the leaf of this name belongs to; "" where the output is no mapping."""
    match = re.match(r"\['(.*?)'\]", name)
    return match[1] if match else ""


def without_adapters(model: nn.Module) -> tuple[str, nn.Module]:
    """The architecture's own model, which in a PeftModel is a module inside, and what its names there begin with."""
    base: Any = getattr(model, "get_base_model", lambda: model)()
    path = next(name for name, module in model.named_modules() if module is base)
    return f"{path}." if path else "", base


def paths_of(model: nn.Module, names: Iterable[str]) -> list[str]:
    """The full names of modules, of which those inside a PeftModel may be named as the model inside names them.

    Raises PartitionError, with names that come close, for what is no module of the model, and for the model itself.
    """
    known = [path for path, _ in model.named_modules(remove_duplicate=False) if path]
    full = [full_name(model, name) for name in names]
    for name in full:
        if name in ("", without_adapters(model)[0].rstrip(".")):
            raise PartitionError(f"partition names the whole {type(model).__name__}: name modules inside of it")
        if name not in known:
            raise PartitionError(unknown("partition", name, type(model).__name__, known, "modules"))
    return full


def full_name(model: nn.Module, name: str) -> str:
    """The name of a module, where what is inside a PeftModel may be named as the model inside names it."""
    prefix, _ = without_adapters(model)
    return name if name.startswith(prefix) else f"{prefix}{name}"


def unknown(who: str, name: str, model: str, known: Collection[str], what: str = "units") -> str:
    """That somebody names what is not there, with names that come close."""
    return f"{who} names {name}, which is none of the {what} of {model}: {hint(name, known)}"


def hint(name: str, known: Collection[str]) -> str:
    """What may have been meant by a name that is none of the known ones."""
    close = get_close_matches(name, known, n=3)
    return f"did you mean {' or '.join(close)}?" if close else f"they are {', '.join(known) or 'none'}"


def as_dicts(tree: Any) -> Any:
    """Model outputs, which are ordered dicts, as plain ones: before version 5, transformers told torch no names."""
    return tree_map(
        lambda node: as_dicts(dict(node)) if isinstance(node, OrderedDict) else node,
        tree,
        is_leaf=lambda node: isinstance(node, OrderedDict),
    )
