"""Tests of smaller copies: a copy of a large model is verified, and a warning says what it cannot represent."""

from __future__ import annotations

import logging
import sys
import time
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from colossalai.booster import Booster
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    LlamaForTokenClassification,
    PretrainedConfig,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

from pipeshard import LayerSpec, PipelineModule, PipelinePlugin
from pipeshard.batch.read import read_batch
from pipeshard.config import PipelineConfig
from pipeshard.engine.grad_sync import Bucket
from pipeshard.errors import PartitionError
from pipeshard.split.policy import Policy
from pipeshard.verify.decide import is_known
from pipeshard.verify.proof import DIFFERENT, EXACT, UNPROVEN, Large, Proof, _Proving, prove
from pipeshard.verify.reference import Copies
from pipeshard.verify.smaller import Smaller, Unlike, smaller
from tests.pool import Pool
from tests.verify.test_mutations import summed_twice

LARGE = Large("its weights are on meta", 8 * 2**20, fits=False)  # bytes
CPU = torch.device("cpu")
SIZES = {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16, "num_key_value_heads": 8}
TEXT = {"vocab_size": 50_000, "num_hidden_layers": 24, "bos_token_id": 49_000, "eos_token_id": 49_001}


class FirstAgain(LlamaForCausalLM):
    """Adds what the first layer made, which no unit passes on: exact."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = first = self.model.layers[0](self.model.embed_tokens(input_ids), **self._places(input_ids))
        for layer in self.model.layers[1:]:
            x = layer(x, **self._places(input_ids))
        logits = self.lm_head(self.model.norm(x + first))
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}

    def _places(self, ids: Tensor) -> dict[str, Any]:
        places = torch.arange(ids.shape[1])[None]
        return {"position_embeddings": self.model.rotary_emb(torch.zeros(1), places), "position_ids": places}


class Deep(nn.Module):
    """Not of transformers: 24 layers in a list, every third one another kind."""

    def __init__(self) -> None:
        super().__init__()
        kinds = [
            nn.Linear(512, 512) if i % 3 else nn.Sequential(nn.LayerNorm(512), nn.Linear(512, 512)) for i in range(24)
        ]
        self.layers, self.head = nn.ModuleList(kinds), nn.Linear(512, 5)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        for layer in self.layers:
            x = x + layer(x)
        return {"loss": F.cross_entropy(self.head(x), y)}


def on_meta(kind: Any, config: PretrainedConfig | None = None) -> Any:
    with torch.device("meta"):
        return (kind() if config is None else kind(config)).train()


def batch(model: nn.Module, **others: Any) -> dict[str, Tensor]:
    torch.manual_seed(0)
    if isinstance(model, Deep):
        return {"x": torch.randn(8, 512), "y": torch.arange(8) % 5}
    ids = torch.randint(0, 49_000, (8, 10))
    return {"input_ids": ids, "labels": ids.clone(), **others}


def proof_of(model: nn.Module, data: Any, optimizer: Any = None, large: Large = LARGE, **arguments: Any) -> Proof:
    config = PipelineConfig(pp_size=2, num_microbatches=2, **arguments)
    return prove(config, CPU, model, optimizer, None, read_batch(model, data), large=large)


def copy_of(model: nn.Module, optimizer: Any = None, most: float = 8 * 2**20) -> Smaller:
    make = next(smaller(Copies(model, None, optimizer, read_batch(model, batch(model))), 2, most, CPU))
    return make()


def test_what_a_copy_keeps() -> None:
    model = on_meta(LlamaForCausalLM, LlamaConfig(**SIZES, **TEXT, tie_word_embeddings=True, attention_dropout=0.1))
    model.tie_weights()
    model.model.layers[0].requires_grad_(False)
    model.model.norm.eval()
    model.gradient_checkpointing_enable()
    model.model.norm.register_forward_hook(doubled)
    model.lm_head.register_forward_hook(lambda module, args, output: output * model.model.norm.weight.mean())
    groups = [{"params": list(model.model.layers[i].parameters()), "lr": 0.1 * (i + 1)} for i in (1, 9)]
    optimizer = torch.optim.AdamW([*groups, {"params": [model.lm_head.weight]}])
    made = copy_of(model, optimizer)
    own: Any = made.own.model
    assert made.what == "4 of 24 layers, width 128 of 1024, 82 of 50000 tokens"
    assert type(own) is LlamaForCausalLM and own.config.num_attention_heads == 2 and own.config.num_key_value_heads == 1
    assert own.lm_head.weight is own.model.embed_tokens.weight and own.training and not own.model.norm.training
    assert own.model.gradient_checkpointing and own.model.layers[0].self_attn.attention_dropout == 0.1
    assert not any(p.requires_grad for p in own.model.layers[0].parameters()) and own.model.norm.weight.requires_grad
    assert list(own.model.norm._forward_hooks.values()) == [doubled]
    [hook] = own.lm_head._forward_hooks.values()
    assert hook.__closure__[0].cell_contents is own  # it reads the copy, not the model
    of_layer, of_head = made.own.optimizer.param_groups  # those of layer 9 have gone
    assert of_layer["lr"] == 0.2 and of_layer["params"] == list(own.model.layers[1].parameters())
    assert of_head["params"] == [own.lm_head.weight]
    ids, given = made.own.sample.leaves[0], batch(model)["input_ids"]
    assert ids.max() < 82 and torch.equal(ids[:, 1:] == ids[:, :-1], given[:, 1:] == given[:, :-1])
    assert torch.equal(ids.flatten().argsort(stable=True), given.flatten().argsort(stable=True))
    assert 0 <= own.config.bos_token_id < own.config.eos_token_id < 82 and model.config.eos_token_id == 49_001
    assert len(model.model.layers) == 24 and all(p.is_meta for p in model.parameters())


def doubled(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return 2 * output


@pytest.mark.turns
def test_large_models_are_proven_on_copies() -> None:
    moe = Qwen3MoeConfig(**SIZES, **TEXT, num_experts=64, num_experts_per_tok=4, moe_intermediate_size=256)
    t5 = T5Config(d_model=512, d_ff=2048, num_heads=8, num_layers=12, num_decoder_layers=8, vocab_size=50_000)
    t5.decoder_start_token_id = 0
    adapted = get_peft_model(
        on_meta(LlamaForCausalLM, LlamaConfig(**SIZES, **TEXT)), LoraConfig(r=4, target_modules=["q_proj", "down_proj"])
    )
    classes = LlamaConfig(**SIZES, **TEXT, pad_token_id=3)
    cases: dict[str, tuple[Any, dict[str, Tensor]]] = {
        "width 128 of 1024": (on_meta(Qwen3MoeForCausalLM, moe), {}),
        "4 of 12 layers, 4 of 8 layers, width 64 of 512": (on_meta(T5ForConditionalGeneration, t5), {}),
        "4 of 24 layers, width 128": (adapted, {}),
        "83 of 50000 tokens": (on_meta(LlamaForSequenceClassification, classes), {"labels": torch.arange(8) % 2}),
        "4 of the 24 layers of layers": (on_meta(Deep), {}),
    }
    for what, (model, others) in cases.items():
        trained = [p for p in model.parameters() if p.requires_grad]
        proof = proof_of(model, batch(model, **others), torch.optim.AdamW(trained, lr=1e-3))
        assert proof.kind == EXACT and what in proof.smaller, (what, proof)
        assert proof.counts["gradients"] >= 28 and proof.counts["parameters"] >= 28


@pytest.mark.turns
def test_a_fault_is_seen_on_a_copy() -> None:
    model = on_meta(FirstAgain, LlamaConfig(**SIZES, **TEXT, tie_word_embeddings=True))
    model.tie_weights()
    assert proof_of(model, batch(model)).kind == EXACT
    with mock.patch.object(Bucket, "summed", summed_twice):
        proof = proof_of(model, batch(model))
    assert proof.kind == DIFFERENT and "embed_tokens" in proof.reason, proof


@pytest.mark.turns
def test_what_a_copy_does_not_stand_for() -> None:
    config = LlamaConfig(**SIZES, **TEXT)
    model, table = on_meta(LlamaForCausalLM, config), torch.ones(1024)
    model.model.norm.register_forward_hook(lambda module, args, output: output * table)
    proof = proof_of(model, batch(model))
    assert proof.kind == UNPROVEN
    assert "the unsplit model fails on its batch: RuntimeError: The size" in proof.reason
    model = on_meta(LlamaForCausalLM, config)
    model.model.norm = on_meta(lambda: nn.LayerNorm(1024))
    with pytest.raises(
        Unlike,
        match=r"module 'model.norm' of a smaller .* does not exist in the full-size model, or has a different class",
    ):
        copy_of(model)
    proof = proof_of(model, batch(model))
    assert proof.kind == UNPROVEN
    instead = (
        "no smaller copy of the model could be verified instead (module 'model.norm' of a smaller LlamaForCausalLM"
    )
    assert proof.reason.startswith(f"its weights are on meta; {instead}")
    with pytest.raises(Unlike, match="a smaller copy takes"):
        copy_of(on_meta(LlamaForCausalLM, config), most=2**10)


class Mixing(Deep):
    """Every layer subtracts the mean of the batch, so microbatches train a different model."""

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        for layer in self.layers:
            x = x + layer(x - x.mean(0))
        return {"loss": F.cross_entropy(self.head(x), y)}


class WithOwnLayer(PipelineModule):
    def __init__(self) -> None:
        super().__init__([LayerSpec(nn.Linear, 512, 512), self.normed, *[LayerSpec(nn.Linear, 512, 512)] * 22])
        self.norm = nn.LayerNorm(512)

    def normed(self, x: Tensor) -> Tensor:
        return self.norm(x)


@pytest.mark.turns
def test_a_copy_of_a_model_whose_layer_is_its_own_method() -> None:
    """The method's model was copied with its whole list, of which most layers had no weights, and no copy ran."""
    model, config = on_meta(WithOwnLayer), PipelineConfig(pp_size=2, num_microbatches=2)
    sample = read_batch(model, (torch.randn(8, 512), torch.randn(8, 512)))
    proof = prove(config, CPU, model, None, lambda output, batch: F.mse_loss(output, batch[1]), sample, large=LARGE)
    assert (proof.kind, proof.smaller) == (EXACT, "4 of the 24 layers of layers"), proof


class LastLayers(Policy):
    """Names a layer that a copy lacks."""

    def distribute_layers(self, num_layers: int, num_stages: int) -> list[int]:
        first = self.calls_of("layers.20")[0]
        return [first, num_layers - first]


@pytest.mark.turns
@pytest.mark.parametrize("cut", [{"partition": [12, 13]}, {"partition": ["layers.20"]}, {"policy": LastLayers}])
def test_a_copy_is_cut_by_its_own_layers(cut: dict[str, Any]) -> None:
    """A model on meta was boosted with partition=[12, 13], or with schedule="auto", which finds such a list.

    Its smaller copy was cut by the same list, which raised an error, so a model that mixes samples trained unproven."""
    proof = proof_of(on_meta(Mixing), {"x": torch.randn(8, 512), "y": torch.arange(8) % 5}, **cut)
    assert (proof.kind, proof.coupled) == (DIFFERENT, True), proof


@pytest.mark.turns
def test_slices_are_proven_on_a_copy_that_is_cut_by_its_own_layers() -> None:
    """A recipe with num_slices=2 and partition=[6, 5] never started: the list did not fit the copy of the model."""
    config = LlamaConfig(
        num_hidden_layers=8, hidden_size=32, intermediate_size=16, num_attention_heads=2, vocab_size=16
    )
    ids = torch.randint(16, (4, 6))
    data = {"input_ids": ids, "labels": ids}
    proof = proof_of(on_meta(LlamaForCausalLM, config), data, partition=[6, 5], num_slices=2)
    assert proof.kind == EXACT and "4 of 8 layers" in proof.smaller, proof


def test_an_error_of_a_copy_is_none_of_training() -> None:
    """The message that a model was not verified was not shown: training, it said, raises the same error."""
    with mock.patch.object(Policy, "_partition", side_effect=PartitionError("no cut is possible")):
        proof = proof_of(on_meta(Deep), batch(Deep()))
    assert (proof.kind, proof.refused) == (UNPROVEN, False), proof


@pytest.mark.turns
def test_a_copy_in_fp32_takes_features_in_fp32() -> None:
    """Whisper in bf16, with features in bf16: its smaller copy has fp32 weights, and none ran."""
    config = WhisperConfig(
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=16,
        decoder_ffn_dim=16,
        vocab_size=64,
        max_source_positions=10,
        max_target_positions=8,
        num_mel_bins=4,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )
    model = WhisperForConditionalGeneration._from_config(config, dtype=torch.bfloat16)
    features = torch.randn(8, 4, 20, dtype=torch.bfloat16)
    large = Large("it is too large", most=2e5, fits=True)
    proof = proof_of(model, {"input_features": features, "labels": torch.randint(3, 64, (8, 6))}, large=large)
    assert proof.kind == EXACT and proof.smaller, proof


def boosted() -> list[str]:
    """What boost says of a class that nobody has seen, on meta."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("pipeshard")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    config = LlamaConfig(**SIZES | {"hidden_size": 256}, **TEXT | {"num_hidden_layers": 8})
    model = on_meta(FirstAgain, config)
    data = batch(model)
    booster = Booster(plugin=PipelinePlugin(pp_size=2, num_microbatches=2, dry_run_input=data, init_weights=True))
    booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    logger.removeHandler(handler)
    return [line for line in said if "proven" in line]


@pytest.mark.turns
def test_at_boost(pool: Pool) -> None:
    # A model on meta was never proven, though it is for these that a pipeline exists.
    [first, second] = pool.run(boosted, 2, timeout=120)
    [line] = first
    assert line.startswith("FirstAgain (a copy with 4 of 8 layers, width") and "was proven exact" in line
    assert not second


def test_known_are_the_classes_of_the_page() -> None:
    config = LlamaConfig(
        num_hidden_layers=1, hidden_size=32, intermediate_size=16, num_attention_heads=2, vocab_size=16
    )
    assert is_known(LlamaForCausalLM(config), None) and is_known(LlamaForSequenceClassification(config), None)
    assert not is_known(FirstAgain(config), None)
    assert not is_known(LlamaForTokenClassification(config), None)


class Clock:
    """Time that passes only where a model sleeps."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        """Of a SlowLayer no time at all; threads of the test runner sleep meanwhile, and are to."""
        if sys._getframe(1).f_globals["__name__"] == __name__:
            self.now += seconds
        else:
            SLEEP(seconds)


SLEEP = time.sleep


class SlowLayer(nn.Linear):
    """Takes 0.1 s for a sample, and 0.2 s in the backward."""

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(0.1 * len(x))
        y = super().forward(x)
        if y.requires_grad:
            y.register_hook(lambda gradient: time.sleep(0.2 * len(gradient)))
        return y


class Slow(nn.Module):
    """A model that takes long; `of_first` is whether the first sample's positions serve all of them."""

    def __init__(self, of_first: bool = False, count: int = 12) -> None:
        super().__init__()
        self.of_first, self.places = of_first, nn.Embedding(9, 8)
        self.layers, self.head = nn.ModuleList(SlowLayer(8, 8) for _ in range(count)), nn.Linear(8, 5)

    def forward(self, x: Tensor, positions: Tensor, y: Tensor) -> dict[str, Tensor]:
        x = x + self.places(positions[:1] if self.of_first else positions)
        for layer in self.layers:
            x = x + layer(x)
        logits = self.head(x.mean(1))
        return {"loss": F.cross_entropy(logits, y), "logits": logits}


def proof_in_time(model: nn.Module, seconds: float) -> Proof:
    """As by default at boost, where `seconds` are given to it."""
    torch.manual_seed(0)
    data = {"x": torch.randn(8, 4, 8), "positions": torch.randint(9, (8, 4)), "y": torch.arange(8) % 5}
    config, clock = PipelineConfig(pp_size=2, num_microbatches=2), Clock()
    with mock.patch("pipeshard.verify.limit.time", clock), mock.patch("time.sleep", clock.sleep):
        return prove(config, CPU, model, None, None, read_batch(model, data), seconds)


@pytest.mark.turns
def test_slow_models_are_proven_on_copies() -> None:
    """A warning took the place of the proof at boost where that took more than 5 s: a model that gives all samples the
    first one's positions was trained as its microbatches alone."""
    shorter = "4 of the 24 layers of layers"
    proof = proof_in_time(Slow(count=24), 5.0)
    assert (proof.kind, proof.smaller) == (EXACT, shorter) and proof.seconds < 2 * 36, proof  # a step takes 36 s
    proof = proof_in_time(Slow(of_first=True, count=24), 5.0)
    assert (proof.kind, proof.coupled, proof.smaller) == (DIFFERENT, True, shorter), proof
    proof = proof_in_time(Slow(count=4), 180.0)
    assert (proof.kind, proof.smaller) == (EXACT, ""), proof


class Counted(SlowLayer):
    """Counts how often layers of its kind run on 5 samples, as a step of the proof has."""

    runs = 0

    def forward(self, x: Tensor) -> Tensor:
        Counted.runs += len(x) == 5
        return super().forward(x)


def test_a_slow_model_is_given_up_after_two_layers() -> None:
    """A whole step was run first, with all its gradients: 5 s and 575 MB of a model of 20 million parameters."""
    model = Slow(count=24)
    model.layers = nn.ModuleList(Counted(8, 8) for _ in range(24))
    ran: list[int] = []
    Counted.runs = 0
    with mock.patch.object(_Proving, "_prove_smaller", lambda _: ran.append(Counted.runs) or True):
        proof_in_time(model, 5.0)
    assert ran == [2]


def test_a_slow_model_with_a_tower_that_does_not_run_is_given_up_after_two_layers() -> None:
    """The vision tower of PaliGemma has more modules than its language model, which has more parameters: a batch of
    texts runs no layer of the tower, so `boost` waited for a whole step."""
    model = Slow(count=24)
    model.layers = nn.ModuleList(Counted(8, 8) for _ in range(24))
    model.tower = nn.ModuleList(nn.Sequential(nn.Linear(2, 2), nn.ReLU()) for _ in range(24))
    ran: list[int] = []
    Counted.runs = 0
    with mock.patch.object(_Proving, "_prove_smaller", lambda _: ran.append(Counted.runs) or True):
        proof_in_time(model, 5.0)
    assert ran == [2]


@pytest.mark.parametrize("count", [3, 5])
@pytest.mark.parametrize("seconds", [2.0, 0.05])
def test_outputs_of_slow_models_are_compared(seconds: float, count: int) -> None:
    """No copy stands for a list of three layers, and that of five takes too long. The outputs were given the same few
    seconds, and none where one step took longer: that passed for a model that does not run."""
    step = 1.5 * count
    proof = proof_in_time(Slow(count=count), seconds)
    assert (proof.kind, proof.reason) == (UNPROVEN, f"the check takes longer than {seconds:g} s"), proof
    assert proof.seconds < 8 * step, proof
    proof = proof_in_time(Slow(of_first=True, count=count), seconds)
    assert proof.kind == DIFFERENT and proof.coupled and "outputs" in proof.reason, proof
