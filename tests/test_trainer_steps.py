"""Tests of a Trainer's steps: a custom training_step changes gradients and weights as in one process, or is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import transformers.trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset
from transformers import BatchEncoding, Trainer, TrainerCallback
from transformers.optimization import Adafactor, AdafactorSchedule

from pipeshard.errors import ConfigurationError, UsageError
from pipeshard.trainer import PipelineTrainer
from tests.pool import Pool
from tests.trainers import TASKS, differences, halved, launched, logs, padded, texts, trainer
from tests.zoo import VOCABULARY


class Halving(Trainer):
    """Halves the gradients of each batch."""

    def training_step(self, model: Any, *args: Any, **kwargs: Any) -> Tensor:
        loss: Tensor = super().training_step(model, *args, **kwargs)
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)
        return loss


class Adversarial(Trainer):
    """A second backward of each batch, with weights that are moved along their gradients."""

    def training_step(self, model: Any, *args: Any, **kwargs: Any) -> Tensor:
        loss: Tensor = super().training_step(model, *args, **kwargs)
        trained = [parameter for parameter in model.parameters() if parameter.grad is not None]
        moves = [0.01 * p.grad / (p.grad.norm() + 1e-9) for p in trained]
        with torch.no_grad():
            for parameter, move in zip(trained, moves, strict=True):
                parameter.add_(move)
        super().training_step(model, *args, **kwargs)
        with torch.no_grad():
            for parameter, move in zip(trained, moves, strict=True):
                parameter.sub_(move)
        return loss


class HalvingByData(Trainer):
    def training_step(self, model: Any, *args: Any, **kwargs: Any) -> Tensor:
        loss: Tensor = super().training_step(model, *args, **kwargs)
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.data.mul_(0.5)
        return loss


class AdversarialByData(Trainer):
    """FGM as in its many copies: moves the weights of the embedding through `data`, and restores them."""

    def training_step(self, model: Any, *args: Any, **kwargs: Any) -> Tensor:
        loss: Tensor = super().training_step(model, *args, **kwargs)
        backup = {}
        for name, parameter in model.named_parameters():
            if "embed" in name and parameter.requires_grad and parameter.grad is not None:
                backup[name] = parameter.data.clone()
                if norm := float(torch.norm(parameter.grad)):
                    parameter.data.add_(parameter.grad / norm)
        super().training_step(model, *args, **kwargs)
        for name, parameter in model.named_parameters():
            if name in backup:
                parameter.data = backup[name]
        return loss


class Counting(Trainer):
    """Changes nothing that is trained, and reads all values through `data`."""

    steps = 0

    def training_step(self, model: Any, *args: Any, **kwargs: Any) -> Tensor:
        self.steps += 1
        loss: Tensor = super().training_step(model, *args, **kwargs)
        for parameter in (p for p in model.parameters() if p.requires_grad):
            parameter.data.norm()
            if parameter.grad is not None:
                parameter.grad.data.norm()
        return loss


class Decaying(TrainerCallback):
    """Shrinks the weights after each batch of a window but its last."""

    def on_substep_end(self, *args: Any, model: Any = None, **kwargs: Any) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.mul_(0.9)


class DecayingByData(TrainerCallback):
    def on_substep_end(self, *args: Any, model: Any = None, **kwargs: Any) -> None:
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data.mul_(0.9)


class DecayingInCount(Trainer):
    """Shrinks the weights where Trainer counts the operations of each batch, which is neither in its training_step nor
    in a callback."""

    def floating_point_ops(self, inputs: Any) -> int:
        with torch.no_grad():
            for parameter in self.model_wrapped.parameters():
                if parameter.requires_grad:
                    parameter.mul_(0.9)
        return 0


def train(
    kind: type[Trainer], folder: str, plugin: dict[str, Any] | None = None, evaluates: bool = False, **others: Any
) -> Any:
    with launched() if plugin else nullcontext(), mock.patch.object(TASKS["causal"], "kind", kind):
        made = trainer("causal", folder, plugin, max_steps=4, max_grad_norm=0.5, **others)
        made.train()
        if evaluates:
            made.evaluate()
        assert getattr(made, "_left", None) is None  # would keep gradients in memory
        return logs(made), getattr(made, "steps", 0)


def refused(folder: str) -> None:
    with launched():
        for kind in (Halving, Adversarial, HalvingByData, AdversarialByData):
            with (
                mock.patch.object(TASKS["causal"], "kind", kind),
                pytest.raises(
                    UsageError,
                    match=rf"Pipelined{kind.__name__}: gradients or parameters have changed in training_step.*pre_opt",
                ),
            ):
                trainer("causal", folder, {"pp_size": 2}, gradient_accumulation_steps=2).train()
        for callback in (Decaying(), DecayingByData()):
            with pytest.raises(UsageError, match=r"have changed between the batches of a window"):
                trainer("causal", folder, {"pp_size": 2}, {"callbacks": [callback]}).train()
        with (
            mock.patch.object(TASKS["causal"], "kind", DecayingInCount),
            pytest.raises(UsageError, match=r"have changed between the batches of a window"),
        ):
            trainer("causal", folder, {"pp_size": 2}, gradient_accumulation_steps=2).train()


@pytest.mark.turns
def test_a_training_step_of_ones_own_is_exact_where_a_step_has_one_batch(pool: Pool, tmp_path: Path) -> None:
    """model.parameters() was empty there while gradients were enabled: gradients that a training_step halved in one
    process stayed as they were in a pipeline."""
    plugin = {"pp_size": 2, "num_microbatches": 2}
    for kind in (Halving, Adversarial):
        expected, _ = train(kind, str(tmp_path), gradient_accumulation_steps=1)
        for found, _ in pool.run(train, 2, kind, str(tmp_path), plugin, gradient_accumulation_steps=1, timeout=120):
            assert differences(found, expected, 3e-6) == []


@pytest.mark.turns
def test_what_changes_within_a_window_is_refused(pool: Pool, tmp_path: Path) -> None:
    """A window runs as one step, after its last batch: what was done after each batch of it was done once, or to
    other weights than in one process. Writes through `data`, as in FGM, were not seen."""
    pool.run(refused, 2, str(tmp_path), timeout=120)
    expected, steps = train(Counting, str(tmp_path))
    for found, counted in pool.run(train, 2, Counting, str(tmp_path), {"pp_size": 2}, timeout=120):
        assert differences(found, expected, 3e-6) == []
        assert counted == steps == 12


class Skipping(Trainer):
    """Skips batches of each window of three: the last, the first, all, then the first and the last."""

    calls = 0

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        self.calls += 1
        if self.calls in (3, 4, 7, 8, 9, 10, 12):
            return torch.tensor(0.0)
        loss: Tensor = super().training_step(*args, **kwargs)
        return loss


@pytest.mark.turns
def test_a_window_with_skipped_batches_is_exact(pool: Pool, tmp_path: Path) -> None:
    """A training_step skipped batches that are too long. The window's last batch, with which the pipeline runs the
    window: an error blamed a callback, and the last window of a run was not trained. The window's first batch: an error
    said that training_step changed parameters, which the optimizer's step had changed."""
    expected, _ = train(Skipping, str(tmp_path), gradient_accumulation_steps=3)
    for found, _ in pool.run(train, 2, Skipping, str(tmp_path), {"pp_size": 2}, gradient_accumulation_steps=3):
        assert differences(found, expected, 3e-6) == []


class OwnLoader(Trainer):
    """Makes its own dataloader, with a column that only the loss reads."""

    def get_train_dataloader(self) -> Any:
        assert self.train_dataset is not None
        return DataLoader(self.train_dataset, batch_size=2, collate_fn=self.with_weights)

    def with_weights(self, samples: list[Any]) -> dict[str, Tensor]:
        batch: dict[str, Tensor] = self.data_collator(samples)
        return batch | {"weights": torch.arange(1.0, 1 + len(samples))}

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        labels, weights = inputs.pop("labels"), inputs.pop("weights")
        outputs = model(**inputs)
        logits = outputs.logits[:, :-1].transpose(1, 2)
        loss = (nn.functional.cross_entropy(logits, labels[:, 1:], reduction="none") * weights[:, None]).sum() / 100
        return (loss, outputs) if return_outputs else loss


def with_own_loader(folder: str, plugin: dict[str, Any] | None, is_given: bool = False) -> Any:
    if is_given:
        batch = padded(texts(2))
        plugin = {**(plugin or {}), "dry_run_input": batch | {"weights": torch.ones(2)}}
    return train(OwnLoader, folder, plugin, gradient_accumulation_steps=1, remove_unused_columns=False)


@pytest.mark.turns
def test_a_dataloader_of_ones_own_gives_the_sample_of_the_trace(pool: Pool, tmp_path: Path) -> None:
    """A Trainer with its own get_train_dataloader was traced with made-up inputs, which lacked the columns of its
    compute_loss: KeyError. With such a batch as dry_run_input, the columns were passed to the model."""
    expected, _ = with_own_loader(str(tmp_path), None)
    for is_given in (False, True):
        for found, _ in pool.run(with_own_loader, 2, str(tmp_path), {"pp_size": 2}, is_given):
            assert differences(found, expected, 3e-6) == []


class Both(Skipping, OwnLoader):
    pass


class BothInStages(Both, PipelineTrainer):
    pass


@pytest.mark.turns
def test_a_subclass_of_the_pipeline_s_trainer_is_exact(pool: Pool, tmp_path: Path) -> None:
    """A user changed the base class of a Trainer to PipelineTrainer. The trace lacked columns of its own dataloader,
    and a window whose last batch training_step skipped was not trained, or its compute_loss was refused."""
    window: dict[str, Any] = {"gradient_accumulation_steps": 3, "remove_unused_columns": False}
    expected, _ = train(Both, str(tmp_path), **window)
    for kind in (Both, BothInStages):
        for found, _ in pool.run(train, 2, kind, str(tmp_path), {"pp_size": 2}, **window):
            assert differences(found, expected, 3e-6) == []


class Multilabel(Trainer):
    """Has several labels per sample, which the model itself cannot compute a loss from. Uses what only BatchEncodings
    have."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        inputs = inputs.to(self.model.device)
        labels = nn.functional.one_hot(inputs.labels, 3).amax(1).float()
        del inputs["labels"]
        outputs = model(**inputs)
        loss = nn.functional.binary_cross_entropy_with_logits(outputs.logits, labels)
        return (loss, outputs) if return_outputs else loss


def encoded(samples: list[Any]) -> BatchEncoding:
    """A batch as tokenizers' own collators return it: a Mapping, but not a dict."""
    batch = padded(samples)
    return BatchEncoding(batch | {"labels": torch.stack([batch["labels"], batch["labels"]], 1)})


def with_several_labels(folder: str, plugin: dict[str, Any] | None, is_given: bool = False) -> Any:
    if is_given:
        plugin = {**(plugin or {}), "dry_run_input": encoded(TASKS["weighted"].data(2))}
    with launched() if plugin else nullcontext(), mock.patch.object(TASKS["weighted"], "kind", Multilabel):
        made = trainer("weighted", folder, plugin, {"data_collator": encoded, "compute_metrics": None}, max_steps=2)
        made.train()
        return logs(made)


@pytest.mark.turns
def test_a_tokenizer_s_batch_is_traced_without_the_labels_of_a_custom_loss(pool: Pool, tmp_path: Path) -> None:
    """A Trainer computed its own loss of multi-hot labels, with the default collator of a tokenizer (a BatchEncoding).
    The trace passed the labels to the model, which failed on them: TraceError. compute_loss received a dict in a step,
    without the attributes of a BatchEncoding."""
    expected = with_several_labels(str(tmp_path), None)
    for is_given in (False, True):
        for found in pool.run(with_several_labels, 2, str(tmp_path), {"pp_size": 2}, is_given):
            assert differences(found, expected, 3e-6) == []


class Rewriting(Trainer):
    """Writes to the batch in place before it calls the model: to labels that only the loss reads."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        labels = inputs.pop("labels")
        labels[labels >= 0] -= 1
        labels.clamp_(min=-100)
        outputs = model(**inputs)
        loss = nn.functional.cross_entropy(outputs.logits[:, :-1].transpose(1, 2), labels[:, 1:].abs() % VOCABULARY)
        return (loss, outputs) if return_outputs else loss


class RewritingInputs(Trainer):
    """Writes in place to tokens and labels that the model and the loss read."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        inputs["input_ids"].add_(1).remainder_(VOCABULARY)
        inputs["labels"][inputs["labels"] % 5 == 0] = -100
        outputs = model(**inputs)
        loss = outputs.loss * inputs["input_ids"].float().mean()
        return (loss, outputs) if return_outputs else loss


@pytest.mark.turns
@pytest.mark.parametrize("kind", [Rewriting, RewritingInputs])
def test_a_loss_that_writes_to_its_batch_writes_once(pool: Pool, tmp_path: Path, kind: type[Trainer]) -> None:
    """compute_loss is called before the step and in it: the labels of a loss that standardizes them in place were
    standardized twice, without an error."""
    expected, _ = train(kind, str(tmp_path), evaluates=True)
    for found, _ in pool.run(train, 2, kind, str(tmp_path), {"pp_size": 2}, evaluates=True):
        assert differences(found, expected, 3e-6) == []


class Contrastive(Trainer):
    """Has a loss whose operators autocast would run in 16 bits."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        outputs = model(**inputs)
        embedded = nn.functional.normalize(outputs.logits)
        loss = nn.functional.cross_entropy(embedded @ embedded.T * 20, torch.arange(len(embedded)))
        return (loss, outputs) if return_outputs else loss


def contrasted(folder: str, plugin: dict[str, Any] | None) -> Any:
    with launched() if plugin else nullcontext(), mock.patch.object(TASKS["weighted"], "kind", Contrastive):
        made = trainer("weighted", folder, plugin, max_steps=2, bf16=True)
        made.train()
        made.evaluate()
        return logs(made)


@pytest.mark.turns
def test_a_loss_of_ones_own_is_computed_in_fp32_under_autocast(pool: Pool, tmp_path: Path) -> None:
    """With bf16=True, the matmul of a contrastive loss ran in bf16, on bf16 outputs: accelerate's autocast ends with
    the model's forward, and returns fp32 outputs."""
    expected = contrasted(str(tmp_path), None)
    for found in pool.run(contrasted, 2, str(tmp_path), {"pp_size": 2}):
        assert differences(found, expected, 3e-6) == []


def padded_without_labels(samples: list[Any]) -> dict[str, Tensor]:
    """A batch as long as the longest sample, without labels if the samples have none."""
    batch = padded([{"labels": sample["input_ids"], **sample} for sample in samples])
    return batch if "labels" in samples[0] else {name: batch[name] for name in ("input_ids", "attention_mask")}


def predicted_first(name: str, folder: str, plugin: dict[str, Any] | None) -> Any:
    more = {"data_collator": padded_without_labels, "compute_metrics": None}
    with launched() if plugin else nullcontext():
        made = trainer(name, folder, plugin, more, max_steps=2)
        unlabeled = [{"input_ids": sample["input_ids"]} for sample in TASKS[name].data(3, seed=8)]
        predicted = made.predict(unlabeled).predictions
        made.train()
        made.evaluate()
        return logs(made), torch.as_tensor(predicted)


@pytest.mark.turns
@pytest.mark.parametrize("name", ["weighted", "smoothed"])
def test_unlabeled_data_are_predicted_before_training(pool: Pool, tmp_path: Path, name: str) -> None:
    """predict(data without labels) was the first call of a Trainer with its own loss, which one process does not
    compute then: KeyError 'labels' from compute_loss."""
    expected, scores = predicted_first(name, str(tmp_path), None)
    for found, predicted in pool.run(predicted_first, 2, name, str(tmp_path), {"pp_size": 2}):
        assert differences(found, expected, 3e-6) == [] and torch.allclose(predicted, scores, atol=1e-5)


def with_relative_steps(folder: str, plugin: dict[str, Any] | None, resume: str = "") -> list[dict[str, float]]:
    with launched() if plugin else nullcontext():
        model = TASKS["classifier"].model()
        optimizer = Adafactor(model.parameters(), scale_parameter=True, relative_step=True, warmup_init=True, lr=None)
        more = {"model": model, "optimizers": (optimizer, AdafactorSchedule(optimizer)), "compute_metrics": None}
        made = trainer("classifier", folder, plugin, more, max_steps=6, save_strategy="steps", save_steps=4)
        made.train(resume_from_checkpoint=resume or None)
        return logs(made)


@pytest.mark.turns
def test_the_rate_that_adafactor_computes_is_not_compared(pool: Pool, tmp_path: Path) -> None:
    """AdafactorSchedule writes to `lr` the rate of a rank's first parameter, which Adafactor(relative_step=True) does
    not read. The second step was refused, and later every save, because this rate differs between ranks."""
    expected = with_relative_steps(str(tmp_path / "whole"), None)
    first, second = pool.run(with_relative_steps, 2, str(tmp_path / "split"), {"pp_size": 2})
    checkpoint = str(tmp_path / "split" / "checkpoint-4")
    resumed, _ = pool.run(with_relative_steps, 2, str(tmp_path / "resumed"), {"pp_size": 2}, checkpoint)
    assert differences(first, expected, 3e-6) == []
    losses, *others = (
        [{"loss": entry["loss"]} for entry in log if "loss" in entry] for log in (expected, second, resumed)
    )
    assert len(losses) == 6 and [differences(found, losses, 3e-6) for found in others] == [[], []]


class Clipping(TrainerCallback):
    """Clips the gradients of some parameters, by their own norm, before the Trainer's step."""

    def __init__(self, made: Any, chosen: Callable[[Any], Iterable[Tensor]]) -> None:
        self.made, self.chosen = made, chosen

    def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        self.made.accelerator.clip_grad_norm_(self.chosen(self.made), 0.1)


def of_one_layer(made: Any) -> Iterable[Tensor]:
    return made.model.model.layers[0].parameters()  # type: ignore[no-any-return]


def of_one_parameter(made: Any) -> Iterable[Tensor]:
    return made.model.model.norm.weight  # type: ignore[no-any-return]


def of_the_groups(made: Any) -> Iterable[Tensor]:
    return [parameter for group in made.optimizer.param_groups for parameter in group["params"]]


def clipped(folder: str) -> None:
    with launched():
        for chosen in (of_one_layer, of_one_parameter, of_the_groups):
            made = trainer("causal", folder, {"pp_size": 2, "zero_stage": 1}, max_steps=1)
            made.add_callback(Clipping(made, chosen))
            is_whole = chosen is of_the_groups
            with nullcontext() if is_whole else pytest.raises(UsageError, match=r"not include .*model.*max_grad_norm"):
                made.train()


@pytest.mark.turns
def test_some_parameters_are_not_clipped_by_the_norm_of_all(pool: Pool, tmp_path: Path) -> None:
    """accelerator.clip_grad_norm_(some parameters) clipped the whole model by the norm of the whole model."""
    pool.run(clipped, 4, str(tmp_path), timeout=120)


class Scaling(TrainerCallback):
    """Clips the gradients of this rank before the Trainer's step, or multiplies them by a factor of the rank."""

    def __init__(self, made: Any, clips: bool) -> None:
        self.made, self.clips = made, clips

    def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        if self.clips:
            torch.nn.utils.clip_grad_norm_(self.made.model.parameters(), 0.1)
        for parameter in of_the_groups(self.made):
            if parameter.grad is not None:
                parameter.grad.mul_(0.5 + 0.1 * dist.get_rank())


class Whole(torch.optim.SGD):
    """Clips by the norm of its gradients."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        torch.nn.utils.clip_grads_with_norm_(params := self.param_groups[0]["params"], 0.1, norm_of(params))
        return super().step(closure)


def norm_of(parameters: list[Tensor]) -> Tensor:
    return torch.stack([p.grad.norm() for p in parameters if p.grad is not None]).norm()


def advised(folder: str, kind: str) -> str:
    """The error of a Trainer whose gradients are clipped, or multiplied, on each rank alone."""
    with launched():
        made = trainer("causal", folder, {"pp_size": 2}, max_steps=1)
        if kind == "optimizer":
            made.optimizer = Whole(made.model.parameters(), lr=0.1)
        else:
            made.add_callback(Scaling(made, clips=kind == "clips"))
        with pytest.raises((UsageError, ConfigurationError)) as refused:
            made.train()
        return str(refused.value)


@pytest.mark.turns
@pytest.mark.parametrize("kind", ["clips", "multiplies", "optimizer"])
def test_errors_in_a_trainer_advise_its_own_argument(pool: Pool, tmp_path: Path, kind: str) -> None:
    """A callback clipped each stage by its own norm. The error advised PipelinePlugin(max_norm=...), which a Trainer
    refuses, since its own argument is max_grad_norm."""
    for told in pool.run(advised, 2, str(tmp_path), kind, timeout=120):
        assert "set TrainingArguments(max_grad_norm=...)" in told and "PipelinePlugin" not in told, told


def test_a_loss_that_cannot_be_split_advises_what_a_trainer_accepts(tmp_path: Path) -> None:
    """With num_microbatches, a class-weighted compute_loss was refused with advice to pass loss_reduction='microbatch'
    or to return (sum, count). A Trainer refuses both, and also num_microbatches=1 with several accumulation steps."""
    with pytest.raises(ConfigurationError, match="A Trainer refuses the first two: omit num_microbatches, "):
        trainer("weighted", tmp_path, {"pp_size": 1, "num_microbatches": 4}).train()
    assert trainer("weighted", tmp_path, {"pp_size": 1}).train().global_step == 8


def scales_of_two(folder: str) -> list[tuple[float, int]]:
    """The loss scale, and the number of steps without an overflow, after each of two Trainers of one model."""
    found, plugin = list[tuple[float, int]](), {"pp_size": 2, "precision": "fp16", "initial_scale": 1024.0}
    with launched():
        first = trainer("causal", folder, plugin, max_steps=2)
        first.train()
        for made in (first, trainer("causal", folder, plugin, {"model": first.model}, max_steps=2)):
            before = made._own_stages().boosted.pipeline.scaling
            before.value /= 2 if made is first else 1
            made.train()
            found.append((before.value, before.steps))
    return found


@pytest.mark.turns
def test_a_second_trainer_begins_with_its_own_loss_scale(pool: Pool, tmp_path: Path) -> None:
    """A second Trainer of a split model continued with the loss scale to which the first one's overflows had reduced
    it. In one process, each Trainer begins with the initial scale."""
    assert pool.run(scales_of_two, 2, str(tmp_path), timeout=120) == [[(512.0, 4), (1024.0, 2)]] * 2


def given_a_loss_too_late(folder: str) -> None:
    with launched():
        for name, loss in (("causal", halved), ("function", None)):
            made = trainer(name, folder, {"pp_size": 1}, max_steps=1)
            made.evaluate()
            made.compute_loss_func = loss
            with pytest.raises(UsageError, match=r"compute_loss_func.*before the first"):
                made.train()


@pytest.mark.turns
def test_a_loss_that_is_set_after_the_stages_were_made_is_refused(pool: Pool, tmp_path: Path) -> None:
    """Evaluations had the new loss, but training had the model's own: that of the time of the first evaluation."""
    pool.run(given_a_loss_too_late, 1, str(tmp_path))


def emptied(folder: str, plugin: dict[str, Any] | None) -> int:
    """How often Trainer empties the cache."""
    with (
        launched() if plugin else nullcontext(),
        mock.patch.object(transformers.trainer, "clear_device_cache") as clear,
    ):
        trainer("causal", folder, plugin, max_steps=2, torch_empty_cache_steps=1).train()
        return clear.call_count


@pytest.mark.turns
def test_the_cache_is_not_emptied_in_a_pipeline(pool: Pool, tmp_path: Path) -> None:
    """torch_empty_cache_steps was accepted, and docs/trainer.md did not say that it has no effect."""
    assert emptied(str(tmp_path), None) == 6
    assert pool.run(emptied, 1, str(tmp_path), {"pp_size": 1}) == [0]


class Stream(IterableDataset[Any]):
    """Five batches of two samples each."""

    def __iter__(self) -> Iterator[Any]:
        return iter(texts(10))


class Stopping(TrainerCallback):
    """Ends the training, or the epoch, after the first batch of a window, once."""

    def __init__(self, what: str) -> None:
        self.what: str | None = what

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.what is not None:
            setattr(control, self.what, True)
            self.what = None


def left_a_window(folder: str) -> int:
    with launched():
        made = trainer("causal", folder, {"pp_size": 1}, {"train_dataset": Stream()}, max_steps=3)
        with pytest.raises(UsageError, match=r"training data has only 2 of .*accumulation_steps=3"):
            made.train()
        made = trainer("causal", folder, {"pp_size": 1}, {"callbacks": [Stopping("should_epoch_stop")]}, max_steps=11)
        with pytest.raises(
            UsageError, match=r"on_substep_end, so 1 of the \d batches .*: set control.should_epoch_stop in"
        ):
            made.train()
        made = trainer("causal", folder, {"pp_size": 1}, {"callbacks": [Stopping("should_training_stop")]}, max_steps=1)
        made.train()
        made.train()
        return int(made.state.global_step)


@pytest.mark.turns
def test_a_stream_that_ends_within_a_window_is_named(pool: Pool, tmp_path: Path) -> None:
    """The error blamed a callback. Batches of a window that a callback had ended were also kept for the next train(),
    which raised the error again."""
    assert pool.run(left_a_window, 1, str(tmp_path)) == [1]


class Asking(TrainerCallback):
    """Asks for a save, an evaluation and a save after it, and a stop in different steps, each on one rank of two. Keeps
    what happens."""

    def __init__(self, is_first: bool, is_last: bool) -> None:
        self.is_first, self.is_last = is_first, is_last
        self.seen: list[tuple[str, int]] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.is_first:
            control.should_save = state.global_step == 2
        if self.is_last:
            control.should_evaluate = state.global_step == 3

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = self.is_last and state.global_step == 4

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seen.append(("save", state.global_step))

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seen.append(("evaluate", state.global_step))
        control.should_save = self.is_first

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seen.append(("end", state.global_step))


def asked(folder: str, pp_size: int) -> list[tuple[str, int]]:
    with launched():
        callback = Asking(dist.get_rank() == 0, dist.get_rank() == pp_size - 1)
        trainer("causal", folder, {"pp_size": pp_size}, {"callbacks": [callback]}).train()
    return callback.seen


class Saving(TrainerCallback):
    def __init__(self, made: Any) -> None:
        self.made = made

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.made.save_model()


def saved_on_one_rank(folder: str) -> str:
    with launched():
        made = trainer("causal", folder, {"pp_size": 2}, max_steps=1)
        if dist.get_rank() == 0:
            made.add_callback(Saving(made))
        with pytest.raises(UsageError, match="the ranks make different calls") as caught:
            made.train()
    return str(caught.value)


@pytest.mark.turns
def test_a_callback_of_one_rank_acts_on_all(pool: Pool, tmp_path: Path) -> None:
    """A time limit that passed on rank 0 one step earlier than on rank 1: rank 0 left the loop, and gloo ended its
    process with SIGABRT, since the next messages of the ranks had different sizes. No error named the callback."""
    expected = [("save", 2), ("evaluate", 3), ("save", 3), ("end", 4)]
    assert pool.run(asked, 1, str(tmp_path / "one"), 1) == [expected]
    assert pool.run(asked, 2, str(tmp_path / "two"), 2) == [expected] * 2
    for said in pool.run(saved_on_one_rank, 2, str(tmp_path / "one")):
        assert "rank 1 (stage 1): trainer.train, after the callbacks of a step (call " in said
