"""Trainers: tiny runs of transformers' Trainer, in one process and through a pipeline, on the same data."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import peft
import torch
import torch.distributed as dist
import transformers
from accelerate.state import AcceleratorState, GradientState
from torch import Tensor, nn
from transformers import EvalPrediction, Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer, TrainingArguments

from pipeshard import PipelinePlugin
from pipeshard.trainer import PipelineTrainer, pipelined
from tests import zoo

LOGGED = ("loss", "grad_norm", "learning_rate", "eval_loss", "eval_right", "eval_first", "train_loss", "total_flos")
LOGGED += ("num_input_tokens_seen", "epoch")


def texts(count: int, seed: int = 3) -> list[dict[str, Tensor]]:
    """Samples of several lengths. In most of them, the first tokens have no label."""
    generator = torch.Generator().manual_seed(seed)
    samples = []
    for k in range(count):
        ids = torch.randint(3, zoo.VOCABULARY, (6 + k % 5,), generator=generator)
        samples.append({"input_ids": ids, "labels": ids.clone().index_fill(0, torch.arange(k % 4), -100)})
    return samples


def sentences(count: int, seed: int = 3) -> list[dict[str, Tensor]]:
    return [{**text, "labels": text["input_ids"][0] % 3} for text in texts(count, seed)]


def pairs(count: int, seed: int = 3) -> list[dict[str, Tensor]]:
    return [{**text, "labels": text["labels"][2:]} for text in texts(count, seed)]


def padded(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """A batch that is padded to its longest sample."""

    def stacked(tensors: list[Tensor], filler: int) -> Tensor:
        if not tensors[0].ndim:
            return torch.stack(tensors)
        length = max(map(len, tensors))
        return torch.stack([nn.functional.pad(tensor, (0, length - len(tensor)), value=filler) for tensor in tensors])

    ids = [sample["input_ids"] for sample in samples]
    batch = {"input_ids": stacked(ids, 0), "attention_mask": stacked([torch.ones_like(one) for one in ids], 0)}
    return batch | {"labels": stacked([sample["labels"] for sample in samples], -100)}


def classifier() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.BertConfig(**zoo.ENCODER, vocab_size=zoo.VOCABULARY, num_labels=3)
    return transformers.BertForSequenceClassification(config)


def with_adapters() -> nn.Module:
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.0, init_lora_weights=False)
    return peft.get_peft_model(zoo.build("llama"), config)


def with_prompts() -> nn.Module:
    torch.manual_seed(0)
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    return peft.get_peft_model(zoo.build("llama"), config)


def first_class(predictions: EvalPrediction) -> dict[str, float]:
    """Metrics that depend on every prediction, on its position and on its label."""
    logits = predictions.predictions[0] if isinstance(predictions.predictions, tuple) else predictions.predictions
    labels, chosen = predictions.label_ids, logits.argmax(-1)
    valid = labels != -100
    weights = np.arange(1, len(labels) + 1).reshape(-1, *[1] * (labels.ndim - 1))
    return {"right": float((chosen == labels)[valid].mean()), "first": float(((chosen % 7) * weights * valid).sum())}


class Weighted(Trainer):
    """A Trainer with its own loss, as in transformers' documentation."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        weights = torch.tensor([1.0, 2.0, 3.0])
        loss = nn.functional.cross_entropy(outputs.logits, labels, weight=weights)
        return (loss, outputs) if return_outputs else loss


def halved(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Tensor:
    """A compute_loss_func."""
    logits, targets = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    return 0.5 * nn.functional.cross_entropy(logits, targets, reduction="sum") / num_items_in_batch


@dataclass
class Task:
    """A model, data and a Trainer class. `arguments` are TrainingArguments; `more` are the Trainer's own arguments."""

    model: Callable[[], nn.Module]
    data: Callable[..., list[dict[str, Tensor]]]
    arguments: dict[str, Any] = field(default_factory=dict)
    more: dict[str, Any] = field(default_factory=dict)
    kind: type[Trainer] = Trainer
    metrics: Callable[..., Any] | None = first_class


def llama() -> nn.Module:
    return zoo.build("llama-tied")


def t5() -> nn.Module:
    return zoo.build("t5")


TASKS = {
    "causal": Task(llama, texts, {"gradient_accumulation_steps": 3, "max_grad_norm": 0.5}, metrics=None),
    "classifier": Task(classifier, sentences, {"gradient_accumulation_steps": 2, "lr_scheduler_type": "cosine"}),
    "seq2seq": Task(t5, pairs, {"gradient_accumulation_steps": 2}, kind=Seq2SeqTrainer),
    "smoothed": Task(llama, texts, {"gradient_accumulation_steps": 2, "label_smoothing_factor": 0.1}),
    "lora": Task(with_adapters, texts, {"gradient_accumulation_steps": 2, "include_num_input_tokens_seen": "all"}),
    "prompts": Task(with_prompts, texts, {"gradient_accumulation_steps": 2}, metrics=None),
    "weighted": Task(classifier, sentences, {"gradient_accumulation_steps": 2}, kind=Weighted),
    "function": Task(llama, texts, {"gradient_accumulation_steps": 2}, {"compute_loss_func": halved}, metrics=None),
}


def arguments(task: Task, folder: Path | str, **others: Any) -> TrainingArguments:
    kind = Seq2SeqTrainingArguments if task.kind is Seq2SeqTrainer else TrainingArguments
    return kind(
        **{
            "output_dir": str(folder),
            "use_cpu": True,
            "report_to": [],
            "disable_tqdm": True,
            "logging_steps": 1,
            "per_device_train_batch_size": 2,
            "per_device_eval_batch_size": 5,
            "save_strategy": "no",
            "max_steps": 8,
            "learning_rate": 1e-3,
            "logging_nan_inf_filter": False,
            **task.arguments,
            **others,
        }
    )


@contextmanager
def launched() -> Iterator[None]:
    """Context manager in which accelerate sees the ranks of this world, as after torchrun."""
    names = {"RANK": dist.get_rank(), "LOCAL_RANK": dist.get_rank(), "WORLD_SIZE": dist.get_world_size()}
    environment = {name: str(value) for name, value in names.items()} if dist.get_world_size() > 1 else {}
    with mock.patch.dict(os.environ, environment | {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}):
        forget()
        try:
            yield
        finally:
            forget()


def forget() -> None:
    """Reset the state that accelerate keeps for the whole process."""
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


def trainer(
    name: str,
    folder: Path | str,
    plugin: dict[str, Any] | None = None,
    more: dict[str, Any] | None = None,
    **others: Any,
) -> Any:
    """A Trainer for this task or, if `plugin` contains its arguments, a Trainer with a pipeline."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
    torch.manual_seed(0)
    task = TASKS[name]
    args = arguments(task, folder, **others)
    given: dict[str, Any] = {"train_dataset": task.data(60), "eval_dataset": task.data(13, seed=5)}
    given |= {
        "model": task.model(),
        "data_collator": padded,
        "compute_metrics": task.metrics,
        **task.more,
        **(more or {}),
    }
    if plugin is None:
        return task.kind(args=args, **given)
    kind = PipelineTrainer if task.kind is Trainer else task.kind
    kind = kind if issubclass(kind, PipelineTrainer) else pipelined(kind)
    return kind(args=args, pipeline=PipelinePlugin(**plugin), **given)


def logs(made: Any) -> list[dict[str, float]]:
    return [{key: entry[key] for key in LOGGED if key in entry} for entry in made.state.log_history]


def run(name: str, folder: Path | str, resume: Any = None, **others: Any) -> list[dict[str, float]]:
    """Train and evaluate a task. Returns the logs."""
    made = trainer(name, folder, **others)
    made.train(resume_from_checkpoint=resume)
    made.evaluate()
    return logs(made)


def run_pipeline(name: str, folder: str, resume: Any = None, **others: Any) -> list[dict[str, float]]:
    """Like `run`, on every rank of a world."""
    with launched():
        return run(name, folder, resume, **others)


def differences(found: list[dict[str, float]], expected: list[dict[str, float]], close: float = 1e-6) -> list[str]:
    """The differences between two logs. Gradient norms may differ more, since their squares are summed in another
    order."""
    if [list(entry) for entry in found] != [list(entry) for entry in expected]:
        return [f"other entries: {found} instead of {expected}"]
    return [
        f"{key} of entry {k} is {entry[key]!r} instead of {other[key]!r}"
        for k, (entry, other) in enumerate(zip(found, expected, strict=True))
        for key in entry
        if not abs(entry[key] - other[key]) <= (10 if key == "grad_norm" else 1) * close * abs(other[key])
    ]
