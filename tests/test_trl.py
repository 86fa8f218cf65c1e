"""Tests of TRL's trainers in a pipeline: their logs, with their own metrics, equal those of one process."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import peft
import pytest
import torch
import transformers
from rich.console import Console

import sft
from pipeshard import PipelinePlugin, trace
from pipeshard.errors import CheckpointError, ConfigurationError, UsageError
from pipeshard.graph.tracer import Tracer
from pipeshard.trainer import pipelined
from pipeshard.trainer.refusals import refuse_class
from tests import zoo
from tests.pool import Pool, WorkerError
from tests.trainers import launched, logs, trainer

trl = pytest.importorskip("trl")
trls = pytest.importorskip("tests.trls")
add_fused_lm_head = pytest.importorskip("trl.trainer.utils").add_fused_lm_head
run, near, tokenizer = trls.run, trls.near, trls.tokenizer


@pytest.mark.turns
@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", trls.KINDS)
def test_logs_are_those_of_one_process(pool: Pool, tmp_path: Path, kind: str) -> None:
    expected = run(kind, str(tmp_path))
    for found in pool.run(run, 2, kind, str(tmp_path), {"pp_size": 2}, timeout=120):
        assert near(found, expected, trls.CLOSE.get(kind, 2e-6)) == []


class Completing(transformers.TrainerCallback):
    """What the error for TRL's LogCompletionsCallback advises."""

    def __init__(self) -> None:
        self.trainer: Any = None
        self.tokens: list[Any] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        inputs = {"input_ids": torch.tensor([[3, 4, 5]]), "max_new_tokens": 4, "do_sample": False}
        self.tokens.append(self.trainer.generate(**inputs).tolist())


def with_callbacks(folder: str) -> tuple[list[str], list[dict[str, float]], list[dict[str, float]], list[Any]]:
    """The errors for callbacks of TRL, and what is logged without a callback and with one that generates."""
    told, logged, completing = [], [], Completing()
    with launched():
        for k in range(2):
            made = trainer("causal", folder, {"pp_size": 2}, max_steps=2)
            completing.trainer = made
            if k:
                made.add_callback(completing)
            made.train()
            logged.append(logs(made))
        for refused in (trl.LogCompletionsCallback(made, freq=1), trl.BEMACallback(), trl.BEMACallback):
            with pytest.raises(ConfigurationError) as caught:
                made.add_callback(refused)
            told.append(str(caught.value))
        with pytest.raises(ConfigurationError) as caught:
            trainer("causal", folder, {"pp_size": 2}, {"callbacks": [trl.BEMACallback()]})
        told.append(str(caught.value))
    return told, *logged, completing.tokens


@pytest.mark.turns
def test_callbacks_that_need_the_whole_model_are_refused_by_name(pool: Pool, tmp_path: Path) -> None:
    """LogCompletionsCallback ended a run in its first step that logs, with an error about a call of TRL's."""
    for told, expected, found, tokens in pool.run(with_callbacks, 2, str(tmp_path)):
        assert "LogCompletionsCallback" in told[0] and "call trainer.generate(...) on every rank" in told[0]
        assert all("BEMACallback" in one and "averages the full weights" in one for one in told[1:])
        assert found == expected and len(tokens) == 2 and len(tokens[0][0]) == 7


class Smoothing(trl.SFTTrainer):  # type: ignore[misc, name-defined]
    """One that calls the model once."""

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return transformers.Trainer.compute_loss(self, *args, **kwargs)


SMOOTHED: dict[str, Any] = {"label_smoothing_factor": 0.1, "max_steps": 2, "eval_steps": 2}


def smoothed(folder: str, plugin: dict[str, Any] | None) -> list[dict[str, float]]:
    refused = pytest.raises(UsageError, match=r"twice.*label_smoothing_factor.*transformers\.Trainer\.compute_loss")
    with refused if plugin else nullcontext():
        run("completion", folder, plugin, **SMOOTHED)
    with mock.patch.object(trl, "SFTTrainer", Smoothing):
        return run("completion", folder, plugin, **SMOOTHED)


@pytest.mark.turns
def test_label_smoothing_of_trl_names_a_loss_that_calls_the_model_once(pool: Pool, tmp_path: Path) -> None:
    """SFTConfig(label_smoothing_factor=0.1) has TRL call the model twice. The error advised to call the model once,
    but the user had not written this compute_loss."""
    expected = smoothed(str(tmp_path), None)
    for found in pool.run(smoothed, 2, str(tmp_path), {"pp_size": 2}, timeout=120):
        assert near(found, expected) == []


def with_adapters_on(folder: str, plugin: dict[str, Any]) -> list[dict[str, float]]:
    with mock.patch("trl.trainer.dpo_trainer.use_adapter", lambda *_, **__: nullcontext()):
        return run("dpo-lora", folder, plugin)


@pytest.mark.turns
def test_a_reference_with_its_adapters_on_is_seen(pool: Pool, tmp_path: Path) -> None:
    """A mutation: the model that is trained is its own reference, so that nothing is ever preferred."""
    expected = run("dpo-lora", str(tmp_path))
    found = pool.run(with_adapters_on, 2, str(tmp_path), {"pp_size": 2}, timeout=120)[0]
    assert any("loss" in line for line in near(found, expected))
    assert all(abs(entry.get("rewards/margins", 0.0)) < 1e-6 for entry in found) and expected[3]["rewards/margins"]


def traces(kind: str, folder: str, steps: int) -> int:
    with mock.patch.object(Tracer, "run", autospec=True, side_effect=Tracer.run) as ran:
        run(kind, folder, {"pp_size": 2}, gradient_checkpointing=True, max_steps=steps, eval_steps=steps)
    return ran.call_count


@pytest.mark.turns
@pytest.mark.parametrize("kind", ["dpo-lora", "packing"])
def test_neither_a_reference_nor_packing_needs_a_trace_per_step(pool: Pool, tmp_path: Path, kind: str) -> None:
    """By default, TRL turns checkpointing off and on for each batch of the reference, by new functions and hooks: DPO
    traced the model five times per step. With packing, every batch has the boundaries of its own documents."""
    few, many = (pool.run(traces, 2, kind, str(tmp_path), steps, timeout=120) for steps in (2, 4))
    assert few == many


@pytest.mark.turns
def test_replicas_gather_the_metrics(pool: Pool, tmp_path: Path) -> None:
    expected = run("completion", str(tmp_path), gradient_accumulation_steps=2)
    options: dict[str, Any] = {"gradient_accumulation_steps": 1}
    for found in pool.run(run, 4, "completion", str(tmp_path), {"pp_size": 2}, timeout=120, **options):
        assert [entry["loss"] for entry in found[:4]] == pytest.approx([entry["loss"] for entry in expected[:4]], 1e-6)
        assert found[3]["num_tokens"] == expected[3]["num_tokens"]


def of_replicas_by_tokens(folder: str) -> None:
    few = {"max_steps": 1, "eval_strategy": "no", "per_device_train_batch_size": 4}
    with pytest.raises(UsageError, match=r"different numbers of microbatches.*pass num_microbatches instead"):
        run("completion", folder, {"pp_size": 1, "microbatch_tokens": 24}, **few)
    run("completion", folder, {"pp_size": 1, "num_microbatches": 4}, **few)


@pytest.mark.turns
def test_replicas_with_microbatches_of_tokens_do_not_gather(pool: Pool, tmp_path: Path) -> None:
    """SFTTrainer with microbatch_tokens=8192 and two replicas gathers its metrics once per microbatch, but each replica
    has its own number of microbatches: one replica waited in a gather for the other, until the timeout."""
    pool.run(of_replicas_by_tokens, 2, str(tmp_path), timeout=40)


def test_a_reference_on_meta_is_not_precomputed() -> None:
    """The reference of adapters on a model on meta was computed with weights of zeros."""
    with torch.device("meta"):
        model = zoo.build("llama")
    args = mock.Mock(precompute_ref_log_probs=True)
    for adapters in (None, trls.adapters()):
        with pytest.raises(ConfigurationError, match="precompute_ref_log_probs=True runs the whole reference model"):
            pipelined(trl.DPOTrainer)(model, args=args, peft_config=adapters, pipeline=PipelinePlugin(1))


class Preferring(trl.DPOTrainer):
    """Has a constructor of its own, as users write one."""

    def __init__(self, model: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(model, *args, **kwargs)


@pytest.mark.parametrize("is_precomputed", [False, True])
def test_a_subclass_of_a_dpo_trainer_has_a_constructor_of_its_own(tmp_path: Path, is_precomputed: bool) -> None:
    """Positional arguments were passed on under the names of its parameters, such as `args`: TypeError."""
    config = trl.DPOConfig(str(tmp_path), use_cpu=True, bf16=False, precompute_ref_log_probs=is_precomputed)
    rows, tokenizer = trls.data("dpo").select(range(4)), trls.tokenizer()
    given = {"processing_class": tokenizer, "train_dataset": rows, "pipeline": PipelinePlugin(1)}
    made = pipelined(Preferring)(zoo.build("llama"), zoo.build("llama", seed=1), config, **given)
    assert len(made.train_dataset) == 4 and made.args is config
    assert (tmp_path / "datasets" / "train_dataset").exists() == is_precomputed


def replacing_adapters(folder: Path) -> None:
    model = PipelinePlugin.from_pretrained(transformers.LlamaForCausalLM, folder)
    with launched():
        pipelined(trl.SFTTrainer)(model, peft_config=trls.adapters(), pipeline=PipelinePlugin(1))


@pytest.mark.turns
def test_new_adapters_do_not_replace_those_of_the_models_folder(pool: Pool, tmp_path: Path) -> None:
    """A Trainer dropped the adapters in the folder of a model on meta, which transformers applies, silently."""
    base: Any = zoo.build("llama")
    base.save_pretrained(tmp_path)
    peft.get_peft_model(base, trls.adapters()).save_pretrained(str(tmp_path))
    for message in pool.run_expecting(CheckpointError, replacing_adapters, 1, tmp_path):
        assert "contains adapters" in message and "enable_lora(model, pretrained_dir=" in message


def with_template(path: Path, folder: Path, vocabulary: int) -> None:
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**zoo.TINY | {"vocab_size": vocabulary}))
    args = trl.SFTConfig(str(folder), chat_template_path=str(path), use_cpu=True, bf16=False, report_to=[])
    rows = trls.data("packing")
    with launched():
        plugin = PipelinePlugin(1)
        pipelined(trl.SFTTrainer)(model, args, train_dataset=rows, processing_class=tokenizer(), pipeline=plugin)


def test_a_chat_template_whose_tokens_resize_a_model_on_meta_is_refused(pool: Pool, tmp_path: Path) -> None:
    """TRL resizes the embeddings for the tokens of another model, which failed on meta with an error of torch."""
    other, file = tmp_path / "other", tmp_path / "chat.jinja"
    made = tokenizer()
    made.chat_template = "{{ messages }}"
    made.save_pretrained(other)
    with pytest.raises(WorkerError, match=r"would resize the embeddings from 61 to 64 tokens.*Jinja template .\.jinja"):
        pool.run(with_template, 1, other, tmp_path, 61)
    file.write_text("{{ messages }}")
    pool.run(with_template, 1, file, tmp_path, 61)
    pool.run(with_template, 1, other, tmp_path, 64)  # TRL resizes to a multiple of 64


def test_other_trainers_are_refused_by_name() -> None:
    for kind in (trl.KTOTrainer, trl.DistillationTrainer):
        with pytest.raises(
            ConfigurationError, match=f"{kind.__name__} is not supported: its steps have not been compared"
        ):
            refuse_class(kind)
    for base in (trl.SFTTrainer, trl.GRPOTrainer, trl.RLOOTrainer):
        refuse_class(type("Mine", (base,), {}))


def test_a_trainer_of_trl_that_overrides_another_one_is_refused() -> None:
    """GKDTrainer is an SFTTrainer that generates, and runs a teacher."""
    with pytest.raises(ConfigurationError, match="GKDTrainer is not supported: its steps have not been compared"):
        refuse_class(type("GKDTrainer", (trl.SFTTrainer,), {"__module__": "trl.experimental.gkd.gkd_trainer"}))


def synced(folder: str) -> None:
    with pytest.raises(ConfigurationError, match="sync_ref_model=True: it averages"):
        run("dpo", folder, {"pp_size": 2}, sync_ref_model=True)


def test_models_are_not_mixed(pool: Pool, tmp_path: Path) -> None:
    pool.run(synced, 2, str(tmp_path))


def offloaded(folder: str) -> list[dict[str, float]]:
    with pytest.raises(
        ConfigurationError, match=r"activation_offloading=True: .*PipelinePlugin\(offload='activations'\)"
    ):
        run("completion", folder, {"pp_size": 2}, activation_offloading=True)
    return run("completion", folder, {"pp_size": 2, "offload": "activations"})


@pytest.mark.turns
def test_activations_are_offloaded_by_the_plugin(pool: Pool, tmp_path: Path) -> None:
    """SFTConfig(activation_offloading=True) was accepted, but TRL's hooks assume a single forward before a backward."""
    expected = run("completion", str(tmp_path))
    for found in pool.run(offloaded, 2, str(tmp_path), timeout=300):
        assert near(found, expected) == []


CHAT = (
    "{{ bos_token }}{% for message in messages %} {{ message['content'] }}"
    "{% if message['role'] == 'assistant' %} {{ eos_token }}{% endif %}{% endfor %}"
)


def chats(folder: Path) -> list[str]:
    """A small model, and a file of chats of which each answer follows from its question; the flags that train it."""
    (folder / "template.jinja").write_text(CHAT)
    tokenizer().save_pretrained(folder / "base")
    zoo.build("llama").save_pretrained(folder / "base")
    talks = [[("user", f"{a} {b}"), ("assistant", f"{b} {a}")] for a in "ab" for b in "cd"]
    lines = [{"messages": [{"role": role, "content": text} for role, text in talk]} for talk in talks]
    (folder / "chats.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines * 8))
    given = {"model": "base", "data": "chats.jsonl", "chat-template": "template.jinja", "output": "out"}
    flags = {"steps": 40, "every": 20, "lr": 2e-2, "microbatches": 2, "held-out": 0.125}
    return [*(f"--{name}={folder / file}" for name, file in given.items()), *(f"--{f}={v}" for f, v in flags.items())]


def train_chats(flags: list[str]) -> str:
    """What the example prints."""
    said = io.StringIO()
    with launched(), mock.patch.dict(os.environ, {"TQDM_DISABLE": "1"}):
        sft.run(sft.parse(flags), Console(file=said, quiet=torch.distributed.get_rank() > 0, width=200))
    return said.getvalue()


def answer(folder: Path) -> str:
    """What plain transformers says with the model, or with the adapters, in this folder."""
    tokens = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    prompt = tokens.apply_chat_template([{"role": "user", "content": "a d"}], return_tensors="pt", return_dict=True)
    made = model.generate(**prompt, max_new_tokens=4, do_sample=False)
    return tokens.decode(made[0, prompt["input_ids"].shape[1] :])


@pytest.mark.turns
@pytest.mark.parametrize("kind", ["whole and resumed", "adapters"])
def test_the_example_trains_a_model_that_answers(pool: Pool, tmp_path: Path, kind: str) -> None:
    flags = [*chats(tmp_path), *(["--lora=8"] if kind == "adapters" else [])]
    said, other = pool.run(train_chats, 2, flags, timeout=200)
    shown = r"step (\d+)/40  loss ([\d.]+)  lr [\de.-]+  norm [\d.]+  tokens/s [\d.]+  GiB [\d.]+ [\d.]+  [\d.]+ min"
    steps = re.findall(shown, said)
    assert [int(step) for step, _ in steps] == [*range(1, 41)] and not other
    lower = 0.95 if kind == "adapters" else 0.7
    assert float(steps[-1][1]) < lower * float(steps[0][1]) and len(re.findall("held-out loss", said)) == 2
    saved = tmp_path / "out" / "sft"
    assert list((saved / "runs").rglob("events.*"))
    if kind == "adapters":  # of a model drawn at random, which they can't teach much
        assert (saved / "model" / "adapter_model.safetensors").is_file() and answer(saved / "model")
    else:
        assert answer(saved / "model").split()[:3] == ["d", "a", "</s>"]
    if kind == "whole and resumed":
        before = transformers.AutoModelForCausalLM.from_pretrained(saved / "model").state_dict()
        shutil.rmtree(saved / "checkpoint-40")
        (again,) = pool.run(train_chats, 1, [*flags, "--pp=1", "--resume"], timeout=200)
        assert re.search(r"step 21/40  loss", again) and not re.search(r"step 20/40  loss", again)
        after = transformers.AutoModelForCausalLM.from_pretrained(saved / "model").state_dict()
        assert all(torch.allclose(after[name], before[name], atol=1e-5) for name in before)


@pytest.mark.turns
def test_glue_that_moves_to_where_weights_are_is_traced_on_meta() -> None:
    """SFTTrainer's loss reads the head's weights, and moves to their device: a model of `from_pretrained`, whose are on
    meta, could not be traced."""
    ids = torch.randint(3, zoo.VOCABULARY, (2, 8))
    found = []
    for device in ("cpu", "meta"):
        model = zoo.build("llama").to(device)
        add_fused_lm_head(model, outputs=("log_probs", "entropy", "is_top1"))
        found.append(trace(model, {"input_ids": ids, "labels": ids, "fused_lm_head": True}))
    assert str(found[0]) == str(found[1])
