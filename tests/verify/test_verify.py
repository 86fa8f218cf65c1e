"""Tests of verify: the proof at boost raises no error for exact models, and finds deliberate faults."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import logging
import re
import subprocess
import sys
import threading
import time
import types
from contextvars import ContextVar
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from colossalai.booster import Booster
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from tqdm import tqdm
from transformers import AttentionInterface, LlamaForCausalLM
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaAttention

from pipeshard import PipelinePlugin
from pipeshard.batch.batch import Batch
from pipeshard.batch.read import read_batch
from pipeshard.commands import drawn_batch
from pipeshard.config import PipelineConfig
from pipeshard.engine.optimizer import PipelineOptimizer
from pipeshard.engine.weight_grad import Deferral
from pipeshard.errors import VerificationError
from pipeshard.split.boundary import Boundary, boundaries
from pipeshard.verify.decide import _say, alone, is_known
from pipeshard.verify.proof import DIFFERENT, EXACT, PARTLY, UNPROVEN, Proof, prove
from tests import zoo
from tests.pool import Pool
from tests.unsplit import refusal


class Layer(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.inner, self.norm, self.dropout = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(dropout)
        self.largest = 0.0

    def forward(self, x: Tensor) -> Tensor:
        y = x + self.dropout(self.norm(self.inner(x)).tanh())
        self.largest = float(y.detach().abs().max())
        return y


class Seeded(nn.Linear):
    """Keeps a seed that is another one each time, as Reformer's layers do: it was taken for a difference."""

    def forward(self, x: Tensor) -> Tensor:
        self.seed = torch.seed()
        return super().forward(x)


class Timed(nn.SiLU):
    """Keeps the clock's time, and draws no random numbers: it was taken for a difference, too."""

    def forward(self, x: Tensor) -> Tensor:
        self.nanoseconds = time.perf_counter_ns()
        return super().forward(x)


class Net(nn.Module):
    """What the first layer made is used again after the last; glue counts, and draws noise where it is asked to."""

    def __init__(self, dropout: float = 0.0, noise: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(dropout) for _ in range(4))
        self.head = nn.Linear(8, 5)
        self.steps, self.noise = 0, noise

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        self.steps += 1
        first = x = self.layers[0](x + self.noise * torch.randn(8))
        for layer in self.layers[1:]:
            x = layer(x)
        logits = self.head(x + first) * (1 + 0.1 * self.steps)
        return {"loss": F.cross_entropy(logits, y, ignore_index=-100), "logits": logits}


def data(rows: int = 12) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    y = torch.randint(0, 5, (rows,), generator=generator)
    y[::3] = -100
    return {"x": torch.randn(rows, 8, generator=generator), "y": y}


def made(**sizes: float) -> nn.Module:
    torch.manual_seed(0)
    return Net(**sizes)


def proof_of(
    model: nn.Module, batch: Any, criterion: Any = None, optimizer: Any = None, pp_size: int = 2, **arguments: Any
) -> Proof:
    with alone():
        plugin = PipelinePlugin(pp_size, **{"num_microbatches": 2, **arguments})
    optimizer = optimizer or torch.optim.AdamW(model.parameters())
    return prove(
        plugin.config, plugin.device, model, optimizer, criterion, read_batch(model, batch, plugin.config.batch_dims)
    )


def exact_ones() -> list[str]:
    """What is not exact, and what a proof has changed."""
    problems = []
    for name, pp_size, arguments in (("llama-tied", 2, {"schedule": "zbv", "recompute": True}), ("t5", 3, {})):
        proof = proof_of(zoo.build(name), zoo.batch(name), None, pp_size=pp_size, **arguments)
        kinds = {"losses", "gradients", "parameters", "saved", "outputs"}
        if proof.kind != EXACT or not kinds <= proof.counts.keys():
            problems.append(f"{name}: {proof}")
    weight = torch.rand(5)

    def criterion(output: Any, batch: Any) -> Tensor:
        return F.mse_loss(output["logits"], weight.expand(len(batch["y"]), 5))

    for sizes in ({}, {"dropout": 0.4, "noise": 0.3}):  # masks and noise are those of the places in a pipeline
        model, batch = made(**sizes), data()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        sides = model, batch, optimizer.state_dict()
        before, drawn = copy.deepcopy(sides), torch.get_rng_state()
        proof = proof_of(model, batch, criterion, optimizer)
        kinds = {"buffers", "attributes"}
        if proof.kind != EXACT or not kinds <= proof.counts.keys():
            problems.append(f"{sizes}: {proof}")
        state = (model.state_dict(), batch, optimizer.state_dict())
        torch.testing.assert_close(state, (before[0].state_dict(), *before[1:]), rtol=0, atol=0)
        same = torch.equal(drawn, torch.get_rng_state()) and model.steps == 0 and model.layers[0].largest == 0.0
        if not same or any(p.grad is not None for p in model.parameters()) or "forward" in vars(model.head):
            problems.append(f"{sizes}: something of the user's has changed")
    model = made()
    model.layers = nn.ModuleList(Seeded(8, 8) for _ in range(4))
    if (proof := proof_of(model, data())).kind != EXACT:
        problems.append(f"seeds: {proof}")
    llama = zoo.build("llama", layers=2)
    for layer in llama.model.layers:
        layer.mlp.act_fn = Timed()
    if (proof := proof_of(llama, zoo.batch("llama"))).kind != EXACT:
        problems.append(f"times: {proof}")
    return problems


def with_two_optimizers() -> Proof:
    model = made()
    muon = torch.optim.Muon([parameter for parameter in model.parameters() if parameter.ndim == 2])
    return proof_of(model, data(), optimizer=muon, max_norm=1.0)


@pytest.mark.turns
def test_an_optimizer_of_some_parameters_is_proven_without_clipping(pool: Pool) -> None:
    """Muon beside AdamW, with max_norm: the proof asked for the norm of gradients that the second optimizer takes, and
    nothing was compared, which only the log of INFO said."""
    (proof,) = pool.run(with_two_optimizers, 1)
    assert proof.kind == PARTLY and proof.counts["parameters"], proof
    assert proof.but == ("clipping with max_norm (the optimizer trains only some of the model's parameters)",)


def as_method(layer: nn.Module) -> Any:
    original = layer.forward
    return types.MethodType(lambda self, x: 0.9 * original(x), layer)


def as_partial(layer: nn.Module) -> Any:
    original = layer.forward
    return functools.partial(lambda factor, x: factor * original(x), 0.9)


def twice(layer: nn.Module) -> Any:
    original = as_partial(layer)
    return lambda x: 0.9 * original(x)


def in_list(layer: nn.Module) -> Any:
    steps = [types.MethodType(lambda self, x, original=layer.forward: 0.9 * original(x), layer)]
    return lambda x: steps[0](x)


def as_argument(layer: nn.Module) -> Any:
    return functools.partial(lambda call, x: call(x), as_method(layer))


class Penalty:
    """The penalty of a head, whose function is bound to this object."""

    def __init__(self, head: nn.Linear) -> None:
        self.of = types.MethodType(lambda self, output, batch: output["loss"] + head.weight.square().sum(), self)


def with_bound_closures() -> list[str]:
    """What is not exact."""
    problems = []
    for first, second in ((as_method, as_method), (as_partial, as_partial), (twice, twice), (in_list, as_argument)):
        model = made()
        model.layers[0].forward = first(model.layers[0])
        model.layers[1].forward = second(model.layers[1])
        if (proof := proof_of(model, data())).kind != EXACT:
            problems.append(f"{first.__name__}, {second.__name__}: {proof}")
    model = made()
    if (proof := proof_of(model, data(), Penalty(model.head).of)).kind != EXACT:
        problems.append(f"criterion: {proof}")
    return problems


@pytest.mark.turns
def test_closures_in_methods_and_partials_read_the_copies(pool: Pool) -> None:
    """deepcopy takes a bound method's function as it is: the copies of a patched layer ran the user's own layer, and
    nothing was compared, with a false reason."""
    assert pool.run(with_bound_closures, 1) == [[]]


OF_THREAD = threading.local()
OF_CONTEXT: ContextVar[float] = ContextVar("factor", default=1.0)


class Told(Net):
    """Goes by what the program has set for its thread and its context."""

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        return super().forward(x * getattr(OF_THREAD, "factor", 1.0) * OF_CONTEXT.get(), y)


def told_by_thread() -> tuple[str, str]:
    OF_THREAD.factor = 3.0
    token = OF_CONTEXT.set(2.0)
    try:
        torch.manual_seed(0)
        proof = proof_of(Told(), data())
    finally:
        OF_CONTEXT.reset(token)
        del OF_THREAD.factor
    return proof.kind, proof.reason


@pytest.mark.turns
@pytest.mark.local
def test_what_a_program_keeps_for_its_thread_is_no_difference(pool: Pool) -> None:
    """Ranks of the proof are threads: they did not see a flag in a threading.local, which the unsplit model saw."""
    assert pool.run(told_by_thread, 1) == [(EXACT, "")]


@pytest.mark.turns
def test_what_is_exact_is_proven_and_nothing_changes(pool: Pool) -> None:
    assert pool.run(exact_ones, 1) == [[]]


def without_gradients(*args: Any, **kwargs: Any) -> list[Boundary]:
    return [dataclasses.replace(boundary, gradients=()) for boundary in boundaries(*args, **kwargs)]


def without_the_first(*args: Any, **kwargs: Any) -> list[Boundary]:
    """One value fewer crosses, the first layer's."""

    def fewer(boundary: Boundary) -> Boundary:
        values = boundary.values[1:] if len(boundary.values) > 1 else boundary.values
        return Boundary(values, tuple(value for value in boundary.gradients if value in values))

    return [fewer(boundary) for boundary in boundaries(*args, **kwargs)]


def unfinished(pending: list[Any]) -> None:
    """Half of the weight gradients that were put off are forgotten."""
    finish(pending[::2])


finish = Deferral.finish


def first_samples(batch: Batch, start: int, length: int) -> Batch:
    """Microbatches that are all cut from the beginning."""
    return narrow(batch, 0, length)


narrow = Batch._narrow
step = PipelineOptimizer._step


def on_stage_0(optimizer: PipelineOptimizer, *args: Any, **kwargs: Any) -> Any:
    return step(optimizer, *args, **kwargs) if optimizer.grid.stage == 0 else None


BROKEN: dict[str, tuple[str, Any, str]] = {
    "a value is not sent": ("pipeshard.engine.routes.boundaries", without_the_first, "the loss in step 1 is nan"),
    "gradients are not sent": (
        "pipeshard.engine.routes.boundaries",
        without_gradients,
        "has no gradient, but a gradient of up to",
    ),
    "weight gradients are forgotten": (
        "pipeshard.engine.weight_grad.Deferral.finish",
        staticmethod(unfinished),
        "the difference begins in the backward pass|has no gradient",
    ),
    "microbatches are not the batch": (
        "pipeshard.batch.batch.Batch._narrow",
        first_samples,
        "x of microbatch 1 differs",
    ),
    "the loss rule is another": (
        "pipeshard.engine.loss.LossRule.shares",
        lambda rule, parts, *_: [1 / len(parts)] * len(parts),
        "the loss of 5 samples is .* but .* with weights 0.5, 0.5",
    ),
    "one stage does not step": (
        "pipeshard.engine.optimizer.PipelineOptimizer._step",
        on_stage_0,
        r"(layers\.\d|head).* after step 1 differs|the ranks are deadlocked",
    ),
    "the owner is another": ("pipeshard.split.ties.Ownership.owner", lambda ownership, name: 0, r"in step 1\b"),
    "the trace counts": ("pipeshard.graph.preserve.Before.restore", lambda self: None, "the loss in step 1 is"),
}


def found(name: str) -> Proof:
    place, stand_in, _ = BROKEN[name]
    with mock.patch(place, stand_in):
        return proof_of(made(), data())


def told(name: str, proof: Proof) -> bool:
    return proof.kind == DIFFERENT and re.search(BROKEN[name][2], proof.reason) is not None


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", BROKEN)
def test_what_is_broken_on_purpose_is_found(pool: Pool, name: str) -> None:
    """Each part that a trace or the runtime could get wrong, wrong: a proof that never fails proves nothing. A step may
    refuse it by itself, too."""
    (proof,) = pool.run(found, 1, name)
    assert proof.refused or told(name, proof), proof


class Trainer:
    """A user's trainer, whose method is the criterion. It also holds its data and what reports its progress."""

    def __init__(self) -> None:
        self.scale, self.losses = torch.tensor(2.0), [0.0]
        self.data, self.bar, self.lock = TensorDataset(torch.zeros(3)), tqdm(disable=True), threading.Lock()
        self.file, self.functional = open(__file__), F  # noqa: SIM115

    def loss(self, output: Any, batch: Any) -> Tensor:
        with self.lock:
            loss = self.scale * F.cross_entropy(output["logits"], batch["y"])
            self.losses.append(float(loss.detach()))
        return loss


def trained_by_a_method() -> str:
    trainer = Trainer()
    proof = proof_of(made(), data(), trainer.loss)
    trainer.file.close()
    return f"{proof.kind} {proof.reason} {trainer.losses}"


@pytest.mark.turns
@pytest.mark.local
def test_a_criterion_of_a_trainer_with_files_and_locks_is_proven(pool: Pool) -> None:
    """Nothing was ever verified for it: the trainer was copied, "cannot pickle '_thread.lock' object"."""
    assert pool.run(trained_by_a_method, 1) == [f"{EXACT}  [0.0]"]


def unprovable() -> list[str]:
    """What cannot be copied, run or trained is said, whatever else it is."""
    locked, empty, failing = made(), made(), made()
    locked.rows = (row for row in ())  # type: ignore[assignment]
    empty.forward = lambda x, y: {"logits": x}  # type: ignore[method-assign]
    failing.forward = lambda x: x  # type: ignore[method-assign]
    proofs = [proof_of(model, data()) for model in (locked, empty, failing)]
    return [f"{proof.kind}: {proof.reason}" for proof in proofs]


@pytest.mark.local
def test_what_cannot_be_proven_is_said(pool: Pool) -> None:
    (said,) = pool.run(unprovable, 1)
    assert all(line.startswith(UNPROVEN) for line in said)
    assert "deepcopy raised TypeError: cannot pickle 'generator' object" in said[0]
    assert "no loss to train on" in said[1] and "fails on its batch: TypeError" in said[2]


def boosting(wrong: bool = False, seconds: float = 60.0, **arguments: Any) -> list[str]:
    """What is said at boost, on this rank; then a step."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(f"{record.levelname} {record.getMessage()}")  # type: ignore[method-assign]
    logger = logging.getLogger("pipeshard")
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    finish = BROKEN["weight gradients are forgotten"]
    with (
        mock.patch("pipeshard.verify.decide.SECONDS", seconds),
        mock.patch("pipeshard.verify.decide.TELL_PERIOD", 0.01),
        mock.patch(finish[0], finish[1]) if wrong else contextlib.nullcontext(),
    ):
        booster = Booster(plugin=PipelinePlugin(2, num_microbatches=2, dry_run_input=data(), **arguments))
        model = made()
        boosted, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters()))
        booster.execute_pipeline(iter([data()]), boosted, None, optimizer)
    return [line for line in said if "proven" in line or "verify" in line]


@pytest.mark.turns
def test_at_boost(pool: Pool) -> None:
    """By default models of one's own are proven by the first rank, while the others wait for its word."""
    first, second = pool.run(boosting, 2)
    assert len(first) == 1 and first[0].startswith("INFO Net split into stages was proven exact in") and not second
    first, second = pool.run(boosting, 2, seconds=0.0)
    assert first == [
        "WARNING could not verify that Net split into stages matches the unsplit model: the check takes longer than "
        "0 s. To check it, run `pipeshard verify SCRIPT` or pass PipelinePlugin(verify=True). verify=False silences "
        "this message"
    ]
    assert pool.run(boosting, 2, wrong=True, verify=False) == [[], []]
    for message in pool.run_expecting(VerificationError, boosting, 2, wrong=True):
        assert "Net split into stages does not match the unsplit model, so training is aborted" in message
        assert "the difference begins in the backward pass" in message and "verify=False" in message


@pytest.mark.parametrize(("is_asked", "level"), [(True, "WARNING"), (False, "INFO")])
def test_a_proof_that_was_asked_for_and_failed_is_warned_of(
    is_asked: bool, level: str, caplog: pytest.LogCaptureFixture
) -> None:
    """With verify=True, an error of the proof was logged at INFO, as one of training, which need not raise it."""
    with caplog.at_level(logging.INFO, logger="pipeshard"):
        _say(Proof(UNPROVEN, "there is no cut", refused=True), "Net", "split into stages", is_asked)
    (record,) = caplog.records
    assert record.levelname == level and ("To check it" in record.getMessage()) != is_asked


def half() -> Proof:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))).bfloat16()
    batch = {"input": torch.randn(8, 8), "criterion.y": torch.randn(8, 8)}
    return proof_of(
        model, batch, lambda output, batch: F.mse_loss(output.float(), batch["criterion.y"]), precision="bf16"
    )


@pytest.mark.turns
def test_a_model_in_16_bits_is_proven_on_features_in_its_dtype(pool: Pool) -> None:
    """A step casts features to the dtype of the model, and the proof did not: the unsplit model failed."""
    (proof,) = pool.run(half, 1)
    assert proof.kind == EXACT, proof


def test_which_models_are_known() -> None:
    llama = zoo.build("llama", layers=2)
    assert is_known(llama, None) and not is_known(llama, lambda output, batch: output.loss)
    assert not is_known(made(), None) and not is_known(nn.Sequential(nn.Linear(2, 2)), None)
    handle = llama.model.layers[0].register_forward_hook(lambda *_: None)
    assert not is_known(llama, None)
    handle.remove()
    assert is_known(llama, None)
    llama.lm_head = Layer()
    assert not is_known(llama, None)


def centred(module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    """An attention whose result depends on all samples of the batch."""
    return (query - query.mean(0)).transpose(1, 2), None


def test_classes_with_replaced_methods_are_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user replaced the forward of LlamaAttention, or registered an attention, whose result depends on the batch: the
    class was taken for transformers' own, and microbatches trained with other numbers than the batch."""
    llama = zoo.build("llama", layers=2)
    plain = LlamaAttention.forward

    @functools.wraps(plain)
    def halved(self: Any, *args: Any, **kwargs: Any) -> Any:
        output, weights = plain(self, *args, **kwargs)
        return output * 0.5, weights

    for kind, name in ((LlamaAttention, "forward"), (LlamaForCausalLM, "prepare_inputs_for_generation")):
        with monkeypatch.context() as patch:
            patch.setattr(kind, name, halved)
            assert not is_known(llama, None)
    assert is_known(llama, None)
    with monkeypatch.context() as patch:
        patch.setitem(AttentionInterface._global_mapping, "centred", centred)
        assert is_known(llama, None)
        llama.set_attn_implementation("centred")
        assert not is_known(llama, None)


def of_equal_samples() -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(AttentionInterface._global_mapping, "centred", centred)
        model = zoo.build("llama", layers=2)
        model.set_attn_implementation("centred")
        with pytest.raises(VerificationError) as refused:
            PipelinePlugin(pp_size=1, num_microbatches=2).configure(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return str(refused.value)


def test_samples_without_a_dataloader_differ(pool: Pool) -> None:
    """Without a dataloader, the proof ran on equal samples of token 0: an attention that centres over the samples gave
    the same for the batch and its microbatches."""
    (said,) = pool.run(of_equal_samples, 1)
    assert "depend on each other" in said, said


def test_a_class_is_not_known_with_a_function_that_was_replaced_in_its_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """Code with which a user replaced a function of the file was exact, the docs said, but no class had changed: the
    model was taken for transformers' own, and a mask that mixes samples was not proven."""
    llama = zoo.build("llama", layers=2)
    assert is_known(llama, None)
    monkeypatch.setattr(modeling_llama, "eager_attention_forward", centred)
    assert not is_known(llama, None)


def test_the_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    assert refusal(verify="always") == "verify must be 'auto', True or False, got 'always'"
    monkeypatch.setenv("PIPESHARD_VERIFY", "0")
    assert [PipelineConfig(pp_size=1, verify=verify).verify for verify in ("auto", True, False)] == [False, True, False]
    monkeypatch.delenv("PIPESHARD_VERIFY")
    assert PipelineConfig(pp_size=1).verify == "auto"


SCRIPT = """
import sys
import torch, torch.distributed as dist
from colossalai.booster import Booster
from pipeshard import PipelinePlugin
from unittest import mock
from tests.verify.test_verify import BROKEN, data, made

dist.init_process_group("gloo")
if "--wrong" in sys.argv:
    mock.patch(*BROKEN["weight gradients are forgotten"][:2]).start()
booster = Booster(plugin=PipelinePlugin(8, num_microbatches=4, dry_run_input=data()))
model = made()
booster.boost(model, torch.optim.AdamW(model.parameters()))
print("boosted")
"""


def run_command(*arguments: str) -> subprocess.CompletedProcess[str]:
    code = "from pipeshard.cli import main; main()"
    return subprocess.run(
        [sys.executable, "-c", code, "verify", *arguments], capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.turns
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("arguments", "code", "verdict"),
    [
        (["--pp", "3", "SCRIPT", "--wrong"], 1, "Net in 3 stages, 1f1b: different: "),
        (
            ["gpt2", "n_embd=16", "n_layer=3", "n_head=2", "vocab_size=50", "--pp", "2", "--schedule", "zbv"],
            0,
            "GPT2LMHeadModel in 4 stages, zbv: exact",
        ),
    ],
)
def test_the_command(tmp_path: Path, arguments: list[str], code: int, verdict: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    result = run_command(*(str(script) if argument == "SCRIPT" else argument for argument in arguments))
    assert result.returncode == code and verdict in result.stdout, result.stdout + result.stderr
    assert "boosted" not in result.stdout


def test_samples_that_are_drawn_differ() -> None:
    batch = drawn_batch(zoo.build("llama", layers=2), 10, 8)
    assert len(batch["input_ids"].unique()) > 20 and len(batch["labels"].eq(-100).sum(1).unique()) == 7
    assert drawn_batch(zoo.build("vit"), 3, 8)["labels"].max() < 5
