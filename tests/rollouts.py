"""Rollouts: tiny runs of TRL's GRPOTrainer and RLOOTrainer, in one process and through a pipeline."""

from __future__ import annotations

import random
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import datasets
import peft
import torch
import transformers
import trl
from torch import nn

from pipeshard import PipelinePlugin
from pipeshard.trainer import pipelined
from tests import zoo
from tests.trainers import launched
from tests.trls import TIMES, adapters, near, scorer, tokenizer, words


def prompts(count: int) -> datasets.Dataset:
    source = random.Random(0)
    return datasets.Dataset.from_list([{"prompt": words(3 + k % 4, source)} for k in range(count)])


def vowels(completions: list[str], **_: Any) -> list[float]:
    """A toy reward: the number of vowels in a completion, plus a hundredth of its length."""
    return [sum(letter in "aeiou" for letter in text) + 0.01 * len(text) for text in completions]


class Drawn:
    """A reward with a state, which uses random numbers of Python and torch, and logs values."""

    __name__ = "drawn"

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, completions: list[str], log_metric: Any, log_extra: Any, **_: Any) -> list[float]:
        self.calls += 1
        log_metric("calls", self.calls)
        log_extra("length", [len(text) for text in completions])
        return [self.calls + random.random() + float(torch.rand(())) for _ in completions]


async def waited(completions: list[str], **_: Any) -> list[float]:
    return [random.random() for _ in completions]


@dataclass
class Kind:
    """A kind of run: `arguments` of the config, and arguments of the Trainer (`given`)."""

    arguments: dict[str, Any] = field(default_factory=dict)
    given: dict[str, Any] = field(default_factory=dict)
    trainer: str = "GRPO"
    lora: str = ""  # "new": adapters that the Trainer adds; "given": the model's own, with a copy as reference
    rewards: str = "vowels"


EIGHT = {"per_device_train_batch_size": 8}
TWO = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 4}
AGAIN = {"num_iterations": 2, **TWO}
LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "vespo", "luspo")
KINDS: dict[str, Kind] = {
    "whole": Kind({"beta": 0.1, **AGAIN}),
    "lora": Kind({"beta": 0.1, **TWO}, lora="new"),
    "lora-given": Kind({"beta": 0.1}, lora="given"),
    "drawn": Kind({"steps_per_generation": 4, **TWO}, rewards="drawn"),
    "scored": Kind(rewards="scorer"),
    "often": Kind({"steps_per_generation": 1, "gradient_accumulation_steps": 2, "scale_rewards": "batch"}),
    "checkpointing": Kind({"gradient_checkpointing": True, "mask_truncated_completions": True}),
    "evaluated": Kind({"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 4}),
    "entropy": Kind({"use_adaptive_entropy": True, "entropy_target": 3.0, "entropy_coef": 0.01, **AGAIN}),
    "quantile": Kind({"top_entropy_quantile": 0.5, **TWO}),
    "sequence": Kind({"importance_sampling_level": "sequence", "off_policy_mask_threshold": 0.5, **AGAIN}),
    "cast": Kind({"cast_lm_head_to_fp32": True, "multi_objective_aggregation": "normalize_then_sum"}),
    "rloo": Kind({"beta": 0.1, **AGAIN}, trainer="RLOO"),
    "rloo-lora": Kind({"beta": 0.1, "normalize_advantages": True}, trainer="RLOO", lora="new", rewards="drawn"),
    **{f"loss {name}": Kind({"loss_type": name, "beta": 0.05, **AGAIN}) for name in LOSSES},
}


def base(folder: str | Path) -> str:
    """The folder of the model, from which TRL also loads the reference. Call it in one process first."""
    path = Path(folder) / "base"
    if not path.exists():
        zoo.build("llama").save_pretrained(path)
    return str(path)


def reward_model() -> nn.Module:
    model = scorer()
    model.config._name_or_path = "scorer"
    return model.eval()


def rewards(kind: Kind) -> dict[str, Any]:
    if kind.rewards == "drawn":
        return {"reward_funcs": [vowels, Drawn(), waited]}
    if kind.rewards == "scorer":
        return {"reward_funcs": [vowels, reward_model()], "reward_processing_classes": [None, tokenizer()]}
    return {"reward_funcs": vowels}


def make(name: str, folder: str, plugin: dict[str, Any] | None = None, **others: Any) -> Any:
    """A Trainer of this kind, with a pipeline if `plugin` contains its arguments."""
    kind = KINDS[name]
    usual = {"max_steps": 4, "logging_steps": 1, "learning_rate": 1e-3, "per_device_train_batch_size": 8, "seed": 5}
    generated = {"num_generations": 4, "max_completion_length": 8}
    quiet = {"report_to": [], "disable_tqdm": True, "save_strategy": "no", "use_cpu": True, "bf16": False}
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(f"{folder}/base")
    if kind.lora == "given":
        torch.manual_seed(1)
        targets = {"r": 4, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False, "lora_dropout": 0.0}
        model = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **targets))
    arguments = {**usual, **generated, **quiet, "gradient_checkpointing": False, **kind.arguments, **others}
    given = {
        "model": model,
        "args": getattr(trl, f"{kind.trainer}Config")(output_dir=f"{folder}/out", **arguments),
        "train_dataset": prompts(24),
        "eval_dataset": prompts(8),
        "processing_class": tokenizer(),
        **({"peft_config": adapters()} if kind.lora == "new" else {}),
        **rewards(kind),
        **kind.given,
    }
    trainer = getattr(trl, f"{kind.trainer}Trainer")
    return trainer(**given) if plugin is None else pipelined(trainer)(**given, pipeline=PipelinePlugin(**plugin))


def shown(made: Any) -> tuple[list[dict[str, Any]], list[str], dict[str, list[float]]]:
    """The logs, the last completions and their rewards."""
    left_out = (*TIMES, "step_time")
    logs = [
        {name: value for name, value in entry.items() if not any(part in name for part in left_out)}
        for entry in made.state.log_history
    ]
    return logs, list(made._logs["completion"]), {name: list(every) for name, every in made._logs["rewards"].items()}


def run(name: str, folder: str, plugin: dict[str, Any] | None = None, **others: Any) -> Any:
    with launched() if plugin else nullcontext():
        made = make(name, folder, plugin, **others)
        made.train()
        return shown(made)


def differences(found: Any, expected: Any) -> list[str]:
    """The differences between two runs."""
    (logs, *made), (others, *wanted) = found, expected
    problems = near(*([{key: -1.0 if v is None else v for key, v in e.items()} for e in log] for log in (logs, others)))
    return problems + [f"{one} instead of {other}" for one, other in zip(made, wanted, strict=True) if one != other]
