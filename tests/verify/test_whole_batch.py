"""Tests of whole batches: models and losses with dependent samples are refused, and all others are compared in full."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from colossalai.booster import Booster
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask
from transformers.models.llama.modeling_llama import eager_attention_forward

from pipeshard import PipelinePlugin
from pipeshard.errors import VerificationError
from pipeshard.verify.proof import DIFFERENT, EXACT, PARTLY, UNPROVEN, Large, prove
from tests import zoo
from tests.pool import Pool
from tests.verify.test_verify import proof_of

pytestmark = pytest.mark.local

WIDTH, WORDS, LENGTH, ROWS = 8, 11, 6, 6  # as many samples as positions
Batch = dict[str, Tensor]


class Net(nn.Module):
    """Words through three layers, with a loss of its own."""

    def __init__(self, layer: Callable[[], nn.Module] | None = None, **embedding: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(WORDS, WIDTH, **embedding)
        self.layers = nn.ModuleList((layer or Layer)() for _ in range(3))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(x)
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x).tanh()


class Centred(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(0, keepdim=True))


class CentredInTraining(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(0, keepdim=True) if self.training else x)


class CentredAndDropped(CentredInTraining):
    """Draws random numbers, too: in training mode both sides have to draw the same ones."""

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(super().forward(x), 0.3, self.training)


class Mixed(Layer):
    """Mixes up each sample with another one, in training."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(0.8 * x + 0.2 * x[torch.randperm(len(x))] if self.training else x)


class Unordered(Layer):
    """Drops positions that are sorted, so that masks belong to no samples, as behind a router."""

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        order = flat[:, 0].argsort()
        return super().forward(F.dropout(flat[order], 0.3, self.training)[order.argsort()].view_as(x))


class Dropped(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        path = x.new_empty(len(x), 1, 1).bernoulli_(0.8) if self.training else 1.0
        return super().forward(self.dropout(x)) * path + F.dropout(x, 0.3, self.training)


class Scaled(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x / x.shape[0])


class Whitened(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x / x.std())


class Ranked(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.detach().flatten(1).quantile(0.5, 0).view_as(x[0]))


class OfBackward(torch.autograd.Function):
    """Nothing in the forward; gradients are centred over the batch."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient - gradient.mean(0, keepdim=True)


class CentredGradient(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(OfBackward.apply(x))


class Bank(Layer):
    """Attends to what the batch before has left."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bank", torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1)))

    def forward(self, x: Tensor) -> Tensor:
        near = (x @ self.bank.T).softmax(-1) @ self.bank
        self.bank = torch.cat([x.detach().mean(1), self.bank])[:ROWS]
        return super().forward(x + near)


class Normed(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x.transpose(1, 2)).transpose(1, 2))


class NormedByHand(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.batch_norm(x.transpose(1, 2), None, None, training=True).transpose(1, 2))


class NormedWeights(Layer):
    """As a convolution of timm or BiT, whose weights are standardized."""

    def forward(self, x: Tensor) -> Tensor:
        weight = F.batch_norm(self.inner.weight[None], None, None, training=True)[0]
        return x + F.linear(x, weight, self.inner.bias).tanh()


class NormedAndCentred(Normed):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(0, keepdim=True))


class Spectral(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.utils.parametrizations.spectral_norm(self.inner)


class Counting(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.turns = 0

    def forward(self, x: Tensor) -> Tensor:
        self.turns += 1
        return super().forward(x) * (1 + 0.1 * self.turns)


class Switching(Layer):
    """Counts its forwards, and does another thing after the thousandth."""

    def __init__(self) -> None:
        super().__init__()
        self.turns = 0

    def forward(self, x: Tensor) -> Tensor:
        self.turns += 1
        return super().forward(x) * (2 if self.turns > 1000 else 1)


class Averaging(Layer):
    """Averages its inputs for later."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.mean.lerp_(x.detach().mean((0, 1)), 0.1)
        return super().forward(x)


class Sized(Layer):
    """Notes sizes, which add up to those of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.seen, self.rows, self.length = 0, 0, 0

    def forward(self, x: Tensor) -> Tensor:
        self.seen += len(x)
        self.rows, self.length = len(x), x.shape[1]
        return super().forward(x)


class Warming:
    """A loss that counts its calls, and is another after the thousandth."""

    calls = 0

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, output: Any, batch: Any) -> Tensor:
        self.calls += 1
        return output["loss"] * (2 if self.calls > 1000 else 1)


class Recurrent(nn.Module):
    """Torch's own layout: (seq, batch)."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(nn.LSTM(WIDTH, WIDTH, 2, dropout=dropout) for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)[0]
        return self.head(x)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(WORDS, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, 0.1)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.encoder(self.embed(ids)))


def words(rows: int = ROWS, length: int = LENGTH) -> Batch:
    generator = torch.Generator().manual_seed(0)
    ids, labels = torch.randint(0, WORDS, (2, rows, length), generator=generator)
    return {"ids": ids, "labels": labels}


def time_first() -> Batch:
    batch = words()
    return {"ids": batch["ids"], "criterion.labels": batch["labels"]}


def over_time(output: Any, batch: Any) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), batch["criterion.labels"].flatten())


@dataclass(frozen=True)
class Case:
    """A model, proven in two microbatches: `coupled` is what is said of it, "" for one whose samples are apart, and
    `moving` what happens for each microbatch."""

    make: Callable[[], nn.Module]
    story: str
    coupled: str = ""
    moving: str = ""
    batch: Callable[[], Batch] = words
    criterion: Any = None
    options: dict[str, Any] = field(default_factory=dict)


BY_TIME = {"batch_dims": {"ids": 1, "criterion.labels": 1}}
CASES = {
    "plain": Case(Net, "Nothing is to be found in what is exact."),
    "centred": Case(lambda: Net(Centred), "The mean over the batch is not the microbatches' means.", "unit layers.0"),
    "centred, accumulated": Case(
        lambda: Net(Centred), "What the error names as a remedy is taken.", options={"loss_reduction": "microbatch"}
    ),
    "centred in training": Case(lambda: Net(CentredInTraining), "Evaluation mode does not show it.", "unit layers.0"),
    "centred under dropout": Case(lambda: Net(CentredAndDropped), "Random numbers do not hide it.", "unit layers.0"),
    "dropout": Case(lambda: Net(Dropped), "Modules, functions and paths that drop are no difference."),
    "dropout of sorted positions": Case(lambda: Net(Unordered), "Nor are masks that belong to no samples."),
    "mixup": Case(lambda: Net(Mixed), "Samples are mixed by a random order.", "unit layers.0"),
    "scaled": Case(lambda: Net(Scaled), "The number of samples is another in a microbatch.", "unit layers.0"),
    "std": Case(lambda: Net(Whitened), "So is the deviation of all of them.", "unit layers.0"),
    "quantile": Case(lambda: Net(Ranked), "And their median.", "unit layers.0"),
    "frequency": Case(
        lambda: Net(scale_grad_by_freq=True), "The loss is equal, the gradient is not.", "gradient of embed.weight"
    ),
    "backward": Case(
        lambda: Net(CentredGradient), "Only the backward pass mixes samples.", "All units return the same"
    ),
    "bank": Case(
        lambda: Net(Bank), "The second microbatch attends to the first one.", "that the next microbatch reads"
    ),
    "batch norm": Case(lambda: Net(Normed), "Accumulation of microbatches is what everybody means."),
    "batch norm by hand": Case(lambda: Net(NormedByHand), "It has no statistics to run with.", "unit layers.0"),
    "batch norm of weights": Case(lambda: Net(NormedWeights), "It mixes no samples."),
    "batch norm and centred": Case(lambda: Net(NormedAndCentred), "It hides nothing beside it.", "unit layers.0"),
    "spectral norm": Case(
        lambda: Net(Spectral), "Its vectors move with each microbatch.", moving="updated once per microbatch"
    ),
    "counter": Case(lambda: Net(Counting), "So do numbers of forwards.", moving="updated once per microbatch"),
    "counter that switches": Case(
        lambda: Net(Switching), "It does so m times as early.", moving="updated once per microbatch"
    ),
    "counter of the criterion": Case(
        Net, "So does a criterion's.", moving="updated once per microbatch", criterion=Warming()
    ),
    "average for later": Case(
        lambda: Net(Averaging), "The average moves m times as fast.", moving="updated once per microbatch"
    ),
    "sizes": Case(lambda: Net(Sized), "Sizes are no counters."),
    "lstm": Case(Recurrent, "Cut along time.", "unit layers.0", batch=time_first, criterion=over_time),
    "lstm, declared": Case(Recurrent, "", batch=time_first, criterion=over_time, options=BY_TIME),
    "lstm with dropout, declared": Case(
        lambda: Recurrent(0.2), "", batch=time_first, criterion=over_time, options=BY_TIME
    ),
    "encoder": Case(Encoder, "Cut along time.", "unit encoder.layers.0", batch=time_first, criterion=over_time),
    "encoder, declared": Case(Encoder, "", batch=time_first, criterion=over_time, options=BY_TIME),
}


def wrong_ones() -> list[str]:
    """The cases that are taken for another kind than they are."""
    found = []
    for name, case in CASES.items():
        proof = proof_of(case.make(), case.batch(), case.criterion, **case.options)
        expected = DIFFERENT if case.coupled else EXACT
        said = case.coupled in proof.reason and case.moving in " ".join(proof.moving)
        if proof.kind != expected or proof.coupled != bool(case.coupled) or not said:
            found.append(f"{name}: {proof}")
        if proof.kind == EXACT and bool(proof.moving) != bool(case.moving):
            found.append(f"{name}: {proof.moving}")
    return found


@pytest.mark.turns
def test_samples_that_depend_on_each_other_are_found(pool: Pool) -> None:
    """Each was trained as its microbatches alone, and called exact, but for the loss of the whole batch."""
    assert pool.run(wrong_ones, 1, timeout=300) == [[]]


class Noisy(Layer):
    """Draws numbers for each sample that are not torch's."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + torch.tensor([0.1 * random.random() for _ in x]).view(-1, 1, 1))


class Rounded(Layer):
    """As a kernel that has no fp64, and rounds other numbers of samples differently."""

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype is torch.float64:
            raise TypeError("only supports fp16 and bf16")
        return super().forward(x * (1 + 2e-5 * len(x)))


class RoundedAndCentred(Rounded):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(0, keepdim=True))


def without_fp64() -> list[str]:
    proofs = [proof_of(Net(layer), words()) for layer in (Rounded, RoundedAndCentred)]
    return [f"{proof.kind} {proof.but} {proof.coupled} {proof.reason}" for proof in proofs]


def rounded_attention(module: nn.Module, query: Tensor, *args: Any, **options: Any) -> tuple[Tensor, Tensor | None]:
    """As flash attention, which has no fp64, and rounds other numbers of samples differently."""
    if query.dtype is torch.float64:
        raise TypeError("only supports fp16 and bf16")
    return eager_attention_forward(module, query * (1 + 1e-2 * len(query)), *args, **options)


def with_flash() -> str:
    AttentionInterface.register("flash_of_test", rounded_attention)
    AttentionMaskInterface.register("flash_of_test", eager_mask)
    model = zoo.build("llama")
    model.config._attn_implementation = "flash_of_test"
    proof = proof_of(model, zoo.batch("llama"))
    return f"{proof.kind} {proof.but} {proof.reason} {model.config._attn_implementation}"


@pytest.mark.turns
def test_flash_attention_is_compared_in_fp64_with_eager_attention(pool: Pool) -> None:
    """The second comparison, in fp64, failed in the kernel. The model itself keeps its kernel."""
    assert pool.run(with_flash, 1) == [f"{EXACT} ()  flash_of_test"]


@pytest.mark.turns
def test_rounding_of_a_model_without_fp64_is_no_difference(pool: Pool) -> None:
    """A model with flash attention was refused, "samples depend on each other": its loss was rounded, and the error of
    its repetition in fp64 was a verdict."""
    (said,) = pool.run(without_fp64, 1)
    assert said[0].startswith(PARTLY) and "does not run in fp64: TypeError: only supports fp16" in said[0], said
    assert said[1].startswith(DIFFERENT) and "unit layers.0" in said[1], said


def partly() -> list[str]:
    noisy = proof_of(Net(Noisy), words())
    with mock.patch("pipeshard.verify.proof._Proving._compare_split", side_effect=AssertionError):
        short = [proof_without_split(Net(layer)) for layer in (Layer, Centred, Normed)]
    return [f"{proof.kind} {proof.but} {proof.coupled} {proof.reason}" for proof in (noisy, *short)]


def proof_without_split(model: nn.Module) -> Any:
    """As where there is no memory for all stages, nor for a smaller copy."""
    large = Large("it is too large", most=0.0, fits=True)
    with mock.patch("tests.verify.test_verify.prove", lambda *args: prove(*args, large=large)):
        return proof_of(model, words())


@pytest.mark.turns
@pytest.mark.processes
def test_what_is_not_compared_is_not_exact(pool: Pool) -> None:
    """It was said after "proven exact, but", which nobody reads. A model that is too large to be split is compared with
    itself in microbatches all the same."""
    (said,) = pool.run(partly, 1)
    assert said[0].startswith(PARTLY) and "random or numpy" in said[0], said
    assert [line.split()[0] for line in said[1:]] == [UNPROVEN, DIFFERENT, UNPROVEN]


def boosted(make: Callable[[], nn.Module], p: int = 2, **options: Any) -> list[str]:
    """The warnings of this rank at boost and in a step."""
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("pipeshard").addHandler(handler)
    options = {"num_microbatches": 2, "dry_run_input": words(), **options}
    booster = Booster(plugin=PipelinePlugin(p, **options))
    model = make()
    split, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    booster.execute_pipeline(iter([words()]), split, None, optimizer)
    return said


def centred() -> nn.Module:
    return Net(Centred)


def normed() -> nn.Module:
    return Net(Normed)


def noisy() -> nn.Module:
    return Net(Noisy)


def evaluating(kind: type[nn.Module], trains: bool = True) -> tuple[str, bool]:
    """What is said at the boost of a model in evaluation mode, as `from_pretrained` returns it, and whether it still is
    in evaluation mode."""
    model, said = Net(kind).eval(), list[str]()
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("pipeshard").addHandler(handler)
    plugin = PipelinePlugin(2, num_microbatches=2, dry_run_input=words(), verify=True)
    try:
        Booster(plugin=plugin).boost(model, torch.optim.SGD(model.parameters(), lr=0.1) if trains else None)
    except VerificationError as error:
        said.append(str(error))
    finally:
        logging.getLogger("pipeshard").removeHandler(handler)
    return " ".join(said), not any(module.training for module in model.modules())


@pytest.mark.turns
@pytest.mark.processes
def test_a_model_in_evaluation_mode_is_proven_in_training_mode(pool: Pool) -> None:
    """Layers that mix samples in training alone were proven exact, and batch norms were not warned of, since models of
    `from_pretrained` are in evaluation mode at boost."""
    for kind, what in ((CentredInTraining, "samples depend on each other"), (Normed, "Net has 3 batch norms")):
        (said, is_still_evaluating), _ = pool.run(evaluating, 2, kind)
        assert what in said and is_still_evaluating
        assert pool.run(evaluating, 2, kind, trains=False) == [("", True)] * 2


@pytest.mark.turns
@pytest.mark.parametrize("verify", ["auto", True])
def test_they_are_refused_at_boost(pool: Pool, verify: Any) -> None:
    for message in pool.run_expecting(VerificationError, boosted, 2, make=centred, verify=verify):
        assert "num_microbatches=1" in message and "loss_reduction='microbatch'" in message
        assert "batch_dims={'ids': 1, 'labels': 1}" in message and "in the input or result of unit layers.0" in message
    for remedy in ({"num_microbatches": 1}, {"loss_reduction": "microbatch"}):
        assert pool.run(boosted, 2, make=centred, verify=verify, **remedy) == [[], []]


@pytest.mark.turns
@pytest.mark.parametrize("verify", ["auto", True])
def test_microbatches_of_one_stage_are_compared_with_the_batch(pool: Pool, verify: Any) -> None:
    """With one stage there was no proof, so a layer that mixes samples trained on the loss of other samples."""
    (message,) = pool.run_expecting(VerificationError, boosted, 1, make=centred, p=1, verify=verify)
    assert "num_microbatches=1" in message and "in the input or result of unit layers.0" in message
    whole = {"num_microbatches": None, "microbatch_size": len(words()["ids"])}
    for remedy in ({"num_microbatches": 1}, whole, {"loss_reduction": "microbatch"}, {"verify": False}):
        assert pool.run(boosted, 1, make=centred, p=1, **{"verify": verify} | remedy) == [[]]
    ((said,),) = pool.run(boosted, 1, make=noisy, p=1, verify=True)
    assert said.startswith("Net split into microbatches was verified") and "Not compared: the whole batch" in said


@pytest.mark.turns
@pytest.mark.processes
def test_what_is_warned_of_at_boost(pool: Pool) -> None:
    """Once, on the first rank."""
    for make, what in (
        (normed, "Net has 3 batch norms (layers.0.norm, ...)"),
        (noisy, "Not compared: the whole batch"),
    ):
        (first,), second = pool.run(boosted, 2, make=make, verify=True)
        assert what in first and not second
