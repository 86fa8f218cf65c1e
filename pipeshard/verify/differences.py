"""Differences: what a step has left on both sides, the first unit that differs, and whole losses beside sums."""

import contextlib
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pipeshard.batch.batch import Batch
from pipeshard.batch.criterion import Criterion, loss_of
from pipeshard.graph.units import Interception
from pipeshard.private import tree_leaves
from pipeshard.split.ties import first_names
from pipeshard.verify.compare import LOSS, Comparison, Different, attributes
from pipeshard.verify.reference import Copies, Reference
from pipeshard.verify.virtual import Virtual


def gradients(split: Virtual, reference: Reference) -> tuple[dict[str, Tensor | None], dict[str, Tensor | None]]:
    """By name, in the order of the backward pass; ties have their sums."""
    calls = {unit: k for k, (unit, _) in enumerate(split.policy.flow.occurrences)}

    def place(name: str) -> int:
        return max((k for unit, k in calls.items() if name.startswith(f"{unit}.")), default=-1)

    parameters = dict(reference.model.named_parameters())
    names = sorted(parameters, key=place, reverse=True)
    unsplit = {name: parameters[name].grad for name in names if parameters[name].requires_grad}
    holders = {name: [rank for rank in split.ranks if name in rank.held] for name in unsplit}
    if lost := [name for name, ranks in holders.items() if not ranks and unsplit[name] is not None]:
        raise Different(f"no stage holds {lost[0]}, which gets a gradient")
    mine = {name: ranks[0].held[name].grad if ranks else None for name, ranks in holders.items()}
    for k, parameter in enumerate(reference.own.foreign()):
        name = f"parameter {k} of the optimizer that is not the model's"
        unsplit[name], mine[name] = parameter.grad, split.last.foreign[k].grad
    return mine, unsplit


def compare_state(
    comparison: Comparison, split: Virtual, reference: Reference, during: str, fickle: Collection[str] = ()
) -> None:
    """Buffers, and what forwards have left on modules, by the stage that has them, but for `fickle` attributes."""
    buffers = dict(reference.model.named_buffers())
    mine = {name: split.of(name).model.get_buffer(name) for name in buffers}
    comparison.tensors(mine, buffers, "buffers", during)
    for path, module in reference.model.named_modules():
        other = split.of(f"{path}.").model.get_submodule(path)
        here, there = attributes(other), attributes(module)
        for name, value in there.items():
            if name in here and here[name] is not value and f"{path}.{name}" not in fickle:
                where = f"{path}.{name}" if path else f"the model's {name}"
                comparison.values(here[name], value, "attributes", f"{where} {during}")


def differing(one: nn.Module, other: nn.Module) -> frozenset[str]:
    """The attributes that two runs of one model leave with other values."""
    found, comparison = set(), Comparison()
    for path, module in one.named_modules():
        there = attributes(other.get_submodule(path))
        for name, value in attributes(module).items():
            try:
                comparison.values(value, there.get(name), "attributes", name)
            except Different:
                found.add(f"{path}.{name}")
    return frozenset(found)


def compare_trained(comparison: Comparison, split: Virtual, reference: Reference, when: str) -> None:
    """Parameters of all stages that hold them, and what is saved."""
    for name, parameter in reference.model.named_parameters():
        for rank in split.ranks:
            if name in rank.held:
                comparison.tensors({name: rank.held[name]}, {name: parameter}, "parameters", when)
    for k, parameter in enumerate(reference.own.foreign()):
        name = f"parameter {k} of the optimizer that is not the model's"
        comparison.tensors({name: split.last.foreign[k]}, {name: parameter}, "parameters", when)
    first = first_names(reference.model)
    states = [rank.model.state_dict() for rank in split.ranks]
    expected = reference.model.state_dict()
    missing = expected.keys() ^ states[0].keys()
    if missing:
        raise Different(f"{min(missing)} is in one state dict only, of the split model and the unsplit one, {when}")
    saved = {name: states[split.policy.ownership.owner(first.get(name, name))][name] for name in expected}
    comparison.tensors(saved, expected, "saved", f"in what is saved {when}")


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


Evaluated = tuple[Tensor, list[Tensor]] | None


def evaluated(own: Copies, criterion: Criterion | None, batch: Batch) -> Evaluated:
    """The loss and the output's tensors in evaluation mode, where nothing is drawn; None without a loss."""
    own.model.eval()
    with torch.no_grad():
        output = batch.call(own.model)
        loss = loss_of(output, criterion, batch)
    leaves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.ndim]
    return None if loss is None else (loss, leaves)


def compare_whole(
    comparison: Comparison, batch: Batch, m: int, split: Virtual, evaluate: Callable[[Batch, int], list[Evaluated]]
) -> str:
    """Compare the loss of `batch` with that which the weights of the last step make of m microbatches; returns why that
    cannot be, "" otherwise.

    `evaluate(batch, n)` evaluates a fresh copy of the unsplit model n times.
    """
    flow = split.microbatches[0].route.flow
    if flow.loss is not None and (flow.loss.hidden or any(flow.is_aside(value) for value in flow.loss.values)):
        return "it has an auxiliary part"
    parts, end = [], 0
    for i, part in enumerate(batch.split(m)):
        start, end = end, end + part.rows
        parts.append(batch.take(torch.arange(start, end)))
        comparison.tensors(part.tensors, parts[-1].tensors, "inputs", f"of microbatch {i}")
    (whole,), each = evaluate(batch, 1), [evaluate(part, 1)[0] for part in parts]
    if whole is None or None in each:
        return "there is none in evaluation mode"
    weights = [microbatch.share for microbatch in split.microbatches]
    loss, losses = float(whole[0]), [float(one[0]) for one in each if one is not None]
    made = sum(weight * one for weight, one in zip(weights, losses, strict=True) if weight)
    if abs(made - loss) <= max(LOSS, 8 * torch.finfo(whole[0].dtype).eps) * max(abs(loss), 1e-3):
        comparison.count("batch losses")
        return ""
    columns = list(zip(whole[1], *(one[1] for one in each if one is not None)))
    if any(not _alike_apart(leaf, leaves) for leaf, *leaves in columns):
        return "its samples have to do with each other"
    first, again = evaluate(parts[-1], 2)
    if not columns and (first is None or again is None or not torch.equal(first[0], again[0])):
        return "it depends on state or chance"
    raise Different(
        f"the loss of {batch.rows} samples is {loss:.7g}, but {made:.7g} made of those of {m} microbatches, which "
        f"count {', '.join(f'{weight:.3g}' for weight in weights)}: pass loss_reduction='microbatch' if the mean of "
        "the microbatches' losses is meant, or use one microbatch"
    )


def _alike_apart(whole: Tensor, parts: Sequence[Tensor]) -> bool:
    """Whether the samples of an output, counted by its first dimension, are what they are in a smaller batch."""
    if any(part.shape[1:] != whole.shape[1:] for part in parts) or sum(map(len, parts)) != len(whole):
        return False
    return Comparison().same(torch.cat(list(parts)), whole)
