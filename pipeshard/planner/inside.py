"""Inside: the places inside layers at which a model can be cut, if the children of layers become units."""

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, pairwise

from torch import nn

from pipeshard.errors import PartitionError, PipeshardError
from pipeshard.graph.dataflow import Dataflow
from pipeshard.graph.taint import Value
from pipeshard.graph.units import find_units
from pipeshard.planner.candidate import Subject
from pipeshard.planner.memory import tensor_bytes
from pipeshard.split.boundary import forbidden_cuts, live_values
from pipeshard.split.partition import Cost

CHILDREN = 16  # the largest number of units that a layer may become
SHARE = 0.1  # the smallest fraction of a layer's cost that a cut inside the layer may separate


@dataclass(frozen=True)
class Inside:
    """A `subject` in which the children of layers are units. For each call of the model with undivided layers, `edges`
    contains the index of the first corresponding call in `subject`. The last entry of `edges` is the number of calls in
    `subject`. For each call before which a cut is possible, `names` contains the name of the module before the cut.
    `inner` contains the keys of `names` that are inside a layer. For each call, `sent` contains the bytes that cross a
    cut before the call, and the bytes of the gradients that are sent back."""

    subject: Subject
    edges: tuple[int, ...]
    names: dict[int, str]
    inner: frozenset[int]
    sent: list[tuple[int, int]]


def places_inside(subject: Subject) -> Inside | None:
    """The places inside the layers of `subject` at which the model can be cut. None if the model cannot be cut inside
    its layers."""
    if subject.again is None or subject.flow.cut_points:
        return None
    openings = _openings(subject.model, subject.flow)
    if not openings:
        return None
    try:
        fine = opened_layers(subject, openings)
    except PipeshardError:  # children of a layer, such as experts that glue selects, cannot be units
        return None
    edges = call_edges(subject.flow, fine.flow)
    live = _crossing(subject.flow, fine.flow, edges)
    entering = [{key: size for key, (size, back) in each.items() if back} for each in live]
    sums = [_sums(each) for each in live]
    forbidden, of_layers = forbidden_cuts(fine.flow), {edges[k]: name for k, name in _last_calls(subject.flow).items()}
    within = {e: name for e, name in _last_calls(fine.flow).items() if e not in (forbidden.keys() | {*edges})}
    inner = _cheapest([sum(cost) for cost in fine.costs], edges, [*within], [size for size, _ in sums])
    names = {e: name for e, name in of_layers.items() if e not in forbidden} | {e: within[e] for e in inner}
    fine = replace(fine, footprint=fine.footprint.entered(entering))
    return Inside(fine, edges, names, frozenset(inner), sums) if inner else None


def opened_layers(subject: Subject, names: Sequence[str]) -> Subject:
    """Study the model of `subject` again, with the module names `names` as the partition. In layers that contain such a
    module, the children are units, and the layer's cost is divided among the children. Raises PartitionError if the
    model cannot be cut this way, or if it calls its units in a different order than in `subject`. Raises TraceError if
    the model cannot be traced."""
    if subject.again is None:
        raise PartitionError("the model cannot be cut inside its layers")
    made = subject.again(names)
    runs = [made.costs[start:end] for start, end in pairwise(call_edges(subject.flow, made.flow))]
    parts = [divided_cost(whole, run) for whole, run in zip(subject.costs, runs, strict=True)]
    # Rounding must not change the sums before a layer: even a small difference from the sums of whole layers can change
    # the order of a program.
    sums = [
        [before + part for before, run in zip(befores, kind) for part in (0.0, *accumulate(run[:-1]))] + [befores[-1]]
        for befores, kind in zip(subject.sums, zip(*([*zip(*run)] for run in parts)))
    ]
    return replace(
        made, costs=[*chain(*parts)], known_sums=sums, devices=subject.devices, in_seconds=subject.in_seconds
    )


def divided_cost(whole: Cost, parts: Sequence[Cost]) -> list[Cost]:
    """Divide the cost of a layer among its children, in proportion to the children's costs."""
    sums = [sum(kind) for kind in zip(*parts, strict=True)]
    shares = [[part / total if total else 1 / len(parts) for part, total in zip(each, sums)] for each in parts]
    return [Cost(*(time * share for time, share in zip(whole, each))) for each in shares]


def call_edges(whole: Dataflow, fine: Dataflow) -> tuple[int, ...]:
    """For each call of `whole`, the index of the first corresponding call of `fine`. The last entry is the number of
    calls of `fine`. Raises PartitionError unless `fine` has the calls of `whole` in the same order, except that
    consecutive calls of modules inside a unit may replace a call of the unit."""
    edges, known = [0], {call.unit for call in fine.calls}
    for call in whole.calls:
        end = edges[-1]
        if call.unit in known:
            end += 1
        else:
            while end < len(fine.calls) and fine.calls[end].unit.startswith(f"{call.unit}."):
                end += 1
        if end == edges[-1]:
            raise PartitionError(f"no child of {call.unit} is called instead of {call.unit}")
        edges.append(end)
    if edges[-1] != len(fine.calls):
        raise PartitionError("the children of a layer are called in several places")
    return tuple(edges)


def _openings(model: nn.Module, flow: Dataflow) -> list[str]:
    """For each unit that is called once and has several children with parameters, the name of one child. Units that
    would become more than `CHILDREN` units, such as a layer with many experts, are omitted."""
    times = Counter(call.unit for call in flow.calls)
    found = {name: _first_child(name, model.get_submodule(name)) for name, count in times.items() if count == 1}
    units = find_units(model, filter(None, found.values()))
    sizes = {name: sum(unit.startswith(f"{name}.") for unit in units) for name in found}
    return [child for name, child in found.items() if child and sizes[name] <= CHILDREN]


def _first_child(name: str, unit: nn.Module) -> str:
    """The name of the first child of `unit` that has parameters, if several children have parameters. If only one child
    has parameters, the result for this child. If none has, ""."""
    children = [each for each in unit.named_children() if next(each[1].parameters(), None) is not None]
    if not children:
        return ""
    child, module = children[0]
    return f"{name}.{child}" if len(children) > 1 else _first_child(f"{name}.{child}", module)


def _last_calls(flow: Dataflow) -> dict[int, str]:
    """For each call except the first, the name of the previous call's unit. Omitted if this unit is called again
    later."""
    last = {call.unit: k for k, call in enumerate(flow.calls, 1)}
    return {k: call.unit for k, call in enumerate(flow.calls, 1) if last[call.unit] == k and k < len(flow.calls)}


def _cheapest(costs: Sequence[float], edges: Sequence[int], possible: Sequence[int], sizes: Sequence[int]) -> list[int]:
    """For each layer, the cuts inside it across which the fewest bytes are sent. Omits cuts that separate less than
    the fraction `SHARE` of the layer's cost."""
    found = []
    for start, end in pairwise(edges):
        least = SHARE * sum(costs[start:end])
        mine = [e for e in possible if start < e < end and min(sum(costs[start:e]), sum(costs[e:end])) >= least]
        found += [e for e in mine if sizes[e] == min(sizes[e] for e in mine)]
    return found


ValueBytes = dict[Hashable, tuple[int, int]]  # the bytes of each value, and of its gradient


def _crossing(whole: Dataflow, fine: Dataflow, edges: Sequence[int]) -> list[ValueBytes]:
    """For each call of `fine`, the values that cross a cut before the call, if only the layer that contains the cut is
    divided: the values that enter the layer, and the results of its children."""
    of_layers = [{("layer", value): size for value, size in each.items()} for each in _live(whole)]
    of_children = _live(fine)
    return [
        of_layers[k] | {v: size for v, size in of_children[e].items() if isinstance(v, Value) and v.call >= start}
        for k, (start, end) in enumerate(pairwise(edges))
        for e in range(start, end)
    ]


def sent(subject: Subject) -> list[tuple[int, int]]:
    """For each call, the bytes that cross a cut before the call, and the bytes of the gradients that are sent back."""
    return [_sums(each) for each in _live(subject.flow)]


def _sums(sizes: ValueBytes) -> tuple[int, int]:
    return sum(size for size, _ in sizes.values()), sum(back for _, back in sizes.values())


def _live(flow: Dataflow) -> list[ValueBytes]:
    """For each call, the values that cross a cut before the call, with their bytes and the bytes of their gradients."""
    last = len(flow.calls)
    values = live_values(flow, range(last), last, flow.needed())
    sizes = [{value: tensor_bytes(flow.spec(value)) for value in each} for each in values]
    return [{value: (size, size * (value in flow.receiving)) for value, size in each.items()} for each in sizes]
