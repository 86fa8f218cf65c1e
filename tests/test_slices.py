"""Tests of slices: microbatches that are split along the sequence train as whole ones do."""

from __future__ import annotations

import copy
import functools
import gc
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import peft
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    BertConfig,
    BertLMHeadModel,
    GPTJConfig,
    GPTJForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    RobertaConfig,
    RobertaForCausalLM,
)
from transformers.integrations.neftune import neftune_post_forward_hook
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from pipeshard.batch.batch import Batch
from pipeshard.batch.read import read_batch
from pipeshard.config import PipelineConfig
from pipeshard.engine.cuts import BatchSplitter
from pipeshard.errors import BatchError, PipeshardError
from pipeshard.hf import BOUNDARIES
from pipeshard.schedule.program import Kind, Program
from pipeshard.schedule.simulate import simulate
from pipeshard.schedule.slices import SLICED, number_of_slices, sliced
from pipeshard.slices.attention import Attention, lower_right
from pipeshard.slices.cache import Keys
from pipeshard.slices.cut import Joint, cut, lengths, shortened, with_padding
from pipeshard.slices.states import Grown
from pipeshard.verify import decide
from pipeshard.verify.proof import Proof, prove
from tests import zoo
from tests.legal import check
from tests.parity.command import outcomes
from tests.parity.entries import find
from tests.parity.report import Row, markdown
from tests.parity.slicing import PAGE
from tests.parity.slicing import check_slices as check_architecture
from tests.pool import Pool
from tests.unsplit import Split, Unsplit, compared, parameter_error, refusal

pytestmark = pytest.mark.local

SMALL: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
FINE, ROUNDED = 1e-10, 1e-6  # in fp64: sums of slices are made in another order
OF_FP32 = ("gemma2",)  # parts of it are fp32 whatever its dtype, and padding on the left makes its own loss NaN there


def data_of(name: str, length: int, seed: int, *, is_padded: bool = False) -> dict[str, Tensor]:
    made: dict[str, Tensor] = zoo.batch(name, rows=4, length=length, seed=seed)
    return zoo.left_padded(made) if is_padded else made


def trained(name: str, m: int, n: int | str, **options: Any) -> list[str]:
    """What differs from the unsplit model in three steps with other lengths, padding and labels."""
    model = zoo.build(name, torch.float64)
    unsplit = Unsplit(copy.deepcopy(model), max_norm=0.5)
    sample = data_of(name, 13, 0)
    split = Split(
        model, dist.get_world_size(), sample, num_microbatches=m, num_slices=n, max_norm=0.5, verify=False, **options
    )
    found = []
    for step, length in enumerate((13, 18, 9)):
        fine = ROUNDED if name in OF_FP32 else FINE
        data = data_of(name, length, step, is_padded=step == 1 and name not in OF_FP32)
        reference = unsplit.backward_in_parts(data, num_microbatches=m)
        found += compared(split, unsplit, split.backward(data)["loss"], reference, fine)
        unsplit.step()
        split.step()
        if not (error := parameter_error(split, unsplit.model)) < fine:
            found.append(f"parameters differ by {error:.2e} after step {step}")
    return found


@pytest.mark.sampled(2)
@pytest.mark.parametrize("p", [1, 2, 3])
@pytest.mark.parametrize(("m", "n"), [(1, 2), (1, 8), (2, 3)])
def test_sliced_model_trains_as_unsplit(pool: Pool, p: int, m: int, n: int) -> None:
    assert pool.run(trained, p, "llama", m, n) == [[]] * p


@pytest.mark.turns
@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("gpt2", {}),
        ("gemma2", {}),
        ("llama-tied", {"schedule": "zb-h1"}),
        ("llama", {"schedule": "gpipe"}),
        ("llama", {"recompute": True}),
        ("llama", {"p2p": "isend"}),
        ("gemma2", {"recompute": 0.5, "schedule": "zb-h1"}),
    ],
)
def test_options_beside_slices(pool: Pool, name: str, options: dict[str, Any]) -> None:
    assert pool.run(trained, 2, name, 2, 3, **options) == [[], []]


@pytest.mark.turns
@pytest.mark.processes
def test_slices_in_processes(pool: Pool) -> None:
    assert pool.run(trained, 3, "llama", 1, 4) == [[]] * 3


def as_unsplit(kind: str, tolerance: float, **options: Any) -> list[str]:
    """What differs from the unsplit model in three steps, in which each replica has rows of its own."""
    model: Any = zoo.build("llama")
    if kind == "lora":
        torch.manual_seed(1)
        config = peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.0)
        model = peft.get_peft_model(model, config)
    unsplit, replicas = Unsplit(copy.deepcopy(model)), options.get("dp_size", 1)
    size = dist.get_world_size() // (replicas * options.get("tp_size", 1))
    split = Split(model, size, data_of("llama", 12, 0), num_microbatches=2, num_slices=3, verify=False, **options)
    assert any(p.requires_grad for p in split.held.values())
    found = []
    for step in range(3):
        data = data_of("llama", 12 + step, step)
        reference = unsplit.backward_in_parts(data, num_microbatches=2 * replicas)
        own = {name: rows.chunk(replicas)[split.plugin.grid.replica] for name, rows in data.items()}
        found += compared(split, unsplit, split.backward(own)["loss"], reference, tolerance)
        unsplit.step()
        split.step()
    return found


@pytest.mark.turns
@pytest.mark.parametrize(
    ("kind", "world", "tolerance", "options"),
    [
        ("lora", 2, 1e-5, {}),
        ("", 2, 3e-2, {"precision": "bf16"}),
        ("", 2, 3e-2, {"precision": "bf16", "autocast": True}),
        ("", 4, 1e-5, {"dp_size": 2, "zero_stage": 1}),
        ("", 4, 1e-5, {"tp_size": 2}),
        ("", 4, 1e-5, {"dp_size": 2, "fsdp": True}),
    ],
)
def test_slices_train_as_unsplit_with_options(
    pool: Pool, kind: str, world: int, tolerance: float, options: dict[str, Any]
) -> None:
    assert pool.run(as_unsplit, world, kind, tolerance, **options) == [[]] * world


def between_steps() -> list[str]:
    """Evaluation, generation and outputs between the steps of a sliced model."""
    model = zoo.build("llama", torch.float64)
    unsplit = Unsplit(copy.deepcopy(model))
    data = data_of("llama", 13, 0)
    split = Split(model, 2, data, num_microbatches=2, num_slices=3, verify=False)
    found = []
    for step in range(2):
        data = data_of("llama", 13 + step, step)
        with torch.no_grad():
            whole = unsplit.model(**data)
        evaluated = split.evaluate(data)["loss"]
        if not abs(float(evaluated - whole.loss)) <= ROUNDED:
            found.append(f"evaluated {float(evaluated)}, unsplit {float(whole.loss)}")
        split.model.generate(data["input_ids"], max_new_tokens=2, do_sample=False)
        out = split.backward(data, return_outputs=True)
        reference = unsplit.backward_in_parts(data, num_microbatches=2)
        found += compared(split, unsplit, out["loss"], reference, FINE)
        if dist.get_rank() == 1 and not torch.allclose(out["outputs"].logits, whole.logits):
            found.append(f"logits differ by {float((out['outputs'].logits - whole.logits).abs().max())}")
        unsplit.step()
        split.step()
    return found


@pytest.mark.turns
def test_slices_beside_evaluation_and_generation(pool: Pool) -> None:
    assert pool.run(between_steps, 2) == [[], []]


@pytest.mark.turns
@pytest.mark.parametrize(
    "name", ["mixtral", "qwen3_next", "lfm2", "opt", "bart", "mistral", "bert", "deepseek_v3", "gpt_oss"]
)
@pytest.mark.sampled(1)
def test_architecture_in_slices(pool: Pool, name: str) -> None:
    (entry,) = find(f"causal-lm/{name}")
    assert [verdict.kind for verdict in pool.run(check_architecture, 1, entry, 2)] == ["close"]


@pytest.mark.turns
@pytest.mark.parametrize("name", ["doge", "diffllama"])
def test_attention_that_is_called_otherwise(pool: Pool, name: str) -> None:
    """Doge names its mask, which was an error of every Doge once anything had been sliced; DiffLlama attends to other
    values than those of its cache."""
    (entry,) = find(f"causal-lm/{name}")
    assert [verdict.kind for verdict in pool.run(check_architecture, 1, entry, 2)] == ["close"]


def aux_loss() -> list[str]:
    """The auxiliary loss of experts is made of all router logits of a microbatch, which stages send on."""
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    sizes = SMALL | {"num_key_value_heads": 2, "num_local_experts": 4, "vocab_size": zoo.VOCABULARY}
    model = MixtralForCausalLM(MixtralConfig(**sizes, output_router_logits=True, router_aux_loss_coef=0.5)).double()
    model.set_experts_implementation("eager")  # the grouped matrix product has no fp64
    unsplit = Unsplit(copy.deepcopy(model))
    data = data_of("llama", 12, 0)
    split = Split(model, 2, data, num_microbatches=1, num_slices=3, verify=False)
    return compared(split, unsplit, split.backward(data)["loss"], unsplit.backward(data), ROUNDED)


@pytest.mark.turns
def test_auxiliary_loss_of_the_whole_microbatch(pool: Pool) -> None:
    assert pool.run(aux_loss, 2) == [[], []]


def refused(
    model: nn.Module, data: dict[str, Tensor] | None, later: dict[str, Tensor] | None = None, **options: Any
) -> str:
    """What boost, or a step on a later batch, says."""
    try:
        options = {"num_microbatches": 2, "num_slices": 3} | options
        split = Split(model, dist.get_world_size(), data, **options)
        split.backward(later or data)
    except PipeshardError as error:
        return f"{type(error).__name__}: {error}"
    return "not refused"


def of_class(kind: str) -> str:
    data = data_of("llama", 12, 0)
    torch.manual_seed(0)
    sizes = SMALL | {"vocab_size": zoo.VOCABULARY}
    if kind == "bidirectional":
        return refused(BertLMHeadModel(BertConfig(**sizes)), data)
    if kind == "padded":
        model = RobertaForCausalLM(RobertaConfig(**sizes, is_decoder=True, pad_token_id=0))
        return refused(model, data, zoo.left_padded(data))
    if kind == "encoder":
        return refused(zoo.build("t5"), zoo.batch("t5"))
    if kind == "no cache":
        return refused(nn.Sequential(nn.Embedding(zoo.VOCABULARY, 8), nn.Linear(8, 8)), data)
    llama = LlamaForCausalLM(LlamaConfig(**sizes))
    if kind == "neftune":
        llama.model.embed_tokens.neftune_noise_alpha = 5.0
        llama.model.embed_tokens.register_forward_hook(neftune_post_forward_hook)
        return refused(llama.train(), data)
    if kind == "checkpointing":
        llama.gradient_checkpointing_enable()
        return refused(llama, data)
    positions = torch.cat([torch.arange(5), torch.arange(7)]).expand(4, -1)
    return refused(llama, data, {"input_ids": data["input_ids"], "position_ids": positions, "labels": data["labels"]})


@pytest.mark.turns
@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (
            "bidirectional",
            "VerificationError: num_slices=3: BertLMHeadModel in slices does not match the model on whole sequences",
        ),
        ("padded", "BatchError: num_slices: this batch has padding, and slices of RobertaForCausalLM with padding"),
        ("encoder", "ConfigurationError: num_slices: T5ForConditionalGeneration has an encoder"),
        ("no cache", "ConfigurationError: num_slices: Sequential has no config, so a slice"),
        ("checkpointing", "ConfigurationError: num_slices: transformers' own gradient checkpointing"),
        ("neftune", "ConfigurationError: the scale of the noise that NEFTune adds to the output of model.embed_tokens"),
        ("packed", "BatchError: num_slices: position_ids restart within a sample"),
    ],
)
def test_what_cannot_be_sliced_is_refused(pool: Pool, kind: str, says: str) -> None:
    """Slices read what is before them alone, through the cache: all else would train otherwise without an error."""
    for said in pool.run(of_class, 2, kind):
        assert said.startswith(says), said


class Mixing(LlamaDecoderLayer):
    """A layer that adds the mean of all positions to each."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        mixed = super().forward(hidden_states, *args, **kwargs)
        return mixed + 0.1 * mixed.mean(1, keepdim=True)


def small_llama(layer: Any = None) -> LlamaForCausalLM:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SMALL, vocab_size=zoo.VOCABULARY))
    if layer is not None:
        model.model.layers = nn.ModuleList(layer(model.config, k) for k in range(2))
    return model


def without_sample(kind: str) -> str:
    data = data_of("llama", 12, 0)
    if kind == "mixing":
        return refused(small_llama(Mixing), None, data)
    torch.manual_seed(0)
    sizes = SMALL | {"vocab_size": zoo.VOCABULARY}
    if "mask" in kind:
        model = GPTJForCausalLM(GPTJConfig(n_embd=32, n_layer=2, n_head=4, rotary_dim=4, vocab_size=zoo.VOCABULARY))
        plain = {name: data[name] for name in ("input_ids", "labels")}
        model.config.pad_token_id = int(plain["input_ids"][0, 3])  # as in packed data, in which it also separates texts
        return refused(model, plain, plain if kind == "no mask" else zoo.left_padded(data))
    model = RobertaForCausalLM(RobertaConfig(**sizes, is_decoder=True, pad_token_id=0))
    return refused(model, None, data if kind == "unpadded" else zoo.left_padded(data))


@pytest.mark.turns
@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("mixing", "VerificationError: num_slices=3: LlamaForCausalLM in slices does not match the model on whole"),
        ("padded", "BatchError: num_slices: this batch has padding, and slices of RobertaForCausalLM with padding"),
        ("unpadded", "not refused"),
        ("mask", "BatchError: num_slices: this batch has padding, and slices of GPTJForCausalLM with padding"),
        ("no mask", "not refused"),
    ],
)
def test_slices_are_proven_without_a_sample(pool: Pool, kind: str, says: str) -> None:
    """Without a dataloader, the proof compared samples whose tokens are all 0: with RoPE, each position then has the
    same hidden states, and nothing that mixes positions could differ. A sample without a mask never had padding. Then
    what was found with a mask also refused batches without one, in which the token of padding separates texts."""
    (said,) = pool.run(without_sample, 1, kind)
    assert said.startswith(says), said


class Normalized(LlamaDecoderLayer):
    """A layer that ends with a batch norm over all positions."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.norm = nn.BatchNorm1d(SMALL["hidden_size"])

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        out: Tensor = self.norm(super().forward(*args, **kwargs).transpose(1, 2)).transpose(1, 2)
        return out


class CentredInTraining(LlamaDecoderLayer):
    """A layer that subtracts a mean of all positions, but only in training."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        out: Tensor = super().forward(*args, **kwargs)
        return out - out.mean(1, keepdim=True) if self.training else out


def of_training(kind: str) -> str:
    layers = {"centred": CentredInTraining, "dropout": None, "tower": None, "tower, unverified": None}
    model = small_llama(layers.get(kind, Normalized))
    if "tower" in kind:
        model.tower = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8))
    for layer in model.model.layers if kind == "dropout" else ():
        layer.self_attn.attention_dropout = 0.1
    options: dict[str, Any] = {"verify": False} if kind.endswith(", unverified") else {}
    if kind.endswith(", whole"):
        options["num_slices"] = 1
    return refused(model.eval(), data_of("llama", 12, 0), **options)


@pytest.mark.turns
@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("centred", "VerificationError: num_slices=3: LlamaForCausalLM in slices does not match the model on whole"),
        ("batch norm", "ConfigurationError: num_slices: LlamaForCausalLM has 2 batch norms (model.layers.0.norm, ...)"),
        ("batch norm, unverified", "ConfigurationError: num_slices: LlamaForCausalLM has 2 batch norms"),
        ("batch norm, whole", "not refused"),
        ("dropout", "not refused"),
        ("tower", "not refused"),
        ("tower, unverified", "not refused"),
    ],
)
def test_statistics_of_positions_in_training(pool: Pool, kind: str, says: str) -> None:
    """Slices were proven in evaluation mode only, because of dropout, and the warning of batch norms needed several
    microbatches: each slice was silently normalized with its own statistics. Batch norms of a tower that no slice runs
    must not be refused."""
    (said,) = pool.run(of_training, 1, kind)
    assert said.startswith(says), said


class Zeroed(LlamaForCausalLM):
    """A model that sets the embeddings of padding to zero, which fails in slices: their mask includes earlier ones."""

    def forward(
        self,
        input_ids: Any = None,
        attention_mask: Any = None,
        past_key_values: Any = None,
        labels: Any = None,
        use_cache: Any = None,
    ) -> Any:
        embedded = self.model.embed_tokens(input_ids)
        if attention_mask is not None and not attention_mask.all():
            embedded = embedded * attention_mask[..., None]
        return super().forward(
            inputs_embeds=embedded,
            attention_mask=attention_mask,
            past_key_values=past_key_values,
            labels=labels,
            use_cache=use_cache,
        )


def with_padding_later() -> str:
    data = data_of("llama", 12, 0)
    torch.manual_seed(0)
    model = Zeroed(LlamaConfig(**SMALL, vocab_size=zoo.VOCABULARY))
    return refused(model, data, zoo.left_padded(data))


@pytest.mark.turns
def test_padding_on_which_the_proof_fails_is_refused(pool: Pool) -> None:
    """A proof that failed counted as one that finds no difference, so the first batch with padding raised an error of
    the model's own, whose code is right."""
    (said,) = pool.run(with_padding_later, 1)
    assert said.startswith("BatchError: num_slices: this batch has padding, and slices of Zeroed with padding could")


def with_unproven_padding(kind: str) -> str:
    data = zoo.batch("llama", rows=1, length=40, seed=0)
    data["labels"][:, 8:] = -100
    later = {**data, "attention_mask": (torch.arange(40) < 20).long()[None]}
    if kind == "padded sample":
        return refused(small_llama(), later, num_microbatches=1)
    runs = []

    def hurried(*given: Any) -> Proof:
        runs.append(given)
        return prove(*given[:6], 0.0 if len(runs) == 2 else given[6], *given[7:])

    with mock.patch.object(decide, "prove", hurried):
        said = refused(small_llama(), data_of("llama", 12, 0), data_of("llama", 12, 0, is_padded=True))
    assert len(runs) == 2
    return said


@pytest.mark.turns
@pytest.mark.parametrize("kind", ["padded sample", "time limit"])
def test_padding_that_the_unsplit_model_cannot_compare_is_not_refused(pool: Pool, kind: str) -> None:
    """The proof's own padding covered all labels of one sample, so the unsplit model's loss was NaN, or its time was
    over: that says nothing of slices, so the first padded batch must not be refused."""
    assert pool.run(with_unproven_padding, 1, kind) == ["not refused"]


def test_padding_of_the_proof_leaves_labels() -> None:
    """Padding on the left covered all labels of a sample, and a loss of no labels is NaN."""
    mask, labels = torch.ones(1, 40, dtype=torch.int64), torch.full((1, 40), -100)
    labels[:, :8] = 1
    data = {"input_ids": torch.ones_like(labels), "attention_mask": mask, "labels": labels}
    padded = with_padding(read_batch(small_llama(), data), 0)
    assert padded.tensors["labels"].equal(labels)
    assert padded.tensors["attention_mask"].sum() == 30


LONG: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "dynamic": (LlamaConfig, LlamaForCausalLM, {"max_position_embeddings": 40}),
    "longrope": (Phi3Config, Phi3ForCausalLM, {"max_position_embeddings": 80, "original_max_position_embeddings": 40}),
}


def beyond(kind: str, **options: Any) -> list[str]:
    """What a step says whose positions change the frequencies of RoPE, and one whose do not: for each rank the loss's
    error, or the error."""
    config, make, sizes = LONG[kind]
    rope = {"rope_type": kind, "factor": 2.0, "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [3.0] * 4}
    torch.manual_seed(0)
    model = make(config(**SMALL | sizes, vocab_size=zoo.VOCABULARY, pad_token_id=0, rope_parameters=rope)).train()
    unsplit = copy.deepcopy(model)
    split, said = Split(model, dist.get_world_size(), data_of("llama", 12, 0), verify=False, **options), []
    for length in (36, 60):
        data = data_of("llama", length, 1)
        data["attention_mask"] = torch.arange(length) < torch.tensor([length, 9, 9, 9])[:, None]
        data["labels"] = data["input_ids"].masked_fill(~data["attention_mask"], -100)
        try:
            error = abs(float(split.backward(data)["loss"]) - float(unsplit(**data).loss))
            said.append("exact" if error < ROUNDED * 10 else f"the loss differs by {error}")
        except PipeshardError as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


@pytest.mark.turns
@pytest.mark.parametrize("kind", LONG)
@pytest.mark.parametrize("options", [{"num_microbatches": 1, "num_slices": 2}, {"microbatch_tokens": 64}], ids=str)
def test_frequencies_that_depend_on_the_length_are_told(pool: Pool, kind: str, options: dict[str, Any]) -> None:
    """Positions before the end of a longer sequence were rotated as in a short one."""
    for short, long in pool.run(beyond, 2, kind, **options):
        assert short == "exact" and long.startswith("BatchError: this batch has 60 positions"), (short, long)


@pytest.mark.parametrize("schedule", ["interleaved", "zbv"])
def test_schedules_without_slices_are_refused(schedule: str) -> None:
    assert f"num_slices=2 is not supported with schedule='{schedule}'" in refusal(num_slices=2, schedule=schedule)
    assert "num_slices must be 'auto' or a positive integer, got 0" in refusal(num_slices=0)
    assert "num_slices=2 is not supported with compile=True" in refusal(num_slices=2, compile=True)


def mutated(mutation: Callable[[], Any]) -> list[str]:
    with mutation():
        try:
            return trained("llama", 2, 3)
        except (PipeshardError, RuntimeError) as error:
            return [str(error)]


def no_gradients_of_keys() -> Any:
    return mock.patch.object(Grown, "gradient", lambda self, start, length: None)


def lengths_of_another_layer() -> Any:
    return mock.patch.object(Keys, "get_seq_length", lambda self: 0)


def slices_in_another_order() -> Any:
    join = Joint.join
    return mock.patch.object(Joint, "join", lambda self, parts: join(self, [*reversed(parts)]))


def buffers_of_a_step() -> int:
    """The most microbatches of which the first stage has keys at a time."""
    model = zoo.build("llama")
    data = data_of("llama", 12, 0)
    split = Split(model, 2, data, num_microbatches=4, num_slices=2, verify=False)
    (stage,) = split.model.pipeline.stages.sliced
    counts = []
    backward = type(stage).backward

    def counted(self: Any, i: int, returning: Any) -> Any:
        counts.append(sum(bool(m.slices[0].sliced.now.states) for m in self.whole))
        return backward(self, i, returning)

    with mock.patch.object(type(stage), "backward", counted):
        split.backward(data)
    return max(counts)


@pytest.mark.turns
def test_keys_are_released_after_the_backward_of_a_microbatch(pool: Pool) -> None:
    """Keys of all microbatches were kept to the end of the step, which with many takes more than slices save."""
    assert max(pool.run(buffers_of_a_step, 2)) <= 2


def left_behind() -> int:
    """The buffers of keys and values that are there after a step, while nobody looks for circles."""
    data = data_of("llama", 12, 0)
    split = Split(zoo.build("llama"), 1, data, num_microbatches=2, num_slices=2, verify=False)
    split.backward(data)
    gc.collect()
    gc.disable()
    try:
        split.backward(data)
        return sum(type(each) is Grown for each in gc.get_objects())
    finally:
        gc.enable()


@pytest.mark.processes
@pytest.mark.turns
def test_nothing_of_a_cache_waits_for_the_collector(pool: Pool) -> None:
    """A cache named itself in a function of its own, so that keys stayed until Python looked for circles: half a
    microbatch."""
    assert pool.run(left_behind, 1) == [0]


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_attention_of_a_slice_is_that_by_a_mask(groups: int, dtype: torch.dtype) -> None:
    start, end = 5, 12
    torch.manual_seed(0)
    query, weights = (torch.randn(2, 4, end - start, 8, dtype=dtype) for _ in range(2))
    key, value = (torch.randn(2, 4 // groups, end, 8, dtype=dtype) for _ in range(2))
    whole = [each.requires_grad_() for each in (query, key, value)]
    mask = torch.ones(end - start, end, dtype=torch.bool).tril(start)
    expected = functional.scaled_dot_product_attention(*whole, attn_mask=mask, scale=0.3, enable_gqa=groups > 1)
    grown = [Grown(each, 2, end) for each in (key, value)]
    own = [query, *(each.detach()[:, :, start:].clone().requires_grad_() for each in (key, value))]
    for into, each, new in zip(grown, (key, value), own[1:], strict=True):
        into.write(each[:, :, :start], 0, 0)
        into.write(new, start, 0)
    output = Attention.apply(*own, *grown, start, 0.3)
    of_query, *of_own = torch.autograd.grad((output * weights).sum(), own)
    wanted = torch.autograd.grad((expected * weights).sum(), whole)
    joined = [torch.cat([into.gradient(0, start), new], 2) for into, new in zip(grown, of_own, strict=True)]
    found, expected = [output, of_query, *joined], [expected, *wanted]
    close = 8 * torch.finfo(dtype).eps
    for one, other in zip(found, expected, strict=True):
        assert float((one - other).detach().norm() / other.detach().norm()) < close


def saved_bytes(n: int) -> int:
    """What autograd keeps for the backward of a step, each storage once, but for parameters."""
    torch.manual_seed(0)
    config = LlamaConfig(**SMALL, vocab_size=32, num_key_value_heads=2)
    data = {"input_ids": torch.arange(512).remainder(32)[None], "labels": torch.arange(512).remainder(32)[None]}
    split = Split(LlamaForCausalLM(config), 1, data, num_microbatches=1, num_slices=n, verify=False)
    own = {parameter.untyped_storage().data_ptr() for parameter in split.model.parameters()}
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        split.backward(data)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


def test_slices_keep_what_a_whole_microbatch_keeps(pool: Pool) -> None:
    """Each layer kept a mask of its own, and keys once for each head of the query: half of the length's square."""
    ((whole,), (sliced_,)) = (pool.run(saved_bytes, 1, n) for n in (1, 8))
    assert sliced_ <= 1.02 * whole


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("mutation", "what"),
    [
        (no_gradients_of_keys, "gradients differ"),
        (lengths_of_another_layer, "The size of tensor a (12) must match the size of tensor b (6)"),
        (slices_in_another_order, "loss"),
    ],
)
def test_a_mutation_is_seen(pool: Pool, mutation: Callable[[], Any], what: str) -> None:
    found = [difference for rank in pool.run(mutated, 2, mutation) for difference in rank]
    assert any(difference.startswith(what) for difference in found), found


def assert_ordered(program: Program, n: int) -> None:
    """For every microbatch of n slices: forwards from the first slice to the last, then backwards from the last to the
    first."""
    wanted = [(Kind.F, s) for s in range(n)] + [(Kind.B, s) for s in reversed(range(n))]
    for actions in program.ranks:
        order: defaultdict[tuple[int, int], list[tuple[Kind, int]]] = defaultdict(list)
        for kind, number, stage in actions:
            if kind in (Kind.F, Kind.B):
                order[stage, number // n].append((kind, number % n))
        assert all(found == wanted for found in order.values())


@pytest.mark.parametrize("name", SLICED)
def test_programs_of_slices(name: str) -> None:
    for p in (1, 2, 3, 5):
        for m in (1, 2, 4):
            for n in (1, 2, 5):
                program = sliced(name, p, m, n)
                check(program)
                assert_ordered(program, n)
                simulate(program)


def test_idle_time_and_memory_of_slices() -> None:
    """One long sample: (p-1)/(n+p-1) of the time is idle, where it is (p-1)/p with the whole."""
    for p in (2, 4):
        for n in (1, 2, 8, 16):
            assert simulate(sliced("1f1b", p, 1, n), 1 / n, 2 / n).bubble == pytest.approx((p - 1) / (n + p - 1))
    assert max(simulate(sliced("1f1b", 4, 8, 8)).peak_activations) == 4 + 8 - 1


def test_auto_stops_where_more_slices_hardly_help() -> None:
    assert number_of_slices("1f1b", 4, 64, 16) == 1 and number_of_slices("1f1b", 4, 8, 16) == 8
    assert number_of_slices("1f1b", 2, 1, 16) == 16 and number_of_slices("1f1b", 2, 1, 3) == 2
    assert number_of_slices("1f1b", 1, 4, 16) == 1
    assert number_of_slices("zb-h1", 4, 1, 0) == 1


@pytest.mark.turns
def test_auto_in_training(pool: Pool) -> None:
    with mock.patch("pipeshard.config.LEAST_OF_SLICE", 4):
        assert pool.run(trained, 2, "llama", 1, "auto") == [[], []]


def packed(name: str) -> list[str]:
    """Two documents in a row, kept apart by a mask of four dimensions: the remedy for position_ids that begin anew."""
    model = zoo.build(name)
    unsplit = Unsplit(copy.deepcopy(model))
    data = data_of(name, 12, 0)
    document = torch.tensor([0] * 5 + [1] * 7)
    visible = (document[:, None] == document[None]) & torch.ones(12, 12).tril().bool()
    data["attention_mask"] = torch.where(visible, 0.0, torch.finfo(torch.float32).min).expand(4, 1, 12, 12).clone()
    data["position_ids"] = torch.cat([torch.arange(5), torch.arange(7)]).expand(4, -1).clone()
    split = Split(model, 2, data, num_microbatches=2, num_slices=3, verify=False)
    reference = unsplit.backward_in_parts(data, num_microbatches=2)
    return compared(split, unsplit, split.backward(data)["loss"], reference, 5 * ROUNDED)


@pytest.mark.turns
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_documents_in_a_row_are_kept_apart_by_a_mask(pool: Pool, name: str) -> None:
    """gemma2's layers with a window returned the keys of the window, and torch raised an error about their number."""
    assert pool.run(packed, 2, name) == [[], []]


@pytest.mark.parametrize(
    ("masked", "attention", "is_refused"),
    [
        (12, "flash_attention_2", True),
        (9, "flash_attention_2", True),
        (4, "flash_attention_2", False),
        (12, "sdpa", False),
    ],
)
def test_flash_attention_reads_positions_beside_a_mask_of_ones(masked: int, attention: str, is_refused: bool) -> None:
    """Flash attention omits a mask without padding, and then separates documents by their position_ids: in slices they
    attended to each other, without an error."""
    model = small_llama()
    model.config._attn_implementation = attention
    positions = torch.cat([torch.arange(5), torch.arange(7)])[None]
    mask = (torch.arange(12) < masked).long()[None]
    data = {"input_ids": torch.ones_like(positions), "attention_mask": mask, "position_ids": positions}
    cuts = BatchSplitter(PipelineConfig(pp_size=1, num_microbatches=1, num_slices=2), model)
    if not is_refused:
        assert len(cuts.slices([[Batch.of(data, "input_ids")]])[0]) == 2
        return
    with pytest.raises(BatchError, match="position_ids restart within a sample"):
        cuts.slices([[Batch.of(data, "input_ids")]])


def flattened(*documents: int) -> dict[str, Any]:
    """These documents in one row, with boundaries for flash attention, as in DataCollatorWithFlattening."""
    data: dict[str, Any] = {name: rows[:1] for name, rows in data_of("llama", sum(documents), 0).items()}
    del data["attention_mask"]
    ends = torch.tensor([0, *documents], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    longest = max(documents)
    return data | {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest}


def boundaries_of_slices() -> list[str]:
    """What differs from the unsplit model in slices of one document with boundaries, and boundaries that slices got."""
    model, found = small_llama().double(), list[str]()
    unsplit = Unsplit(copy.deepcopy(model))
    split = Split(model, dist.get_world_size(), flattened(140), num_microbatches=1, num_slices=3)
    forward = split.model.pipeline.model.forward

    @functools.wraps(forward)
    def seen(*args: Any, **kwargs: Any) -> Any:
        is_slice = kwargs["input_ids"].shape[1] < 12  # not the head, which runs no layers
        found.extend(f"a slice got {name}" for name in BOUNDARIES if is_slice and kwargs.get(name) is not None)
        return forward(*args, **kwargs)

    split.model.pipeline.model.forward = seen
    data = flattened(12)
    return compared(split, unsplit, split.backward(data)["loss"], unsplit.backward(data), FINE) + found


@pytest.mark.turns
def test_slices_get_no_boundaries(pool: Pool) -> None:
    """Slices got the boundaries of the whole row, up to which flash attention reads and writes: past their end."""
    assert pool.run(boundaries_of_slices, 1) == [[]]


def test_boundaries_within_a_row_are_refused() -> None:
    """Without position_ids (return_position_ids=False), only the boundaries show that a row has several documents."""
    (first, *_) = cut(Batch.of(flattened(12), "input_ids"), [5, 7], is_flash=True)
    assert not {*BOUNDARIES} & {path for path, leaf in zip(first.paths, first.leaves, strict=True) if leaf is not None}
    for split in (cut, lambda batch, sizes, is_flash: shortened(batch, sizes[0], is_flash)):
        with pytest.raises(BatchError, match="cu_seq_lens_q has a boundary within a sample"):
            split(Batch.of(flattened(5, 7), "input_ids"), [5, 7], True)


def test_a_long_sample_is_proven_where_it_has_labels() -> None:
    ids = torch.arange(40).expand(2, -1)
    labels = torch.full_like(ids, -100)
    labels[:, 25:31] = 1
    sample = Batch.of({"input_ids": ids, "labels": labels, "attention_mask": torch.ones_like(ids)}, "input_ids")
    short = shortened(sample, 10).tensors
    assert short["input_ids"][0].tolist() == [*range(20, 30)] and int(short["labels"].ne(-100).sum()) == 10
    assert short["attention_mask"].shape == (2, 10)
    assert shortened(sample, 40) is sample


def test_lengths_take_equally_long() -> None:
    assert lengths(13, 3, 0.0) == [4, 5, 4] and sum(lengths(2048, 8, 0.01)) == 2048
    first, *_, last = lengths(2048, 8, 0.01)
    assert first > 2 * last
    assert lengths(5, 8, 0.0) == [2, 3] and lengths(1, 8, 0.0) == [1]


def test_page_of_slices(tmp_path: Path) -> None:
    rows = [Row("causal-lm/a", 2, "close"), Row("causal-lm/b", 2, "close", reason="batches with padding are refused")]
    text = PAGE.of(rows, {"torch": "1"})
    assert "**2** of these (100.0%)" in text and "| causal-lm/b | 2 | close | batches with" in text
    page = tmp_path / "page.md"
    page.write_text(PAGE.of([*rows, Row("causal-lm/c", 2, "refused", reason="why")], {}))
    assert outcomes(page) == {"causal-lm/a": "yes", "causal-lm/b": "yes", "causal-lm/c": "refused"}
    whole = markdown([Row("causal-lm/a", 2, "bitwise")], {}, page, sides={"slices": outcomes(page)})
    assert "| a | bitwise | 0 |  | yes |" in whole


def test_a_gpu_s_causal_mask_can_be_made_in_a_mode() -> None:
    """On a GPU the slices of a second model raised "Creating a new Tensor subclass CausalBias", as they do where a user
    counts flops: torch cannot make a subclass of Tensor in a mode, and a guard of the first model is one."""
    query, key = torch.ones(1, 1, 2, 4), torch.ones(1, 1, 4, 4)
    with FlopCounterMode(display=False):
        mask = lower_right(query, key)
        attended = functional.scaled_dot_product_attention(query, key, key.cumsum(2), attn_mask=mask)
    assert attended[0, 0, :, 0].tolist() == [2.0, 2.5]
