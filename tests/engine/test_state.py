"""Tests of state that one forward leaves for the next: it equals the unsplit model's, or it is refused."""

from __future__ import annotations

import copy
import gc
import math
import re
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from colossalai.booster import Booster
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import pipeshard
from pipeshard import PipelinePlugin, to_sequential
from pipeshard.batch.read import read_batch
from pipeshard.engine import traces, ways
from pipeshard.engine.running_state import deferred
from pipeshard.errors import TraceError
from pipeshard.graph.flags import MOST_STATES, Flags
from pipeshard.graph.trace import trace
from pipeshard.split.materialize import is_released
from tests import zoo
from tests.pool import Pool
from tests.unsplit import LEARNING_RATE, Split, Unsplit, compared, largest_error, parameter_error, refusal

pytestmark = pytest.mark.local

SCHEDULES = [
    {"schedule": "1f1b"},
    {"schedule": "gpipe"},
    {"schedule": "interleaved", "num_model_chunks": 2},
    {"schedule": "zbv"},
]


class Block(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.b(torch.tanh(self.a(x)))


class Net(nn.Module):
    """Embedding, layers, head; what is around the layers and between them is to be overridden."""

    block: type[nn.Module] = Block

    def __init__(self, layers: int = 5, width: int = 8, words: int = 11) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.layers = nn.ModuleList(self.block(width) for _ in range(layers))
        self.head = nn.Linear(width, words)

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.first(self.embed(ids))
        for k, layer in enumerate(self.layers):
            x = layer(x)
            if k == 1:
                x = self.between(x)
        logits = self.head(x)
        self.last(logits)
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}

    def first(self, x: Tensor) -> Tensor:
        return x

    def between(self, x: Tensor) -> Tensor:
        return x

    def last(self, x: Tensor) -> None:
        pass


class CountsFirst(Net):
    """A counter that is moved where the forward begins: a rank with two chunks moved it twice."""

    count = 0

    def first(self, x: Tensor) -> Tensor:
        self.count += 1
        return x * self.count


class CountsLast(Net):
    """A counter that is moved where the forward ends, which the first stage never reached."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.log: list[int] = []

    def first(self, x: Tensor) -> Tensor:
        return x * (1 + self.steps + 0.1 * len(self.log))

    def last(self, x: Tensor) -> None:
        self.steps += 1
        self.log.append(len(self.log))


class Warms(Net):
    """A flag that the first forward puts down as it ends, on the model and beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.is_first, self.beside, self.kept = True, SimpleNamespace(is_first=True), ""

    def first(self, x: Tensor) -> Tensor:
        return x * (2 if self.is_first else 1) + (self.beside.is_first is True)

    def last(self, x: Tensor) -> None:
        self.is_first = self.beside.is_first = False
        self.kept = self.kept or "known"  # read where it is set


class Lengthens(Net):
    """The greatest length so far, which no short batch of the trace exceeds: the first stage forgot it."""

    longest = 64

    def first(self, x: Tensor) -> Tensor:
        self.longest = max(self.longest, x.shape[1])
        return x * self.longest / 64

    def last(self, x: Tensor) -> None:
        x *= self.longest / 64


class AddsUnderNoGrad(Net):
    """Glue that reads more without gradients, which nobody sends."""

    def first(self, x: Tensor) -> Tensor:
        self.made = x
        return x

    def last(self, x: Tensor) -> None:
        if not torch.is_grad_enabled():
            x += self.made.sum()


class Rotates(nn.Module):
    """Llama with dynamic RoPE, whose frequencies are computed again for each batch that is the longest so far."""

    def __init__(self) -> None:
        super().__init__()
        rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
        sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2}
        config = LlamaConfig(vocab_size=11, max_position_embeddings=64, rope_parameters=rope, **sizes)
        self.llama = LlamaForCausalLM(config)

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": self.llama(input_ids=ids, labels=labels).loss}


class Normal(nn.Module):
    """Statistics alone."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("scale", torch.ones(8))
        self.seen = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        x = x - self.mean + 0.1 * self.seen
        with torch.no_grad():
            self.mean.lerp_(x.mean((0, 1)), 0.1)
            self.scale.lerp_(x.abs().amax((0, 1)), 0.1)
            self.seen = self.seen + x.mean()
        return x / self.scale


class Normalizes(Net):
    """A module of buffers alone has no parameter to be a unit by: where its input was not, its statistics were NaN,
    and so they were saved."""

    def __init__(self) -> None:
        super().__init__()
        self.normal = Normal()

    def between(self, x: Tensor) -> Tensor:
        return self.normal(x)


class Remembers(Net):
    """The logits' mean is used in the forward after: no cut may be in between."""

    def __init__(self) -> None:
        super().__init__(layers=9)
        self.register_buffer("mean", torch.zeros(()))

    def between(self, x: Tensor) -> Tensor:
        self.made = x
        return x

    def last(self, x: Tensor) -> None:
        self.mean.lerp_(self.made.detach().mean(), 0.5)

    def first(self, x: Tensor) -> Tensor:
        return x + self.mean


class Draws(Net):
    """Noise of a generator of the model's own: the loss's trial on the last stage moved that stage's alone."""

    def __init__(self) -> None:
        super().__init__()
        self.torch, self.numpy = torch.Generator().manual_seed(7), np.random.default_rng(7)

    def first(self, x: Tensor) -> Tensor:
        return x + torch.randn(x.shape, generator=self.torch)

    def last(self, x: Tensor) -> None:
        x += torch.from_numpy(self.numpy.standard_normal(tuple(x.shape), dtype="float32"))


class Scaled(Block):
    """A layer with statistics, a counter and a generator of its own."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.register_buffer("scale", torch.ones(()))
        self.count, self.mean = 0, torch.zeros(())
        self.generator = torch.Generator().manual_seed(width)

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        noise = torch.empty_like(x).normal_(generator=self.generator)
        with torch.no_grad():
            self.scale.mul_(0.5).add_(x.abs().max(), alpha=0.5)
            self.mean = 0.5 * self.mean + x.mean()
        return super().forward(x / self.scale + 0.1 * self.mean + 0.01 * self.count) + 0.01 * noise


class Scales(Net):
    """Layers that move state of their own: a chunk that replays them moved it, and so did recompute."""

    block = Scaled


class Smoothed(Block):
    """A layer that updates its statistics through `data`, which has a version of its own."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.register_buffer("scale", torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        self.scale.data.lerp_(x.detach().abs().amax((0, 1)), 0.5)
        return super().forward(x / self.scale)


class Smooths(Net):
    block = Smoothed


class Shifts(Net):
    """Labels that begin at 1, changed in place in every forward: of each microbatch once a chunk."""

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        labels -= 1
        return super().forward(ids, labels.clamp_min(0))


class Told(Block):
    """A layer that is told what it is to do by a mapping and an object."""

    def forward(self, x: Tensor, given: dict[str, float], context: Any) -> Tensor:  # type: ignore[override]
        return super().forward(x * given["scale"] + context.shift)


class Tells(Net):
    """What layers are given is another thing when they run again: that was what they got."""

    block = Told

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        given, context, x = {"scale": 1.0}, SimpleNamespace(shift=0.0), self.embed(ids)
        for layer in self.layers:
            x = layer(x, given, context)
            given["scale"] += 1
            context.shift -= 1
        return {"loss": nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())}


class Momentum(Net):
    """MoCo: an encoder that follows another one, as the forward begins. Boost alone moved it."""

    def first(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for a, b in zip(self.layers[0].parameters(), self.layers[4].parameters(), strict=True):
                b.mul_(0.9).add_(a, alpha=0.1)
        return x


class Assigns(Momentum):
    """The same by assignment."""

    def first(self, x: Tensor) -> Tensor:
        for a, b in zip(self.layers[0].parameters(), self.layers[4].parameters(), strict=True):
            b.data = b.data * 0.9 + a.data * 0.1
        return x


class Numbers(Block):
    """A layer that counts its calls in an integer buffer, scales by this buffer, and returns it."""

    def __init__(self, width: int = 8) -> None:
        super().__init__(width)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        self.calls += 1
        return super().forward(x) * self.calls, self.calls


class Numbered(Net):
    """What the first layer returns is saved for backward there and on the last stage. A later microbatch changes it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[0] = Numbers()

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x, number = self.layers[0](self.embed(ids))
        for layer in self.layers[1:]:
            x = layer(x)
        x = self.head(x * number)
        return {"loss": nn.functional.cross_entropy(x.flatten(0, 1), labels.flatten())}


class Marks(Block):
    """A layer that leaves a number that it computes from its weights, in an attribute and in a dict."""

    def forward(self, x: Tensor) -> Tensor:
        self.mark = self.marks["more"] = 2 if self.a.weight.abs().max() > 0 else 1
        return super().forward(x)


class Marking(Net):
    """Reads the numbers on the last stage, which has no weights of the first layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[0] = Marks()

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        first: Any = self.layers[0]
        self.begin(first)
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        x = self.head(x * self.scale(first))
        return {"loss": nn.functional.cross_entropy(x.flatten(0, 1), labels.flatten())}

    def begin(self, first: Any) -> None:
        first.mark, first.marks = 0, {}

    def scale(self, first: Any) -> int:
        return int(first.mark)


class MarkingInDict(Marking):
    def scale(self, first: Any) -> int:
        return int(first.marks["more"])


class MarkingInCycle(MarkingInDict):
    """Reads the number in a dict that contains itself."""

    def begin(self, first: Any) -> None:
        super().begin(first)
        first.marks["self"] = first.marks


class ReadsMark(Block):
    """A layer that is scaled by the number that the layer before has left."""

    def __init__(self, first: nn.Module) -> None:
        super().__init__()
        self.before = [first]

    def forward(self, x: Tensor) -> Tensor:
        marks: Any = self.before[0]
        return super().forward(x) * int(marks.mark)


class MarkingNear(Marking):
    def __init__(self) -> None:
        super().__init__()
        self.layers[1] = ReadsMark(self.layers[0])

    def scale(self, first: Any) -> int:
        return 1


class Lists(Block):
    """A layer that replaces the entries of a list by a number that the list may contain already."""

    def __init__(self, width: int = 8) -> None:
        super().__init__(width)
        self.marks = [0, 2]

    def forward(self, x: Tensor) -> Tensor:
        self.marks[:] = [2 if self.a.weight.abs().max() > 0 else 1]
        return super().forward(x)


class MarkingInList(Marking):
    def __init__(self) -> None:
        super().__init__()
        self.layers[0] = Lists()

    def begin(self, first: Any) -> None:
        pass

    def scale(self, first: Any) -> int:
        return int(first.marks[0])


class Lengthened(Lists):
    """A layer with the number at the end of a long list."""

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        self.marks[:0] = [0] * 50
        return x


class MarkingInLongList(MarkingInList):
    def __init__(self) -> None:
        super().__init__()
        self.layers[0] = Lengthened()

    def scale(self, first: Any) -> int:
        return int(first.marks[-1])


class Tallies(Block):
    """A layer that counts its calls in a dict."""

    def __init__(self, width: int = 8) -> None:
        super().__init__(width)
        self.marks = {"scale": 2, "calls": 0}

    def forward(self, x: Tensor) -> Tensor:
        self.marks["calls"] += 1
        return super().forward(x)


class Tallying(Marking):
    def __init__(self) -> None:
        super().__init__()
        self.layers[0] = Tallies()

    def begin(self, first: Any) -> None:
        pass

    def scale(self, first: Any) -> int:
        return int(first.marks["scale"])


SHARED = torch.Generator().manual_seed(3)


class Shares(Block):
    """Layers that draw from one generator: each stage has one of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + torch.empty_like(x).normal_(generator=SHARED)


class Total(Block):
    """Layers that count together."""

    total = 0

    def forward(self, x: Tensor) -> Tensor:
        Total.total += 1
        return super().forward(x) * Total.total


class SharesGenerator(Net):
    block = Shares


class SharesCounter(Net):
    block = Total


class Counting:
    """A criterion whose loss depends on how often it was called."""

    calls = 0

    def __call__(self, outputs: Any, inputs: Any) -> Tensor:
        self.calls += 1
        loss: Tensor = outputs["loss"] * self.calls
        return loss


def batch(seed: int, length: int = 6) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randint(0, 11, (4, length), generator=generator) for name in ("ids", "labels")}


def wrong(
    make: type[nn.Module], counts: bool = False, lengths: Sequence[int] = (6, 6, 6, 6), **arguments: Any
) -> list[str]:
    """What differs from the unsplit model in three steps of two microbatches, an evaluation, and the model after."""
    torch.manual_seed(0)
    model = make()
    unsplit, criterion = copy.deepcopy(model), Counting() if counts else None
    given = copy.deepcopy(criterion)
    options = {"num_microbatches": 2, "loss_reduction": "microbatch", "dry_run_input": batch(9), **arguments}
    booster = Booster(plugin=PipelinePlugin(pp_size=dist.get_world_size(), **options))
    boosted, optimizer, given, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), 0.1), given)
    reference, found = torch.optim.SGD(unsplit.parameters(), 0.1), []
    for step, length in enumerate(lengths):
        data, train = batch(step, length), step != 2
        unsplit.train(train)
        boosted.train(train)
        total = 0.0
        with torch.set_grad_enabled(train):
            loss = booster.execute_pipeline(iter([copy.deepcopy(data)]), boosted, given, optimizer)["loss"]
            for k in (0, 2):
                part = {name: leaf[k : k + 2].clone() for name, leaf in data.items()}
                of_part = criterion(unsplit(**part), part) if criterion else unsplit(**part)["loss"]
                total += float(of_part) / 2
                if train:
                    (of_part / 2).backward()
        if not abs(float(loss) - total) <= 1e-5 * abs(total):
            found.append(f"step {step}: loss {float(loss)}, unsplit {total}")
        gradients = {name: parameter.grad for name, parameter in unsplit.named_parameters()}
        for name, parameter in boosted.unwrap().named_parameters():
            grad = gradients[name]
            if grad is not None and not is_released(parameter) and not (parameter.grad - grad).abs().max() <= 1e-5:
                found.append(f"step {step}: the gradient of {name}")
        if train:
            optimizer.step()
            optimizer.zero_grad()
            reference.step()
            reference.zero_grad()
    whole = to_sequential(boosted)
    assert whole is not None
    for name, tensor in whole.state_dict().items():
        if not (tensor - unsplit.state_dict()[name]).abs().max() <= 1e-5:
            found.append(f"{name} {tensor}, unsplit {unsplit.state_dict()[name]}")
    return found


@pytest.mark.turns
@pytest.mark.parametrize(("p", "options"), [(1, SCHEDULES[1]), *((2, options) for options in SCHEDULES)])
def test_a_buffer_of_integers_is_saved_as_it_was(pool: Pool, p: int, options: dict[str, Any]) -> None:
    """Backward passes raised an error: a later microbatch had changed the buffer of integers, also that of messages."""
    assert pool.run(wrong, p, Numbered, timeout=200.0, **options) == [[]] * p


@pytest.mark.turns
@pytest.mark.parametrize("make", [Marking, MarkingInDict, MarkingInList])
def test_numbers_that_units_leave_are_the_same_on_all_stages(pool: Pool, make: type[nn.Module]) -> None:
    """The first evaluation traced the model again, with zeros for the weights of other stages: there, the number that a
    layer computes from its weights and leaves in an attribute was another one, and so was the loss. A number in a list
    was taken for the list's earlier entry, which is the same object: IndexError."""
    assert pool.run(wrong, 2, make, timeout=200.0) == [[], []]


@pytest.mark.turns
def test_a_counter_in_a_dict_of_which_glue_reads_another_key_trains(pool: Pool) -> None:
    """The second microbatch was refused: every number in a dict counted as read by other stages, also the counter, of
    which each trace records only one value."""
    assert pool.run(wrong, 2, Tallying, timeout=200.0) == [[], []]


def refused_of_large(make: type[nn.Module]) -> str:
    with mock.patch.object(ways, "SMALL_TENSOR", 0):
        try:
            return str(wrong(make))
        except TraceError as error:
            return str(error)


@pytest.mark.parametrize("make", [Marking, MarkingInDict, MarkingInCycle, MarkingInList, MarkingInLongList])
def test_numbers_that_units_compute_from_large_weights_are_refused(pool: Pool, make: type[nn.Module]) -> None:
    """Stages without the weights, which are too large to be lent, silently used another number if the unit left it in a
    dict or in a list. At the end of a long list, it was compared no longer, and a dict in itself ended the trace."""
    for message in pool.run(refused_of_large, 2, make, timeout=200.0):
        assert re.search(r"mark.* is .* in the trace on .*, but .* on ", message), message


def test_numbers_that_one_stage_computes_and_reads_may_differ_on_others(pool: Pool) -> None:
    """They were compared, too, and the error said to cut so that one stage has the layer and its readers."""
    assert pool.run(refused_of_large, 2, MarkingNear, timeout=200.0) == ["[]", "[]"]


def all_wrong(makes: list[type[nn.Module]], **arguments: Any) -> dict[str, list[str]]:
    return {make.__name__: found for make in makes if (found := wrong(make, counts=make is Net, **arguments))}


@pytest.mark.turns
@pytest.mark.sampled(1)
@pytest.mark.parametrize(("p", "options"), [(1, SCHEDULES[1]), *((2, options) for options in SCHEDULES)])
def test_state_is_that_of_the_unsplit_model(pool: Pool, p: int, options: dict[str, Any]) -> None:
    makes = [CountsFirst, CountsLast, Warms, Normalizes, Remembers, Draws, Scales, Shifts, Net]
    assert pool.run(all_wrong, p, makes, timeout=200.0, **options) == [{}] * p


@pytest.mark.turns
@pytest.mark.parametrize("options", [*SCHEDULES, {"recompute": True}])
def test_a_buffer_that_is_updated_through_data_is_carried(pool: Pool, options: dict[str, Any]) -> None:
    """Such updates were not seen: a backward used the statistics of a later microbatch, and recomputation updated them
    again."""
    assert pool.run(wrong, 2, Smooths, verify=False, timeout=200.0, **options) == [[], []]


@pytest.mark.turns
@pytest.mark.parametrize("options", SCHEDULES)
def test_state_of_long_sequences_persists(pool: Pool, options: dict[str, Any]) -> None:
    """A place that only the glue of long sequences changes was taken for one that the forward restores as it ends."""
    assert pool.run(all_wrong, 2, [Lengthens, Rotates], lengths=(100, 80, 90, 40), **options) == [{}, {}]


def test_a_flag_is_no_change_by_a_step_that_ran_without_it() -> None:
    """A flag that was set for a step that failed, and set back, counted as changed by the next step, so that its trace
    was that of both."""
    model = CountsFirst()
    flags = Flags(model)

    def run(flag: bool, is_failed: bool = False) -> int:
        model.flag = flag
        number = flags.number()
        if not is_failed:
            model.count += 1
            flags.stepped()
        return number

    model.flag = False
    assert [run(False), run(True, is_failed=True), run(False), run(True), run(True), run(False)] == [0, 1, 0, 1, 1, 0]


class Annealed(Net):
    beta: float | Tensor

    def first(self, x: Tensor) -> Tensor:
        return x * (1 - self.beta)


FEW_STATES = 5


HOOKED = "the model has a different hook in each step (most recently, in embed._forward_hooks)"


def traced_often() -> list[tuple[int, list[str]]]:
    """The numbers of traces with a number that changes in each step, and the warnings: as a float, as a buffer, and in
    a hook."""
    found = []
    for kind in ("float", "buffer", "hook"):
        model, said = Annealed(), list[str]()
        model.beta = nn.Buffer(torch.tensor(0.0)) if kind == "buffer" else 0.0
        with (
            mock.patch("pipeshard.graph.flags.MOST_STATES", FEW_STATES),
            mock.patch.object(traces, "trace", wraps=traces.trace) as tracing,
            mock.patch.object(traces.logger, "warning", lambda text, *args, said=said: said.append(text % args)),
        ):
            split = Split(model, 2, batch(0), num_microbatches=2, verify=False)
            for k in range(FEW_STATES + 3):
                handle = model.embed.register_forward_hook(counting(k)) if kind == "hook" else None
                if kind == "buffer":
                    model.beta.fill_(k / 100)  # type: ignore[union-attr, operator]
                elif kind == "float":
                    model.beta = k / 100
                split.backward(batch(0))
                if handle is not None:
                    handle.remove()
        found.append((tracing.call_count, said))
    return found


@pytest.mark.processes
@pytest.mark.turns
def test_a_number_of_the_model_that_changes_in_each_step_is_named(pool: Pool) -> None:
    """A step took ten times as long as without an attribute that the loop set in each step, and no message said so."""
    for rank, ((of_float, said), (of_buffer, silent), (of_hook, advised)) in enumerate(pool.run(traced_often, 2)):
        assert of_float >= FEW_STATES > 3 >= of_buffer and of_hook >= FEW_STATES and silent == []
        assert [text[:52] for text in said] == ["the model changes in each step (most recently, beta)"][rank:]
        assert [text.split(", so ")[0] for text in advised] == [HOOKED][rank:]


class Shapes(Net):
    """The embedding may return a flat result."""

    def first(self, x: Tensor) -> Tensor:
        return x if x.ndim == 3 else x.unflatten(1, (-1, 8))


def patched(options: dict[str, Any]) -> tuple[list[str], list[bool]]:
    """The differences of steps from plain torch, and whether each step has traced the model: two before the forward of
    the embedding is replaced, two after, and two after it is restored."""
    torch.manual_seed(0)
    model = Shapes()
    unsplit, sizes = Unsplit(copy.deepcopy(model)), [1, 6]  # cut after the embedding
    split = Split(model, 2, batch(0), num_microbatches=2, verify=False, partition=sizes, **options)
    wrong, has_traced = list[str](), list[bool]()
    for step in range(6):
        for layer in (model.embed, unsplit.model.embed):
            if step == 2:
                layer.forward = lambda x, layer=layer: nn.Embedding.forward(layer, x).flatten(1)
            elif step == 4:
                del layer.forward
        with mock.patch.object(traces, "trace", wraps=traces.trace) as tracing:
            loss = split.backward(batch(step))["loss"]
        has_traced.append(tracing.called)
        expected = unsplit.model(**batch(step))["loss"]
        expected.backward()
        wrong += compared(split, unsplit, loss, expected.detach())
        split.step()
        unsplit.step()
    return wrong, has_traced


@pytest.mark.turns
@pytest.mark.parametrize("options", [{}, {"schedule": "zb-h1", "recompute": True}])
def test_a_layer_whose_forward_is_replaced_is_traced_again(pool: Pool, options: dict[str, Any]) -> None:
    """The new forward ran, but the step kept the trace of the old one: the next stage received another shape."""
    assert pool.run(patched, 2, options) == [([], [False, False, True, False, False, False])] * 2


def distilling(weight: float, logits: Tensor) -> Any:
    """A criterion with a number, and a tensor of one step."""
    return lambda out, _: weight * out["loss"] + 0 * logits.sum()


def created_often(as_partial: bool) -> tuple[list[str], int, int]:
    """The warnings if each window of steps creates a criterion, with other values or (`as_partial`) the same, how many
    of their tensors are then kept, and the number of traces."""
    said, kept, traces_run = list[str](), list[weakref.ref[Tensor]](), 0

    def traced(trace: Any, *args: Any, **options: Any) -> Any:  # a mock would keep the criterion
        nonlocal traces_run
        traces_run += 1
        return trace(*args, **options)

    with (
        mock.patch.object(traces, "MOST_CRITERIA", FEW_STATES),
        mock.patch.object(
            traces, "trace", lambda *args, trace=traces.trace, **options: traced(trace, *args, **options)
        ),
        mock.patch.object(traces.logger, "warning", lambda text, *args: said.append(text % args)),
    ):
        split = Split(Net(), 2, batch(0), num_microbatches=2, verify=False)
        for k in range(3 * FEW_STATES):
            logits = torch.zeros(2)
            kept.append(weakref.ref(logits))
            criterion = partial(scaled, scale=0.5) if as_partial else distilling((k + 1) / 100, logits)
            for _ in range(3):  # an accumulation window
                split.booster.execute_pipeline(iter([batch(0)]), split.model, criterion, split.optimizer)
    gc.collect()
    return said, sum(reference() is not None for reference in kept), traces_run


def scaled(out: Any, batch: Any, scale: float) -> Any:
    return scale * out["loss"]


@pytest.mark.processes
@pytest.mark.turns
def test_a_criterion_that_each_step_creates_is_named_and_not_kept(pool: Pool) -> None:
    """A loop created its criterion around values of the step: each step traced and verified it without a message, and
    the tensors of 128 criteria stayed in memory. Even a partial with the same values was another one in each step. If
    several steps used each criterion, there was no warning."""
    for rank, (said, kept, _) in enumerate(pool.run(created_often, 2, False)):
        assert [text[:78] for text in said] == [
            "the loop has used more than 5 criteria. For each new criterion, pipeshard trac"
        ][rank:]
        assert kept <= 2 * FEW_STATES
    for said, _, number in pool.run(created_often, 2, True):
        assert said == [] and number <= 2


class Scaling:
    """A criterion of one of many tasks."""

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def __call__(self, out: Any, batch: Any) -> Any:
        return self.scale * out["loss"]


def taken_in_turn(kind: str) -> tuple[list[str], int]:
    """The warnings if steps take criteria of many tasks in turn, each created once, and the number of traces."""
    said = list[str]()
    scales = [(k + 1) / 100 for k in range(FEW_STATES)]
    if kind == "objects":
        criteria: list[Any] = [*map(Scaling, scales)]
    elif kind == "methods":
        criteria = [Scaling(scale).__call__ for scale in scales]
    else:
        criteria = [partial(scaled, scale=scale) for scale in scales]
    with (
        mock.patch.object(traces, "MOST_CRITERIA", FEW_STATES),
        mock.patch.object(traces.logger, "warning", lambda text, *args: said.append(text % args)),
        mock.patch.object(traces, "trace", wraps=traces.trace) as tracing,
    ):
        split = Split(Net(), 2, batch(0), num_microbatches=2, verify=False)
        for criterion in 3 * criteria:
            split.booster.execute_pipeline(iter([batch(0)]), split.model, criterion, split.optimizer)
    return said, tracing.call_count


@pytest.mark.processes
@pytest.mark.turns
@pytest.mark.parametrize("kind", ["partials", "objects", "methods"])
def test_criteria_of_many_tasks_are_traced_once(pool: Pool, kind: str) -> None:
    """With several criteria in turn, each step traced and verified again, and a warning advised to create them
    once."""
    for said, number in pool.run(taken_in_turn, 2, kind, timeout=200.0):
        assert said == [] and number <= 2 * FEW_STATES


class Weighing:
    """A criterion with numbers that the loop sets, and that its code compares with numbers of several kinds."""

    def __init__(self) -> None:
        self.alpha, self.epoch, self.warmup, self.weights = 0.0, 0.0, 5, [1.0, 0.4]

    def __call__(self, loss: Tensor, start: float = 0.7) -> Tensor:
        late = self.epoch > self.warmup or self.alpha > start
        return loss * self.weights[1] + self.alpha * loss.sum(-1) if late else loss


def test_which_changes_of_a_float_count() -> None:
    """A float that stayed 1.0 counted as changed in each step, since the code contains a 1, and so did a list, which
    was then no longer compared. A number in an integer, or in a default value, was no threshold."""
    criterion = Weighing()
    flags = Flags(nn.Linear(1, 1), criterion)

    def state() -> int:
        number = flags.number()
        flags.stepped()
        return number

    found = [state()]
    for name, value in (
        *[("alpha", value) for value in (1000 / 1000, float("1"), 0.3, 0.31, 0.8)],
        *[("epoch", value) for value in (4.5, 4.9, 5.1, 5.2)],
    ):
        setattr(criterion, name, value)
        found.append(state())
    criterion.weights[1] = 0.0
    found.append(state())
    assert found == [0, 1, 1, 2, 2, 3, 4, 4, 5, 5, 6]


class Milestones(NamedTuple):
    start: Any
    end: float = 7.0


MILESTONES = (0.3, 0.65)


class Late:
    """A criterion with a threshold in a collection or in an array."""

    alpha = 0.0

    def __init__(self, milestones: Any) -> None:
        self.milestones = milestones

    def __call__(self, loss: Tensor, batch: Any) -> Tensor:
        return loss.sum() if self.alpha > min(self.milestones) else loss.mean()


class LateByGlobal(Late):
    def __init__(self, milestones: Any) -> None:
        pass

    def __call__(self, loss: Tensor, batch: Any) -> Tensor:
        return loss.sum() if self.alpha > MILESTONES[0] else loss.mean()


@pytest.mark.parametrize(
    "milestones",
    [
        (0.3, 0.64),
        Milestones(0.3),
        ((0.3,), "a"),
        MILESTONES,
        frozenset([0.3]),
        np.float64(0.3),
        [np.float32(0.5), np.int64(1)],
        np.array([0.3]),
        torch.tensor(0.25 + 0.0625),
        Milestones(torch.tensor([0.25 + 0.0625, 0.5])),
    ],
    ids=repr,
)
def test_a_threshold_inside_a_collection_or_an_array_counts(milestones: Any) -> None:
    """A term of the loss that begins when a float passes such a number was averaged by the rule without this term."""
    criterion = (LateByGlobal if milestones is MILESTONES else Late)(milestones)
    flags, found = Flags(nn.Linear(1, 1), criterion), []
    for criterion.alpha in (0.28, 0.29, 0.61, 0.62):
        found.append(flags.number())
        flags.stepped()
    assert found == [0, 0, 1, 1]


class Pair:
    """A criterion with two weights, of which one may be a threshold."""

    def __init__(self) -> None:
        self.a = self.b = 1.0

    def __call__(self, loss: Tensor, batch: Any) -> Tensor:
        return self.a * loss.mean() + self.b * loss.square().mean()


@pytest.mark.parametrize(
    ("of_b", "expected"),
    [
        ((0.28, 0.3, 0.32, 0.34), [0, 0, 0, 0]),  # two equal weights
        ((0.285, 0.305, 0.325, 0.345), [0, 0, 0, 0]),  # a larger one
        ((0.28, 0.28, 0.28, 0.28), [0, 1, 1, 1]),  # passes a threshold
        ((0.36, 0.35, 0.31, 0.3), [0, 0, 1, 1]),  # the two pass each other
    ],
)
def test_floats_that_change_alike_pass_no_threshold(of_b: tuple[float, ...], expected: list[int]) -> None:
    """Two weights of the same value were thresholds of each other: each step was traced and verified again."""
    criterion, found = Pair(), []
    flags = Flags(nn.Linear(1, 1), criterion)
    for criterion.a, criterion.b in zip((0.28, 0.3, 0.32, 0.34), of_b, strict=True):
        found.append(flags.number())
        flags.stepped()
    assert found == expected


@pytest.mark.parametrize("kind", [float, np.float64, np.float32])
def test_a_number_of_numpy_may_be_annealed(kind: Any) -> None:
    """`np.interp` returns one, with which each step was traced and verified again."""
    criterion, found = Pair(), []
    flags = Flags(nn.Linear(1, 1), criterion)
    for weight in (0.28, 0.3, 0.32, 0.9, 1.1):
        criterion.a = kind(weight)
        found.append(flags.number())
        flags.stepped()
    assert found == [0, 0, 0, 0, 1]


def mentions_loss(out: Any, batch: Any) -> Any:
    return {"epoch": out.loss} if hasattr(out, "epoch") else out.loss


def reads_epoch(out: Any, batch: Any) -> Any:
    return [out.loss * epoch for _ in range(1)]  # noqa: F821


def reads_globals(out: Any, batch: Any) -> Any:
    return out.loss * globals()["epoch"]


@pytest.mark.parametrize(
    ("criterion", "expected"), [(mentions_loss, [0, 0, 0]), (reads_epoch, [0, 1, 2]), (reads_globals, [0, 1, 2])]
)
def test_a_global_with_the_name_of_an_attribute_is_no_state(
    monkeypatch: pytest.MonkeyPatch, criterion: Any, expected: list[int]
) -> None:
    """A script whose loop kept `loss` in a global, with a model that returned `out.loss`, traced again in each step."""
    found = []
    flags = Flags(nn.Linear(1, 1), criterion)
    for epoch in range(3):
        monkeypatch.setitem(globals(), "epoch", epoch)
        monkeypatch.setitem(globals(), "loss", 1.0 / (epoch + 1))
        found.append(flags.number())
        flags.stepped()
    assert found == expected


@pytest.mark.turns
def test_a_layer_that_moves_state_of_its_own_is_not_recomputed(pool: Pool) -> None:
    """A running maximum was moved again in the backward pass."""
    assert pool.run(wrong, 2, Scales, recompute=True) == [[], []]
    assert pool.run(wrong, 2, Tells, recompute=True) == [[], []]


@pytest.mark.turns
@pytest.mark.parametrize(
    ("make", "what"),
    [
        (Momentum, "changes the parameter layers.4.a.weight outside all units, based on layers.0.a.weight"),
        (Assigns, "changes the parameter layers.4.a.weight outside all units, based on layers.0.a.weight"),
        (SharesGenerator, "layers.0 and layers.4 draw from"),
        (SharesCounter, "layers.0 and layers.4 change"),
    ],
)
def test_what_no_stage_can_know_is_refused(pool: Pool, make: type[nn.Module], what: str) -> None:
    for message in pool.run_expecting(TraceError, wrong, 2, make):
        assert what in message
        assert "pp_size=1" in message
    if issubclass(make, Momentum):
        assert pool.run(wrong, 1, make) == [[]]


@pytest.mark.turns
def test_what_glue_reads_only_without_gradients_is_told(pool: Pool) -> None:
    """Evaluation returned a loss that was not a number, as the trace was confirmed with gradients."""
    for message in pool.run_expecting(TraceError, wrong, 2, AddsUnderNoGrad):
        assert "branch on torch.is_grad_enabled()" in message


class SkipsIfLong(Net):
    """A skip connection from the first stage to the last, only for long samples."""

    def first(self, x: Tensor) -> Tensor:
        self.made = x
        return x

    def last(self, x: Tensor) -> None:
        if x.shape[1] > 80:
            x += self.made.sum()


def after_no_labels(lengths: Sequence[int]) -> list[float]:
    """The losses of batches of these lengths, of which the first one has no valid label, so that its loss is NaN."""
    torch.manual_seed(0)
    model = SkipsIfLong()
    plugin = PipelinePlugin(dist.get_world_size(), num_microbatches=2, dry_run_input=batch(9), verify=False)
    engine = pipeshard.initialize(model, torch.optim.SGD(model.parameters(), 0.1), plugin=plugin)
    batches = [batch(step, length) for step, length in enumerate(lengths)]
    batches[0]["labels"].fill_(-100)
    losses = []
    for each in batches:
        losses.append(float(engine.execute_pipeline(iter([each]))["loss"]))
        engine.optimizer.zero_grad()
    return losses


def test_a_branch_on_a_length_between_the_same_powers_of_two_is_told(pool: Pool) -> None:
    """The trace that was to explain a NaN ran on shortened samples, so the loss was NaN from then on, without an error;
    an earlier batch without labels, of another length, had already confirmed the path."""
    assert not any(map(math.isnan, pool.run(after_no_labels, 2, [6, 70, 200])[0][1:]))
    for message in pool.run_expecting(TraceError, after_no_labels, 2, [6, 70, 100]):
        assert "on the batch's sizes" in message


class Normed(nn.Module):
    """Convolutions with batch norms of several kinds, one of which is frozen and one of which counts by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3, momentum=momentum), nn.ReLU(inplace=True))
            for momentum in (0.1, None, 0.3, 0.5)
        )
        self.layers[2][1].eval()

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        for layer in self.layers:
            x = layer(x)
        return {"loss": (x.mean((1, 2, 3)) - labels).square().mean()}


class Deferred(nn.BatchNorm2d):
    """torchgpipe's DeferredBatchNorm, but with torch's unbiased variance. The test counts the microbatches."""

    seen: list[Tensor]

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return super().forward(x)
        self.seen.append(x.detach().transpose(0, 1).flatten(1))
        return nn.functional.batch_norm(x, None, None, self.weight, self.bias, True, 0.0, self.eps)

    def commit(self) -> None:
        x, self.seen = torch.cat(self.seen, 1), []
        self.num_batches_tracked += 1
        share = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean = self.running_mean * (1 - share) + x.mean(1) * share
        self.running_var = self.running_var * (1 - share) + x.var(1) * share


def norms_once_a_batch(options: dict[str, Any]) -> dict[str, float]:
    """The errors of what this rank holds after three steps and an evaluation, the last step with a smaller batch."""
    torch.manual_seed(0)
    model = Normed()
    reference = copy.deepcopy(model)
    norms = [layer[1] for layer in reference.layers if layer[1].training]
    for norm in norms:
        norm.__class__, norm.seen = Deferred, []
    data = [{"x": torch.randn(rows, 3, 4, 4), "labels": torch.randn(rows)} for rows in (8, 8, 5)]
    split = Split(model, dist.get_world_size(), data[0], num_microbatches=4, deferred_batch_norm=True, **options)
    optimizer = torch.optim.AdamW(reference.parameters(), lr=LEARNING_RATE)
    for batch in data:
        split.backward(batch)
        split.step()
        split.evaluate(batch)  # in training mode, which moves them as well
        for part in read_batch(reference, batch).split(4):
            (part.call(reference)["loss"] * part.rows / len(batch["x"])).backward()
        for norm in norms:
            norm.commit()
        optimizer.step()
        optimizer.zero_grad()
        for part in read_batch(reference, batch).split(4):
            part.call(reference)
        for norm in norms:
            norm.commit()
    held = {name.rpartition(".")[0] for name in split.held}
    buffers = {n: b for n, b in split.model.unwrap().named_buffers() if n.rpartition(".")[0] in held}
    errors = {name: float((b - reference.get_buffer(name)).abs().max()) for name, b in buffers.items()}
    return errors | {"": parameter_error(split, reference)}


@pytest.mark.turns
@pytest.mark.parametrize(
    "options",
    [{}, {"schedule": "gpipe", "recompute": True}, *SCHEDULES[2:]],
    ids=["1f1b", "recompute", "interleaved", "zbv"],
)
def test_batch_norm_once_a_batch(pool: Pool, options: dict[str, Any]) -> None:
    """Running statistics moved once a microbatch, so that 4 of them forgot as much as 4 batches did. With several
    chunks per rank, the blanks that replace a norm's inputs on another stage were counted as well: NaN."""
    errors = pool.run(norms_once_a_batch, 2, options)
    assert len(set().union(*errors)) == 13 and all(error < 1e-5 for found in errors for error in found.values()), errors
    assert "does not support compile" in refusal(deferred_batch_norm=True, compile=True)


@pytest.mark.parametrize(("dtype", "mean"), [(torch.float16, 300.0), (torch.bfloat16, 8.0), (torch.float32, 2023.0)])
def test_batch_norm_once_a_batch_sums_as_precisely_as_torch(dtype: torch.dtype, mean: float) -> None:
    """E[x^2] - E[x]^2 in the input's dtype was inf in fp16, and in bf16, or for a constant column, a wrong or negative
    variance. An input that was passed by its name was an IndexError."""
    torch.manual_seed(0)
    norm, parts = nn.BatchNorm1d(2, momentum=1.0), [(torch.randn(64, 2) + mean).to(dtype) for _ in range(4)]
    for part in parts:
        part[:, 1] = mean  # a constant column
    with deferred([norm]):
        for part in parts:
            norm(input=part)
    expected = torch.cat(parts).double()
    torch.testing.assert_close(norm.running_mean, expected.mean(0).float(), rtol=1e-6, atol=0)
    torch.testing.assert_close(norm.running_var, expected.var(0).float(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("momentum", [0.1, None])
def test_batch_norm_once_a_batch_moves_as_in_the_unsplit_model(momentum: float | None) -> None:
    """The running variance moved to the biased variance of the batch, but torch moves it to the unbiased variance: for
    8 values per channel, it was an eighth too small, without an error."""
    torch.manual_seed(0)
    batches = torch.randn(3, 8, 2)
    norm, unsplit = (nn.BatchNorm1d(2, momentum=momentum) for _ in range(2))
    for batch in batches:
        unsplit(batch)
        with deferred([norm]):
            for part in batch.split((2, 3, 3)):
                norm(part)
    for name, expected in unsplit.named_buffers():
        torch.testing.assert_close(norm.get_buffer(name), expected)


def test_a_state_in_use_is_not_forgotten() -> None:
    """A loop evaluated with an attribute of its own for each epoch: after a few epochs, the state of the training steps
    between them was forgotten, so the model was traced and its loss verified again."""
    model: Any = nn.Linear(1, 1)
    model.epoch, numbers = None, []
    flags = Flags(model)
    for epoch in range(MOST_STATES + 2):
        for model.epoch in (None, f"epoch {epoch}"):
            numbers.append(flags.number())
            flags.stepped()
    assert set(numbers[::2]) == {0} and len({*numbers[1::2]}) == MOST_STATES + 2
    assert flags.newest_change()


def test_a_list_that_is_replaced_by_an_equal_one_is_no_change() -> None:
    """Each call of peft's `set_adapter` makes new lists of active adapters: DPO with a reference adapter traced all of
    the model three times a step, however long it trained."""
    model: Any = get_peft_model(LlamaForCausalLM(LlamaConfig(**zoo.TINY)), LoraConfig(target_modules=["q_proj"]))
    model.add_adapter("ref", LoraConfig(target_modules=["q_proj"]))
    flags = Flags(model)
    numbers = []
    for name in ("default", "ref") * 3:
        model.set_adapter(name)
        numbers.append(flags.number())
        flags.stepped()
    assert numbers == [0, 1, 0, 1, 0, 1]
    layer = model.get_submodule("base_model.model.model.layers.0.self_attn.q_proj")
    layer._active_adapter.append("default")  # the list of a later call
    assert flags.number() == 2


def test_a_dict_in_another_order_is_a_change() -> None:
    """A loop replaced the dict whose order is that of the layers, and the step was refused: the forward called another
    layer than its trace."""
    model: Any = nn.Linear(1, 1)
    model.order = {"first": 0, "second": 1}
    flags, numbers = Flags(model), list[int]()
    for order in (model.order, {**model.order}, {"second": 1, "first": 0}):
        model.order = order
        numbers.append(flags.number())
        flags.stepped()
    assert numbers == [0, 0, 1]


class Renewing(Net):
    """Sets an attribute to a copy of itself."""

    sizes: Any

    def last(self, logits: Tensor) -> None:
        self.sizes = type(self.sizes)(self.sizes)


@pytest.mark.parametrize("sizes", [[1, 2], {"a": 1, "b": 2}], ids=["list", "dict"])
def test_a_collection_that_a_forward_replaces_by_an_equal_one_is_not_carried(sizes: Any) -> None:
    model = Renewing()
    model.sizes = sizes
    assert not trace(model, read_batch(model, batch(0)), None).carried


class Probes(Net):
    """Collects the results of all layers by hooks, which it registers and removes itself."""

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        self.feats: list[Tensor] = []
        handles = [layer.register_forward_hook(lambda *call: self.feats.append(call[-1])) for layer in self.layers]
        super().forward(ids, labels)
        for handle in handles:
            handle.remove()
        logits = self.head(torch.stack(self.feats).mean(0))
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


class Adapted(nn.Module):
    """Two adapters beside a layer; `active` names the one that is used, or is None."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.base, self.policy, self.other = (nn.Linear(width, width) for _ in range(3))
        self.active: str | None = "policy"

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + (getattr(self, self.active)(x) if self.active else 0)


class HasAdapters(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.adapted = Adapted(width)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.adapted(x))


class Switches(Net):
    """Runs all layers with the other adapter first, in training only, and switches back."""

    block = HasAdapters

    def use(self, name: str | None) -> None:
        for layer in self.layers:
            layer.adapted.active = name

    def run(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        other = 0.0
        if self.training:
            self.use(None)
            with torch.no_grad():
                other = self.run(self.embed(ids)).square().mean()
            self.use("policy")
        logits = self.head(self.run(self.embed(ids)))
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"loss": loss + 0.1 * logits.square().mean() * other, "logits": logits}


def wrong_or_hooked(make: type[nn.Module]) -> list[str]:
    """What `wrong` finds, and the hooks that are left on the layers."""
    made: list[Net] = []

    class Made(make):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            super().__init__()
            made.append(self)

    found = wrong(Made)
    return found + [f"hooks of layer {k}" for k, layer in enumerate(made[0].layers) if layer._forward_hooks]


@pytest.mark.turns
def test_hooks_of_a_forward_are_removed_where_it_is_left_early(pool: Pool) -> None:
    """A forward that registers hooks and removes them as it ends left them on every stage but the last: each microbatch
    added one more, whose list kept the results of all later ones, until memory was full."""
    assert pool.run(wrong_or_hooked, 2, Probes) == [[], []]


@pytest.mark.turns
def test_an_attribute_inside_layers_is_put_back_where_a_forward_is_left_early(pool: Pool) -> None:
    """A forward switched all layers to another adapter and back, and the first stage left it in between: the next
    evaluation used the other adapter there, silently."""
    assert pool.run(wrong, 2, Switches, partition=[6, 7]) == [[], []]


class ProbesAgain(Net):
    """Runs all layers twice, and the second time with a hook on a module inside a layer."""

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        feats: list[Tensor] = []
        x = nn.Sequential(*self.layers)(self.embed(ids))
        handle = self.layers[1].b.register_forward_hook(lambda *call: feats.append(call[-1]))
        for layer in self.layers:
            x = layer(x)
        handle.remove()
        logits = self.head(x + sum(feats))
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def test_a_first_hook_between_two_calls_of_a_layer_is_called() -> None:
    """The second call was taken for one of the first call's kind, which has no hooks: the trace did not call the first
    hook of a module inside the layer, so the result of the module was not sent."""
    flow = trace(ProbesAgain(), read_batch(ProbesAgain(), batch(0)), None)
    parts = [[part.source.module for part in call.parts] for call in flow.calls if call.unit == "layers.1"]
    assert parts == [[""], ["", "b"]]
    assert {flow.calls[value.call].unit for value in flow.calls[-1].reads.values} == {"layers.1", "layers.4"}


class Capturing(Net):
    """Installs hooks in its first forward, as transformers does to collect router logits."""

    installed = False

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        if not self.installed:
            for layer in self.layers:
                layer.register_forward_hook(lambda *call: self.feats.append(call[-1]))
            self.installed = True
        self.feats: list[Tensor] = []
        super().forward(ids, labels)
        logits = self.head(torch.stack(self.feats).mean(0))
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def hooked_after_boost(kind: str) -> list[float]:
    """The differences of the loss from the unsplit model's, without and with the first hook on a module in layer 0. The
    hook was registered after boost, and leaves a term of the criterion's loss."""
    torch.manual_seed(0)
    model, terms = Net(), list[Tensor]()
    unsplit = copy.deepcopy(model)

    def criterion(outputs: Any, inputs: Any) -> Tensor:
        loss: Tensor = outputs["loss"] + sum(terms)
        return loss

    def hook(module: nn.Module, *call: Any) -> None:
        terms.append((call[-1] if kind == "forward" else module.weight).square().mean())

    booster = Booster(plugin=PipelinePlugin(pp_size=dist.get_world_size(), num_microbatches=1, dry_run_input=batch(9)))
    boosted, optimizer, given, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), 0.1), criterion)
    found = []
    for is_hooked in (False, True):
        for each in (boosted.unwrap(), unsplit) if is_hooked else ():
            module = each.layers[0].a
            (module.register_forward_hook if kind == "forward" else module.register_forward_pre_hook)(hook)
        terms.clear()
        loss = booster.execute_pipeline(iter([batch(0)]), boosted, given, optimizer)["loss"]
        terms.clear()
        found.append(abs(float(loss - criterion(unsplit(**batch(0)), {}))))
    return found


@pytest.mark.turns
@pytest.mark.parametrize("kind", ["forward", "pre"])
def test_the_first_hook_of_a_module_is_found_after_boost(pool: Pool, kind: str) -> None:
    """A loop registered the first hook of a module inside a layer after `boost`: no place was seen to change, so stages
    without the layer did not call the hook, and its term was missing from the loss, silently."""
    for differences in pool.run(hooked_after_boost, 2, kind):
        assert largest_error(differences) < 1e-6


def counting(count: int) -> Any:
    """A hook that a loop creates for a step."""
    return lambda *call: count * 0 or None


def test_a_hook_is_a_state_and_one_of_the_forward_is_none() -> None:
    """A module's first hook was no new state, nor was a hook on a module on which the first step had registered one.
    Hooks that steps register must not be a state: each later step would trace the model again."""
    model = nn.Sequential(nn.Linear(1, 1), nn.Tanh())
    flags, numbers = Flags(model), []

    def look(step: Callable[[], Any] = lambda: None) -> None:
        numbers.append(flags.number())
        step()
        flags.stepped()

    def leaks() -> None:
        model[0].register_forward_hook(lambda *call: None)

    look(leaks)
    look(leaks)
    handle = model[0].register_forward_hook(counting(1))
    look(leaks)
    handle.remove()
    look()
    model[0].register_forward_hook(counting(2))
    look(leaks)
    look()
    assert numbers == [0, 0, 1, 0, 2, 2]


def test_hooks_that_a_loop_registers_for_each_step_are_one_state() -> None:
    """A loop that registered the same hook for each step was in a new state in each step, and was traced in each: the
    ids of handles were compared. Functions that the loop creates again are the same hooks if their values are."""
    model = nn.Sequential(nn.Linear(1, 1), nn.Tanh())
    flags, seen, numbers = Flags(model), Seen(), []
    for hook in (counting(1), seen.add, counting(1), seen.add, counting(2), None):
        handle = model[0].register_forward_hook(hook) if hook else None
        numbers.append(flags.number())
        flags.stepped()
        if handle:
            handle.remove()
    assert numbers == [0, 1, 0, 1, 2, 3]


class Seen:
    """Keeps the mean of what a module returns."""

    def __init__(self) -> None:
        self.means: list[Tensor] = []

    def add(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self.means.append(output.mean())


def hooked_each_step() -> tuple[list[float], int]:
    """The differences of the loss from the unsplit model's where a loop registers a hook for each step, whose results
    are a term of the loss, and the number of states."""
    torch.manual_seed(0)
    model, seen = Net(), Seen()
    unsplit = copy.deepcopy(model)

    def criterion(outputs: Any, inputs: Any) -> Tensor:
        loss: Tensor = outputs["loss"] + sum(seen.means)
        return loss

    booster = Booster(plugin=PipelinePlugin(pp_size=dist.get_world_size(), num_microbatches=1, dry_run_input=batch(9)))
    boosted, optimizer, given, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), 0.1), criterion)
    found = []
    for _ in range(3):
        handles = [each.layers[0].a.register_forward_hook(seen.add) for each in (boosted.unwrap(), unsplit)]
        seen.means.clear()
        loss = booster.execute_pipeline(iter([batch(0)]), boosted, given, optimizer)["loss"]
        seen.means.clear()
        found.append(abs(float(loss - criterion(unsplit(**batch(0)), {}))))
        for handle in handles:
            handle.remove()
    return found, boosted.pipeline.traces.flags.next


@pytest.mark.turns
def test_a_hook_that_a_loop_registers_for_each_step_is_traced_once(pool: Pool) -> None:
    """Each step traced the model again and proved its loss, as a handle has a new id each time. A place inside a hook
    must not be found by this id."""
    for differences, states in pool.run(hooked_each_step, 2):
        assert largest_error(differences) < 1e-6
        assert states == 2


def test_hooks_of_the_first_forward_change_only_at_its_start() -> None:
    """Hooks that a forward registers once, at its start, were taken for changed after each call, as a record of them is
    a copy: stages in front removed them again, and a Mixtral with `output_router_logits` failed in slices."""
    model = Capturing()
    flow = trace(model, read_batch(model, batch(0)), None)
    hooks = [place for place in flow.carried if "_hooks" in place.name]
    assert len(hooks) == len(model.layers) and {place.until for place in hooks} == {0}
