"""Nodes: searches in autograd's graph."""

from collections.abc import Container, Iterable, Iterator, Mapping
from typing import Any, TypeVar

from torch.autograd.graph import Node

T = TypeVar("T")


def nodes_from(roots: Iterable[Node | None], until: Container[Node] = ()) -> Iterator[Node]:
    """Yield each node of autograd's graph that can be reached from `roots`, including the roots. Nodes in `until` are
    yielded, but the search does not continue past these nodes."""
    stack, seen = [node for node in roots if node is not None], set[Node]()
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        yield node
        if node not in until:
            stack += [following for following, _ in node.next_functions if following is not None]


def reached(leaf: Any, nodes: Mapping[Node, frozenset[T]]) -> frozenset[T]:
    """The union of the sets of those `nodes` that receive a gradient if `leaf` receives one, according to autograd's
    graph (which ends at a detach or a comparison). Empty if `leaf` is not a tensor."""
    found = nodes_from([getattr(leaf, "grad_fn", None)], until=nodes)
    return frozenset[T]().union(*(nodes[node] for node in found if node in nodes))
