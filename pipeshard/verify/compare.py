"""Compare: compares the split model with the unsplit model after a step, including the models' state dicts."""

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Number
from typing import Any

import torch
from torch import Tensor, nn

from pipeshard.batch.batch import Batch
from pipeshard.batch.tree import flatten_with_names
from pipeshard.graph.units import Interception
from pipeshard.private import tree_leaves
from pipeshard.split.ties import first_names
from pipeshard.verify.local import Different, LocalPipeline
from pipeshard.verify.reference import Reference

LOSS, GRADIENT = 1e-5, 1e-4  # relative errors that rounding may cause
FINE = 1e-9  # the relative error that rounding may cause in fp64
FLOOR = 1e-3  # errors of small gradients are relative to this fraction of the largest gradient
HeldGradient = tuple[str, Tensor | None]  # the suffix that names the replica in errors, and the gradient
ATTRIBUTE_DEPTH = 3  # levels of nested lists and dicts that are compared in an attribute


@dataclass
class Comparison:
    """Compares values, counts the comparisons, and raises Different for a difference.

    With `fine`, the comparisons use the tolerance for fp64.
    """

    fine: bool = False
    counts: Counter[str] = field(default_factory=Counter)

    def loss(self, split: Tensor, unsplit: Tensor, what: str) -> None:
        if not self._close(split, unsplit, LOSS, 1e-3):
            raise Different(f"{what} is {float(split):.7g}, but {float(unsplit):.7g} in the unsplit model", "forward")
        self.counts["losses"] += 1

    def norm(self, split: float, unsplit: float) -> None:
        if not self._close(torch.tensor(split), torch.tensor(unsplit), LOSS, 1e-6):
            raise Different(f"the gradient norm is {split:.7g}, but {unsplit:.7g} in the unsplit model")
        self.counts["norms"] += 1

    def gradients(
        self, split: Mapping[str, Sequence[HeldGradient]], unsplit: Mapping[str, Tensor | None], what: str
    ) -> None:
        """Compare each parameter's gradient, on all ranks that hold the parameter, with the unsplit model's. The order
        is that of `unsplit`, the order of the backward pass, so the first difference found is also the earliest."""
        largest = max((size(gradient) for gradient in unsplit.values() if gradient is not None), default=0.0)
        for name, expected in unsplit.items():
            for where, gradient in split[name]:
                if (gradient is None) != (expected is None):
                    raise Different(
                        f"{what}, {name}{where} has {_a(gradient)}, but {_a(expected)} in the unsplit model", "backward"
                    )
                if gradient is not None and expected is not None:
                    if not self._close(gradient, expected, GRADIENT, FLOOR * largest):
                        how = difference_text(gradient, expected)
                        raise Different(f"the gradient of {name} {what}{where} differs: {how}", "backward")
                    self.counts["gradients"] += 1

    def tensors(
        self, split: Mapping[str, Any], unsplit: Mapping[str, Any], kind: str, what: str, part: str = ""
    ) -> None:
        """Compare parameters, buffers, saved tensors, inputs or outputs, by name."""
        if split.keys() != unsplit.keys():
            names = split.keys() ^ unsplit.keys()
            side = "unsplit" if min(names) in unsplit else "split"
            raise Different(f"{min(names)} {what} exists only in the {side} model")
        for name, expected in unsplit.items():
            if not self.same(split[name], expected):
                raise Different(f"{name} {what} differs: {difference_text(split[name], expected)}", part)
            self.counts[kind] += 1

    def values(self, split: Any, unsplit: Any, kind: str, what: str, when: str = "") -> None:
        """Compare numbers and tensors in nested values, except values that the split model lacks, tensors of the split
        model that contain only NaN, and parameters, which a stage may have released: `compare_parameters` compares
        them."""
        theirs, mine = dict(_leaves(unsplit)), dict(_leaves(split))
        for name, expected in theirs.items():
            if isinstance(expected, nn.Parameter):
                continue
            if name in mine and not _poison(mine[name]) and not self.same(mine[name], expected):
                raise Different(f"{what}{name}{when} {_values_text(mine[name], expected)}")
            self.counts[kind] += 1

    def same(self, split: Any, unsplit: Any) -> bool:
        if isinstance(unsplit, Tensor) and isinstance(split, Tensor):
            return self._close(split, unsplit, GRADIENT, 1e-6)
        if isinstance(unsplit, int) and isinstance(split, int):
            return split == unsplit
        if isinstance(unsplit, Number) and isinstance(split, Number):
            return self._close(torch.tensor(split), torch.tensor(unsplit), GRADIENT, 1e-6)
        return True

    def _close(self, split: Tensor, unsplit: Tensor, relative: float, floor: float) -> bool:
        """Whether two tensors have the same shape and are equal up to rounding. Floating-point and complex values may
        differ by a fraction of the largest magnitude in `unsplit` (or of `floor`, if larger). The fraction is
        `relative` or 8 times the epsilon of the dtype of `unsplit`, whichever is larger, or FINE with `fine`. All other
        values must be equal."""
        if split.shape != unsplit.shape:
            return False
        if not split.layout is unsplit.layout is torch.strided:
            split, unsplit = split.to_dense(), unsplit.to_dense()
        elif split.dtype is unsplit.dtype and split.device == unsplit.device and torch.equal(split, unsplit):
            return True  # bit for bit, the most frequent case and the fastest check
        if not (unsplit.is_floating_point() or unsplit.is_complex()) or not unsplit.numel():
            return torch.equal(split, unsplit.to(split.dtype))
        relative = FINE if self.fine else max(relative, 8 * torch.finfo(unsplit.dtype).eps)
        gap = (split.detach() - unsplit.detach().to(split.device)).abs()
        gap = gap.masked_fill(split.isnan() & unsplit.isnan() | (split == unsplit), 0)  # inf - inf is NaN
        return bool(gap.max() <= relative * max(size(unsplit), floor))


def attributes(module: nn.Module) -> dict[str, Any]:
    """A module's attributes, except parameters, buffers and submodules. Forwards may leave state in attributes."""
    own = nn.Module().__dict__.keys()
    return {name: value for name, value in vars(module).items() if name not in own and name != "forward"}


def _leaves(value: Any, name: str = "", depth: int = ATTRIBUTE_DEPTH) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Tensor | bool | int | float):
        yield name, value
    elif depth and isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _leaves(inner, f"{name}[{key!r}]", depth - 1)
    elif depth and isinstance(value, list | tuple):
        for key, inner in enumerate(value):
            yield from _leaves(inner, f"{name}[{key}]", depth - 1)


def output_tensors(output: Any) -> dict[str, Tensor]:
    """The tensors of a model's output, by name."""
    return {name: leaf for name, leaf in flatten_with_names(output)[0] if isinstance(leaf, Tensor)}


def _a(gradient: Tensor | None) -> str:
    return "no gradient" if gradient is None else f"a gradient of up to {size(gradient):.2g}"


def _poison(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and bool(value.isnan().all())


def size(tensor: Tensor) -> float:
    """The largest finite magnitude of a tensor's elements, or 0 if no element is finite."""
    if not tensor.numel():
        return 0.0
    dense = tensor.detach() if tensor.layout is torch.strided else tensor.detach().to_dense()
    largest = magnitude(dense)
    return largest if math.isfinite(largest) else magnitude(dense.nan_to_num(0.0, 0.0, 0.0))


def magnitude(tensor: Tensor) -> float:
    """The largest magnitude of a tensor's elements, or NaN if any element is NaN."""
    if tensor.is_complex():
        return float(tensor.abs().max())
    low, high = tensor.aminmax()  # one pass without a temporary tensor
    return max(-float(low), float(high))


def difference_text(split: Any, unsplit: Any) -> str:
    if not (isinstance(split, Tensor) and isinstance(unsplit, Tensor)):
        return f"{split!r:.40}, unsplit {unsplit!r:.40}"
    if split.shape != unsplit.shape:
        return f"shape {tuple(split.shape)}, unsplit {tuple(unsplit.shape)}"
    gap = (split.detach().double() - unsplit.detach().double()).abs().max()
    return f"largest difference {float(gap):.2g}, largest value {size(unsplit):.2g}"


def _values_text(split: Any, unsplit: Any) -> str:
    if isinstance(unsplit, Tensor) and unsplit.numel() != 1:
        return f"differs: {difference_text(split, unsplit)}"
    return f"is {float(split):.7g}, unsplit {float(unsplit):.7g}"


def gradients(
    split: LocalPipeline, reference: Reference
) -> tuple[dict[str, list[HeldGradient]], dict[str, Tensor | None]]:
    """Return the gradients of the split model and of the unsplit model, by parameter name, in the order of the backward
    pass. For the split model, each name has a list with one gradient per rank that holds the parameter. The gradients
    of tied parameters are already summed."""
    calls = {unit: k for k, (unit, _) in enumerate(split.policy.flow.occurrences)}

    def place(name: str) -> int:
        return max((k for unit, k in calls.items() if name.startswith(f"{unit}.")), default=-1)

    parameters, of_ranks = reference.own.trained(), [(split.named(rank), split.trained(rank)) for rank in split.ranks]
    names = sorted(parameters, key=place, reverse=True)
    unsplit = {name: parameters[name].grad for name in names if parameters[name].requires_grad}
    mine = {name: [(where, own[name].grad) for where, own in of_ranks if name in own] for name in unsplit}
    if lost := [name for name, held in mine.items() if not held and unsplit[name] is not None]:
        raise Different(f"no stage holds {lost[0]}, which has a gradient in the unsplit model")
    return mine, unsplit


def compare_state(
    comparison: Comparison,
    split: LocalPipeline,
    reference: Reference,
    during: str,
    fickle: Callable[[], Collection[str]],
    replica: int,
) -> None:
    """Compare buffers, and state that forwards have left on modules, with the unsplit model's. Each buffer and module
    of the split model is read on the stage that owns it. The attributes that `fickle()` returns may differ. `fickle` is
    called only if an attribute differs."""
    buffers = dict(reference.model.named_buffers())
    mine = {name: split.of(name, replica).model.get_buffer(name) for name in buffers}
    comparison.tensors(mine, buffers, "buffers", during)
    for path, module in reference.model.named_modules():
        here = attributes(split.of(f"{path}.", replica).model.get_submodule(path))
        for name, value in attributes(module).items():
            if name not in here or here[name] is value:
                continue
            where = f"{path}.{name}" if path else f"the model's {name}"
            try:
                comparison.values(here[name], value, "attributes", where, f" {during}")
            except Different:
                if f"{path}.{name}" not in fickle():
                    raise


def differing_attributes(one: nn.Module, other: nn.Module) -> frozenset[str]:
    """The attributes, as "module.name", whose values differ between two runs of one model."""
    found, comparison = set(), Comparison()
    for path, module in one.named_modules():
        there = attributes(other.get_submodule(path))
        for name, value in attributes(module).items():
            try:
                comparison.values(value, there.get(name), "attributes", name)
            except Different:
                found.add(f"{path}.{name}")
    return frozenset(found)


def compare_parameters(comparison: Comparison, split: LocalPipeline, reference: Reference, when: str) -> None:
    """Compare each parameter, on every stage that holds it, and each entry of the state dict with the unsplit
    model's."""
    of_ranks = [split.trained(rank) for rank in split.ranks]
    for name, parameter in reference.own.trained().items():
        for own in of_ranks:
            if name in own:
                comparison.tensors({name: own[name]}, {name: parameter}, "parameters", when, "update")
    first = first_names(reference.model)
    states = [rank.model.state_dict() for rank in split.ranks]
    expected = reference.model.state_dict()
    missing = expected.keys() ^ states[0].keys()
    if missing:
        side = "unsplit" if min(missing) in expected else "split"
        raise Different(f"{min(missing)} is only in the {side} model's state dict {when}")
    saved = {name: states[split.policy.ownership.owner(first.get(name, name))][name] for name in expected}
    comparison.tensors(saved, expected, "saved", f"in the saved state {when}")


# The leaves of units' results, by unit, number of the call in a microbatch's forward, and microbatch.
Results = dict[tuple[str, int, int], list[Any]]


def first_unit(
    split: LocalPipeline,
    reference: Reference,
    rows: Callable[[Batch, int], Batch],
    m: int,
    at: tuple[int, int],
    note: Callable[[], None],
) -> str:
    """Return a sentence that names the first unit, in the order of the forward, whose results differ from the unsplit
    model's. Return "" if no results differ, or if the structure of the results differs."""
    units = list(split.policy.units)
    of_ranks: list[Results] = [{} for _ in split.ranks]
    unsplit: Results = {}
    with contextlib.ExitStack() as around:
        for rank, results in zip(split.ranks, of_ranks, strict=True):
            around.enter_context(recorded(rank.model, units, results))
        around.enter_context(recorded(reference.model, units, unsplit))
        with contextlib.suppress(
            Exception
        ):  # an error of any type: the results recorded before the error show where the difference begins
            split.step(lambda batch, replica: rows(batch, 0), m, False, at)
        reference.step(rows(reference.own.sample, 0).split(m), split.weights(0), at, note)
    for (unit, k, i), expected in unsplit.items():
        stage = split.policy.partition.stages.get((unit, k), 0)
        leaves = of_ranks[split.placement[stage]].get((unit, k, i), [])
        if len(leaves) != len(expected):
            return ""
        for mine, theirs in zip(leaves, expected, strict=True):
            if type(mine) is not type(theirs) or not Comparison().same(mine, theirs):
                return f"The first difference is in the result of unit {unit} (stage {stage}, microbatch {i})"
    return ""


@contextlib.contextmanager
def recorded(model: nn.Module, units: list[str], results: Results) -> Iterator[None]:
    """Context manager that records the results of units in forwards. On a stage, only the results of the stage's own
    units are recorded."""
    calls, microbatches = Counter[str](), Counter[tuple[str, int]]()

    def begin(module: nn.Module, args: Any) -> None:
        calls.clear()

    def recording(name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            call = name, calls[name]
            calls[name] += 1
            result = forward(*args, **kwargs)
            leaves = tree_leaves(result)
            if not any(isinstance(leaf, Tensor) and leaf.is_meta for leaf in leaves):  # on meta: a trace
                copies = [x.detach().clone() if isinstance(x, Tensor) else x for x in leaves]
                results[*call, microbatches[call]] = copies
                microbatches[call] += 1
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
