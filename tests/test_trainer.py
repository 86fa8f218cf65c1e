"""Tests of PipelineTrainer: its logs, evaluations and resumed runs equal those of Trainer in one process."""

from __future__ import annotations

import ast
import inspect
import os
import re
import shlex
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import datasets
import numpy as np
import pytest
import torch
import yaml
from accelerate.commands.launch import launch_command_parser
from torch import Tensor, nn
from torch.distributed.run import get_args_parser
from torch.utils.data import IterableDataset
from transformers import (
    AutoModelForCausalLM,
    EarlyStoppingCallback,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    default_data_collator,
)

from pipeshard import PipelinePlugin, to_sequential
from pipeshard.dataloader import ResumableDataLoader
from pipeshard.errors import CheckpointError, ConfigurationError, UsageError
from pipeshard.planner import auto
from pipeshard.planner.planner import automatic
from pipeshard.private import tree_leaves
from pipeshard.trainer import PipelineTrainer, pipelined
from pipeshard.trainer.refusals import refuse_precision
from pipeshard.trainer.stand_ins import PipelineAccelerator
from pipeshard.trainer.trainer import Loop
from tests import trainers, zoo
from tests.house import PACKAGE
from tests.pool import Pool
from tests.trainer_features import BEGIN, END, FEATURES, LEAST, PAGE, verdict
from tests.trainers import TASKS, arguments, differences, forget, launched, logs, padded, run, run_pipeline, trainer

EVALUATED = {"eval_strategy": "steps", "eval_steps": 4}


@pytest.mark.turns
@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("name", "ranks", "plugin", "others"),
    [
        ("causal", 2, {}, {"max_steps": 50, "num_train_epochs": 5}),
        ("causal", 2, {"num_microbatches": 6}, {}),
        ("classifier", 2, {}, {}),
        ("seq2seq", 2, {}, {}),
        ("smoothed", 2, {}, {}),
        ("smoothed", 2, {"num_microbatches": 4}, {}),
        ("lora", 2, {}, {}),
        ("weighted", 2, {}, {}),
        ("function", 2, {}, {}),
        ("causal", 2, {"microbatch_tokens": 11}, {}),
        ("classifier", 2, {"microbatch_tokens": 11}, {}),
        ("seq2seq", 2, {"microbatch_tokens": 24}, {}),
        ("smoothed", 2, {"microbatch_tokens": 11}, {}),
    ],
    ids=lambda value: str(value).replace(" ", ""),
)
def test_logs_are_those_of_one_process(
    pool: Pool, tmp_path: Path, name: str, ranks: int, plugin: dict[str, Any], others: dict[str, Any]
) -> None:
    expected = run(name, tmp_path, **EVALUATED, **others)
    plugin = {"pp_size": ranks, **plugin}
    for found in pool.run(run_pipeline, ranks, name, str(tmp_path), plugin=plugin, **EVALUATED, **others):
        assert differences(found, expected) == []


@pytest.mark.turns
@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["causal", "classifier"])
def test_replicas_share_a_window(pool: Pool, tmp_path: Path, name: str) -> None:
    expected = run(name, tmp_path, gradient_accumulation_steps=4, **EVALUATED)
    options = {"plugin": {"pp_size": 2}, "gradient_accumulation_steps": 2}
    for found in pool.run(run_pipeline, 4, name, str(tmp_path), **options, **EVALUATED):
        assert differences(found, expected) == []


def searched(folder: str, plugin: dict[str, Any]) -> tuple[list[dict[str, float]], list[int]]:
    """What is logged with a searched schedule, and for how many microbatches it was searched."""
    with (
        mock.patch.multiple(auto, TRIES=30, ESTIMATES=30),
        mock.patch("pipeshard.boost.automatic", wraps=automatic) as search,
    ):
        found = run_pipeline("causal", folder, plugin={"pp_size": 2, "schedule": "auto", **plugin}, max_steps=2)
    return found, [call.args[2] for call in search.call_args_list]


def without_adapters(folder: str) -> float:
    """The error of a base model's outputs that stages with adapters compute from three microbatches."""
    with launched():
        made = trainer("lora", folder, {"pp_size": 2, "num_microbatches": 6})
        stages = made._own_stages().eval()
        ids = torch.arange(24).view(6, 4)
        cuts = stages.boosted.pipeline.cuts
        with torch.no_grad(), made.model.disable_adapter(), mock.patch.object(cuts, "uncut") as uncut:
            found = stages(input_ids=ids).logits
        assert not uncut.called
        with torch.no_grad():
            return float((found - zoo.build("llama").eval()(input_ids=ids).logits).norm())


def test_the_outputs_without_adapters_are_those_of_several_microbatches(pool: Pool, tmp_path: Path) -> None:
    """`disable_adapter`, as TRL computes a reference, freezes the adapters: a change of what is trained made each such
    batch one microbatch, whose activations may not fit."""
    assert all(error < 1e-6 for error in pool.run(without_adapters, 2, str(tmp_path)))


@pytest.mark.turns
@pytest.mark.parametrize(("plugin", "m"), [({}, 3), ({"num_microbatches": 6}, 6), ({"microbatch_size": 1}, 6)])
def test_a_schedule_is_searched_for_the_microbatches_of_a_window(
    pool: Pool, tmp_path: Path, plugin: dict[str, Any], m: int
) -> None:
    """schedule="auto" was searched for the microbatches of one batch, which is one for most: the cuts were those of a
    step without overlap, and memory_limit held for one microbatch."""
    expected = run("causal", tmp_path, max_steps=2)
    for found, microbatches in pool.run(searched, 2, str(tmp_path), plugin):
        assert differences(found, expected) == [] and microbatches == [m]


def launched_in_bf16(folder: str) -> list[list[dict[str, float]]]:
    with launched(), mock.patch.dict(os.environ, {"ACCELERATE_MIXED_PRECISION": "bf16"}):
        by_launcher = run("causal", folder, plugin={"pp_size": 1}, max_steps=2)
    return [by_launcher, run_pipeline("causal", folder, plugin={"pp_size": 1}, max_steps=2, bf16=True)]


@pytest.mark.turns
def test_the_precision_of_accelerate_launch_is_that_of_the_stages(pool: Pool, tmp_path: Path) -> None:
    """`accelerate launch --mixed_precision bf16` tells Trainer by the environment: stages trained in fp32."""
    for by_launcher, by_argument in pool.run(launched_in_bf16, 1, str(tmp_path)):
        assert differences(by_launcher, by_argument) == []


@pytest.mark.parametrize("precision", ["fp8", "no"])
def test_a_precision_in_which_stages_do_not_train_is_refused(precision: str) -> None:
    """`accelerate launch --mixed_precision fp8` trained in fp32, without a word."""
    error = pytest.raises(ConfigurationError, match="mixed precision 'fp8' of `accelerate launch`: set bf16=True")
    with error if precision == "fp8" else nullcontext():
        refuse_precision(precision, "PipelineTrainer")


def predict(name: str, folder: str, plugin: dict[str, Any] | None = None, **others: Any) -> list[Any]:
    """Predictions before training, after it, and of the model that is saved then."""
    with launched() if plugin else nullcontext():
        made = trainer(name, folder, plugin, **others)
        before = made.evaluate()
        made.train()
        predicted = made.predict(TASKS[name].data(7, seed=8))
        made.save_model()
        metrics = {key: before[key] for key in before if key in ("eval_loss", "eval_right", "eval_first")}
        metrics["has_time"] = "eval_model_preparation_time" in before  # which logs of a split model lacked
        return [metrics | {"loss": predicted.metrics["test_loss"]}, predicted.predictions, predicted.label_ids]


@pytest.mark.turns
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("ranks", "options"),
    [(2, {}), (4, {"eval_accumulation_steps": 1}), (2, {"eval_do_concat_batches": False})],
    ids=str,
)
def test_predictions_are_on_every_rank(pool: Pool, tmp_path: Path, ranks: int, options: dict[str, Any]) -> None:
    short = {"max_steps": 3, "gradient_accumulation_steps": 4, **options}
    name = "causal" if "eval_do_concat_batches" in options else "smoothed"
    metrics, predictions, labels = predict(name, str(tmp_path / "whole"), **short)
    split = {**short, "gradient_accumulation_steps": 8 // ranks}
    for found in pool.run(predict, ranks, name, str(tmp_path / "split"), {"pp_size": 2}, **split):
        assert differences([found[0]], [metrics]) == []
        for mine, theirs in zip(tree_leaves(found[1:]), tree_leaves([predictions, labels]), strict=True):
            assert np.allclose(mine, theirs, atol=1e-5)
    saved, whole = (AutoModelForCausalLM.from_pretrained(tmp_path / which) for which in ("split", "whole"))
    mine, theirs = saved.state_dict(), whole.state_dict()
    assert mine.keys() == theirs.keys() and all(torch.allclose(mine[k], theirs[k], atol=1e-6) for k in mine)


class OneMore(LlamaForCausalLM):
    """Returns one more output: a part of the loss, a scalar, the number of labels, or a field of batches with a row
    without padding."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> dict[str, Any]:
        out = super().forward(input_ids, attention_mask, labels=labels)
        outputs, more = {"loss": out.loss, "logits": out.logits}, self.config.more
        if more == "field":
            return outputs | ({more: out.logits[:, -1]} if attention_mask.all(1).any() else {})
        if more == "count":
            return outputs | {more: (labels != -100).sum()}
        return outputs | {more: out.loss.detach() / 2 if more == "part" else out.logits.mean()}


def evaluate_one_more(folder: str, more: str, plugin: dict[str, Any] | None = None) -> list[Any]:
    """The loss and all outputs of an evaluation."""
    with launched() if plugin else nullcontext():
        torch.manual_seed(0)
        model = OneMore(LlamaConfig(**zoo.TINY, more=more)).eval()
        made = trainer("causal", folder, plugin, {"model": model}, gradient_accumulation_steps=1)
        predicted = made.predict(TASKS["causal"].data(13, seed=5))
        return [predicted.metrics["test_loss"], *predicted.predictions]


@pytest.mark.turns
@pytest.mark.sampled(1)
@pytest.mark.parametrize("more", ["part", "scalar", "count", "field"])
def test_outputs_that_cannot_be_merged_are_those_of_the_whole_batch(pool: Pool, tmp_path: Path, more: str) -> None:
    """A user's model returned the parts of its loss: training with several microbatches was exact, and the first
    evaluation with compute_metrics was refused. So were evaluations of which one microbatch alone had images."""
    expected = evaluate_one_more(str(tmp_path / "whole"), more)
    assert len(expected) == 3
    cut = {"pp_size": 2, "num_microbatches": 2}
    for found in pool.run(evaluate_one_more, 2, str(tmp_path / "split"), more, cut):
        for mine, theirs in zip(found, expected, strict=True):
            assert np.allclose(mine, theirs, atol=1e-5)


def generate_after_training(folder: str) -> tuple[str, bool]:
    """The error of `trainer.model.generate`, and whether the call that it names returns the same tokens as one
    process does."""
    with launched():
        made = trainer("causal", folder, {"pp_size": 2}, max_steps=1)
        made.train()
        inputs = {"input_ids": torch.tensor([[3, 4, 5]]), "max_new_tokens": 4, "do_sample": False}
        with pytest.raises(UsageError) as caught:
            made.model.generate(**inputs)
        whole = to_sequential(made._own_stages().boosted)
        return str(caught.value), torch.equal(made.generate(**inputs), whole.eval().generate(**inputs))


@pytest.mark.turns
def test_a_trainer_s_model_that_generates_names_the_trainer_s_call(pool: Pool, tmp_path: Path) -> None:
    """`trainer.model.generate(...)` after training advised calls of a booster, which a Trainer's user does not have."""
    for message, is_same in pool.run(generate_after_training, 2, str(tmp_path)):
        assert "With a pipelined Trainer, call trainer.predict(...) or trainer.generate(...)" in message
        assert is_same


def predict_own(folder: str, plugin: dict[str, Any] | None) -> list[Any]:
    """Tokens of a model with its own `generate`, which is changed between two predictions."""
    with launched() if plugin else nullcontext():
        made = trainer("seq2seq", folder, plugin, {"compute_metrics": None}, predict_with_generate=True, max_steps=1)
        usual, predicted = made.model.generate, []
        for count in (3, 5):
            made.model.generate = partial(usual, max_new_tokens=count, min_new_tokens=count)
            predicted.append(made.predict(TASKS["seq2seq"].data(3, seed=8)).predictions)
        generate = getattr(made, "generate", made.model.generate)
        return [*predicted, generate(input_ids=torch.tensor([[3, 4, 5]])).numpy()]


@pytest.mark.turns
def test_a_generate_that_was_set_on_the_model_predicts(pool: Pool, tmp_path: Path) -> None:
    """`model.generate = partial(model.generate, language=..., task=...)` was ignored in a Seq2SeqTrainer's evaluation:
    other tokens, and so other metrics and another best checkpoint, without a message."""
    expected = predict_own(str(tmp_path), None)
    for found in pool.run(predict_own, 2, str(tmp_path), {"pp_size": 2}):
        assert [tokens.tolist() for tokens in found] == [tokens.tolist() for tokens in expected]


class Stream(IterableDataset[Any]):
    """Thirteen samples: the last batch is smaller than the others."""

    def __iter__(self) -> Iterator[Any]:
        return iter(TASKS["causal"].data(13, seed=5))


class Predicting(Trainer):
    """Has a prediction_step of its own."""

    def prediction_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        inputs = self._prepare_inputs(inputs)
        with torch.no_grad():
            loss, outputs = self.compute_loss(model, inputs, return_outputs=True)
        return loss, outputs.logits, inputs["labels"]


def evaluated_stream(folder: str, plugin: dict[str, Any] | None) -> tuple[float, float, int]:
    """The losses of an evaluated and of a predicted stream, and the number of predictions."""
    with launched() if plugin else nullcontext(), mock.patch.object(TASKS["causal"], "kind", Predicting):
        made = trainer("causal", folder, plugin, {"eval_dataset": Stream()})
        predicted = made.predict(Stream())
        return made.evaluate()["eval_loss"], predicted.metrics["test_loss"], len(predicted.predictions)


@pytest.mark.turns
def test_the_last_batch_of_an_evaluated_stream_counts_as_many_samples_as_it_has(pool: Pool, tmp_path: Path) -> None:
    """A Trainer with its own prediction_step counted the last batch of a stream as a full one: another eval_loss than
    in one process."""
    expected = evaluated_stream(str(tmp_path), None)
    assert expected[-1] == 13
    for found in pool.run(evaluated_stream, 2, str(tmp_path), {"pp_size": 2}, timeout=300):
        assert found == pytest.approx(expected, rel=1e-6)


class Averaging(Trainer):
    """Evaluates a whole model of its own on each rank, as an average of the trained weights."""

    def prediction_step(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        return super().prediction_step(zoo.build("llama-tied", seed=9), *args, **kwargs)

    def training_step(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        return super().training_step(zoo.build("llama-tied", seed=9), *args, **kwargs)


def evaluated_other(folder: str, plugin: dict[str, Any] | None) -> float:
    """The loss of the other model. To train this model is refused in a pipeline."""
    with launched() if plugin else nullcontext(), mock.patch.object(TASKS["causal"], "kind", Averaging):
        made = trainer("causal", folder, plugin)
        loss: float = made.evaluate()["eval_loss"]
        if plugin:
            with pytest.raises(
                UsageError, match=r"calls training_step with an instance of \w+ that is not the Trainer's model"
            ):
                made.train()
        return loss


@pytest.mark.turns
def test_another_model_is_evaluated_and_not_trained(pool: Pool, tmp_path: Path) -> None:
    """The stages of the trained model were evaluated instead of an average of its weights: an eval_loss, and a best
    checkpoint, of other weights without an error."""
    expected = evaluated_other(str(tmp_path), None)
    for found in pool.run(evaluated_other, 2, str(tmp_path), {"pp_size": 2}, timeout=300):
        assert found == pytest.approx(expected, rel=1e-6)


class Streaming:
    """A compute_metrics that is told of every batch."""

    def __init__(self) -> None:
        self.right = self.all = 0

    def __call__(self, predictions: Any, compute_result: bool) -> dict[str, float]:
        valid = predictions.label_ids != -100
        self.right += int((predictions.predictions == predictions.label_ids)[valid].sum())
        self.all += int(valid.sum())
        return {"right": self.right / self.all} if compute_result else {}


def chosen(logits: Any, labels: Any) -> Any:
    return logits.argmax(-1)


def stream(folder: str, plugin: dict[str, Any] | None = None) -> list[Any]:
    more = {"compute_metrics": Streaming(), "preprocess_logits_for_metrics": chosen}
    with launched() if plugin else nullcontext(), mock.patch.dict(TASKS["causal"].more, more):
        return run("causal", folder, plugin=plugin, max_steps=2, batch_eval_metrics=True)


@pytest.mark.turns
def test_metrics_may_be_streamed(pool: Pool, tmp_path: Path) -> None:
    expected = stream(str(tmp_path))
    assert "eval_right" in expected[-1]
    for found in pool.run(stream, 2, str(tmp_path), {"pp_size": 2}):
        assert differences(found, expected) == []


class Worse:
    """A compute_metrics by which the second evaluation is the best one."""

    def __init__(self) -> None:
        self.values = [0.5, 0.9, 0.4, 0.3, 0.2, 0.1, 0.1]

    def __call__(self, predictions: Any) -> dict[str, float]:
        return {"right": self.values.pop(0)}


def keep_the_best(name: str, folder: str, plugin: dict[str, Any] | None = None) -> list[Any]:
    kept = {"save_strategy": "steps", "save_steps": 2, "save_total_limit": 2, "load_best_model_at_end": True}
    judged = {"eval_strategy": "steps", "eval_steps": 2, "metric_for_best_model": "right", "max_steps": 20}
    with launched() if plugin else nullcontext(), mock.patch.object(TASKS[name], "metrics", Worse()):
        made = trainer(name, folder, plugin, **kept, **judged)
        made.add_callback(EarlyStoppingCallback(2))
        made.train()
        folders = sorted(path.name for path in Path(folder).glob("checkpoint-*"))
        with mock.patch.object(made, "compute_metrics", None):
            return [folders, {"loss": made.evaluate()["eval_loss"], "step": made.state.global_step}]


@pytest.mark.turns
@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["causal", "lora"])
def test_the_best_model_is_kept_and_loaded(pool: Pool, tmp_path: Path, name: str) -> None:
    folders, metrics = keep_the_best(name, str(tmp_path / "whole"))
    assert folders == ["checkpoint-4", "checkpoint-8"] and metrics["step"] == 8
    for found in pool.run(keep_the_best, 2, name, str(tmp_path / "split"), {"pp_size": 2}):
        assert found[0] == folders and differences([found[1]], [metrics]) == []


class Other(Trainer):
    """One whose loss cannot be that of a pipeline."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        return model(**{**inputs, "input_ids": inputs["input_ids"].flip(1)}).loss


class Twice(Trainer):
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        return model(**inputs).loss + model(**inputs).loss


class Both(Trainer):
    """One that always returns its outputs."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        outputs = model(**inputs)
        return outputs.loss, outputs


class Reading(Trainer):
    """One that reads the outputs in training_step."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        loss, _ = self.compute_loss(model, self._prepare_inputs(inputs), return_outputs=True)
        self.accelerator.backward(loss)
        return loss.detach()


class Penalized(Predicting):
    """One that reads the outputs in compute_loss and in prediction_step."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **kwargs)
        loss = loss + 0.01 * outputs.logits.square().mean()
        return (loss, outputs) if return_outputs else loss


def penalized(folder: str, plugin: dict[str, Any] | None = None) -> list[dict[str, float]]:
    with launched() if plugin else nullcontext(), mock.patch.object(TASKS["causal"], "kind", Penalized):
        return run("causal", folder, plugin=plugin, max_steps=3)


@pytest.mark.turns
def test_a_loss_may_read_the_outputs_of_the_trainer_s_own_loss(pool: Pool, tmp_path: Path) -> None:
    """A compute_loss that returned its outputs in training, or a training_step that asked for them, got an error that
    showed their tensors, or that did not name compute_loss. Reading them where the errors say is exact."""
    expected = penalized(str(tmp_path / "whole"))
    for found in pool.run(penalized, 2, str(tmp_path / "split"), {"pp_size": 2}, timeout=300):
        assert differences(found, expected) == []


class Archiving(Trainer):
    """One that saves its own files."""

    def _save(self, *args: Any, **kwargs: Any) -> None:
        super()._save(*args, **kwargs)


class Counting(Trainer):
    """Counts what it has seen, and knows its rank."""

    seen = 0

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        outputs = model(**inputs, output_hidden_states=True)
        self.seen += int(self.accelerator.gather_for_metrics(inputs["labels"].ne(-100).sum()).sum())
        return (outputs.loss, outputs) if return_outputs else outputs.loss


def count(folder: str, plugin: dict[str, Any] | None = None) -> tuple[int, int]:
    with launched() if plugin else nullcontext(), mock.patch.object(TASKS["causal"], "kind", Counting):
        made = trainer("causal", folder, plugin, max_steps=3)
        made.rank = torch.distributed.get_rank() if plugin else 0
        made.train()
        return made.seen, made.rank


@pytest.mark.turns
def test_what_a_loss_counts_is_known_to_every_rank(pool: Pool, tmp_path: Path) -> None:
    expected, _ = count(str(tmp_path))
    assert pool.run(count, 2, str(tmp_path), {"pp_size": 2}) == [(expected, 0), (expected, 1)]


REFUSED: list[tuple[type[Exception], str, dict[str, Any], dict[str, Any]]] = [
    (ConfigurationError, "auto_find_batch_size=True: .*pipeshard plan", {"auto_find_batch_size": True}, {}),
    (ConfigurationError, "bf16_full_eval=True.*bf16=True", {"bf16_full_eval": True}, {}),
    (ConfigurationError, "optim=.*backward", {"optim": "lomo"}, {}),
    (ConfigurationError, "debug=.*check_finite", {"debug": "underflow_overflow"}, {}),
    (ConfigurationError, "dispatch_batches=True", {"accelerator_config": {"dispatch_batches": True}}, {}),
    (
        ConfigurationError,
        "even_batches=False with dp_size=2",
        {"accelerator_config": {"even_batches": False}},
        {"pp_size": 1},
    ),
    (ConfigurationError, "dataloader_in_order=False: .*remove it", {"dataloader_in_order": False}, {}),
    (ConfigurationError, "max_norm=1.0.*max_grad_norm", {}, {"max_norm": 1.0}),
    (ConfigurationError, "num_microbatches=4.*gradient_accumulation_steps=3", {}, {"num_microbatches": 4}),
    (ConfigurationError, "loss_reduction='microbatch'", {}, {"loss_reduction": "microbatch"}),
    (CheckpointError, "it is not a complete, intact PipelineTrainer checkpoint", {"resume": "nowhere"}, {}),
    (
        UsageError,
        "copies or other values of input_ids to the model, but the pipeline runs the model on the batch",
        {"kind": Other},
        {},
    ),
    (UsageError, "calls the model twice", {"kind": Twice}, {}),
    (UsageError, r"PipelinedBoth.compute_loss returned a tuple.*only if return_outputs is True", {"kind": Both}, {}),
    (UsageError, r"nor compute_loss, .*return_outputs=True.*your own training_step.*super\(\)", {"kind": Reading}, {}),
    (ConfigurationError, "PipelinedArchiving overrides _save, .*override save_model", {"kind": Archiving}, {}),
]


def refused(folder: str, error: type[Exception], what: str, others: dict[str, Any], plugin: dict[str, Any]) -> None:
    kind, resume = others.pop("kind", Trainer), others.pop("resume", None)
    with launched(), mock.patch.object(TASKS["causal"], "kind", kind), pytest.raises(error, match=what):
        trainer("causal", folder, {"pp_size": 2, **plugin}, **others).train(resume_from_checkpoint=resume)


def all_refused(folder: str) -> None:
    for error, what, others, plugin in REFUSED:
        refused(folder, error, what, dict(others), plugin)
    with pytest.raises(ConfigurationError, match=r"has 2 ranks, but accelerate.*has 1: start the script with torchrun"):
        trainer("causal", folder, {"pp_size": 2})
    forget()
    with launched():  # one replica, or replicas with equally many batches
        trainer("causal", folder, {"pp_size": 2}, accelerator_config={"even_batches": False})
        whole = {"accelerator_config": {"even_batches": False}, "dataloader_drop_last": True}
        trainer("causal", folder, {"pp_size": 1}, **whole)
        made = trainer("causal", folder, {"pp_size": 2})
        with pytest.raises(UsageError, match="does not support hyperparameter_search"):
            made.hyperparameter_search()
        with pytest.raises(UsageError, match=r"under torch.no_grad"):
            made.accelerator.prepare(made.model)(input_ids=torch.ones(1, 4))


@pytest.mark.turns
def test_what_cannot_be_is_refused_by_name(pool: Pool, tmp_path: Path) -> None:
    """With even_batches=False, a replica that had fewer batches began its next epoch earlier, and silently trained more
    often on its own samples. With dataloader_in_order=False, stages read different batches after hours."""
    pool.run(all_refused, 2, str(tmp_path))
    for wrong in (int, PipelinePlugin):
        with pytest.raises(ConfigurationError, match=r"a subclass of transformers.Trainer"):
            pipelined(wrong)
    with pytest.raises(ConfigurationError, match="pipeline must be a PipelinePlugin, got 2"):
        PipelineTrainer(None, pipeline=2)


def test_private_names_of_trainer_mean_what_is_assumed() -> None:
    """They are methods with these arguments, and Trainer itself calls them where it is assumed to. All other names of
    Trainer that the room uses are documented."""
    source = inspect.getsource(Trainer)
    calls = {
        "_has_mixed_mesh_grads": ("model", ["if self._has_mixed_mesh_grads(model):"]),
        "_wrap_model": ("model, training, dataloader", ["self._wrap_model(self.model_wrapped)"]),
        "_load_from_checkpoint": (
            "resume_from_checkpoint, model",
            ["self._load_from_checkpoint(resume_from_checkpoint)"],
        ),
        "_load_optimizer_and_scheduler": ("checkpoint", ["self._load_optimizer_and_scheduler(resume_from_checkpoint)"]),
        "_save_optimizer_and_scheduler": ("output_dir", ["self._save_optimizer_and_scheduler(output_dir)"]),
        "_load_best_model": ("", ["self._load_best_model()"]),
        "_load_rng_state": ("checkpoint", ["self._load_rng_state(resume_from_checkpoint)"]),
        "_prepare_inputs": ("inputs", ["inputs = self._prepare_inputs(inputs)"]),
    }
    calls["_wrap_model"][1].append("model = self._wrap_model(self.model, training=False")
    for name, (parameters, uses) in calls.items():
        assert ", ".join([*inspect.signature(getattr(Trainer, name)).parameters][1:]) == parameters
        assert all(use in source for use in uses), name
    own = {
        node.attr
        for path in (PACKAGE / "trainer").glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr in vars(Trainer) and node.attr.startswith("_")
    }
    overridden = {name for name in vars(Loop) if name.startswith("_") and name in vars(Trainer)} - {
        "__doc__",
        "__module__",
    }
    assert {name for name in own | overridden if not name.startswith("__")} == set(calls)


@pytest.mark.turns
def test_a_window_s_tokens_are_counted_together(pool: Pool, tmp_path: Path) -> None:
    """A mutation: each batch by its own tokens, as if `num_items_in_batch` were not known."""
    expected = run("causal", tmp_path, max_steps=2)
    found = pool.run(mutated, 2, "items", str(tmp_path), {"pp_size": 2}, max_steps=2)[0]
    assert differences(found, expected)


@pytest.mark.turns
def test_mutations_of_an_evaluation_are_seen(pool: Pool, tmp_path: Path) -> None:
    """The loss averaged by batches, of which the last is smaller; metrics of the samples of one replica alone."""
    expected = run("smoothed", tmp_path, max_steps=1)
    told = pool.run_expecting(UsageError, mutated, 4, "replica", str(tmp_path), {"pp_size": 2}, max_steps=1)
    assert all("distributes its batches over replicas" in line for line in told)
    for mutation, key in (("batches", "eval_loss"), ("rows", "eval_first")):
        found = pool.run(
            mutated, 4, mutation, str(tmp_path), {"pp_size": 2}, max_steps=1, gradient_accumulation_steps=1
        )
        assert all(any(key in line for line in differences(one, expected)) for one in found), mutation


def of_one_replica(loop: Any, *args: Any, **options: Any) -> Any:
    loss, logits, labels = super(Loop, loop).prediction_step(*args, **options)
    return loss, logits[::2], labels[::2]


def test_one_process_uses_one_of_its_gpus(tmp_path: Path) -> None:
    """On a machine with several GPUs, transformers multiplied the batch size, and counted tokens for DataParallel."""
    expected = run("causal", tmp_path, max_steps=2)
    args = arguments(TASKS["causal"], tmp_path, max_steps=2)
    args._n_gpu = 4
    with mock.patch.object(trainers, "arguments", lambda *_, **__: args):
        made = trainer("causal", tmp_path, {"pp_size": 1})
    made.train()
    made.evaluate()
    assert args.n_gpu == 1 and args.train_batch_size == args.per_device_train_batch_size
    assert differences(logs(made), expected, 3e-6) == []


def test_an_evaluation_of_one_replica_s_part_is_refused(tmp_path: Path) -> None:
    """The metrics were those of the first replica's samples, without an error."""
    made = trainer("causal", tmp_path, {"pp_size": 1})
    loader = ResumableDataLoader(made.eval_dataset, 2, collate_fn=padded, num_replicas=2)
    with pytest.raises(UsageError, match=r"over replicas.*Do not use plugin\.prepare_dataloader"):
        made.evaluation_loop(loader, "Evaluation")


def test_a_prepared_dataloader_is_not_prepared_again(tmp_path: Path) -> None:
    """Of two replicas' batches, accelerate gave each replica every second one: half of the data was never read."""
    made = trainer("causal", tmp_path, {"pp_size": 1})
    loader = made.pipeline.prepare_dataloader(made.train_dataset, 2, collate_fn=padded)
    with pytest.raises(UsageError, match=r"accelerator\.prepare got a dataloader from plugin\.prepare_dataloader"):
        made.accelerator.prepare(loader)


def trained_in_any_order(folder: str) -> None:
    rows = datasets.Dataset.from_dict({name: [[1, k] for k in range(8)] for name in ("input_ids", "labels")})
    stream = rows.to_iterable_dataset().with_format("torch").shuffle(buffer_size=4)
    with launched():
        trainer("causal", folder, {"pp_size": 2}, {"train_dataset": stream}).train()


@pytest.mark.turns
def test_a_stream_that_is_shuffled_without_a_seed_is_refused(pool: Pool, tmp_path: Path) -> None:
    """The stages read different batches; the error advised a seed of the process, which such a stream does not use."""
    for told in pool.run_expecting(ConfigurationError, trained_in_any_order, 2, str(tmp_path)):
        assert "was shuffled or interleaved without a seed" in told


class Preparing(Trainer):
    def get_train_dataloader(self) -> Any:
        return self.pipeline.prepare_dataloader(self.train_dataset, 2, collate_fn=padded)


def test_a_prepared_dataloader_is_not_resumed_by_a_trainer(tmp_path: Path) -> None:
    """A run that was resumed within an epoch read its other batches in a random order."""
    with mock.patch.object(TASKS["causal"], "kind", Preparing):
        made = trainer("causal", tmp_path, {"pp_size": 1})
    with pytest.raises(UsageError, match=r"get_train_dataloader returns a dataloader from plugin\.prepare_dataloader"):
        made.train()


class Regression(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 1)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        output = self.second(self.first(x)).squeeze(-1)
        return {"output": output} if labels is None else {"loss": (output - labels).pow(2).mean(), "output": output}


BATCHES = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 1}


class Chain:
    def __init__(self, *loaders: Any) -> None:
        self.loaders = loaders

    def __len__(self) -> int:
        return sum(map(len, self.loaders))

    def __iter__(self) -> Iterator[Any]:
        for loader in self.loaders:
            yield from loader


class Chaining(Trainer):
    def get_train_dataloader(self) -> Any:
        return Chain(super().get_train_dataloader(), super().get_train_dataloader())


def test_dataloaders_that_a_class_chains_give_the_sample(tmp_path: Path) -> None:
    """The object that chained them had no dataset, so no sample was found, and train() raised an error."""
    samples = [{"x": [float(k), 1.0, 2.0], "labels": float(k)} for k in range(8)]
    more = {"model": Regression(), "train_dataset": samples, "data_collator": default_data_collator}
    with mock.patch.object(TASKS["causal"], "kind", Chaining):
        made = trainer("causal", tmp_path, {"pp_size": 1}, more, num_train_epochs=1, max_steps=-1, **BATCHES)
    made.train()
    assert made.state.global_step == 8


def mutated(mutation: str, folder: str, plugin: dict[str, Any], **others: Any) -> list[dict[str, float]]:
    patch: Any = {
        "items": lambda: mock.patch.object(Loop, "_given", lambda self, inputs, items, is_sample=False: dict(inputs)),
        "batches": lambda: mock.patch.object(PipelineAccelerator, "gather_for_metrics", lambda self, data, *_: data),
        "replica": lambda: mock.patch.object(PipelineAccelerator, "alone", nullcontext),
        "rows": lambda: mock.patch.object(Loop, "prediction_step", of_one_replica),
    }[mutation]
    with launched(), patch():
        return run("causal" if mutation == "items" else "smoothed", folder, plugin=plugin, **others)


@pytest.mark.turns
@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "name",
    [
        "`PipelinePlugin.from_pretrained`: no process holds the whole model",
        "`model_init`",
        "tensor parallelism (`tp_size`)",
        "`dataloader_num_workers`, `dataloader_prefetch_factor`",
        "callbacks on every rank, in Trainer's order",
        "`ignore_data_skip`",
        '`optim="adamw_bnb_8bit"`',
        '`optim="paged_adamw_8bit"`',
        "`predict_with_generate`",
    ],
)
def test_features_work(pool: Pool, name: str) -> None:
    if "8bit" in name:
        pytest.importorskip("bitsandbytes")
    assert verdict(pool, name) == "works"


def test_the_table_of_features_is_that_of_the_features() -> None:
    rows = PAGE.read_text().partition(BEGIN)[2].partition(END)[0].splitlines()[2:]
    assert [row.split(" | ")[0] for row in rows] == [f"| {name}" for name in FEATURES]
    works = sum(row.endswith("| works |") for row in rows)
    assert works >= LEAST and works + sum("| refused: " in row for row in rows) == len(rows) >= 60


def launches() -> list[list[str]]:
    """The commands under Launching, with values in the place of what a cluster's environment says."""
    section = PAGE.read_text().partition("## Launching")[2].partition("\n## ")[0]
    *shells, task = re.findall(r"```\w+\n(.*?)```", section, re.DOTALL)
    given = yaml.safe_load(task)
    assert set(given) == {"num_nodes", "resources", "workdir", "setup", "run"} and given["num_nodes"] == 2
    lines = "".join([*shells, given["run"]]).replace("\\\n", " ")
    lines = lines.replace('$(echo "$SKYPILOT_NODE_IPS" | head -n 1)', "host")
    commands = [shlex.split(line, comments=True) for line in lines.splitlines() if line.strip()]
    return [["2" if re.fullmatch(r"\$\w+", word) else word for word in words] for words in commands]


def test_the_commands_that_launch_are_those_of_the_launchers() -> None:
    commands = launches()
    assert len(commands) == 3
    for words in commands:
        if "torchrun" in words:
            parsed = get_args_parser().parse_args(words[words.index("torchrun") + 1 :])
            assert parsed.training_script == "script.py" and int(parsed.nproc_per_node) >= 2
            met = parsed.rdzv_backend == "c10d" and parsed.rdzv_endpoint.endswith(":29500")
            assert met or parsed.nnodes == "1:1"
        else:
            assert words[:2] == ["accelerate", "launch"]
            assert launch_command_parser().parse_args(words[2:]).num_processes == 4
