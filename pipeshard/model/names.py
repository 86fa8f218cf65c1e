"""Names: of the leaves of a nested value, each its path as text, and of what is inside a model with adapters."""

import re
from collections import OrderedDict
from typing import Any

from torch import nn
from torch.utils._pytree import TreeSpec, keystr, tree_flatten, tree_flatten_with_path, tree_map


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


def as_dicts(tree: Any) -> Any:
    """Model outputs, which are ordered dicts, as plain ones: before version 5, transformers told torch no names."""
    return tree_map(
        lambda node: as_dicts(dict(node)) if isinstance(node, OrderedDict) else node,
        tree,
        is_leaf=lambda node: isinstance(node, OrderedDict),
    )
