"""Names: the leaves of a nested value, each with its path as text."""

from collections import OrderedDict
from typing import Any

from torch.utils._pytree import TreeSpec, keystr, tree_flatten, tree_flatten_with_path, tree_map


def flatten_with_names(tree: Any) -> tuple[list[tuple[str, Any]], TreeSpec]:
    """Each leaf with its name (such as "['logits']"), in torch's order, and what `tree_unflatten` takes."""
    leaves, spec = tree_flatten(tree)
    paths, _ = tree_flatten_with_path(_as_dicts(tree))
    return [(keystr(path), leaf) for (path, _), leaf in zip(paths, leaves, strict=True)], spec


def _as_dicts(tree: Any) -> Any:
    """Model outputs, which are ordered dicts, as plain ones: before version 5, transformers told torch no names."""
    return tree_map(
        lambda node: _as_dicts(dict(node)) if isinstance(node, OrderedDict) else node,
        tree,
        is_leaf=lambda node: isinstance(node, OrderedDict),
    )
