"""Tests of scripts from Hugging Face, torch and ColossalAI: they work, or get one error with the remedy."""

from __future__ import annotations

import copy
import json
import logging
import os
from argparse import Namespace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from colossalai.booster import Booster
from colossalai.lazy import LazyInitContext
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, SequentialSampler
from transformers import (
    AutoModelForCausalLM,
    DataCollatorForLanguageModeling,
    GPT2Config,
    GPT2ForSequenceClassification,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
    get_cosine_schedule_with_warmup,
)

from pipeshard import PipelinePlugin
from pipeshard.engine.optimizer import PipelineOptimizer
from pipeshard.engine.refusals import uncompiled
from pipeshard.errors import CheckpointError, ConfigurationError, PipeshardError, UsageError
from pipeshard.recipe import folder_of
from tests import zoo
from tests.messages import assert_told
from tests.pool import Pool
from tests.unsplit import Split, Unsplit, differences, gradient_error, parameter_error

pytestmark = pytest.mark.local


def split_in_two(name: str = "llama", **options: Any) -> Split:
    return Split(zoo.build(name), dist.get_world_size(), zoo.batch(name), **{"num_microbatches": 2, **options})


def habits(folder: str) -> list[str]:
    """What is typed by habit, one after the other, and what is said of it; then a step that is exact."""
    model = zoo.build("llama")
    unsplit = Unsplit(copy.deepcopy(model))
    data = zoo.batch("llama")
    split = Split(model, dist.get_world_size(), data, num_microbatches=2)
    boosted, execute = split.model, split.booster.execute_pipeline
    loss = split.backward(data)["loss"]
    split.optimizer.zero_grad()
    assert f"{loss:.3f}" == f"{float(loss):.3f}" and repr(loss).startswith("tensor(")
    assert type(copy.deepcopy(loss)) is type(loss / 2) is type(loss.detach()) is Tensor
    assert boosted.config is boosted.unwrap().config and boosted.dtype is torch.float32
    boosted.gradient_checkpointing_enable()
    boosted.gradient_checkpointing_disable()

    def trainer() -> None:
        arguments = TrainingArguments(folder, max_steps=1, report_to=[], use_cpu=True)
        Trainer(model=boosted, args=arguments, train_dataset=[data]).train()

    attempts = [
        lambda: loss.backward(),
        lambda: boosted.unwrap().generate(data["input_ids"]),
        lambda: boosted.save_pretrained(folder),
        lambda: DistributedDataParallel(boosted),
        lambda: Accelerator(cpu=True).prepare(boosted),
        trainer,
        lambda: copy.deepcopy(split.optimizer),
        lambda: execute(iter([data]), boosted, nn.CrossEntropyLoss(), split.optimizer),
        lambda: execute(iter([data]), boosted, nn.functional.mse_loss, split.optimizer),
        lambda: execute(iter([data]), boosted, lambda: 0.0, split.optimizer),
        lambda: execute(iter([data]), boosted, "cross_entropy", split.optimizer),  # type: ignore[arg-type]
    ]
    messages = []
    for attempt in attempts:
        with pytest.raises(PipeshardError) as caught:
            attempt()
        messages.append(f"{type(caught.value).__name__}: {caught.value}")
    assert not differences(split, unsplit, data, num_microbatches=2)
    return messages


@pytest.mark.turns
def test_habits_are_answered_by_name(pool: Pool, tmp_path: Any) -> None:
    """`out["loss"].backward()` said that element 0 has no grad_fn, `model.config` that there is none, DDP that ranks
    have other parameters, and CrossEntropyLoss that its argument must be a Tensor."""
    expected = [
        "UsageError: execute_pipeline already runs the backward pass",
        "UsageError: .*(to_sequential|execute_pipeline)",
        "UsageError: save_pretrained: .*booster.save_model",
        "UsageError: DistributedDataParallel cannot wrap a boosted model",
        "UsageError: accelerate .* cannot wrap a boosted model.*execute_pipeline",
        "UsageError: accelerate .* cannot wrap a boosted model",
        "UsageError: an optimizer of a boosted model cannot be copied or pickled.*booster.save_optimizer",
        "ConfigurationError: CrossEntropyLoss takes tensors, but a criterion .* the model's output .CausalLMOutput.*",
        "ConfigurationError: mse_loss takes tensors, but",
        r"ConfigurationError: the criterion must accept \(outputs, inputs\) or only outputs, but it accepts \(\)",
        r"ConfigurationError: the criterion must be callable as criterion\(outputs, inputs\) or criterion\(outputs\), "
        "got an object of class str",
    ]
    for messages in pool.run(habits, 2, str(tmp_path)):
        assert_told(messages, expected)


def of_outputs(outputs: Any) -> Any:
    return outputs.loss


def one_argument() -> None:
    data, model = zoo.batch("llama"), zoo.build("llama")
    unsplit = Unsplit(copy.deepcopy(model))
    split = object.__new__(Split)
    split.plugin = PipelinePlugin(pp_size=dist.get_world_size(), num_microbatches=2, dry_run_input=data)
    split.booster = Booster(plugin=split.plugin)
    raw = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def fails_on_outputs(x: Any) -> Any:
        return x["mean"].mean()

    split.model, split.optimizer, criterion, *_ = split.booster.boost(model, raw, fails_on_outputs)
    assert criterion is fails_on_outputs  # the script calls it itself
    run = split.booster.execute_pipeline
    for one in (lambda outputs, inputs: criterion({"mean": outputs.logits}), of_outputs):
        loss = run(iter([data]), split.model, one, split.optimizer, return_loss=True)["loss"]
        assert loss.shape == ()
        split.optimizer.zero_grad()
    reference = unsplit.backward_in_parts(data, num_microbatches=2)
    assert torch.equal(run(iter([data]), split.model, of_outputs, split.optimizer)["loss"], reference)


@pytest.mark.turns
def test_a_criterion_of_the_outputs_alone(pool: Pool) -> None:
    """ColossalAI's tests give `boost` a loss function of one argument, and call it themselves: it was called with two,
    which was a TypeError."""
    pool.run(one_argument, 2)


def scheduled_afterwards() -> None:
    """A schedule of transformers, and one of torch with momentum, of what boost returned."""
    model = zoo.build("llama")
    unsplit = Unsplit(copy.deepcopy(model))
    data = zoo.batch("llama")
    split = Split(model, dist.get_world_size(), data, num_microbatches=2)
    assert isinstance(split.optimizer, torch.optim.Optimizer)
    schedulers = [get_cosine_schedule_with_warmup(one.optimizer, 2, 8) for one in (split, unsplit)]
    seen: list[int] = []
    split.optimizer.register_step_post_hook(lambda *_: seen.append(len(split.optimizer.state)))
    for _ in range(3):
        assert not differences(split, unsplit, data, tolerance=1e-5)
        unsplit.step()
        split.step()
        for scheduler in schedulers:
            scheduler.step()
        assert schedulers[0].get_last_lr() == schedulers[1].get_last_lr()
        assert split.optimizer.param_groups[0]["lr"] == unsplit.optimizer.param_groups[0]["lr"]
    assert parameter_error(split, unsplit.model) < 1e-5 and len(seen) == 3 and seen[-1] > 0
    torch.optim.lr_scheduler.OneCycleLR(split.optimizer, max_lr=0.1, total_steps=4).step()
    assert isinstance(split.optimizer, PipelineOptimizer)


@pytest.mark.turns
def test_a_scheduler_may_be_made_after_boost(pool: Pool) -> None:
    """It was a TypeError: PipelineOptimizer is not an Optimizer."""
    pool.run(scheduled_afterwards, 2)


class Tokenized:
    """What a `datasets.Dataset` of a tokenizer gives: columns of lists."""

    def __init__(self, count: int = 8) -> None:
        ids = torch.randint(3, zoo.VOCABULARY, (count, 8), generator=torch.Generator().manual_seed(0)).tolist()
        self.rows = [{"input_ids": row, "attention_mask": [1] * 8, "labels": row} for row in ids]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, k: int) -> dict[str, list[int]]:
        return self.rows[k]


def loaders() -> None:
    """Lists of tokens, a batch sampler, and one that masks at random, with ranks that are seeded apart."""
    torch.manual_seed(0)
    model = zoo.build("llama")
    torch.manual_seed(dist.get_rank())

    def mask(samples: Any) -> Any:
        batch = {key: torch.tensor([sample[key] for sample in samples]) for key in samples[0]}
        return {**batch, "labels": torch.where(torch.rand(batch["labels"].shape) < 0.5, batch["labels"], -100)}

    words = {"[PAD]": 0, "[MASK]": 1, "[UNK]": 2} | {f"word {k}": k for k in range(3, zoo.VOCABULARY)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="[UNK]")), pad_token="[PAD]", mask_token="[MASK]"
    )
    for options in (
        {"batch_size": 4},
        {"batch_size": 4, "collate_fn": mask},
        {"batch_size": 4, "collate_fn": DataCollatorForLanguageModeling(tokenizer, mlm=True)},
        {"batch_size": 1, "batch_sampler": BatchSampler(SequentialSampler(range(8)), 4, False)},
    ):
        plugin = PipelinePlugin(pp_size=dist.get_world_size(), num_microbatches=2)
        loader = plugin.prepare_dataloader(Tokenized(), **options)
        own = copy.deepcopy(model)
        booster = Booster(plugin=plugin)
        boosted, optimizer, *_ = booster.boost(own, torch.optim.SGD(own.parameters(), lr=0.1), None, loader)
        batches = iter(loader)
        for _ in range(len(loader)):
            assert booster.execute_pipeline(batches, boosted, None, optimizer)["loss"] > 0


@pytest.mark.turns
def test_loaders_as_the_trainer_has_them(pool: Pool) -> None:
    """A tokenized dataset, a `batch_sampler` (KeyError: 0) and a random collator train."""
    pool.run(loaders, 2)


class Backwards(DistributedSampler[int]):
    """A sampler of one's own, in the order that it wants."""

    def __iter__(self) -> Any:
        return iter(range(self.num_samples - 1, -1, -1))


def own_sampler() -> list[list[int]]:
    """The samples of this rank's replica, by what ColossalAI's `distributed_sampler_cls` says of all of them."""
    plugin = PipelinePlugin(pp_size=1, dp_size=dist.get_world_size(), num_microbatches=2)
    loader: Any = plugin.prepare_dataloader(list(range(8)), 2, distributed_sampler_cls=Backwards)  # type: ignore[arg-type]
    loader.sampler.set_epoch(1)
    orders = {
        tuple(next(iter(plugin.prepare_dataloader(range(64), 64, True, distributed_sampler_cls=kind))).tolist())  # type: ignore[arg-type]
        for kind in (partial(DistributedSampler, seed=seed) for seed in (1, 2))
    }
    assert len(orders) == 2, "a partial did not choose the seed of torch's DistributedSampler"
    return [batch.tolist() for batch in loader]


def test_a_class_of_samplers_is_asked_for_the_order_of_all(pool: Pool) -> None:
    """`prepare_dataloader(distributed_sampler_cls=...)` was a TypeError of DataLoader."""
    assert pool.run(own_sampler, 2) == [[[7, 6], [3, 2]], [[5, 4], [1, 0]]]


def test_without_torchrun_the_plugin_says_how_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: False)  # another test may have needed a world of one process
    with pytest.raises(ConfigurationError, match=r"init_process_group.*started with torchrun --nproc-per-node N"):
        PipelinePlugin(pp_size=2, num_microbatches=2)


class RectifiesItsInput(nn.Module):
    """Writes to the batch itself, before anything else, and to what its layers make."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.ReLU(inplace=True), nn.Linear(6, 6)) for _ in range(4))

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        for layer in self.layers:
            x = layer(x)
        return {"loss": nn.functional.cross_entropy(x, labels)}


def in_place_on_the_batch(**options: Any) -> None:
    torch.manual_seed(0)
    model = RectifiesItsInput()
    plain = copy.deepcopy(model)
    split, optimizer = None, torch.optim.AdamW(plain.parameters(), lr=1e-3)
    for _ in range(3):
        x, labels = torch.randn(8, 6), torch.arange(8) % 6
        split = split or Split(model, dist.get_world_size(), {"x": x.clone(), "labels": labels}, **options)
        loss = plain(x.clone(), labels)["loss"]
        loss.backward()
        assert float(split.backward({"x": x.clone(), "labels": labels})["loss"]) == pytest.approx(float(loss), rel=1e-6)
        assert gradient_error(split, plain) < 1e-5
        optimizer.step()
        optimizer.zero_grad()
        split.step()


@pytest.mark.turns
@pytest.mark.parametrize("options", [{}, {"schedule": "gpipe"}, {"schedule": "gpipe", "recompute": True}], ids=str)
def test_what_writes_to_the_batch_is_exact(pool: Pool, options: dict[str, Any]) -> None:
    """gpipe with recompute was refused, since all slices of a batch share a version."""
    pool.run(in_place_on_the_batch, 2, num_microbatches=4, **options)


def boosted_with_a_loss_of_tensors() -> None:
    plugin = PipelinePlugin(pp_size=dist.get_world_size(), num_microbatches=2, dry_run_input=zoo.batch("llama"))
    Booster(plugin=plugin).boost(zoo.build("llama"), None, nn.CrossEntropyLoss())


def test_a_criterion_of_tensors_is_refused_at_boost(pool: Pool) -> None:
    """It was a TypeError: argument 'input' must be Tensor, not CausalLMOutputWithPast."""
    for message in pool.run_expecting(ConfigurationError, boosted_with_a_loss_of_tensors, 2):
        assert "CrossEntropyLoss takes tensors, but a criterion is called with the model's output" in message


def trained_in_16_bits(**options: Any) -> list[str]:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("pipeshard").addHandler(handler)
    try:
        Split(
            zoo.build("llama").to(torch.bfloat16),
            dist.get_world_size(),
            zoo.batch("llama"),
            num_microbatches=2,
            **options,
        )
    finally:
        logging.getLogger("pipeshard").removeHandler(handler)
    return [text for text in said if "fp32 master weights" in text]


@pytest.mark.turns
@pytest.mark.processes
def test_training_in_16_bits_alone_is_said_once(pool: Pool) -> None:
    """transformers 5 loads a bf16 checkpoint as it is: nine updates of ten were rounded away without a word."""
    first, second = pool.run(trained_in_16_bits, 2)
    assert len(first) == 1 and not second
    assert "torch.bfloat16" in first[0] and "PipelinePlugin(precision='bf16')" in first[0]
    assert pool.run(trained_in_16_bits, 2, precision="bf16") == [[], []]


def whole(precision: str) -> None:
    """`model(**batch)` and `booster.backward`, over two halves of a batch, on one or two replicas, beside a step that
    cuts the batch in two, and beside plain torch."""
    model, world = zoo.build("llama-tied"), dist.get_world_size()
    plain = Unsplit(copy.deepcopy(model), max_norm=0.5)
    options = {"precision": precision, "max_norm": 0.5, "dry_run_input": zoo.batch("llama")}
    called = Split(copy.deepcopy(model), 1, num_microbatches=None, sample=options.pop("dry_run_input"), **options)
    stepped = Split(model, 1, zoo.batch("llama"), num_microbatches=2, **options)
    assert not called.plugin.enable_pipeline_parallelism
    for seed in range(3):
        ids = zoo.batch("llama", seed=seed)["input_ids"]
        own = ids.chunk(world)[dist.get_rank()]
        for half in own.chunk(2):
            output = called.model(input_ids=half, labels=half)
            if world > 1 or precision == "fp16":
                with pytest.raises(UsageError, match=r"call booster.backward\(loss, optimizer\)"):
                    (output.loss / 2).backward(retain_graph=True)
            called.booster.backward(output.loss / 2, called.optimizer)
        stepped.backward({"input_ids": own, "labels": own})
        plain.backward({"input_ids": ids, "labels": ids})
        for one in (called, stepped, plain):
            one.step()
        norms = [one.optimizer.get_grad_norm() for one in (called, stepped)]
        assert norms[0] == pytest.approx(norms[1], rel=1e-5)
        assert norms[0] == pytest.approx(float(plain.norm), rel=1e-5 if precision == "fp32" else 0.1)  # type: ignore[arg-type]
    assert parameter_error(called, stepped.model.unwrap()) < (1e-6 if precision == "fp32" else 1e-3)
    if precision == "fp32":
        assert parameter_error(called, plain.model) < 1e-5
    with torch.no_grad():
        assert called.model(input_ids=ids).loss is None
        logits = called.model(input_ids=ids).logits
    evaluated = called.evaluate({"input_ids": ids}, return_outputs=True, return_loss=False)["outputs"]
    assert torch.equal(logits, evaluated.logits)


@pytest.mark.turns
@pytest.mark.sampled(2)
@pytest.mark.parametrize(("precision", "world"), [("fp32", 1), ("fp32", 2), ("bf16", 2), ("fp16", 1)])
def test_one_stage_can_be_called_as_a_plain_model(pool: Pool, precision: str, world: int) -> None:
    """Scripts have `if plugin.pp_size > 1: execute_pipeline(...) else: model(**batch)`, whose other branch was lost."""
    pool.run(whole, world, precision)


def whole_but_for(**options: Any) -> None:
    data = zoo.batch("llama")
    split = Split(zoo.build("llama"), 1, data, num_microbatches=2, **options)
    with pytest.raises(UsageError, match=r"use execute_pipeline"):
        split.model(**data)


@pytest.mark.processes
@pytest.mark.turns
def test_sharded_parameters_are_not_called(pool: Pool) -> None:
    """Units are gathered by a step alone."""
    pool.run(whole_but_for, 2, fsdp=True)


def one_by_one() -> None:
    """Trained beside the unsplit model, sample by sample, with two lengths."""
    config = GPT2Config(vocab_size=61, n_embd=32, n_layer=3, n_head=4, n_positions=32, num_labels=3)
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    torch.manual_seed(0)
    model = GPT2ForSequenceClassification(config).train()
    unsplit = Unsplit(copy.deepcopy(model))
    ids = torch.randint(61, (4, 9), generator=torch.Generator().manual_seed(0))
    data = {"input_ids": ids, "labels": torch.tensor([0, 2, 1, 1])}
    loader: Any = DataLoader([{key: value[k] for key, value in data.items()} for k in range(4)], batch_size=4)
    split = object.__new__(Split)
    split.plugin = PipelinePlugin(pp_size=dist.get_world_size(), microbatch_size=1, loss_reduction="microbatch")
    split.booster = Booster(plugin=split.plugin)
    raw = torch.optim.AdamW(model.parameters(), lr=1e-3)
    split.model, split.optimizer, *_ = split.booster.boost(model, raw, None, loader)
    for length in (9, 5, 9):
        batch = {**data, "input_ids": ids[:, :length]}
        loss = split.backward(batch)["loss"]
        reference = 0.0
        for k in range(4):
            part = unsplit.model(**{key: value[k : k + 1] for key, value in batch.items()}).loss / 4
            part.backward()
            reference += float(part.detach())
        assert float(loss) == pytest.approx(reference, rel=1e-6)
        assert gradient_error(split, unsplit.model) < 1e-5
        unsplit.step()
        split.step()
    assert parameter_error(split, unsplit.model) < 1e-5


@pytest.mark.turns
def test_a_model_that_takes_one_sample_at_a_time(pool: Pool) -> None:
    """A classifier without a padding token was refused, since it was traced with several samples."""
    pool.run(one_by_one, 2)


def lazily() -> None:
    with LazyInitContext():
        model = zoo.build("llama")
    Split(model, dist.get_world_size(), zoo.batch("llama"), num_microbatches=2)


def test_lazy_tensors_of_colossalai_are_refused_by_name(pool: Pool) -> None:
    """It was a RuntimeError: META device type not an accelerator."""
    for message in pool.run_expecting(ConfigurationError, lazily, 2):
        assert "under colossalai's LazyInitContext" in message and "torch.device('meta')" in message


def test_lazy_modules_of_torch_are_refused_by_name() -> None:
    """A LazyLinear that had not seen a batch was an error of torch's about the shape of a parameter, without a name."""
    with pytest.raises(ConfigurationError, match=r"1.weight belongs to a torch Lazy module, so .* run the model on"):
        uncompiled(nn.Sequential(nn.Linear(4, 4), nn.LazyLinear(4)))


def test_layers_of_bitsandbytes_are_refused_by_name() -> None:
    """In four bits the first step ended: a layer was not what it had been when the model was boosted."""
    bitsandbytes = pytest.importorskip("bitsandbytes")
    model = nn.Sequential(nn.Linear(4, 4), bitsandbytes.nn.Linear4bit(4, 4))
    with pytest.raises(ConfigurationError, match="1 is a bitsandbytes Linear4bit, which stages cannot hold"):
        uncompiled(model)


def test_a_name_of_the_hub_is_looked_for_in_its_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`from_pretrained(AutoModel, "owner/name")` said that there is no such folder, and no more."""
    with pytest.raises(CheckpointError, match=r"huggingface_hub.snapshot_download\('owner/name'\)"):
        PipelinePlugin.from_pretrained(AutoModelForCausalLM, "owner/name")
    with pytest.raises(
        CheckpointError,
        match=r"no/such/folder is neither a folder nor the name of a model on the Hub: pass a folder .* wrote$",
    ):
        PipelinePlugin.from_pretrained(AutoModelForCausalLM, "no/such/folder")
    folder = in_cache(tmp_path, monkeypatch)
    zoo.build("llama").save_pretrained(folder)  # type: ignore[operator]
    model: Any = PipelinePlugin.from_pretrained(AutoModelForCausalLM, "owner/name")
    assert model.config.num_hidden_layers == 4 and model._pretrained == str(folder)


def in_cache(root: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The empty folder of owner/name in a cache of the Hub, which `root` becomes."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(root))
    cache, commit = root / "models--owner--name", "0" * 40
    (cache / "refs").mkdir(parents=True)
    (cache / "refs" / "main").write_text(commit)
    folder = cache / "snapshots" / commit
    folder.mkdir(parents=True)
    return folder


@pytest.mark.parametrize("lost", ["*.safetensors*", "*-00002-of-*"])
def test_a_part_of_a_model_in_the_cache_is_no_model(lost: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script had made its tokenizer of the same name, which left only the config in the cache: the model was
    accepted, and every rank ended, after the trace, with a path in the cache that has no checkpoint."""
    folder = in_cache(tmp_path, monkeypatch)
    zoo.build("llama").save_pretrained(folder, max_shard_size="60KB")  # type: ignore[operator]
    for file in list(folder.glob(lost)):
        file.unlink()
    with pytest.raises(CheckpointError, match=r"huggingface_hub.snapshot_download\('owner/name'\)"):
        PipelinePlugin.from_pretrained(AutoModelForCausalLM, "owner/name")
    with pytest.raises(ConfigurationError, match=r"owner/name .* the cached folder lacks model.safetensors or"):
        folder_of(Namespace(model_name_or_path="owner/name", model_revision="main"))


def test_a_model_in_the_cache_needs_no_other_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`pipeshard sft` had downloaded the model without its original/*.pth: a script with the same name was told to
    download it."""
    folder = in_cache(tmp_path, monkeypatch)
    zoo.build("llama").save_pretrained(folder)  # type: ignore[operator]
    files = {name: {"size": 1, "blob_id": "0"} for name in (*os.listdir(folder), "original/model.pth")}
    (tmp_path / "models--owner--name" / "trees").mkdir()
    listing = tmp_path / "models--owner--name" / "trees" / f"{folder.name}.json"
    listing.write_text(json.dumps({"format_version": 1, "files": files}))
    model: Any = PipelinePlugin.from_pretrained(AutoModelForCausalLM, "owner/name")
    assert model._pretrained == str(folder)
    assert folder_of(Namespace(model_name_or_path="owner/name", model_revision="main")) == folder


def test_a_revision_and_a_subfolder_are_those_that_are_named(tmp_path: Path) -> None:
    """`from_pretrained(..., revision="step1000")` took the weights of `main`, and one with `subfolder=` the config of
    the subfolder and the weights beside it, both without a word."""
    repository = tmp_path / "models--owner--name"
    (repository / "refs").mkdir(parents=True)
    for layers, revision, commit in ((2, "main", "a" * 40), (3, "step1000", "b" * 40)):
        (repository / "refs" / revision).write_text(commit)
        zoo.build("llama", layers=layers).save_pretrained(repository / "snapshots" / commit)  # type: ignore[operator]
        zoo.build("llama").save_pretrained(repository / "snapshots" / commit / "inner")  # type: ignore[operator]
    for layers, inside, options in (
        (2, "a" * 40, {}),
        (3, "b" * 40, {"revision": "step1000"}),
        (4, "b" * 40 + "/inner", {"revision": "step1000", "subfolder": "inner"}),
    ):
        model: Any = PipelinePlugin.from_pretrained(AutoModelForCausalLM, "owner/name", cache_dir=tmp_path, **options)
        assert model.config.num_hidden_layers == layers
        assert model._pretrained == str(repository / "snapshots" / inside)
    with pytest.raises(CheckpointError, match=r"snapshot_download\('owner/name', revision='step7', cache_dir=.*\)"):
        PipelinePlugin.from_pretrained(AutoModelForCausalLM, "owner/name", revision="step7", cache_dir=tmp_path)
    with pytest.raises(ConfigurationError, match=r"force_download has no effect.* and pass the returned folder"):
        PipelinePlugin.from_pretrained(AutoModelForCausalLM, "owner/name", cache_dir=tmp_path, force_download=True)
