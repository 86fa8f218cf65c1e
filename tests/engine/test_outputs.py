"""Tests of the model outputs that a step returns, and of the outputs that it does not keep."""

from __future__ import annotations

import copy
import gc
import weakref
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers.utils import ModelOutput

from pipeshard.batch.read import read_batch
from pipeshard.errors import PipeshardError, UsageError
from tests import zoo
from tests.hooks import register_unseen
from tests.messages import assert_told
from tests.pool import Pool
from tests.unsplit import Split, Unsplit, differences

pytestmark = pytest.mark.local

M = 3
CHUNKS = {"interleaved": 2}


def boosted(schedule: str = "1f1b", name: str = "llama") -> tuple[Split, Any, list[Any], bool]:
    """The split model, its batch, what the unsplit one makes of the microbatches, and whether this rank is the last."""
    model, data = zoo.build(name), zoo.batch(name)
    parts = read_batch(model, data).split(num_microbatches=M)
    with torch.no_grad():
        expected = [copy.deepcopy(part.call(model)) for part in parts]
    options: Any = {"schedule": schedule, "num_model_chunks": CHUNKS.get(schedule, 1)}
    split = Split(model, dist.get_world_size(), data, num_microbatches=M, **options)
    return split, data, expected, dist.get_rank() == split.model.pipeline.policy.placement[-1]


def every_kind(schedule: str) -> None:
    split, data, expected, is_last = boosted(schedule)
    logits = torch.cat([part.logits for part in expected])

    def seen(output: Any, inputs: Any) -> Any:
        assert not torch.is_grad_enabled() and not output.logits.requires_grad
        return output.logits.argmax(-1), inputs["labels"], output.loss

    for run in (split.backward, split.evaluate):
        whole = run(data, return_outputs=True)
        assert run(data, return_outputs=False)["outputs"] is None
        one, several = (run(data, return_outputs=what) for what in ("logits", ["logits", "loss"]))
        losses, results = (run(data, return_outputs=what) for what in ("loss", seen))
        found = [whole, one, several, losses, results]
        assert all(torch.equal(out["loss"], whole["loss"]) for out in found)
        if not is_last:
            assert all(out["outputs"] is None for out in found)
            continue
        assert type(one["outputs"]) is type(several["outputs"]) is type(whole["outputs"])
        assert list(one["outputs"]) == ["logits"] and sorted(several["outputs"]) == ["logits", "loss"]
        assert all(torch.equal(out["outputs"].logits, logits) for out in (whole, one, several))
        assert torch.equal(several["outputs"].loss, whole["loss"])
        assert torch.equal(losses["outputs"], torch.stack([part.loss for part in expected]))
        assert len(results["outputs"]) == M
        rows = 0
        for (guess, labels, loss), part in zip(results["outputs"], expected, strict=True):
            assert torch.equal(guess, part.logits.argmax(-1)) and torch.equal(loss, part.loss)
            assert torch.equal(labels, data["labels"][rows : rows + len(labels)])
            rows += len(labels)


@pytest.mark.turns
@pytest.mark.sampled(2)
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zb-h1", "zbv"])
def test_every_kind_of_output(pool: Pool, schedule: str) -> None:
    for p in (1, 2):
        pool.run(every_kind, p, schedule)


def training() -> list[str]:
    """Metrics in training: the gradients are those of the unsplit model."""
    split, data, *_ = boosted()
    unsplit, backward = Unsplit(zoo.build("llama")), split.backward
    found = []
    for what in ("logits", "loss", lambda output, inputs: output.logits.sum()):
        split.backward = lambda batch, what=what: backward(batch, return_outputs=what)  # type: ignore[method-assign]
        found += differences(split, unsplit, data, num_microbatches=M)
    return found


@pytest.mark.turns
def test_asking_for_outputs_changes_no_gradient(pool: Pool) -> None:
    assert pool.run(training, 2) == [[], []]


def alive() -> tuple[list[int], list[int]]:
    """The most microbatches of which the logits are there when a forward of the last stage has ended, and the number of
    them that are there after the step."""
    split, data, _, is_last = boosted()
    peaks, rests = [], []
    for what in (True, "logits", "loss", lambda output, inputs: output.logits.argmax(-1)):
        living, most = [0], [0]

        def made(module: Any, args: Any, result: Tensor, living: Any = living, most: Any = most) -> None:
            living[0] += 1
            most[0] = max(most[0], living[0])
            weakref.finalize(result.untyped_storage(), lambda: living.__setitem__(0, living[0] - 1))

        split.evaluate(data, return_outputs=what)  # traced by now
        handle = register_unseen(split.model.unwrap().lm_head, made)
        out = split.evaluate(data, return_outputs=what)
        handle.remove()
        assert (out["outputs"] is not None) == is_last
        peaks += most
        gc.collect()
        rests += living
    return peaks, rests


@pytest.mark.turns
def test_only_what_was_asked_for_is_kept(pool: Pool) -> None:
    """A step with a teacher's outputs kept the logits of each microbatch until the teacher's next step: through the
    student's whole step."""
    *_, (peaks, rests) = pool.run(alive, 2)
    assert peaks == [M, M, 1, 1] and rests == [0, 0, 0, 0]


def messages() -> list[int]:
    """How many values cross for an output with all hidden states: asked for, and not."""
    split, data, *_ = boosted()
    split.model.unwrap().config.output_hidden_states = True
    data = {**data, "output_hidden_states": True}
    traces = split.model.pipeline.traces
    counts = []
    for what in (True, "hidden_states", "logits", "loss"):
        out = split.evaluate(data, return_outputs=what)["outputs"]
        if out is not None and what in (True, "hidden_states"):
            assert all(torch.isfinite(t).all() for t in out.hidden_states)
        (route,) = [routes[0] for (_, wanted), routes in traces.routes._routes.items() if wanted == _wanted(what)][-1:]
        counts.append(len(route.leaves.values))
    return counts


def _wanted(what: Any) -> Any:
    return what if what is True else frozenset([what]) if what != "loss" else False


@pytest.mark.turns
def test_fields_that_nobody_asked_for_are_not_sent(pool: Pool) -> None:
    every, hidden, logits, loss = pool.run(messages, 2)[0]
    assert every == hidden > logits == loss == 1


def mistakes() -> list[str]:
    split, data, *_ = boosted()
    unsplit = Unsplit(zoo.build("llama"))
    rank = dist.get_rank()

    def fails(output: Any, inputs: Any) -> Any:
        if inputs["labels"][0, 0] == data["labels"][3, 0]:
            raise ValueError("no metric")

    unlabelled = {key: tensor for key, tensor in data.items() if key != "labels"}
    attempts: list[tuple[Any, Any]] = [
        (data, "logit"),
        (data, ["logits", "hidden_states", "x"]),
        (data, []),
        (data, 3),
        (data, None),
        (data, ["logits", 3]),
        (unlabelled, "loss"),
        (data, bool(rank)),
        (data, "logits" if rank else "loss"),
        (data, "logits" if rank else ["logits", "loss"]),
        (data, True if rank else fails),
        (data, fails),
    ]
    told = []
    for batch, what in attempts:
        with pytest.raises(PipeshardError) as caught:
            split.evaluate(batch, return_outputs=what)
        told.append(f"{type(caught.value).__name__}: {caught.value}")
    with pytest.raises(UsageError):
        split.backward(data, return_outputs=fails)
    split.optimizer.zero_grad()
    assert not differences(split, unsplit, data, num_microbatches=M)
    return told


@pytest.mark.turns
def test_mistakes_are_told_on_every_rank_and_harm_nothing(pool: Pool) -> None:
    expected = [
        "UsageError: return_outputs requests 'logit', .* its fields are loss, logits",
        "UsageError: return_outputs requests 'hidden_states', 'x', ",
        r"UsageError: return_outputs must be True, False, 'loss', a field name, .* got \[\]",
        "UsageError: return_outputs must be .* got 3",
        "UsageError: return_outputs must be .* got None",
        r"UsageError: return_outputs must be .* got \['logits', 3\]",
        "UsageError: return_outputs='loss' requests a loss, but this batch has none: "
        "add labels to the batch, or pass a criterion",
        r"BatchError: .*\(stage 0\): .*return_outputs=False, .*\(stage 1\): .*return_outputs=True",
        r"BatchError: .*\(stage 0\): .*return_outputs='loss', .*\(stage 1\): .*return_outputs=\['logits'\]",
        r"BatchError: .*return_outputs=\['logits', 'loss'\].*return_outputs=\['logits'\]",
        "BatchError: .*return_outputs=a function, .*return_outputs=True",
    ]
    failed = "the function passed as return_outputs failed on the output of microbatch 1"
    for messages_of_rank in pool.run(mistakes, 2):
        assert_told(messages_of_rank, [*expected, rf"UsageError: {failed} \(ValueError: no metric\)"])


@dataclass
class Bundle:
    logits: Tensor
    hidden: Tensor
    loss: Tensor


class Bundles(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Bundle:
        kept = []
        for layer in self.layers:
            x = torch.tanh(layer(x))
            kept.append(x)
        return Bundle(x, kept[0], x.square().mean())


def refused(split: Split, data: dict[str, Tensor], request: Any) -> str:
    with pytest.raises(UsageError) as caught:
        split.evaluate(data, return_outputs=request)
    return str(caught.value)


def bundled() -> str:
    data = {"x": torch.randn(8, 8)}
    split = Split(Bundles(), dist.get_world_size(), data, num_microbatches=2)
    split.backward(data)
    split.evaluate(data, return_outputs="loss")
    return refused(split, data, True)


@pytest.mark.local
@pytest.mark.turns
def test_an_output_of_an_unknown_class_is_refused(pool: Pool) -> None:
    """A dataclass as a model's output trained as it should, but an evaluation returned the first microbatch alone, with
    NaN in the place of what other stages have."""
    for p in (1, 2):
        for text in pool.run(bundled, p):
            assert "return_outputs=True requests the model's output (Bundle)" in text


class Nests(Bundles):
    def forward(self, x: Tensor) -> dict[str, Any]:  # type: ignore[override]
        output = super().forward(x)
        return {"logits": output.logits, "beside": output, "loss": output.loss}


def nested(request: Any) -> str:
    data = {"x": torch.randn(8, 8)}
    split = Split(Nests(), dist.get_world_size(), data, num_microbatches=2)
    for allowed in ("logits", lambda output, batch: output["logits"].sum()):
        split.evaluate(data, return_outputs=allowed)
    return refused(split, data, request)


@pytest.mark.turns
def test_an_object_of_an_unknown_class_in_an_output_is_refused(pool: Pool) -> None:
    """A dataclass in a dict was returned of the first microbatch alone, with NaN in the place of what other stages
    have."""
    for p, request in ((1, True), (2, ["beside", "logits"])):
        for text in pool.run(nested, p, request):
            assert f"return_outputs={request} requests the model's output ['beside'] (Bundle)" in text


@dataclass
class Strict(ModelOutput):
    logits: Tensor
    hidden: Tensor | None = None


class Stricts(Bundles):
    def forward(self, x: Tensor) -> Strict:  # type: ignore[override]
        output = super().forward(x)
        return Strict(output.logits, output.hidden)


def of_strict() -> None:
    data = {"x": torch.randn(8, 8)}
    model = Stricts()
    with torch.no_grad():
        expected = model(**data)
    split = Split(model, dist.get_world_size(), data, num_microbatches=2)
    hidden = split.evaluate(data, return_loss=False, return_outputs="hidden")["outputs"]
    both = split.evaluate(data, return_loss=False, return_outputs=["logits", "hidden"])["outputs"]
    if hidden is not None:
        assert type(hidden) is type(both) is Strict and list(hidden) == ["hidden"] and hidden.logits is None
        torch.testing.assert_close(hidden.hidden, expected.hidden)
        torch.testing.assert_close(both.logits, expected.logits)


def test_a_field_of_an_output_that_requires_another(pool: Pool) -> None:
    """A ModelOutput of a user's own requires its logits: a request for its other field ended in a TypeError of the
    class, amid the step."""
    for p in (1, 2):
        pool.run(of_strict, p)
