"""Tests of generate: the tokens of several stages are those of one process."""

from __future__ import annotations

import copy
import gc
import random
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import peft
import pytest
import torch
import torch.distributed as dist
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from transformers import (
    CompileConfig,
    DynamicCache,
    EncoderDecoderCache,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LogitsProcessorList,
    MaxTimeCriteria,
    MiniMaxConfig,
    MiniMaxForCausalLM,
    PreTrainedTokenizerFast,
    StoppingCriteria,
    StoppingCriteriaList,
    pipeline,
)
from transformers.generation.streamers import BaseStreamer

from pipeshard import PipelinePlugin, initialize, to_sequential
from pipeshard.batch.read import read_batch
from pipeshard.engine.coupling import Watching
from pipeshard.engine.traces import Traces
from pipeshard.errors import BatchError, ConfigurationError, PipeshardError, TraceError, UsageError
from pipeshard.generate import forward
from pipeshard.generate.cache import Entries
from pipeshard.generate.generate import Generation
from pipeshard.hf import LAYER_CACHES
from pipeshard.private import modes_entered
from pipeshard.replaced import replaced
from tests import zoo
from tests.parity.build import batch, build
from tests.parity.check import Verdict
from tests.parity.entries import Entry, find
from tests.parity.generating import PAGE, check_generation, score_error, scores, with_caches
from tests.parity.generating import generated as generated_of_parity
from tests.parity.report import Row
from tests.pool import Pool, WorkerError
from tests.unsplit import Split

pytestmark = pytest.mark.local

NEW = 6
GREEDY: dict[str, Any] = {"do_sample": False}
MODES: dict[str, dict[str, Any]] = {
    "greedy": GREEDY,
    "sampled": {"do_sample": True, "top_k": 20},
    "beams": {"num_beams": 3, "do_sample": False},
    "several": {"do_sample": True, "num_return_sequences": 2},
    "no cache": GREEDY | {"use_cache": False},
    "static": GREEDY | {"cache_implementation": "static", "disable_compile": True},
    "scores": GREEDY | {"return_dict_in_generate": True, "output_scores": True, "output_hidden_states": True},
}


def prompts(name: str) -> dict[str, Tensor]:
    """Three prompts of other lengths; those of a decoder begin with padding."""
    data: dict[str, Tensor] = zoo.batch(name, rows=3, length=7)
    if name != "t5":
        data = zoo.left_padded(data)
    return {key: data[key] for key in ("input_ids", "attention_mask") if key in data}


def generated(model: Any, name: str, seed: int = 7, **options: Any) -> Any:
    torch.manual_seed(seed)
    return model.generate(**prompts(name), max_new_tokens=NEW, min_new_tokens=NEW, **options)


def content(output: Any) -> list[Tensor]:
    if isinstance(output, Tensor):
        return [output]
    return [output.sequences, *output.scores]


def is_same(one: Any, other: Any, tolerance: float = 0.0) -> bool:
    """Other sizes of a matrix product round otherwise, so the scores of microbatches may be off by a little."""
    (tokens, *scores), (others, *other_scores) = content(one), content(other)
    return torch.equal(tokens, others) and all(
        torch.allclose(a, b, rtol=tolerance, atol=tolerance) for a, b in zip(scores, other_scores, strict=True)
    )


def boosted(model: nn.Module, name: str, **options: Any) -> Any:
    """The model over all ranks, in evaluation mode."""
    data = zoo.batch(name, rows=4)
    options = {"pp_size": dist.get_world_size(), "num_microbatches": 2, "verify": False} | options
    engine = initialize(model, dry_run_input=data, **options)
    assert engine.model is not None
    return engine.model.eval()


def as_alone(name: str, num_microbatches: int | None, modes: list[str]) -> list[str]:
    """The modes in which what is generated differs from what one process generates."""
    model = zoo.build(name)
    alone = copy.deepcopy(model).eval()
    expected = {mode: generated(alone, name, **MODES[mode]) for mode in modes}
    split = boosted(model, name)
    made = {mode: generated(split, name, num_microbatches=num_microbatches, **MODES[mode]) for mode in modes}
    tolerance = 1e-4 if num_microbatches else 0.0
    return [mode for mode in modes if not is_same(made[mode], expected[mode], tolerance)]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("modes", [[*MODES][:4], [*MODES][4:]], ids=["tokens", "caches"])
@pytest.mark.parametrize("num_microbatches", [None, 2])
@pytest.mark.parametrize(("name", "p"), [("llama-tied", 2), ("t5", 2), ("llama-tied", 3), ("gemma2", 2)])
def test_tokens_are_those_of_one_process(
    pool: Pool, name: str, p: int, num_microbatches: int | None, modes: list[str]
) -> None:
    """transformers' own pipeline generates other tokens for prompts that begin with padding, without an error."""
    assert pool.run(as_alone, p, name, num_microbatches, modes) == [[]] * p


def states(name: str) -> tuple[list[bool], list[bool]]:
    """Which layers' keys are in memory here, and which layers this stage holds."""
    split = boosted(zoo.build(name), name)
    cache = DynamicCache(config=split.config)
    generated(split, name, past_key_values=cache, **GREEDY)
    held = split.pipeline.policy.held_units
    layers = [f"model.layers.{k}" in held for k in range(len(cache.layers))]
    assert {layer.get_seq_length() for layer in cache.layers} == {prompts(name)["input_ids"].shape[1] + NEW - 1}
    return [not layer.keys.is_meta for layer in cache.layers], layers


@pytest.mark.turns
def test_a_stage_keeps_the_states_of_its_own_layers(pool: Pool) -> None:
    for in_memory, held in pool.run(states, 2, "llama-tied"):
        assert in_memory == held


def in_memory() -> int:
    """The bytes of all tensors that this process has, each storage once."""
    gc.collect()
    found = {}
    for each in gc.get_objects():
        if type(each) in (Tensor, nn.Parameter) and each.device.type == "cpu" and each.layout is torch.strided:
            found[each.untyped_storage().data_ptr()] = each.untyped_storage().nbytes()
    return sum(found.values())


class Peak(StoppingCriteria):
    """Stops nothing, and notes the most memory there is between two tokens."""

    def __init__(self) -> None:
        self.bytes = 0

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        self.bytes = max(self.bytes, in_memory())
        return torch.zeros(len(input_ids), dtype=torch.bool)


def memory() -> tuple[int, int]:
    """The most bytes while a stage generates beyond what there was before, and those of its weights and cache."""
    before = in_memory()
    ids = torch.randint(4, 30, (4, 384))
    sizes = {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 4, "num_attention_heads": 4}
    split = boosted(LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=64, eos_token_id=None)), "llama-tied")
    cache, peak = DynamicCache(config=split.config), Peak()
    split.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=4,
        stopping_criteria=StoppingCriteriaList([peak]),
        past_key_values=cache,
        **GREEDY,
    )
    own = [each for layer in cache.layers for each in (layer.keys, layer.values) if not each.is_meta]
    weights = [each for each in (*split.parameters(), *split.buffers()) if not each.is_meta]
    return peak.bytes - before, sum(each.nbytes for each in {id(each): each for each in (*own, *weights)}.values())


def cache_afterwards(num_microbatches: int | None) -> bool:
    """Whether a cache that was passed to `generate` is freed with the last reference to it."""
    split = boosted(zoo.build("llama-tied"), "llama-tied")
    cache = DynamicCache(config=split.config)
    generated(split, "llama-tied", past_key_values=cache, num_microbatches=num_microbatches, **GREEDY)
    freed = weakref.ref(cache)
    del cache
    gc.collect()
    return freed() is None


@pytest.mark.turns
@pytest.mark.parametrize("num_microbatches", [None, 2])
def test_the_cache_is_freed_after_generate(pool: Pool, num_microbatches: int | None) -> None:
    """A GRPO run generated and then trained: on several stages, each rank kept the last cache, gigabytes of it, through
    all training steps until the next generate."""
    assert pool.run(cache_afterwards, 2, num_microbatches) == [True, True]


def empty_cache(name: str) -> Any:
    """A cache that knows no config: it creates its entries when layers run."""
    return EncoderDecoderCache(DynamicCache(), DynamicCache()) if name == "t5" else DynamicCache()


def filling(name: str, options: dict[str, Any], num_microbatches: int | None) -> list[str]:
    """The modes in which a stage generates other tokens, or sees another length, with such a cache."""
    model, found = zoo.build(name), []
    alone = copy.deepcopy(model).eval()
    split = boosted(model, name, **({"pp_size": 2} | options))
    for mode, asked in (("greedy", GREEDY), ("beams", MODES["beams"]), ("chunks", GREEDY | {"prefill_chunk_size": 3})):
        own, cache = empty_cache(name), empty_cache(name)
        expected = generated(alone, name, past_key_values=own, **asked)
        made = generated(split, name, past_key_values=cache, num_microbatches=num_microbatches, **asked)
        if not torch.equal(made, expected) or cache.get_seq_length() != own.get_seq_length():
            found.append(mode)
    return found


@pytest.mark.turns
@pytest.mark.parametrize(
    ("name", "p", "options", "num_microbatches"),
    [
        ("llama-tied", 2, {}, None),
        ("llama-tied", 3, {"pp_size": 3}, 2),
        ("llama-tied", 2, {"schedule": "interleaved", "num_model_chunks": 2}, None),
        ("t5", 2, {}, None),
    ],
)
def test_a_cache_without_a_config_is_filled(
    pool: Pool, name: str, p: int, options: dict[str, Any], num_microbatches: int | None
) -> None:
    """A later stage also created the entries of earlier layers, which stayed empty there: its masks had other lengths,
    and padded prompts gave wrong tokens without an error."""
    assert pool.run(filling, p, name, options, num_microbatches) == [[]] * p


def minimax() -> MiniMaxForCausalLM:
    """A model whose forward creates a cache that knows no config."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    kinds = ["full_attention", "linear_attention"] * 3
    config = MiniMaxConfig(
        vocab_size=256, num_hidden_layers=6, layer_types=kinds, head_dim=8, num_local_experts=2, block_size=4, **sizes
    )
    config.pad_token_id, config.initializer_range = 0, 0.4
    return MiniMaxForCausalLM(config)


def created_in_forward() -> list[str]:
    model = minimax()
    alone = copy.deepcopy(model).eval()
    split = boosted(model, "llama-tied")
    modes = {mode: MODES[mode] for mode in ("scores", "beams")}
    return [
        mode
        for mode, asked in modes.items()
        if not is_same(generated(split, "llama-tied", **asked), generated(alone, "llama-tied", **asked))
    ]


@pytest.mark.turns
@pytest.mark.parametrize("p", [2, 3])
def test_a_cache_that_the_forward_creates_without_a_config_is_filled(pool: Pool, p: int) -> None:
    """The forward of MiniMax creates a cache without a config. A later stage counted the entries of earlier layers,
    which its own layers had created empty, as its own: the lengths of padded prompts were wrong, without an error."""
    assert pool.run(created_in_forward, p) == [[]] * p


def test_an_entry_to_which_glue_of_every_rank_writes_has_the_length_of_its_layer() -> None:
    """Glue of Qwen4-Exp stores positions in the entry of its first indexed layer. Other ranks then took this entry for
    their own, and kept it empty: lengths were wrong, and so were tokens, without an error."""
    config = LlamaConfig(num_hidden_layers=2, hidden_size=8, num_attention_heads=2)
    of_stages = [Entries(DynamicCache(config=config)) for _ in range(2)]
    for k, entries in enumerate(of_stages):
        entries.begin()
        entries.cache.layers[0].positions = torch.arange(100)
        entries.cache.update(*torch.ones(2, 1, 2, 3, 4), layer_idx=k)
    told = [entries.changes() for entries in of_stages]
    of_stages[0].update(told[1])
    of_stages[1].update(told[0])
    for k, entries in enumerate(of_stages):
        assert [layer.get_seq_length() for layer in entries.cache.layers] == [3, 3]
        assert [layer.keys.is_meta for layer in entries.cache.layers] == [k == 1, k == 0]
        assert not entries.cache.layers[0].positions.is_meta


def continued(model: Any) -> list[Any]:
    """Completions of two questions, each with its own copy of the cache of what precedes them."""
    cache, before = DynamicCache(config=model.config), torch.tensor([[3, 4, 5, 6]])
    model.generate(before, past_key_values=cache, max_new_tokens=1, **GREEDY)
    questions = [torch.cat([before, torch.tensor([[k, k + 1]])], dim=1) for k in (7, 9)]
    return [
        model.generate(ids, past_key_values=copy.deepcopy(cache), max_new_tokens=NEW, **GREEDY).tolist()
        for ids in questions
    ]


def with_copied_caches() -> bool:
    model = zoo.build("llama-tied")
    expected = continued(copy.deepcopy(model).eval())
    return continued(boosted(model, "llama-tied")) == expected


@pytest.mark.turns
def test_a_cache_may_be_copied(pool: Pool) -> None:
    """Reusing the cache of a long prefix by copy.deepcopy, as in transformers' documentation, ended in torch's error
    about subclasses that do not implement clone()."""
    assert pool.run(with_copied_caches, 2) == [True, True]


def compiling() -> tuple[bool, int]:
    """Whether a static cache gives the tokens of one process where transformers would compile, and the number of
    functions that it compiles."""
    model, config = zoo.build("llama-tied"), CompileConfig(backend="eager")
    config._compile_all_devices = True  # as on a GPU
    options = {"cache_implementation": "static", **GREEDY}
    expected = generated(copy.deepcopy(model).eval(), "llama-tied", disable_compile=True, **options)
    split = boosted(model, "llama-tied")
    with mock.patch.object(torch, "compile", side_effect=lambda function, **_: function) as compile:
        found = generated(split, "llama-tied", compile_config=config, **options)
    return is_same(found, expected), compile.call_count


@pytest.mark.processes
@pytest.mark.turns
def test_a_static_cache_does_not_compile_the_forward(pool: Pool) -> None:
    """On GPUs, transformers compiles the decode steps of a static cache: here, the exchange between stages."""
    assert pool.run(compiling, 2) == [(True, 0)] * 2


@pytest.mark.turns
@pytest.mark.processes
def test_a_rank_that_generates_has_its_weights_and_cache_in_memory(pool: Pool) -> None:
    for most, own in pool.run(memory, 2):
        assert abs(most - own) <= 0.05 * own, (most, own)


def losses(generates: bool) -> list[float]:
    data = zoo.batch("llama-tied", rows=4)
    split = Split(zoo.build("llama-tied"), dist.get_world_size(), data, num_microbatches=2)
    found = []
    for _ in range(3):
        found.append(float(split.backward(data)["loss"]))
        split.optimizer.step()
        split.optimizer.zero_grad()
        if generates:
            split.model.eval()
            split.model.generate(**prompts("llama-tied"), max_new_tokens=3, do_sample=False)
            split.model.train()
    return found


@pytest.mark.turns
def test_training_goes_on_as_if_nothing_had_been_generated(pool: Pool) -> None:
    assert pool.run(losses, 2, True) == pool.run(losses, 2, False)


def with_prompts_of_ranks(options: dict[str, Any]) -> str:
    """The error of a call whose prompts differ between stages, then of the same prompts but for other replicas'."""
    split = boosted(zoo.build("llama-tied"), "llama-tied", **options)
    grid = split.pipeline.grid
    other = torch.tensor([[3, 4, 5, 6 + grid.stage + grid.slice]])
    with pytest.raises(BatchError) as caught:
        split.generate(other, attention_mask=torch.ones_like(other), max_new_tokens=2, **GREEDY)
    same = torch.tensor([[3, 4, 5, 6 + grid.replica]])
    made = split.generate(same, max_new_tokens=2, streamer=Noting() if grid.first else None, **GREEDY)
    assert made[0, :4].tolist() == same[0].tolist()
    return str(caught.value)


@pytest.mark.turns
@pytest.mark.parametrize(
    ("world", "options"),
    [(2, {}), (4, {"pp_size": 2, "dp_size": 2}), (2, {"pp_size": 1, "tp_size": 2, "num_microbatches": 1})],
    ids=str,
)
def test_other_prompts_of_the_same_size_are_refused(pool: Pool, world: int, options: dict[str, Any]) -> None:
    """Each rank passed its own prompt, as to replicas: the second rank returned its prompt with the completion of the
    first rank's."""
    for message in pool.run(with_prompts_of_ranks, world, options):
        assert "rank 0 (" in message and "positional argument 0 is of shape (1, 4)" in message and "dp_size" in message
        assert "attention_mask" not in message


def similar(model: Any, tokens: Tensor, scores: Tensor) -> Tensor:
    """A processor that prefers tokens whose rows in the head are similar to token 5's."""
    weight = model.get_output_embeddings().weight
    return scores + 0.1 * (weight @ weight[5])


def similar_by_module(model: Any, tokens: Tensor, scores: Tensor) -> Tensor:
    """The same, by a call of the head."""
    head = model.get_output_embeddings()
    return scores + 0.1 * head(head(torch.eye(32))[:, 5])


def drawn(model: Any, tokens: Tensor, scores: Tensor) -> Tensor:
    """A processor that draws from Python's generator, which has another seed on each rank."""
    return scores.index_fill(1, torch.tensor([4 + dist.get_rank() + random.randrange(2) * 5]), 100.0)


def processed(new: int) -> list[str]:
    """What happens with each processor: an error, or whether the tokens are those of one process."""
    found, model = [], zoo.build("llama")
    alone, split = copy.deepcopy(model).eval(), boosted(model, "llama")

    def made(model: Any, processor: Any) -> Tensor:
        processors = LogitsProcessorList([partial(processor, model)])
        tokens: Tensor = model.generate(**prompts("llama"), max_new_tokens=new, logits_processor=processors, **GREEDY)
        return tokens

    for processor in (similar, drawn):
        with pytest.raises(PipeshardError) as caught:
            made(split, processor)
        found.append(f"{type(caught.value).__name__}: {caught.value}")
    return [*found, str(torch.equal(made(split, similar_by_module), made(alone, similar)))]


@pytest.mark.turns
@pytest.mark.parametrize("new", [1, NEW])
def test_processors_that_differ_between_ranks_are_refused(pool: Pool, new: int) -> None:
    """A processor that read the head's weights got NaN on the first rank, which chose token 0: all later tokens were
    wrong, and different ones on each rank."""
    for of_weights, of_random, is_same in pool.run(processed, 2, new):
        for message in (of_weights, of_random):
            assert message.startswith("UsageError: the ranks of one pipeline have different tokens")
            assert "call modules of the model instead of reading their parameters" in message
        assert is_same == "True"


def stopped(options: dict[str, Any]) -> str:
    def stops(ids: Tensor, scores: Any) -> Tensor:
        return torch.full((len(ids),), ids.shape[1] > 8 + 2 * (dist.get_rank() % 2), dtype=torch.bool)

    split = boosted(zoo.build("llama"), "llama", **options)
    with pytest.raises(UsageError) as caught:
        split.generate(**prompts("llama"), max_new_tokens=30, stopping_criteria=[stops], **GREEDY)
    return str(caught.value)


@pytest.mark.turns
@pytest.mark.parametrize(
    ("world", "options"),
    [(2, {}), (2, {"pp_size": 1, "tp_size": 2}), (4, {"pp_size": 2, "tp_size": 2})],
    ids=["stages", "slices", "pipelines of slices"],
)
def test_stopping_criteria_that_differ_between_ranks_are_refused(
    pool: Pool, world: int, options: dict[str, Any]
) -> None:
    """A criterion stopped at a number of tokens of each rank's own. The rank that went on waited for the other until
    the timeout. Later, the stages of a pipeline compared their tokens, but the slices of a stage still did not."""
    for message in pool.run(stopped, world, options):
        assert message.startswith("the ranks of one pipeline have different tokens")
        assert " of the result" in message and " of a call of LlamaForCausalLM" in message


def opposed() -> tuple[Tensor, Tensor]:
    """The tokens of one process, and those of slices of which the second computes the opposite of each logit."""
    model = zoo.build("llama")
    alone, split = copy.deepcopy(model).eval(), boosted(model, "llama", pp_size=1, tp_size=2)
    split.unwrap().lm_head.register_forward_hook(lambda module, args, logits: logits * (1 - 2 * dist.get_rank()))
    return generated(alone, "llama", **GREEDY), generated(split, "llama", **GREEDY)


@pytest.mark.turns
def test_slices_choose_from_the_same_logits(pool: Pool) -> None:
    """With kernels that are not deterministic, slices compute logits that differ in their last bits. They chose other
    tokens, and the error blamed the loop of generate."""
    for expected, found in pool.run(opposed, 2):
        assert torch.equal(expected, found)


def test_states_in_tuples_are_not_compared() -> None:
    """Each slice has states of its own heads, some of them integers, in a tuple: at the second token, an error said
    that ranks have different tokens."""
    ids, states = torch.tensor([[1, 2]]), (torch.tensor([3]), torch.tensor([4]))
    digests = {forward.digest_of((ids,), {"past_buckets_states": (state,)}) for state in states}
    assert digests == {forward.digest_of((ids,), {})}


class Noting(BaseStreamer):
    def __init__(self) -> None:
        self.tokens: list[int] = []

    def put(self, value: Tensor) -> None:
        self.tokens += value.flatten().tolist()

    def end(self) -> None:
        pass


def own_seeds() -> tuple[list[list[int]], list[int]]:
    split = boosted(zoo.build("llama-tied"), "llama-tied")
    streamer = Noting() if dist.get_rank() == 1 else None
    one = {name: leaf[:1] for name, leaf in prompts("llama-tied").items()}
    torch.manual_seed(7 + dist.get_rank())
    made = split.generate(**one, max_new_tokens=NEW, do_sample=True, streamer=streamer)
    return made.tolist(), [] if streamer is None else streamer.tokens


def watching() -> tuple[bool, bool]:
    """Whether the loop is watched after a generation, and during the next one."""
    split = boosted(zoo.build("llama-tied"), "llama-tied")

    def is_watched() -> bool:
        return any(isinstance(mode, Watching) for mode in modes_entered())

    during: list[bool] = []

    def note(tokens: Tensor, scores: Tensor) -> Tensor:
        during.append(is_watched())
        return scores

    split.generate(**prompts("llama-tied"), max_new_tokens=NEW)
    after = is_watched()
    split.generate(**prompts("llama-tied"), max_new_tokens=NEW, logits_processor=LogitsProcessorList([note]))
    return after, any(during)


@pytest.mark.turns
def test_what_is_generated_is_not_watched_as_the_loop_is(pool: Pool) -> None:
    """The modes that watch a loop's first updates followed every operator of a generation among them, which made
    tokens 20 % slower, or all tokens of a model that is never trained."""
    assert pool.run(watching, 2) == [(True, False)] * 2


@pytest.mark.turns
def test_all_ranks_draw_the_tokens_of_the_first(pool: Pool) -> None:
    """Each rank samples for itself: with generators of their own, stages would read other tokens."""
    alone = zoo.build("llama-tied").eval()
    one = {name: leaf[:1] for name, leaf in prompts("llama-tied").items()}
    torch.manual_seed(7)
    expected = alone.generate(**one, max_new_tokens=NEW, do_sample=True).tolist()
    (first, _), (second, streamed) = pool.run(own_seeds, 2)
    assert first == second == expected
    assert streamed == expected[0]


def with_options(options: dict[str, Any]) -> bool:
    model = zoo.build("llama-tied")
    data = zoo.batch("llama-tied", rows=4)
    alone = copy.deepcopy(model).eval()
    if options.get("precision"):
        alone = alone.bfloat16()
    expected = generated(alone, "llama-tied", **GREEDY)
    split = boosted(model, "llama-tied", **({"pp_size": 2} | options))
    assert data
    return is_same(generated(split, "llama-tied", **GREEDY), expected)


@pytest.mark.turns
@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("world", "options"),
    [
        (2, {"precision": "bf16"}),
        (2, {"schedule": "interleaved", "num_model_chunks": 2}),
        (2, {"schedule": "zbv"}),
        (4, {"dp_size": 2}),
        (1, {"pp_size": 1}),
    ],
    ids=str,
)
def test_generation_beside_other_options(pool: Pool, world: int, options: dict[str, Any]) -> None:
    assert all(pool.run(with_options, world, options))


@pytest.mark.turns
@pytest.mark.processes
def test_generation_with_slices(pool: Pool) -> None:
    assert all(pool.run(with_options, 4, {"tp_size": 2}))


def adapted(name: str, targets: list[str], options: dict[str, Any]) -> bool:
    torch.manual_seed(1)
    config = peft.LoraConfig(r=2, target_modules=targets, init_lora_weights=False)
    model = peft.get_peft_model(zoo.build(name), config)
    expected = generated(copy.deepcopy(model).eval(), name, **GREEDY, **options)
    return is_same(generated(boosted(model, name), name, **GREEDY, **options), expected)


STARTED = {"decoder_input_ids": torch.tensor([[0, 0, 0, 5], [0, 0, 7, 8], [0, 3, 4, 5]])}
STARTED["decoder_attention_mask"] = torch.tensor([[0, 0, 1, 1], [0, 1, 1, 1], [1, 1, 1, 1]])


@pytest.mark.turns
@pytest.mark.parametrize(
    ("name", "targets", "options"),
    [("llama-tied", ["q_proj", "v_proj"], {}), ("t5", ["q", "v"], STARTED)],
    ids=["decoder", "encoder-decoder"],
)
def test_generation_with_adapters(pool: Pool, name: str, targets: list[str], options: dict[str, Any]) -> None:
    assert pool.run(adapted, 2, name, targets, options) == [True, True]


def traced_for_each(name: str) -> list[int]:
    """The number of traces in each of three calls of a PeftModel that sets a method of its base model in each call."""
    task = "SEQ_2_SEQ_LM" if name == "t5" else "CAUSAL_LM"
    config = peft.LoraConfig(task_type=task, r=2, target_modules=["q" if name == "t5" else "q_proj"])
    model = boosted(peft.get_peft_model(zoo.build(name), config), name)
    numbers = []
    for _ in range(3):
        traces = model.pipeline.traces
        with mock.patch.object(traces, "_traced", wraps=traces._traced) as tracing:
            generated(model, name, **GREEDY)
        numbers.append(tracing.call_count)
    return numbers


@pytest.mark.turns
@pytest.mark.parametrize("name", ["llama-tied", "t5"])
def test_a_model_with_adapters_is_traced_once_for_all_calls(pool: Pool, name: str) -> None:
    """In each call, peft assigns the same method to the base model again: each prompt and each decode was traced again,
    and after 16 calls a warning said that the script changes the model."""
    for first, *later in pool.run(traced_for_each, 2, name):
        assert first > 0 and later == [0, 0]


def seeing(name: str, num_microbatches: int | None = None, with_adapters: bool = False) -> bool:
    """Whether prompts with images, all of one size, are answered as in one process."""
    (entry,) = find(name)
    model: Any = build(entry).eval()
    with_caches(model)
    sample = read_batch(model, batch(entry, model)).take(torch.tensor([0, 2, 3, 0])).data  # 1 has a larger image
    prompt = {name: value for name, value in sample.items() if "labels" not in name}
    if with_adapters:
        torch.manual_seed(1)
        adapters = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        model = peft.get_peft_model(model, adapters).eval()
    expected = model.generate(**prompt, max_new_tokens=NEW, **GREEDY)
    engine = initialize(model.train(), pp_size=2, num_microbatches=1, dry_run_input=sample, verify=False)
    assert engine.model is not None
    split = engine.model.eval()
    return torch.equal(
        split.generate(**prompt, max_new_tokens=NEW, num_microbatches=num_microbatches, **GREEDY), expected
    )


@pytest.mark.turns
@pytest.mark.parametrize("name", ["image-text-to-text/qwen2_5_vl", "image-text-to-text/llava"])
def test_adapters_of_a_model_that_sees(pool: Pool, name: str) -> None:
    """In a PeftModel, the base model generates: the list of its images' embeddings was refused as ambiguous, and the
    error's remedy was for training."""
    assert pool.run(seeing, 2, name, with_adapters=True) == [True, True]


@pytest.mark.turns
@pytest.mark.parametrize("name", ["image-text-to-text/qwen2_5_vl", "image-text-to-text/llava"])
def test_prompts_with_images_in_several_microbatches(pool: Pool, name: str) -> None:
    """Patches of the vision tower were split like samples, an error about something else, and so were embeddings if an
    image had as many as there are prompts: wrong tokens without an error."""
    assert pool.run(seeing, 2, name, num_microbatches=2) == [True, True]


def with_own_generate() -> bool:
    whole, split = zoo.build("llama"), zoo.build("llama")
    for model in (whole, split):
        model.generate = partial(model.generate, bad_words_ids=[[k] for k in range(zoo.VOCABULARY // 2)])
    alone = generated(whole.eval(), "llama", **GREEDY)
    usual = generated(zoo.build("llama").eval(), "llama", **GREEDY)
    return is_same(generated(boosted(split, "llama").eval(), "llama", **GREEDY), alone) and not is_same(usual, alone)


@pytest.mark.turns
def test_a_generate_that_was_set_on_the_model_is_called(pool: Pool) -> None:
    """`model.generate = partial(model.generate, language="sinhalese", task="transcribe")`, as in the course on audio:
    the stages called the method of the model's class, so the arguments were ignored without a message."""
    assert pool.run(with_own_generate, 2) == [True] * 2


def with_later_generate() -> list[str]:
    """The errors about a `generate` that is set after boost: on the boosted model, and on the original model."""
    model, errors = boosted(zoo.build("llama"), "llama").eval(), []
    with pytest.raises(UsageError) as error:
        model.generate = partial(model.generate, bad_words_ids=[[1]])
    errors.append(str(error.value))
    generated(model, "llama", **GREEDY)  # still usable
    model.unwrap().generate = partial(model.generate, bad_words_ids=[[1]])
    with pytest.raises(UsageError) as error:
        generated(model, "llama", **GREEDY)
    return [*errors, str(error.value)]


@pytest.mark.turns
def test_a_generate_that_is_set_after_boost_is_refused(pool: Pool) -> None:
    """A script's `model.generate = partial(model.generate, language="sinhalese")` came after boost, where a plain
    script has it: it was kept on the model, but the stages called the method of the model's class without it."""
    for errors in pool.run(with_later_generate, 2):
        for error in errors:
            assert "model.generate must not be replaced after booster.boost" in error
            assert "Set it before booster.boost" in error


def patched() -> list[bool]:
    """Whether the tokens are those of one process: before the model inside is patched, patched, and patched again so
    that it runs a layer less."""
    whole, split = zoo.build("llama").eval(), zoo.build("llama")
    split = boosted(split, "llama")
    inner, plain = (whole.model, split.unwrap().model), (whole.model.forward, split.unwrap().model.forward)

    def negated(own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        output = own(*args, **kwargs)
        output.last_hidden_state = -output.last_hidden_state
        return output

    def shorter(module: nn.Module, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with replaced(module.config, num_hidden_layers=1):
            return own(*args, **kwargs)

    def pair() -> list[Any]:
        return [generated(model, "llama", **GREEDY) for model in (whole, split)]

    results = [pair()]
    for module, own in zip(inner, plain, strict=True):
        module.forward = partial(negated, own)
    results.append(pair())
    for module, own in zip(inner, plain, strict=True):
        module.forward = partial(shorter, module, own)
    results.append(pair())
    assert not is_same(results[0][0], results[1][0]) and not is_same(results[0][0], results[2][0])
    return [is_same(*made) for made in results]


@pytest.mark.turns
def test_a_forward_that_is_patched_between_calls_runs(pool: Pool) -> None:
    """A user patched the inner model after `generate`. Later calls ran the earlier forward, without an error."""
    assert pool.run(patched, 2) == [[True] * 3] * 2


def for_each_prompt(kind: str) -> bool:
    """Whether the tokens are those of one process if something outside of the forward's arguments has one entry for
    each prompt, and prompts are long enough for microbatches."""
    base: Any = zoo.build("llama-tied")
    options = GREEDY | {"return_dict_in_generate": True, "output_scores": True}
    steering = torch.randn(3, 1, 32, generator=torch.Generator().manual_seed(3))
    if kind == "adapters":
        config = peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj"], init_lora_weights=False)
        base = peft.get_peft_model(base, config, adapter_name="a")
        base.add_adapter("b", config)
        options["adapter_names"] = ["a", "b", "a"]
    alone = copy.deepcopy(base).eval()
    split = boosted(base, "llama-tied", num_microbatches=1)
    found = []
    for model, whole in ((split, split.unwrap()), (alone, alone)):
        if kind == "steering":
            whole.model.layers[0].register_forward_hook(lambda layer, args, output: output + steering)
        found.append(generated(model, "llama-tied", **options))
    return is_same(*found, tolerance=1e-4)


@pytest.mark.turns
@pytest.mark.processes
@pytest.mark.parametrize("kind", ["adapters", "steering"])
@pytest.mark.parametrize("least", [7, 10], ids=["each", "two"])
def test_long_prompts_with_an_adapter_or_a_vector_for_each(pool: Pool, kind: str, least: int) -> None:
    """Only batches of 512 tokens and more failed: their microbatches met the names of the whole batch's adapters, or,
    one prompt each, became as many rows as the batch has, and all rows were answered as the first prompt."""
    assert pool.run(with_tokens, 2, least, kind) == [True, True]


def with_tokens(least: int, kind: str) -> bool:
    """The same with at least `least` tokens in a microbatch: 21 tokens are 3 or 2 of them."""
    with mock.patch.object(forward, "TOKENS", least):
        return for_each_prompt(kind)


def refused(options: dict[str, Any], asked: dict[str, Any]) -> str:
    split = boosted(zoo.build("llama-tied"), "llama-tied", **options)
    with pytest.raises(PipeshardError) as caught:
        generated(split, "llama-tied", **asked)
    return f"{type(caught.value).__name__}: {caught.value}"


@pytest.mark.processes
def guessing() -> list[bool]:
    """Whether tokens guessed from the prompt are checked as in one process, wherever the config says so."""
    model = zoo.build("llama")
    prompt = torch.tensor([[3, 4, 5, 6, 3, 4, 5, 6, 3, 4]])
    config = GenerationConfig(prompt_lookup_num_tokens=3, max_new_tokens=12, do_sample=False)
    expected = model.generate(prompt, generation_config=config)
    split = boosted(copy.deepcopy(model), "llama")
    found = [split.generate(prompt, generation_config=config)]
    split.unwrap().generation_config = config
    found.append(split.generate(prompt))
    return [torch.equal(expected, one) for one in found]


@pytest.mark.turns
def test_guessed_tokens_are_those_of_one_process(pool: Pool) -> None:
    """Ranks received only the logits of the last position, unless an argument of `generate` itself asked to guess."""
    assert pool.run(guessing, 2) == [[True, True]] * 2


def timed() -> list[str]:
    """The errors of calls that stop by the clock; a model on one rank may."""
    split, config = boosted(zoo.build("llama"), "llama"), GenerationConfig(max_time=20.0, max_new_tokens=2)
    ways: list[dict[str, Any]] = [{"max_time": 20.0}, {"generation_config": config}]
    ways.append({"stopping_criteria": StoppingCriteriaList([MaxTimeCriteria(20.0)])})
    if dist.get_world_size() == 1:
        return [str(split.generate(**prompts("llama"), **way, max_new_tokens=2).shape[0]) for way in ways[:1]]
    messages = []
    for way in ways:
        with pytest.raises(ConfigurationError) as caught:
            split.generate(**prompts("llama"), **way)
        messages.append(str(caught.value))
    return messages


@pytest.mark.turns
def test_a_limit_of_time_is_refused(pool: Pool) -> None:
    """Ranks that read other times left the loop at other tokens, and the others waited for them."""
    for messages in pool.run(timed, 2):
        assert len(messages) == 3 and all("max_time is not supported in a pipeline" in one for one in messages)
    assert pool.run(timed, 1) == [["3"]]


def batched_continuously(options: dict[str, Any]) -> list[str]:
    """The errors of each way to continuous batching."""
    split, ids = boosted(zoo.build("llama"), "llama", **options), prompts("llama")["input_ids"]
    ways: list[Callable[[], Any]] = [
        lambda: split.generate_batch(ids.tolist(), max_new_tokens=2),
        lambda: split.unwrap().generate_batch(ids.tolist(), max_new_tokens=2),  # a Trainer's trainer.model
        split.init_continuous_batching,
        lambda: split.generate(ids, max_new_tokens=2, cache_implementation="paged"),
    ]
    messages = []
    for way in ways:
        with pytest.raises(UsageError) as caught:
            way()
        messages.append(str(caught.value))
    whole = to_sequential(split)
    assert whole is not None and "init_continuous_batching" not in vars(whole)
    return messages


@pytest.mark.turns
@pytest.mark.parametrize("options", [{}, {"pp_size": 1, "tp_size": 2}])
def test_continuous_batching_is_refused(pool: Pool, options: dict[str, Any]) -> None:
    """A thread of transformers called one stage as if it were the whole model, and the user's call did not return."""
    for messages in pool.run(batched_continuously, 2, options):
        assert all("call model.generate(...) of the boosted model" in message for message in messages)


@pytest.mark.turns
def test_sharded_parameters_are_refused(pool: Pool) -> None:
    for message in pool.run(refused, 4, {"pp_size": 2, "fsdp": True}, {}):
        assert message.startswith(
            f"{ConfigurationError.__name__}: PipelinePlugin(fsdp=True) does not support generation"
        )


class Summing(nn.Module):
    """A layer that reads the keys of the layer before it."""

    def __init__(self, layer: nn.Module, k: int) -> None:
        super().__init__()
        self.layer, self.k = layer, k

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Any:
        cache = next(filter(None, map(kwargs.get, LAYER_CACHES)), None)
        if cache is not None and self.k:
            hidden_states = hidden_states + 0.1 * cache.layers[self.k - 1].keys.mean()
        return self.layer(hidden_states, **kwargs)


@pytest.mark.turns
@pytest.mark.processes
def test_a_layer_that_reads_another_stage_s_states_is_refused(pool: Pool) -> None:
    with pytest.raises(WorkerError, match=r"a layer of stage 1 reads a cache entry of a layer on another stage"):
        pool.run(reading_others_raising, 2)


def reading_others_raising() -> None:
    model: Any = zoo.build("llama-tied")
    for k, layer in enumerate(model.model.layers):
        model.model.layers[k] = Summing(layer, k)
    generated(boosted(model, "llama-tied"), "llama-tied", **GREEDY)


def without_ghosts() -> list[str]:
    with mock.patch.object(Entries, "update", lambda self, changes: None):
        return as_alone("llama-tied", None, [*MODES])


def without_generators() -> tuple[list[list[int]], list[int]]:
    with mock.patch.object(Generation, "_share_generators", lambda self: None):
        return own_seeds()


@pytest.mark.turns
@pytest.mark.processes
def test_mutations_are_seen(pool: Pool) -> None:
    """Lengths of other stages' layers that are missing, and a generator for each rank."""
    for mutated in (without_ghosts, without_generators):
        with pytest.raises(WorkerError, match="the ranks of one pipeline have different tokens"):
            pool.run(mutated, 2)


def traced_by_others() -> str:
    model = boosted(zoo.build("llama-tied"), "llama-tied")
    failing = mock.patch.object(Traces, "find", side_effect=TraceError("unit lm_head does not run"))
    with failing if dist.get_rank() == 0 else nullcontext(), pytest.raises(TraceError) as caught:
        generated(model, "llama-tied")
    return str(caught.value)


@pytest.mark.processes
@pytest.mark.turns
def test_a_rank_whose_trace_fails_is_named_on_the_others(pool: Pool) -> None:
    """The others were told to pass the same prompts and to use the same seed, which they did."""
    first, second = pool.run(traced_by_others, 2)
    assert "unit lm_head does not run" in first
    assert "cannot run on several stages: see the error of rank 0 (stage 0)" in second


def guided() -> str:
    model, options = (
        build(find("seq2seq-lm/bart")[0], encoder_layers=6, decoder_layers=2),
        GREEDY | {"guidance_scale": 1.5},
    )
    alone = copy.deepcopy(model).eval()
    split = boosted(model, "t5")
    with pytest.raises(UsageError) as caught:
        generated(split, "t5", **options)
    made, expected = (generated(each, "t5", use_cache=False, **options) for each in (split, alone))
    assert is_same(made, expected)
    return str(caught.value)


@pytest.mark.turns
def test_a_cache_that_only_later_stages_create_is_refused(pool: Pool) -> None:
    """Guidance calls an encoder-decoder without a cache, and the decoder creates one. The encoder's rank failed:
    "another rank's message refers to cache 0 ... call generate with the same prompts", which they were."""
    for message in pool.run(guided, 2):
        assert "BartForConditionalGeneration creates a cache in its forward" in message and "use_cache=False" in message


def guided_by_chunks() -> str:
    model, options = zoo.build("llama-tied"), GREEDY | {"guidance_scale": 1.5}
    alone = copy.deepcopy(model).eval()
    split = boosted(model, "llama-tied", schedule="interleaved", num_model_chunks=2)
    made, expected = (generated(each, "llama-tied", use_cache=False, **options) for each in (split, alone))
    assert is_same(made, expected)
    with pytest.raises(PipeshardError) as caught:
        generated(split, "llama-tied", **options)
    return str(caught.value)


@pytest.mark.turns
def test_a_cache_that_several_stages_of_a_rank_create_is_refused(pool: Pool) -> None:
    """Guidance calls the model without a cache, and each stage of a rank created one. The error named microbatches, and
    asked for num_microbatches=1, with which it was raised again."""
    for message in pool.run(guided_by_chunks, 2):
        assert (
            "LlamaForCausalLM creates a cache in its forward, but the caches of several stages of a rank cannot be "
            "merged: call model.generate(..., use_cache=False)" in message
        )


def plain_module() -> bool:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    plugin = PipelinePlugin(2, num_microbatches=1, dry_run_input=(torch.randn(2, 4),), verify=False)
    split, *_ = plugin.configure(model, criterion=lambda output, batch: output.sum())
    return hasattr(split, "generate")


def broadcast_by(rank: int, output: Any, of_last: dict[str, Any]) -> list[Tensor]:
    """The tensors that a rank of two broadcasts for the output of the last rank, whose message is `of_last`."""
    policy = SimpleNamespace(placement=[0, 1])
    pipeline: Any = SimpleNamespace(rank=rank, last_rank=1, policy=policy, device=torch.device("meta"), group=None)
    entry: Any = SimpleNamespace(leaves=[], data={})
    tensors: list[Tensor] = []

    def gathered(said: Any, group: None) -> list[Any]:
        of_last.update(said if rank == 1 else {})
        return [{"caches": []}, of_last]

    with replaced(forward, _gathered=gathered, broadcast_bytes=lambda tensor, *_: tensors.append(tensor)):
        forward.Forward(pipeline)._share(output, entry, [])
    return tensors


def test_all_ranks_broadcast_a_tensor_of_the_output_from_the_same_kind_of_device() -> None:
    """With NCCL, generate hung if an output contained a tensor on the CPU, such as a counter: the last rank broadcast
    it with gloo, and the others received it on their GPUs, with NCCL. Here, meta stands for the GPU."""
    said: dict[str, Any] = {}
    sent = broadcast_by(1, {"calls": torch.tensor(1), "logits": torch.zeros(2, 3, device="meta")}, said)
    received = broadcast_by(0, None, said)
    assert [tensor.device.type for tensor in received] == [tensor.device.type for tensor in sent] == ["cpu", "meta"]


def test_a_model_that_does_not_generate_has_no_generate(pool: Pool) -> None:
    assert pool.run(plain_module, 2) == [False, False]


@pytest.mark.turns
@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "name",
    [
        *("causal-lm/mamba", "causal-lm/jamba", "causal-lm/gemma3_text", "causal-lm/qwen3_moe", "causal-lm/bloom"),
        *("seq2seq-lm/bart", "seq2seq-lm/switch_transformers", "speech-seq2seq/whisper"),
        *("image-text-to-text/llava", "image-text-to-text/idefics3", "speech-seq2seq/granite_speech"),
    ],
)
def test_architecture_generates(pool: Pool, name: str) -> None:
    (entry,) = find(name)
    assert {verdict.kind for verdict in pool.run(check_generation, 2, entry)} <= {"bitwise", "close"}


def scaled(entry: Entry) -> Verdict:
    def of_larger_scores(model: Any, *given: Any) -> Any:
        output = generated_of_parity(model, *given)
        if scores(output) and hasattr(model, "unwrap"):
            output.scores = tuple(1.01 * score for score in output.scores)
        return output

    with mock.patch("tests.parity.generating.generated", of_larger_scores):
        return check_generation(entry)


@pytest.mark.turns
def test_scores_of_an_architecture_are_those_of_the_unsplit_model(pool: Pool) -> None:
    """Whatever scores were, the outcome was "close" as long as the largest one was that of the same token."""
    (found,) = pool.run(scaled, 1, find("causal-lm/gpt2")[0])
    assert (found.kind, found.reason) == ("wrong", "scores: scores differ by 1.0e-02 of the largest one")


def test_scores_that_are_not_finite_are_those_of_the_unsplit_model() -> None:
    score, infinite = torch.tensor([2.0, -4.0, 1.0]), torch.tensor([2.0, -4.0, float("-inf")])
    assert score_error(score + 1e-6, score) < 1e-6 and score_error(infinite, infinite) == 0
    assert score_error(torch.tensor([2.0, -4.0, float("nan")]), score) == score_error(score, infinite) == float("inf")


def test_page_of_generation() -> None:
    rows = [Row("causal-lm/a", p, "bitwise") for p in (2, 3)]
    rows += [Row("causal-lm/b", 2, "refused", reason="TraceError: why"), Row("causal-lm/c", 2, "untrainable")]
    text = PAGE.of(rows, {"torch": "1"})
    assert "Of 3 architectures in" in text and "2 generate unsplit. **1** of these (50.0%)" in text
    assert "| causal-lm/b | 2 | refused | TraceError: why |" in text and "| causal-lm/c |" not in text
    assert len(PAGE.tasks) == 4


def written() -> list[Any]:
    """transformers' own text-generation pipeline on a boosted model."""
    words = Tokenizer(models.WordLevel({f"w{k}": k for k in range(zoo.VOCABULARY)}, unk_token="w1"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token="w2")
    model = zoo.build("llama")
    unsplit = copy.deepcopy(model).eval()
    return [
        pipeline("text-generation", model=each, tokenizer=tokenizer)("w5 w6 w7", max_new_tokens=4, do_sample=False)
        for each in (unsplit, boosted(model, "llama"))
    ]


@pytest.mark.turns
def test_text_generation_pipeline_takes_a_boosted_model(pool: Pool) -> None:
    for unsplit, split in pool.run(written, 2):
        assert split == unsplit
