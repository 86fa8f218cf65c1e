"""Stage: one part of the model, run forward and backward on one microbatch at a time, and checked for NaNs.

A NaN in a gradient of one stage spreads to all parameters on every rank in the next step. torch's anomaly mode finds
the operator that computed the NaN, but is slow and reports neither the stage nor the microbatch.

A stage runs the model's own forward on every microbatch. Calls of units that other stages hold return the received
values, or are skipped, so the model's own code computes masks, positions and losses. The inputs of a stage are leaves
of its autograd graph, and the backward pass starts at the stage's outputs.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from pipeshard.batch.batch import Batch
from pipeshard.batch.criterion import Criterion, in_step, sum_and_count
from pipeshard.distributed.collectives import local, local_grad
from pipeshard.engine.mixed_precision import filled_like
from pipeshard.engine.offload import Offload
from pipeshard.engine.outputs import Outputs
from pipeshard.engine.weight_grad import Deferral, Gradients
from pipeshard.errors import NO_LOSS, ConfigurationError, NonFiniteError, TraceError, UsageError
from pipeshard.graph.dataflow import Dataflow
from pipeshard.graph.foreign import foreign_error, kept, leaves_of
from pipeshard.graph.operators import casting
from pipeshard.graph.taint import Value
from pipeshard.graph.writes import stored
from pipeshard.private import foreach_norm, tree_tensors
from pipeshard.schedule.program import Action, Kind
from pipeshard.slices.cut import SliceCall
from pipeshard.slices.states import Left
from pipeshard.split.replay import Listener, Replay
from pipeshard.split.route import Route


class NaNCheck:
    """Checks that the results and parameters of a stage are finite. With `gradients`, also checks the gradients. With a
    loss scale, `gradients` is False, since gradients may overflow. `parameters` are the stage's parameters by name.

    Every method raises NonFiniteError. The error names the stage, the microbatch (unless an optimizer's step is
    checked), and a non-finite parameter if there is one.
    """

    def __init__(self, stage: int, parameters: Mapping[str, nn.Parameter], gradients: bool = True) -> None:
        self.stage, self.parameters, self.gradients = stage, parameters, gradients

    def forward(self, i: int, units: Sequence[str], sent: Sequence[Tensor], loss: Tensor | None) -> None:
        """Check the results of microbatch i: `sent`, which `units` computed for later stages, and the loss."""
        for unit, tensor in zip(units, sent, strict=True):
            if not _is_finite(tensor):
                self._stop(f"the result of {unit} for microbatch {i} is not finite")
        if loss is not None and not _is_finite(loss):
            self._stop(f"the loss of microbatch {i} is {float(loss.detach()):g}")

    def backward(self, i: int, sent: Sequence[Tensor] = ()) -> None:
        """Check the gradients of the parameters and for the previous stage after the backward of microbatch i."""
        self._gradients(f"after the backward pass of microbatch {i}")
        if self.gradients and not all(map(_is_finite, sent)):
            self._stop(f"the gradient of microbatch {i} for the previous stage is not finite")

    def before_update(self) -> None:
        """Check the gradients before the optimizer's step, after they were summed over the ranks."""
        self._gradients("before the optimizer's step")

    def after_update(self) -> None:
        """Check the parameters that an optimizer has updated, before they are saved or used."""
        if (broken := self._broken()) is not None:
            self._stop(f"{broken} is not finite after the optimizer's step")

    def _gradients(self, when: str) -> None:
        named = {name: stored(grad) for name, p in self.parameters.items() if (grad := local_grad(p)) is not None}
        if not (self.gradients and named):
            return
        if not bool(torch.isfinite(torch.stack(foreach_norm(list(named.values())))).all()):
            broken = [name for name, grad in named.items() if not _is_finite(grad)]
            if broken:  # otherwise only the norm overflows. A backward computes the last gradient first
                self._stop(f"the gradient of {broken[-1]} is not finite {when}")

    def _broken(self) -> str | None:
        return next((name for name, p in self.parameters.items() if not _is_finite(local(p.detach()))), None)

    def _stop(self, what: str) -> None:
        broken = self._broken()
        why = (
            f"parameter {broken} of this stage is not finite"
            if broken
            else "all parameters of this stage are finite: check this batch"
        )
        raise NonFiniteError(
            f"on stage {self.stage}, {what}; {why}. Resume from the last training state with a smaller learning rate, "
            "with max_norm (in a Trainer, max_grad_norm), or without this batch"
        )


def _is_finite(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex()) or bool(torch.isfinite(tensor).all())


@dataclass(frozen=True)
class Microbatch:
    """One microbatch with its route through a stage. The batch's loss is the sum of the microbatches' losses, each
    times its `share`. With `summed`, these losses are the criterion's sums, not divided by counts. For a slice, the
    model is called with `sliced` instead of `batch`."""

    batch: Batch
    route: Route
    deltas: tuple[int, ...]
    share: float
    summed: bool = False
    sliced: SliceCall | None = None

    def shape(self, value: Value) -> tuple[tuple[int, ...], torch.dtype]:
        shape = self.route.sizes(self.deltas)[value.call][value.leaf]
        assert shape is not None
        return shape, self.route.flow.spec(value).dtype


@dataclass(frozen=True, slots=True)
class Saved:
    """The state of a forward that its backward needs: the inputs whose gradients are sent back (`entered`), the other
    inputs that require a gradient (`others`), the autograd root of each output (`left`; None without a graph), and the
    `loss`. The outputs themselves are freed after they are sent. `carried` contains the states that a slice has passed
    to later slices."""

    entered: list[Tensor]
    others: list[tuple[Value, Tensor]]
    left: list[GradientEdge | None]
    loss: Tensor | None
    carried: Sequence[Left] = ()


class Stage:
    """Runs stage `index` of the model: `forward`, `backward` and `weight` of microbatch i, in any legal order.

    The last stage computes the loss. `loss` is the sum of the microbatches' losses, each times its share, and `outputs`
    keeps the requested outputs of the model. Forwards run inside `around()` and `carry(route)`. If `deferral` is
    installed, a split `backward` defers weight gradients to `weight`. An unsplit `backward` defers only the weight
    gradients of large embeddings, until the end of `backward`. `listener` receives the arguments of unit calls with a
    cache. With `offload`, activations are kept on the host until their backward.
    """

    listener: Listener | None = None
    offload: Offload | None = None

    def __init__(
        self,
        replay: Replay,
        index: int,
        is_last: bool,
        deferral: Deferral,
        around: Callable[[], AbstractContextManager[object]] = nullcontext,
        finite: NaNCheck | None = None,
        carry: Callable[[Route], AbstractContextManager[object]] = lambda route: nullcontext(),
    ) -> None:
        self.replay, self.index, self.is_last, self.deferral = replay, index, is_last, deferral
        self.around, self.finite, self.carry = around, finite, carry

    @property
    def end_of_loss(self) -> "Stage":
        """The Stage that computes the loss, if this is the last stage."""
        return self

    def begin(
        self,
        microbatches: Sequence[Microbatch],
        criterion: Criterion | None,
        train: bool,
        outputs: Outputs,
        scale: float = 1.0,
        splits: Collection[int] = (),
    ) -> None:
        """Prepare a step. Backward passes start from the loss times `scale`. `splits` are the microbatches whose
        backward has a separate `weight`."""
        self.microbatches, self.criterion, self.train, self.outputs = microbatches, criterion, train, outputs
        self.scale, self.splits = scale, splits
        self.replay.criterion = criterion
        self.loss: Tensor | None = None
        self.saved: dict[int, Saved] = {}
        self.pending: dict[int, list[Gradients]] = {}
        # whether each input has received a gradient so far
        self.reached: dict[tuple[Dataflow, Value], bool] = {}
        self.remaining = len(microbatches)  # backwards still to run

    def end(self) -> None:
        """Discard all state of the step except `loss`."""
        self.saved.clear()
        self.pending.clear()
        self.microbatches = ()
        self.outputs, self.criterion, self.replay.criterion = Outputs(False), None, None
        self.replay.repeats.clear()
        self.replay.free_blanks()

    def values_in(self, i: int) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """The shape and dtype of each value that `forward(i, ...)` receives."""
        microbatch = self.microbatches[i]
        return [microbatch.shape(value) for value in microbatch.route.enters.values]

    def gradients_in(self, i: int) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """The shape and dtype of each gradient that `backward(i, ...)` receives."""
        microbatch = self.microbatches[i]
        return [microbatch.shape(value) for value in microbatch.route.leaves.gradients]

    def forward(self, i: int, entering: Sequence[Tensor]) -> list[Tensor]:
        """Run the forward of microbatch i on the values from the previous stage, and return the values for the next
        stage."""
        microbatch = self.microbatches[i]
        route = microbatch.route
        self.deferral.whole = i not in self.splits
        received = dict(zip(route.enters.values, entering, strict=True))
        if self.train:
            for value, tensor in received.items():
                tensor.requires_grad_(route.flow.spec(value).requires_grad)
        self.replay.randomness.microbatch(i)
        offload = self.offload if self.train else None
        saving = offload.saving(i, self.index) if offload is not None else nullcontext()
        with self.around(), self.carry(route), saving as self.replay.save, self.replay.following(route) as zeros:
            # autocast would cache the cast of a leaf, and gradients would be summed in this 16-bit cast. Hooks of the
            # model may call requires_grad_ on a received result: a view protects the leaf.
            is_lent = casting() or offload is not None
            lent = {v: t.view_as(t) if is_lent or not t.requires_grad else t for v, t in received.items()}
            called = microbatch.sliced or microbatch.batch
            output, made = self.replay.run(route, microbatch.deltas, lent, called, self.listener)
            loss = self._loss(output, microbatch, received.values()) if self.is_last else None
            if zeros is not None and self.is_last:
                zeros.refuse((loss, self.outputs.latest), "the loss or a requested output")
        if self.train:
            entered = [received[value] for value in route.enters.gradients]
            returned = set(route.enters.gradients)
            others = [(value, t) for value, t in received.items() if t.requires_grad and value not in returned]
            self.saved[i] = Saved(entered, others, [_edge(made[value]) for value in route.leaves.gradients], loss)
            for leaf in received.values() if offload is not None else ():
                leaf.data = leaf.new_empty(()).expand(leaf.shape)  # only its gradient is needed from now on
        sent = [_plain(made[value].detach()) for value in route.leaves.values]
        if self.finite is not None:
            units = [route.flow.calls[value.call].unit for value in route.leaves.values]
            self.finite.forward(i, units, sent, loss if microbatch.share else None)  # 0/0 without labels
        return sent

    def backward(self, i: int, gradients: Sequence[Tensor]) -> list[Tensor]:
        """Backpropagate the gradients of the outputs of `forward(i)`, and return the gradients of its inputs. The
        gradient of an input that is also sent to later stages includes the gradients from the later stages."""
        saved, share = self.saved.pop(i), self.microbatches[i].share
        self.deferral.whole = i not in self.splits  # recomputed units run their forward again
        if not self.is_last:
            pairs = [(edge, grad) for edge, grad in zip(saved.left, gradients, strict=True) if edge is not None]
        elif saved.loss is not None and share != 0:  # no label: no gradient, rather than 0/0
            pairs = [(get_gradient_edge(saved.loss), filled_like(saved.loss, share * self.scale))]
        else:
            pairs = []
        pairs += [(edge, grad) for edge, of_later in saved.carried if (grad := of_later()) is not None]
        if self.offload is not None:
            self.offload.load(Action(Kind.B, i, self.index))
        self.replay.repeats.stage = self.index
        self.pending[i] = self.deferral.begin(edge for edge, _ in pairs)
        if pairs:
            torch.autograd.backward([edge for edge, _ in pairs], [grad for _, grad in pairs])
        self.deferral.end()
        if self.deferral.whole:
            self.deferral.finish(self.pending.pop(i))
        elif self.offload is not None:
            self.offload.store(i, self.index, self.pending[i])
        if saved.others:
            self._refuse_lost(i, saved.others)
        if saved.entered and (pairs or not self.is_last):
            self._note_reached(i, saved.entered)
        self.remaining -= 1
        if not self.remaining:
            self._refuse_none()
        sent = [t.new_zeros(t.shape) if t.grad is None else _plain(t.grad) for t in saved.entered]
        if self.finite is not None:
            self.finite.backward(i, sent)
        return sent

    def _refuse_lost(self, i: int, others: Sequence[tuple[Value, Tensor]]) -> None:
        for value, tensor in others:
            if tensor.grad is not None:
                unit = self.microbatches[i].route.flow.calls[value.call].unit
                raise TraceError(
                    f"result {value.leaf} of unit {unit}, which another stage sent to stage {self.index}, receives a "
                    "gradient that the trace did not record, so this stage would not send it back. Make the path "
                    "depend only on attributes and configs, which you may set between steps, or, if all batches are of "
                    "this kind, pass one of them as PipelinePlugin(dry_run_input=...)"
                )

    def _note_reached(self, i: int, entered: Sequence[Tensor]) -> None:
        """Record which inputs have received a gradient from microbatch i."""
        route = self.microbatches[i].route
        for value, tensor in zip(route.enters.gradients, entered, strict=True):
            received = route.flow, value
            self.reached[received] = self.reached.get(received, False) or tensor.grad is not None

    def _refuse_none(self) -> None:
        """Raise TraceError if an input has received no gradient in the step. The stage that computed the input would
        receive a gradient of zeros. Some optimizers (AdamW) decay parameters with a zero gradient, but not parameters
        without a gradient."""
        for (flow, value), is_reached in self.reached.items():
            if not is_reached:
                raise TraceError(
                    f"result {value.leaf} of unit {flow.calls[value.call].unit}, which another stage sent to stage "
                    f"{self.index}, receives no gradient in this step, although the trace recorded one: a unit "
                    "detaches or omits it, depending on a counter, the batch's sizes or tensor values, or a custom "
                    "backward (torch.autograd.Function) returns None for it. In each step, detach or omit it in every "
                    "forward or in none (to switch between steps, set an attribute), or multiply it by zero. In a "
                    "custom backward, return zeros instead of None. Alternatively, cut elsewhere (partition=[...])"
                )

    def weight(self, i: int) -> None:
        """Compute the weight gradients that `backward(i)` has deferred."""
        if self.offload is not None:
            self.offload.load(Action(Kind.W, i, self.index))
            self.offload.restore(self.pending[i])
        self.deferral.finish(self.pending.pop(i))
        if self.finite is not None:
            self.finite.backward(i)

    def _loss(self, output: Any, microbatch: Microbatch, received: Collection[Tensor]) -> Tensor | None:
        loss, count = sum_and_count(output, in_step(self.criterion), microbatch.batch)
        if self.train and isinstance(count, Tensor) and count.requires_grad:
            raise ConfigurationError(
                "the criterion returned two tensors, which pipeshard reads as (sum, count), but the second tensor "
                "requires a gradient and so cannot be a count: return the sum of several losses as one tensor, or "
                "detach the count"
            )
        if self.train and loss is not None and self.criterion is not None:
            self._refuse_foreign(loss, output, received)
        mean = loss if loss is None or count is None else loss / count
        self.outputs.keep(output, mean, microbatch.batch)
        loss = loss if microbatch.summed else mean
        if loss is None:
            if self.train:
                raise UsageError(NO_LOSS)
            return None
        share = microbatch.share
        part = loss.detach() * share if share != 0 else torch.zeros_like(loss)  # 0/0 without labels
        self.loss = part if self.loss is None else self.loss + part
        return loss

    def _refuse_foreign(self, loss: Tensor, output: Any, received: Collection[Tensor]) -> None:
        """Raise ConfigurationError for a criterion that trains its own weights now, but did not train them in the
        trace. Only the autograd graph of the criterion itself is searched."""
        until = tree_tensors(output)
        leaves = leaves_of(loss, until)
        if not leaves:
            return
        own = {id(tensor) for tensor in (*self.replay.model.parameters(), *received, *until)}
        assert self.criterion is not None
        if foreign := kept([leaf for leaf in leaves if id(leaf) not in own], self.criterion):
            raise foreign_error(foreign, self.criterion)


def _plain(tensor: Tensor) -> Tensor:
    """A contiguous tensor with the same values, without lazy conjugation or negation."""
    return tensor.resolve_conj().resolve_neg().contiguous()


def _edge(tensor: Tensor) -> GradientEdge | None:
    return get_gradient_edge(tensor) if tensor.requires_grad else None
