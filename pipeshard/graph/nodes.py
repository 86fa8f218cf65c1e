"""Nodes: the nodes of autograd's graph."""

from collections.abc import Container, Iterable, Iterator

from torch.autograd.graph import Node


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
