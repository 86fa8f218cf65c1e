"""Trace: the Dataflow of a model, for every batch of one structure."""

import contextlib
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pipeshard.batch.batch import Batch
from pipeshard.batch.criterion import Criterion
from pipeshard.batch.read import read_batch, refuse_labels_for_model
from pipeshard.errors import BatchError, TraceError
from pipeshard.ghost import inside_pipeshard
from pipeshard.graph.carried import carrying, informed, run_watched
from pipeshard.graph.dataflow import Dataflow, Reads
from pipeshard.graph.places import is_comparable
from pipeshard.graph.preserve import preserving
from pipeshard.graph.question import Question
from pipeshard.graph.rng import no_draw
from pipeshard.graph.shapes import Axes, Count, TensorSpec, is_count
from pipeshard.graph.tracer import Tracer
from pipeshard.graph.units import paths_of
from pipeshard.hf import BOUNDARIES, is_encoder_decoder, is_of_transformers
from pipeshard.private import restore_meta_kernels

logger = logging.getLogger("pipeshard")
FAR_LENGTHS = (1001, 29)  # increases in length: the last check uses the first increase that the model accepts
ROWS, LENGTH = 2, 8  # the minimum number of samples in a trace, and their maximum length (if the model accepts it)
MOST_TRACED = 2**26  # the model is traced with the batch's own lengths only if no tensor has more elements


@inside_pipeshard()
def trace(
    model: nn.Module,
    batch: Any,
    criterion: Criterion | None = None,
    exact: bool = False,
    cuts: Sequence[str] = (),
    device: torch.device | None = None,
    lent: Mapping[str, Mapping[str, Tensor]] | None = None,
    grad: bool = True,
    draw: Callable[[int], object] = no_draw,
) -> Dataflow:
    """Return the Dataflow of `model(batch)` and of `criterion(output, batch)` (by default the output's loss).

    Only glue runs. Each unit call returns zeros with the shapes of its result. The trace finds these shapes by running
    one unit per kind (class, parameter shapes, input shapes) on meta. The model, which may be on meta, and the user's
    random generators are unchanged afterwards. The trace is repeated with other batch and sequence sizes, to find the
    shapes for all sizes. With `exact`, only the batch itself is traced, and the Dataflow is valid only for the batch's
    sizes.

    Modules named in `cuts` are units at any depth. A module without parameters is also a unit if its code branches on
    activations or parameters. A unit that does not run on meta (because it needs values, or its kernels need memory)
    runs once on `device` (default: the model's device). Each of the unit's own tensors then contains the first of the
    following that exists: its values in `lent` (by unit and name), its values on this rank, or zeros. Without `grad`,
    the glue runs as under no_grad, and no result requires grad. `draw` seeds the random numbers of the glue, as
    described for Tracer.

    Raises:
        TraceError: the forward or the criterion fails. The error names the unit, the last unit before the error, or the
            criterion.
        ConfigurationError: the criterion trains tensors outside the model, or returns no scalar loss.
        PartitionError: a name in `cuts` is not a module inside the model.
        BatchError: the batch cannot be read (for example, a tensor is sparse), or the labels in a tuple are passed to
            the model as another argument.
    """
    restore_meta_kernels()
    sample = batch if isinstance(batch, Batch) else read_batch(model, batch)
    tracer_of = partial(Tracer, model, criterion, device=device, lent=lent, draw=draw)
    cuts = paths_of(model, cuts)
    with torch.set_grad_enabled(grad):  # specs record whether a result requires grad
        flow = _traced(partial(tracer_of, cuts=cuts), sample, exact)
        while flow.decisions and (more := flow.deciders.difference(cuts)):
            cuts = [*cuts, *sorted(more)]
            flow = _traced(partial(tracer_of, cuts=cuts), sample, exact)
    if criterion is not None and flow.loss is not None:
        refuse_labels_for_model(model, sample, flow.loss.inputs)
    return flow


def _traced(tracer_of: Callable[[Batch], Tracer], sample: Batch, exact: bool) -> Dataflow:
    """The Dataflow for batches of any size. With `exact`, or if no such Dataflow can be traced, the Dataflow is valid
    only for the sizes of `sample`. `tracer_of` creates a Tracer for batches like its argument."""
    if not exact:
        try:
            with contextlib.suppress(_OtherAtLength):
                return _trace_any(tracer_of, sample, LENGTH)
            return _trace_any(tracer_of, sample, None)
        except (TraceError, BatchError) as error:  # the batch cannot be split, or the model fails on so few samples
            logger.debug("a trace for any size failed, so the whole batch is traced: %s", error)
    tracer = tracer_of(sample)
    with preserving(tracer.model, tracer.criterion) as before:
        flow = carrying(tracer, sample, None, before, run_watched(tracer, sample, None, before))
    return _pinned(replace(informed(flow), axes=_axes(tracer, sample)), 0)


class _OtherAtLength(TraceError):
    """Raised if the model takes another path, or has other shapes, on samples that are not shortened."""


def _trace_any(tracer_of: Callable[[Batch], Tracer], sample: Batch, length: int | None) -> Dataflow:
    """The Dataflow for batches of any size, traced on a few samples, shortened to `length`. Raises _OtherAtLength if
    this Dataflow is wrong for samples with all their positions. The boundaries of documents are omitted: a kernel would
    access memory up to the last boundary, beyond the end of the shortened rows."""
    real, sample = sample, sample.take(_traced_rows(sample)).without(BOUNDARIES)
    tracer = tracer_of(sample)
    short = sample if length is None else _axes(tracer, sample).shortened(sample, length)
    with preserving(tracer.model, tracer.criterion) as before:
        try:
            flow = run_watched(tracer, short, real, before)
        except TraceError:
            if short is sample:
                raise
            flow = run_watched(tracer, short := sample, real, before)
        flow = carrying(tracer, short, real, before, flow)
        general = _generalize(tracer, flow, short, _axes(tracer, short), real)
        if short is not sample and not _is_same_at(sample, tracer, flow, general, real):
            raise _OtherAtLength(f"{type(tracer.model).__name__} depends on the length of its input")
        return informed(general)


def _is_same_at(sample: Batch, tracer: Tracer, flow: Dataflow, general: Dataflow, real: Batch) -> bool:
    """Whether samples that are not shortened have the path and the shapes of `general`. Not tried for transformers'
    classes, whose losses would take long, and for samples with very large tensors."""
    deltas = general.axes.deltas(sample)
    if deltas is None or is_of_transformers(tracer.model):
        return True
    if max(map(math.prod, (_sizes(spec, deltas) for spec in _specs(general))), default=0) > MOST_TRACED:
        return True
    return _holds(tracer, flow, general, sample, real, [0] * len(deltas)) is not False


def _traced_rows(sample: Batch) -> Tensor:
    """The indices of the samples to trace: the first ROWS samples. If a media leaf has no entry for these samples, the
    first sample with an entry in this leaf is added. Without the added sample, the Dataflow would lack the units that
    read the leaf."""
    rows = [row % sample.rows for row in range(ROWS)]
    for counts in sample.owners.values():
        if any(counts) and not any(counts[row] for row in rows):
            rows.append(next(row for row, count in enumerate(counts) if count))
    return torch.tensor(rows)


def _axes(tracer: Tracer, batch: Batch) -> Axes:
    return Axes.of(batch, is_encoder_decoder(tracer.model))


def _generalize(tracer: Tracer, flow: Dataflow, batch: Batch, axes: Axes, real: Batch) -> Dataflow:
    """Return `flow` with the slope of every dimension for every group of axes. Groups are pinned if shapes are not
    affine functions of the groups' sizes, or if the model's path depends on these sizes. The Question that computes a
    criterion's count pins no group: if this Question differs for other sizes, the Dataflow omits it."""
    others: dict[int, tuple[int, Dataflow]] = {}
    for group in range(len(axes.sizes)):
        for delta in (1, -1):
            with contextlib.suppress(TraceError):
                other = tracer.run(axes.resized(batch, group, delta), real)
                if _same_path(flow, other):
                    others[group] = delta, other
                    break
    if 0 not in others:  # the model's path depends on the number of samples
        others = {}
    axes = axes.pin({group for group in range(len(axes.sizes)) if group not in others})
    runs = list(others.values())
    if not all(_same_count(flow, other) for _, other in runs):
        flow, runs = flow.without_count(), [(delta, other.without_count()) for delta, other in runs]
    general = _with_slopes(replace(flow, axes=axes), runs)
    choices = [general, _pinned(general, 1)]
    if general.count is not None:
        choices = [choice for each in choices for choice in (each, each.without_count())]
    return next((choice for choice in choices if _verified(tracer, flow, choice, batch, real)), _pinned(general, 0))


def _pinned(flow: Dataflow, keep: int) -> Dataflow:
    """`flow` with only the first `keep` groups of axes free. The sizes of all other groups are fixed."""
    return replace(flow, axes=flow.axes.pin(set(range(keep, len(flow.axes.sizes)))))


def _verified(tracer: Tracer, flow: Dataflow, general: Dataflow, batch: Batch, real: Batch) -> bool:
    """Whether the shapes of `general` are correct for slightly larger free sizes and, if the model accepts them, for
    much larger lengths. A size that is rounded to windows or strides appears constant if a length changes only
    slightly."""
    lengths = len(general.axes.sizes) - 1
    if _holds(tracer, flow, general, batch, real, [2, *range(3, 3 + lengths)]) is not True:
        return False
    for far in FAR_LENGTHS[0 if lengths == 1 and _may_round(general) else 1 :] if lengths else ():
        is_last = far == FAR_LENGTHS[-1]
        found = _holds(tracer, flow, general, batch, real, [0, *range(far, far + lengths)], same_path=is_last)
        if found is not None:
            return found
    return True


def _may_round(flow: Dataflow) -> bool:
    """Whether lengths may be rounded: the model uses a unit's tensor whose shape does not seem to depend on the length.
    Other models are not tried with the largest increase, since some units run a loop over positions."""
    reads = [*(call.reads for call in flow.calls), *(reads for _, reads, _ in flow.outputs), flow.loss or Reads()]
    used = flow.touched.union(*(each.values for each in reads))
    tensors = [flow.spec(value) for value in used]
    return any(spec.slopes and len(spec.shape) > 1 and not any(slopes[1] for slopes in spec.slopes) for spec in tensors)


def _holds(
    tracer: Tracer,
    flow: Dataflow,
    general: Dataflow,
    batch: Batch,
    real: Batch,
    growth: Sequence[int],
    same_path: bool = True,
) -> bool | None:
    """Whether a run in which each group g is larger by `growth[g]` has the shapes of `general`. None if the run fails.
    Without `same_path`, also None if the run takes another path (for example, creates a mask because the length exceeds
    the window)."""
    axes = general.axes
    for group in range(len(axes.sizes)):
        batch = axes.resized(batch, group, growth[group])
    try:
        found, deltas = tracer.run(batch, real), axes.deltas(batch)
    except TraceError:
        return None
    if deltas is None or not _same_path(flow, found):
        return False if same_path else None
    if general.count is None:
        found = found.without_count()
    elif not _same_count(flow, found):
        return False
    return all(_sizes(spec, deltas) == _sizes(now) for spec, now in zip(_specs(general), _specs(found), strict=True))


def _same_path(a: Dataflow, b: Dataflow) -> bool:
    (calls, uses), (others, other_uses) = (
        (
            [(c.unit, c.reads, c.differentiated, c.parts, [_constant(leaf) for leaf in c.leaves]) for c in flow.calls],
            [(path, use) for path, use, _ in flow.outputs],
        )
        for flow in (a, b)
    )
    asked, others_asked = (flow.without_count().questions for flow in (a, b))
    are_asked = len(asked) == len(others_asked) and all(map(Question.is_as, asked, others_asked))
    return calls == others and uses == other_uses and are_asked


def _same_count(a: Dataflow, b: Dataflow) -> bool:
    if a.count is None or b.count is None:
        return a.count is b.count
    return a.count.is_as(b.count)


def _constant(leaf: Any) -> Any:
    """The properties of a leaf that must be the same for all sizes."""
    if isinstance(leaf, TensorSpec):
        return leaf.dtype, leaf.requires_grad
    return type(leaf), leaf if is_comparable(leaf) and not is_count(leaf) else None


def _sizes(spec: Any, deltas: Sequence[int] = ()) -> tuple[int, ...]:
    """The shape of a tensor, or an integer as a tuple, for a batch whose sizes differ from the traced sizes by
    `deltas`."""
    size = spec if isinstance(spec, int) else spec.at(deltas)
    return (size,) if isinstance(size, int) else size


def _specs(flow: Dataflow) -> Iterator[Any]:
    """The tensors and integers of `flow` that may depend on the sizes of the batch."""
    for call in flow.calls:
        yield from (leaf for leaf in call.leaves if isinstance(leaf, TensorSpec) or is_count(leaf))
    yield from (spec for _, _, spec in flow.outputs)
    for question in flow.questions:
        yield from question.numbers


def _with_slopes(flow: Dataflow, runs: Sequence[tuple[int, Dataflow]]) -> Dataflow:
    """Return `flow` with the slopes of its tensors, and with a Count for each integer that depends on the batch's
    sizes. For each group of axes, `runs` contains (delta, Dataflow): the Dataflow of a run in which the group's size
    differed by delta."""
    columns = [
        [
            tuple((b - a) * delta for a, b in zip(_sizes(spec), _sizes(now), strict=True))
            for spec, now in zip(_specs(flow), _specs(other), strict=True)
        ]
        for delta, other in runs
    ]
    found = (tuple(zip(*column, strict=True)) for column in zip(*columns, strict=True))

    def with_slopes(leaf: Any) -> Any:
        if isinstance(leaf, TensorSpec):
            return replace(leaf, slopes=next(found, ()))
        if not is_count(leaf):
            return leaf
        (slopes,) = next(found, ((),))
        is_product = all(slope * size == leaf for slope, size in zip(slopes, flow.axes.sizes) if slope)
        return Count(leaf, slopes, is_product) if any(slopes) else leaf

    calls = tuple(replace(call, leaves=tuple(map(with_slopes, call.leaves))) for call in flow.calls)
    outputs = tuple((path, use, with_slopes(spec)) for path, use, spec in flow.outputs)
    questions = tuple(question.with_numbers(map(with_slopes, question.numbers)) for question in flow.questions)
    return replace(flow, calls=calls, outputs=outputs, questions=questions)
