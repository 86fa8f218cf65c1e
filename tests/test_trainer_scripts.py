"""Tests of steps in transformers' example scripts other than training: a Trainer gives the results of one process."""

from __future__ import annotations

import random
import sys
from collections import namedtuple
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback

from pipeshard.distributed.collectives import decode, encode
from pipeshard.errors import UsageError
from pipeshard.trainer.serialization import ValueReader, ValueWriter
from pipeshard.trainer.stand_ins import _shared
from tests.pool import Pool
from tests.trainers import TASKS, Task, differences, launched, run, texts, trainer

Pair = namedtuple("Pair", ["loss", "scores"])
SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}


def clip() -> nn.Module:
    torch.manual_seed(0)
    text = {**SIZES, "vocab_size": 40, "max_position_embeddings": 16, "eos_token_id": 2}
    vision = {**SIZES, "image_size": 8, "patch_size": 4}
    return transformers.CLIPModel(transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=8))


def captioned(count: int, seed: int = 3) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 40, (count, 8), generator=generator)
    pixels = torch.randn(count, 3, 8, 8, generator=generator)
    return [{"input_ids": ids[k], "pixel_values": pixels[k]} for k in range(count)]


def collated(samples: list[dict[str, Tensor]]) -> dict[str, Any]:
    """The collator of run_clip.py."""
    batch = {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}
    return {**batch, "return_loss": True}


def classes_and_norms(outputs: Any) -> list[Any]:
    """The path and norm of each leaf, and the kind of container of each node."""
    if isinstance(outputs, dict):
        return [(name, hasattr(outputs, name), classes_and_norms(value)) for name, value in outputs.items()]
    if isinstance(outputs, list | tuple):
        return [getattr(outputs, "_fields", ()), *map(classes_and_norms, outputs)]
    return [round(float(torch.as_tensor(outputs).norm()), 4)]


def evaluate_clip(folder: str, plugin: dict[str, Any] | None = None) -> tuple[list[Any], Any, Any]:
    task = Task(clip, captioned, {"max_steps": 2}, {"data_collator": collated}, metrics=None)
    with launched() if plugin else nullcontext(), mock.patch.dict(TASKS, clip=task):
        evaluated = run("clip", folder, plugin=plugin, eval_strategy="steps", eval_steps=1)
        made = trainer("clip", folder, plugin)
        predicted = made.predict(task.data(5, seed=8))
        with torch.no_grad():
            outputs = made._wrap_model(made.model, training=False)(**collated(task.data(5, seed=8)))
        return evaluated, classes_and_norms(predicted.predictions), outputs.vision_model_output.pooler_output.norm()


@pytest.mark.turns
def test_a_model_with_outputs_within_outputs_is_evaluated(pool: Pool, tmp_path: Path) -> None:
    """run_clip.py --do_eval: each evaluation ended in a MessageError, since CLIP's output has the outputs of its two
    towers in it, and classes are not sent. Its batches have no labels, so all outputs were sent for the loss alone."""
    expected, predictions, norm = evaluate_clip(str(tmp_path))
    for found, theirs, of_tower in pool.run(evaluate_clip, 2, str(tmp_path), {"pp_size": 2}):
        assert differences(found, expected) == []
        assert theirs == predictions and torch.allclose(of_tower, norm)


def test_the_containers_of_an_output_are_as_they_were_when_they_are_received() -> None:
    """A named tuple, as which the error about opaque outputs tells a user to return them, could not be sent."""
    tower = transformers.modeling_outputs.BaseModelOutput(last_hidden_state=torch.ones(2))
    sent = Pair(1.0, {"tower": tower, "parts": [(2, "two"), Pair(None, torch.Size([3]))]})
    writer = ValueWriter({}, {})
    writer.dump(sent)
    received = ValueReader(decode(encode(writer.written)), {}, torch.device("cpu")).load()
    assert type(received) is Pair and next(iter(received)) == received.loss == 1.0
    assert type(received.scores) is dict and type(received.scores["tower"]) is type(tower)
    assert torch.equal(received.scores["tower"].last_hidden_state, torch.ones(2))
    assert received.scores["parts"][0] == (2, "two") and received.scores["parts"][1].scores == torch.Size([3])


def local_outputs() -> tuple[str, Any]:
    pipeline: Any = SimpleNamespace(last_rank=1, group=dist.group.WORLD, device=torch.device("cpu"))
    local, shared = namedtuple("local", ["loss"]), Pair(torch.ones(2), None)
    with pytest.raises(UsageError) as caught:
        _shared(local(1.0) if dist.get_rank() == 1 else None, pipeline)
    return str(caught.value), _shared(shared if dist.get_rank() == 1 else None, pipeline)


def test_outputs_of_a_class_that_has_no_name_are_refused_on_every_rank(pool: Pool) -> None:
    for message, shared in pool.run(local_outputs, 2):
        assert "the model's output cannot be sent (PicklingError: " in message and "local" in message
        assert ".py file" in message
        assert type(shared) is Pair and torch.equal(shared.loss, torch.ones(2))


def test_a_class_that_only_the_last_stage_has_imported_is_named() -> None:
    """A loss stored an object of a module that it imports itself, late in training. The other ranks raised KeyError,
    without the reason or a remedy."""
    module: Any = ModuleType("of_last_stage")
    module.Kind = type("Kind", (), {"__module__": module.__name__})
    writer = ValueWriter({}, {})
    with mock.patch.dict(sys.modules, {module.__name__: module}):
        writer.dump(module.Kind())
    with pytest.raises(UsageError, match=r"sends of_last_stage\.Kind, which this rank has not imported: import it"):
        ValueReader(writer.written, {}, torch.device("cpu")).load()


class Judging(Trainer):
    """The main process alone computes the metrics, as in trainer_qa.py of transformers' examples."""

    values = (0.5, 0.9, 0.4, 0.3, 0.2, 0.1)

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        metrics: dict[str, float] = self.evaluation_loop(self.get_eval_dataloader(), "Evaluation").metrics
        if self.args.should_save:
            metrics = {**metrics, "eval_f1": np.float64(self.values[self.state.global_step // 2 - 1])}
            self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics


class Stopping(TrainerCallback):
    """Ends the training when a metric is low."""

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any, **kwargs: Any) -> None:
        control.should_training_stop = metrics.get("eval_f1", 1.0) < 0.45


def judge(folder: str, plugin: dict[str, Any] | None = None) -> list[Any]:
    """The step and the checkpoint that are chosen by a metric, and the step at which a callback ends the training."""
    evaluated = {"eval_strategy": "steps", "eval_steps": 2, "lr_scheduler_type": "reduce_lr_on_plateau"}
    saved = {"save_strategy": "steps", "save_steps": 2, "load_best_model_at_end": True, "metric_for_best_model": "f1"}
    with launched() if plugin else nullcontext(), mock.patch.object(TASKS["causal"], "kind", Judging):
        more = {"callbacks": [EarlyStoppingCallback(2)]}
        early = trainer("causal", folder, plugin, more, max_steps=12, **evaluated, **saved)
        early.train()
        own = trainer("causal", folder, plugin, {"callbacks": [Stopping()]}, eval_strategy="steps", eval_steps=2)
        own.train()
        best = Path(early.state.best_model_checkpoint).name
        return [early.state.global_step, best, early.state.best_metric, own.state.global_step]


@pytest.mark.turns
def test_ranks_stop_by_the_metrics_of_the_main_process(pool: Pool, tmp_path: Path) -> None:
    """The Trainer of run_qa.py computes metrics on the main process only. Rank 1 raised KeyError with
    load_best_model_at_end, and a callback that stops by such a metric left the ranks in different steps."""
    assert judge(str(tmp_path / "whole")) == [8, "checkpoint-4", 0.9, 6]
    found = pool.run(judge, 2, str(tmp_path / "split"), {"pp_size": 2}, timeout=60)
    assert found == [[8, "checkpoint-4", 0.9, 6]] * 2


class Augmented:
    """A dataset with generators of its own, as albumentations' Compose has, which set_seed does not seed."""

    def __init__(self, samples: list[dict[str, Tensor]]) -> None:
        self.samples = samples
        self.rng, self.random, self.torch = np.random.default_rng(), random.Random(), torch.Generator()
        self.torch.seed()

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, k: int) -> dict[str, Tensor]:
        first = self.rng.integers(3, 20), self.random.randrange(3, 20), torch.randint(3, 20, (), generator=self.torch)
        ids = self.samples[k]["input_ids"].clone()
        ids[:3] = torch.tensor([int(drawn) for drawn in first])
        return {"input_ids": ids, "labels": ids}


def augment(folder: str) -> tuple[int, list[Any]]:
    with launched():
        data = {"train_dataset": Augmented(texts(24)), "eval_dataset": Augmented(texts(7, seed=5))}
        made = trainer("causal", folder, {"pp_size": 2}, data, max_steps=2, eval_strategy="steps", eval_steps=1)
        made.train()
        read = [sample["input_ids"].tolist() for sample in map(data["train_dataset"].__getitem__, range(2))]
        return made.pipeline.grid.replica, read


@pytest.mark.turns
@pytest.mark.parametrize("ranks", [2, 4])
def test_the_stages_of_a_replica_draw_from_the_same_generators(pool: Pool, tmp_path: Path, ranks: int) -> None:
    """run_object_detection.py ended in a BatchError in its first step: each stage augmented its images with random
    numbers of its own, although the script calls set_seed."""
    found = pool.run(augment, ranks, str(tmp_path))
    assert [replica for replica, _ in found] == [0, 0, 1, 1][:ranks]
    for (_, one), (_, other) in zip(found[::2], found[1::2], strict=True):
        assert one == other
    assert ranks == 2 or found[0][1] != found[2][1]


def count(folder: str, plugin: dict[str, Any] | None = None) -> list[int]:
    with launched() if plugin else nullcontext():
        made = trainer("lora", folder, plugin, max_steps=1)
        before = made.get_num_trainable_parameters()
        made.train()
        return [before, made.get_num_trainable_parameters()]


@pytest.mark.turns
def test_the_trained_parameters_of_all_stages_are_counted(pool: Pool, tmp_path: Path) -> None:
    """After train(), a script's `trainer.get_num_trainable_parameters()` was the number of one stage."""
    expected = count(str(tmp_path))
    assert expected[0] == expected[1] > 0
    assert pool.run(count, 2, str(tmp_path), {"pp_size": 2}) == [expected, expected]
