"""Trainer features: each runs on two stages, and is compared with Trainer in one process.

`python -m tests.trainer_features` runs all of them, and writes the table in docs/trainer.md.
"""

from __future__ import annotations

import multiprocessing
import re
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import IterableDataset
from transformers import EarlyStoppingCallback, LlamaConfig, LlamaForCausalLM, TrainerCallback

from pipeshard import PipelinePlugin
from pipeshard.errors import PipeshardError
from tests import zoo
from tests.house import ROOT
from tests.pool import Pool
from tests.trainers import TASKS, differences, first_class, launched, llama, logs, pairs, texts, trainer

PAGE = ROOT / "docs" / "trainer.md"
BEGIN, END = "<!-- features -->\n", "<!-- end of features -->"
LEAST = 56  # the minimum number of features that work


def nothing(folder: str) -> dict[str, Any]:
    return {}


@dataclass
class Feature:
    """A task with additional TrainingArguments `arguments` and Trainer arguments `more(folder)`."""

    arguments: dict[str, Any] = field(default_factory=dict)
    task: str = "plain"
    more: Callable[[str], dict[str, Any]] = nothing
    then: Callable[[Any], list[dict[str, Any]]] | None = None  # called with the Trainer after training
    logged: Callable[[str, dict[str, Any] | None], list[dict[str, Any]]] | None = None  # replaces the other fields
    close: float = 1e-6
    plugin: dict[str, Any] = field(default_factory=dict)
    ranks: int = 2
    window: int | None = None  # gradient_accumulation_steps in one process
    refused: bool = False


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(texts(40))


class Events(TrainerCallback):
    """A callback that records the order in which a Trainer calls its methods."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("on_"):
            self.seen.append(name)
        return super().__getattribute__(name)


EVENTS = Events()


def with_events(folder: str) -> dict[str, Any]:
    EVENTS.seen = []
    return {"callbacks": [EVENTS]}


def optimizers(folder: str) -> dict[str, Any]:
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return {"model": model, "optimizers": (optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2))}


def wide(folder: str) -> dict[str, Any]:
    """A model with matrices of at least 4096 elements, the minimum for which bitsandbytes keeps 8-bit states."""
    torch.manual_seed(0)
    return {"model": LlamaForCausalLM(LlamaConfig(**zoo.TINY | {"hidden_size": 64, "intermediate_size": 96}))}


def from_folder(folder: str) -> dict[str, Any]:
    path = Path(folder) / "whole"
    if torch.distributed.is_initialized():
        return {"model": PipelinePlugin.from_pretrained(type(llama()), path)}
    llama().save_pretrained(path)
    return {}


def tokenized(folder: str) -> dict[str, Any]:
    from datasets import Dataset

    rows = [{name: value.tolist() for name, value in text.items()} | {"unused": "text"} for text in texts(40)]
    return {"train_dataset": Dataset.from_list(rows).with_format("torch")}


def two_sets(folder: str) -> dict[str, Any]:
    return {"eval_dataset": {"short": texts(4, seed=1), "long": texts(9, seed=2)}}


def predicted(made: Any) -> list[dict[str, Any]]:
    output = made.predict(texts(7, seed=8))
    return [{"sum": float(abs(output.predictions).sum()), "loss": output.metrics["test_loss"]}]


def translated(made: Any) -> list[dict[str, Any]]:
    made.compute_metrics = None
    output = made.predict(pairs(7, seed=8), max_new_tokens=6, num_beams=2)
    tokens = {f"token {k}": float(token) for k, token in enumerate(output.predictions.flatten())}
    return [{"loss": output.metrics["test_loss"], **tokens}]


def kept(made: Any) -> list[dict[str, Any]]:
    return [{path.name: 1.0 for path in sorted(Path(made.args.output_dir).glob("checkpoint-*"))}]


def resumed(made: Any) -> list[dict[str, Any]]:
    made.train(resume_from_checkpoint=True)
    return logs(made)[-3:]


def loaded(made: Any) -> list[dict[str, Any]]:
    from transformers import AutoModelForCausalLM

    made.save_model()
    state = AutoModelForCausalLM.from_pretrained(made.args.output_dir).state_dict()
    return [{name: float(value.double().norm()) for name, value in state.items()}]


def boarded(made: Any) -> list[dict[str, Any]]:
    files = list((Path(made.args.output_dir) / "runs").rglob("events.*"))
    return [{"files": float(len(files))}] if made.is_world_process_zero() else [{"files": 1.0}]


def events(made: Any) -> list[dict[str, Any]]:
    return [{f"{k} {name}": 1.0 for k, name in enumerate(EVENTS.seen) if name != "on_init_end"}]


def rolled_out(folder: str, plugin: dict[str, Any] | None) -> list[dict[str, Any]]:
    """The logs of TRL's two trainers that generate their training data."""
    from tests import rollouts

    if plugin is None:
        rollouts.base(folder)
    every = [entry for kind in ("whole", "rloo-lora") for entry in rollouts.run(kind, folder, plugin)[0]]
    return [{name: value + 1.0 for name, value in entry.items()} for entry in every]


def searched(made: Any) -> list[dict[str, Any]]:
    made.hyperparameter_search()
    return []


def inputs_too(predictions: Any) -> dict[str, float]:
    return first_class(predictions) | {"right": float(predictions.inputs.sum() + predictions.losses.sum())}


class Summed:
    """A metric that is summed over batches."""

    def __init__(self) -> None:
        self.total = 0.0

    def __call__(self, predictions: Any, compute_result: bool) -> dict[str, float]:
        self.total += float((predictions.predictions.argmax(-1) * (predictions.label_ids != -100)).sum())
        return {"right": self.total} if compute_result else {}


STEPS = {"eval_strategy": "steps", "eval_steps": 2}
SAVES = {"save_strategy": "steps", "save_steps": 2}
BEST = {**STEPS, **SAVES, "load_best_model_at_end": True, "metric_for_best_model": "loss"}
METRICS: Callable[[str], dict[str, Any]] = lambda folder: {"compute_metrics": first_class}  # noqa: E731

FEATURES: dict[str, Feature] = {
    "`per_device_train_batch_size`, `max_steps`": Feature({"per_device_train_batch_size": 4}),
    "`gradient_accumulation_steps`: each batch is a microbatch": Feature({"gradient_accumulation_steps": 3}),
    "the plugin's `num_microbatches`, finer than batches": Feature(
        {"gradient_accumulation_steps": 2}, plugin={"num_microbatches": 4}
    ),
    "replicas (`dp_size`)": Feature({"gradient_accumulation_steps": 1}, ranks=4, window=2),
    'the plugin\'s `schedule="interleaved"`, several chunks per rank': Feature(
        {"gradient_accumulation_steps": 4}, plugin={"schedule": "interleaved", "num_model_chunks": 2}
    ),
    '`schedule="zbv"`, `"zb-h1"`, `"gpipe"`': Feature({"gradient_accumulation_steps": 4}, plugin={"schedule": "zbv"}),
    "tensor parallelism (`tp_size`)": Feature(
        {**SAVES, "max_steps": 5}, plugin={"tp_size": 2}, ranks=4, then=resumed, close=3e-6
    ),
    "optimizer states sharded across replicas (`zero_stage=1`)": Feature(
        {**SAVES, "max_steps": 5}, plugin={"zero_stage": 1}, ranks=4, window=2, then=resumed
    ),
    "parameters sharded across replicas (`fsdp=True`)": Feature(
        {**SAVES, "max_steps": 5}, plugin={"fsdp": True}, ranks=4, window=2, then=resumed
    ),
    "`num_train_epochs`, with an incomplete last window": Feature(
        {"max_steps": -1, "num_train_epochs": 1, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 3}
    ),
    "`num_items_in_batch`: tokens of the whole window": Feature({"gradient_accumulation_steps": 4}),
    "`average_tokens_across_devices=False`": Feature({"average_tokens_across_devices": False}),
    "`label_smoothing_factor`": Feature({"label_smoothing_factor": 0.1, "gradient_accumulation_steps": 2}),
    "`compute_loss_func`": Feature(task="function"),
    "your own `compute_loss` (`pipelined(MyTrainer)`)": Feature(task="weighted"),
    "`Seq2SeqTrainer`": Feature(task="seq2seq"),
    "`max_grad_norm`, the norm in the logs": Feature({"max_grad_norm": 0.05}),
    "`max_grad_norm=0`": Feature({"max_grad_norm": 0.0}),
    "`learning_rate`, `weight_decay` (not of biases and norms)": Feature({"learning_rate": 1e-2, "weight_decay": 0.1}),
    "`adam_beta1`, `adam_beta2`, `adam_epsilon`": Feature({"adam_beta1": 0.8, "adam_beta2": 0.9, "adam_epsilon": 1e-6}),
    "`lr_scheduler_type`, `warmup_steps`": Feature({"lr_scheduler_type": "cosine", "warmup_steps": 2}),
    "`lr_scheduler_kwargs`": Feature(
        {"lr_scheduler_type": "cosine_with_restarts", "lr_scheduler_kwargs": {"num_cycles": 2}}
    ),
    '`lr_scheduler_type="reduce_lr_on_plateau"`': Feature(
        {**STEPS, "lr_scheduler_type": "reduce_lr_on_plateau", "metric_for_best_model": "loss"}
    ),
    '`optim="adafactor"`': Feature({"optim": "adafactor"}),
    '`optim="sgd"`, `"adagrad"`, `"rmsprop"`': Feature({"optim": "rmsprop"}),
    '`optim="adamw_bnb_8bit"`': Feature({"optim": "adamw_bnb_8bit", **SAVES, "max_steps": 5}, more=wide, then=resumed),
    '`optim="paged_adamw_8bit"`': Feature({"optim": "paged_adamw_8bit"}, more=wide),
    "`optim_args`": Feature({"optim": "adamw_torch", "optim_args": "amsgrad=True"}),
    "`optimizers=(optimizer, scheduler)`": Feature(more=optimizers),
    "`optimizer_cls_and_kwargs`": Feature(
        more=lambda folder: {"optimizer_cls_and_kwargs": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9})}
    ),
    "`model_init`": Feature(more=lambda folder: {"model": None, "model_init": llama}),
    "`PipelinePlugin.from_pretrained`: no process holds the whole model": Feature(more=from_folder),
    "models with PEFT adapters": Feature(task="lora"),
    "`gradient_checkpointing`": Feature({"gradient_checkpointing": True}),
    "`gradient_checkpointing_kwargs`": Feature(
        {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}
    ),
    "`bf16` (and `fp16` on GPUs)": Feature({"bf16": True}, close=3e-2),
    "`torch_compile`, `torch_compile_backend`": Feature({"torch_compile": True, "torch_compile_backend": "aot_eager"}),
    "`seed`, `data_seed`": Feature({"seed": 7, "data_seed": 3}),
    "`full_determinism`": Feature({"full_determinism": True}),
    "`group_by_length`": Feature({"train_sampling_strategy": "group_by_length"}),
    "`dataloader_num_workers`, `dataloader_prefetch_factor`": Feature(
        {"dataloader_num_workers": 1, "dataloader_prefetch_factor": 2}
    ),
    "`dataloader_persistent_workers`": Feature(
        {"dataloader_num_workers": 1, "dataloader_persistent_workers": True, "max_steps": 9, **STEPS}
    ),
    "`dataloader_drop_last`": Feature(
        {"dataloader_drop_last": True, "per_device_train_batch_size": 7, "max_steps": 10}
    ),
    "an `IterableDataset`": Feature(more=lambda folder: {"train_dataset": Stream()}),
    "a tokenized `datasets.Dataset`, `remove_unused_columns`": Feature(more=tokenized),
    "`eval_strategy`, `eval_steps`, `per_device_eval_batch_size`": Feature(STEPS),
    "`eval_on_start`, `eval_delay`": Feature({**STEPS, "eval_on_start": True, "eval_delay": 3}),
    "`compute_metrics`": Feature(STEPS, more=METRICS),
    "`preprocess_logits_for_metrics`": Feature(
        STEPS, more=lambda folder: {**METRICS(folder), "preprocess_logits_for_metrics": lambda logits, labels: -logits}
    ),
    "`batch_eval_metrics`": Feature({"batch_eval_metrics": True}, more=lambda folder: {"compute_metrics": Summed()}),
    "`include_for_metrics`": Feature(
        {**STEPS, "include_for_metrics": ["inputs", "loss"]}, more=lambda folder: {"compute_metrics": inputs_too}
    ),
    "`eval_accumulation_steps`": Feature({**STEPS, "eval_accumulation_steps": 1}, more=METRICS),
    "`prediction_loss_only`": Feature({**STEPS, "prediction_loss_only": True}, more=METRICS),
    "several `eval_dataset`s": Feature(STEPS, more=two_sets),
    "`predict`": Feature(then=predicted),
    "`save_model`, for plain `from_pretrained`": Feature(then=loaded, close=1e-5),
    "`save_strategy`, `save_total_limit`": Feature({**SAVES, "save_total_limit": 1}, then=kept),
    "`save_only_model`": Feature({**SAVES, "save_only_model": True}, then=kept),
    "`resume_from_checkpoint`, also with other `pp_size`, `dp_size`": Feature({**SAVES, "max_steps": 5}, then=resumed),
    "`ignore_data_skip`": Feature({**SAVES, "max_steps": 5, "ignore_data_skip": True}, then=resumed),
    "`load_best_model_at_end`": Feature(BEST, then=lambda made: [{"loss": made.evaluate()["eval_loss"]}]),
    "`EarlyStoppingCallback`": Feature(BEST, more=lambda folder: {"callbacks": [EarlyStoppingCallback(1, 10.0)]}),
    "callbacks on every rank, in Trainer's order": Feature(
        {**STEPS, **SAVES, "gradient_accumulation_steps": 2}, more=with_events, then=events
    ),
    "`logging_steps`, `logging_first_step`": Feature({"logging_steps": 2, "logging_first_step": True}),
    "`logging_nan_inf_filter`": Feature({"logging_nan_inf_filter": True}),
    "`report_to` (by rank 0)": Feature({"report_to": ["tensorboard"]}, then=boarded),
    "`include_num_input_tokens_seen`": Feature({"include_num_input_tokens_seen": "non_padding"}),
    "`auto_find_batch_size`": Feature({"auto_find_batch_size": True}, refused=True),
    "`predict_with_generate`": Feature({"predict_with_generate": True}, "seq2seq", then=translated),
    "TRL's `GRPOTrainer` and `RLOOTrainer`: the stages generate": Feature(logged=rolled_out, close=2e-6),
    "`fp16_full_eval`, `bf16_full_eval`": Feature({"bf16_full_eval": True}, refused=True),
    '`debug="underflow_overflow"`': Feature({"debug": "underflow_overflow"}, refused=True),
    "`optim` that updates in backward (LOMO, layer-wise)": Feature({"optim": "lomo"}, refused=True),
    "`hyperparameter_search`": Feature(then=searched, refused=True),
}


def attempt(name: str, folder: str, plugin: dict[str, Any] | None = None) -> list[dict[str, Any]] | str:
    """Train with a feature. Returns the logs, or the error that refuses the feature."""
    feature = FEATURES[name]
    split = plugin is not None
    if feature.logged is not None:
        return feature.logged(folder, plugin)
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # it may start workers
    arguments = {"max_steps": 4, **feature.arguments}
    if not split and feature.window:
        arguments["gradient_accumulation_steps"] = feature.window
    TASKS.setdefault("plain", TASKS["causal"].__class__(llama, texts, metrics=None))
    with launched() if split else nullcontext():
        try:
            made = trainer(feature.task, f"{folder}/{split}", plugin, feature.more(folder), **arguments)
            made.train()
            found = logs(made)
            if feature.then is None:
                made.evaluate()
                found = logs(made)
            return found + (feature.then(made) if feature.then is not None else [])
        except PipeshardError as error:
            return f"{type(error).__name__}: {error}"
        finally:
            torch.use_deterministic_algorithms(False)
            torch.backends.mkldnn.deterministic = False


def verdict(pool: Pool, name: str) -> str:
    """Run a feature. Returns "works", "refused: ..." or, if it fails, "failed: ..." or "differs: ..."."""
    feature = FEATURES[name]
    with tempfile.TemporaryDirectory() as folder:
        expected = [] if feature.refused else attempt(name, folder)
        try:
            every = pool.run(attempt, feature.ranks, name, folder, {"pp_size": 2, **feature.plugin}, timeout=120)
        except Exception as error:
            return f"failed: {error}"
    for found in every:
        if isinstance(found, str):
            return f"refused: {found.partition(', since ')[2] or found.partition(': ')[2]}"
        assert isinstance(expected, list)
        if problems := differences(found, expected, feature.close):
            return f"differs: {problems[0]}"
    return "works"


def table(verdicts: dict[str, str]) -> str:
    rows = [f"| {name} | {what} |" for name, what in verdicts.items()]
    return "\n".join(["| feature | |", "|---|---|", *rows, ""])


def written(text: str, verdicts: dict[str, str]) -> str:
    """The text of the page with the table of these verdicts."""
    pattern = re.compile(re.escape(BEGIN) + ".*?" + re.escape(END), re.DOTALL)
    return pattern.sub(lambda _: f"{BEGIN}{table(verdicts)}{END}", text)


def main() -> int:
    pool, verdicts = Pool(), {}
    for name in FEATURES:
        verdicts[name] = verdict(pool, name)
        print(f"{name}: {verdicts[name][:300]}", flush=True)
    PAGE.write_text(written(PAGE.read_text(), verdicts))
    pool.shutdown()
    bad = [name for name, what in verdicts.items() if what != "works" and not what.startswith("refused")]
    print(f"{sum(what == 'works' for what in verdicts.values())} of {len(FEATURES)} work, {len(bad)} failed: {bad}")
    return bool(bad)


if __name__ == "__main__":
    raise SystemExit(main())
