"""Unit results: the first unit whose result is another in the split model, for the message."""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from pipeshard.model.batch import Batch
from pipeshard.model.units import Interception
from pipeshard.verify.compare import Comparison
from pipeshard.verify.reference import Reference
from pipeshard.verify.virtual import Virtual

Results = list[tuple[str, int, list[Any]]]  # unit, which call of it, and the leaves of what it returned


def first_unit(
    split: Virtual,
    reference: Reference,
    rows: Callable[[Batch, int], Batch],
    m: int,
    at: tuple[int, int],
    note: Callable[[], None],
) -> str:
    """Which unit, in the order of the forward, first returns something else than unsplit; "" where none does."""
    units = list(split.policy.units)
    of_ranks: list[Results] = [[] for _ in split.ranks]
    unsplit: Results = []
    with contextlib.ExitStack() as around:
        for rank, results in zip(split.ranks, of_ranks, strict=True):
            around.enter_context(_recorded(rank.model, units, results))
        around.enter_context(_recorded(reference.model, units, unsplit))
        with contextlib.suppress(Exception):
            split.step(lambda batch: rows(batch, 0), m, False, at)
        weights = split.weights
        reference.step(rows(reference.own.sample, 0).split(m), weights, at, note)
    placed = split.policy.partition.stages
    comparison, met = Comparison(), Counter[tuple[str, int]]()
    found: dict[tuple[str, int, int], list[Any]] = {}
    for at_rank, results in enumerate(of_ranks):
        seen = Counter[tuple[str, int]]()
        for unit, k, leaves in results:
            if split.placement[placed.get((unit, k), 0)] == at_rank:
                found[unit, k, seen[unit, k]] = leaves
                seen[unit, k] += 1
    for unit, k, expected in unsplit:
        i = met[unit, k]
        met[unit, k] += 1
        leaves = found.get((unit, k, i), [])
        if len(leaves) != len(expected):
            return ""
        for mine, theirs in zip(leaves, expected, strict=True):
            if type(mine) is not type(theirs) or not comparison.same(mine, theirs):
                stage = placed.get((unit, k), 0)
                return f"It begins at unit {unit} (stage {stage}, microbatch {i}), whose result is another"
    return ""


@contextlib.contextmanager
def _recorded(model: nn.Module, units: list[str], results: Results) -> Iterator[None]:
    """Inside, what the forwards of units return is kept; a stage's of its own units."""
    calls: Counter[str] = Counter()

    def begin(module: nn.Module, args: Any) -> None:
        calls.clear()

    def recording(name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            k = calls[name]
            calls[name] += 1
            result = forward(*args, **kwargs)
            leaves = tree_leaves(result)
            if not any(isinstance(leaf, Tensor) and leaf.is_meta for leaf in leaves):  # as in a trace
                results.append((name, k, [x.detach().clone() if isinstance(x, Tensor) else x for x in leaves]))
            return result

        return run

    handle = model.register_forward_pre_hook(begin)
    for name in units:
        unit: Any = model.get_submodule(name)
        if isinstance(unit.forward, Interception):
            unit.forward.original = recording(name, unit.forward.original)
        else:
            unit.forward = recording(name, unit.forward)
    try:
        yield
    finally:
        handle.remove()
