"""TRL: its trainers through a pipeline log what they log in one process, with their own metrics."""

from __future__ import annotations

import random
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import nn
from transformers import PreTrainedTokenizerFast

from pipeshard import PipelinePlugin
from pipeshard.errors import ConfigurationError
from pipeshard.trainer import pipelined
from pipeshard.trainer.refusals import refuse_class
from tests import zoo
from tests.pool import Pool
from tests.trainers import differences, launched

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")

TIMES = ("runtime", "per_second", "flos")


def tokenizer() -> PreTrainedTokenizerFast:
    words = ["<pad>", "<s>", "</s>", "<unk>", *"abcdefghijklmnopqrstuvwxyz"]
    made = Tokenizer(WordLevel({word: k for k, word in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer = Whitespace()
    special = dict(zip(("pad_token", "bos_token", "eos_token", "unk_token"), words))
    return PreTrainedTokenizerFast(tokenizer_object=made, **special)


def words(count: int, source: random.Random) -> str:
    return " ".join(source.choices("abcdefghijklmnopqrstuvwxyz", k=count))


def data(kind: str) -> Any:
    source = random.Random(0)
    rows: list[dict[str, str]] = []
    for k in range(40):
        prompt, first, second = words(3 + k % 4, source), words(4 + k % 3, source), words(3 + k % 2, source)
        if kind in ("reward", "dpo"):
            rows.append({"prompt": prompt, "chosen": " " + first, "rejected": " " + second})
        elif kind == "completion":
            rows.append({"prompt": prompt, "completion": " " + first})
        else:
            rows.append({"text": f"{prompt} {first}"})
    return datasets.Dataset.from_list(rows)


def scorer() -> nn.Module:
    torch.manual_seed(0)
    return transformers.LlamaForSequenceClassification(transformers.LlamaConfig(**zoo.TINY, num_labels=1))


def adapters() -> Any:
    return peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.0)


# For each kind: the Trainer, its arguments beside the usual ones, and what it is given.
KINDS: dict[str, tuple[str, dict[str, Any], Any]] = {
    "packing": ("SFT", {"packing": True, "max_length": 16}, dict),
    "completion": ("SFT", {}, dict),
    "lora": ("SFT", {}, lambda: {"peft_config": adapters()}),
    "reward": ("Reward", {}, lambda: {"model": scorer()}),
    "dpo": ("DPO", {}, lambda: {"ref_model": zoo.build("llama", seed=1)}),
    "dpo-lora": ("DPO", {}, lambda: {"peft_config": adapters()}),
}


def run(kind: str, folder: str, plugin: dict[str, Any] | None = None, **others: Any) -> list[dict[str, float]]:
    name, arguments, given = KINDS[kind]
    trainer = getattr(trl, f"{name}Trainer")
    usual = {"max_steps": 4, "logging_steps": 1, "eval_strategy": "steps", "eval_steps": 4, "learning_rate": 1e-3}
    sizes = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    quiet = {"report_to": [], "disable_tqdm": True, "save_strategy": "no", "use_cpu": True, "bf16": False}
    plain = {"gradient_checkpointing": False}
    with launched() if plugin else nullcontext():
        args = getattr(trl, f"{name}Config")(
            output_dir=folder, **{**usual, **sizes, **quiet, **plain, **arguments, **others}
        )
        rows = data(kind.partition("-")[0])
        torch.manual_seed(0)
        more = {"model": zoo.build("llama"), "train_dataset": rows, "eval_dataset": rows.select(range(7)), **given()}
        if plugin is None:
            made = trainer(args=args, processing_class=tokenizer(), **more)
        else:
            kinds = pipelined(trainer)
            made = kinds(args=args, processing_class=tokenizer(), pipeline=PipelinePlugin(**plugin), **more)
        made.train()
        history = made.state.log_history
    return [{key: value for key, value in entry.items() if not any(t in key for t in TIMES)} for entry in history]


def near(found: list[dict[str, float]], expected: list[dict[str, float]]) -> list[str]:
    """Differences, with what is small beside one compared as it is."""
    lifted = [[{key: value + 1.0 for key, value in entry.items()} for entry in log] for log in (found, expected)]
    return differences(*lifted, close=2e-6)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", KINDS)
def test_logs_are_those_of_one_process(pool: Pool, tmp_path: Path, kind: str) -> None:
    expected = run(kind, str(tmp_path))
    for found in pool.run(run, 2, kind, str(tmp_path), {"pp_size": 2}, timeout=120):
        assert near(found, expected) == []


def test_replicas_gather_the_metrics(pool: Pool, tmp_path: Path) -> None:
    expected = run("completion", str(tmp_path), gradient_accumulation_steps=2)
    options: dict[str, Any] = {"gradient_accumulation_steps": 1}
    for found in pool.run(run, 4, "completion", str(tmp_path), {"pp_size": 2}, timeout=120, **options):
        assert [entry["loss"] for entry in found[:4]] == pytest.approx([entry["loss"] for entry in expected[:4]], 1e-6)
        assert found[3]["num_tokens"] == expected[3]["num_tokens"]


def test_other_trainers_are_refused_by_name() -> None:
    for name in ("GRPOTrainer", "RLOOTrainer", "KTOTrainer"):
        with pytest.raises(ConfigurationError, match=f"{name} generates, or runs several models"):
            refuse_class(getattr(trl, name))
    refuse_class(type("Mine", (trl.SFTTrainer,), {}))


def synced(folder: str) -> None:
    with pytest.raises(ConfigurationError, match="sync_ref_model=True would mix"):
        run("dpo", folder, {"pp_size": 2}, sync_ref_model=True)


def test_models_are_not_mixed(pool: Pool, tmp_path: Path) -> None:
    pool.run(synced, 2, str(tmp_path))
