"""Tests of a Trainer's state: values that compute_loss keeps, draws and reads are on every rank as in one process."""

from __future__ import annotations

import collections
import copy
import dataclasses
import datetime
import enum
import gc
import random
import threading
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback
from transformers.trainer_utils import TrainerMemoryTracker

import pipeshard
from pipeshard.distributed.collectives import decode, encode
from pipeshard.errors import ConfigurationError, UsageError
from pipeshard.split.materialize import is_released
from pipeshard.trainer.kept import KeptState, _changed_by_threads
from pipeshard.trainer.stand_ins import SPLIT, KeptStages
from tests import zoo
from tests.pool import Pool, WorkerError
from tests.trainers import LOGGED, TASKS, differences, halved, launched, logs, padded, texts, trainer
from tests.unsplit import largest_error

LATE = 3  # the first step that keeps something
LISTED: list[Tensor] = []


def cross_entropy(outputs: Any, inputs: Any) -> Tensor:
    logits, labels = outputs.logits[:, :-1].flatten(0, 1), inputs["labels"][:, 1:].flatten()
    return nn.functional.cross_entropy(logits, labels, ignore_index=-100)


@dataclasses.dataclass
class Meter:
    total: Any = 0.0
    values: list[Tensor] = dataclasses.field(default_factory=list)

    def add(self, value: Tensor) -> None:
        self.total = self.total + value
        self.values.append(value)


class Slotted:
    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


class Mood(enum.Enum):
    GOOD = 1
    BAD = 2


class Watching(TrainerCallback):
    def __init__(self) -> None:
        self.seen = 0


class Keeping(Trainer):
    """Keeps something in each way that Python has, from some step on, and makes its loss of it."""

    counted = 0
    shown: list[Any]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.center, self.average, self.bank = torch.zeros(3), torch.zeros(3), torch.zeros(300_000)
        self.last, self.counter = collections.deque[Tensor](maxlen=3), collections.Counter[str]()
        self.lists: Any = collections.defaultdict(list)
        self.meters, self.best, self.slotted = {"a": Meter()}, None, Slotted()
        self.array, self.names, self.fixed, self.mood = np.zeros(4), set[str](), (), Mood.BAD
        self.norm, self.generator = nn.BatchNorm1d(zoo.VOCABULARY, affine=False), torch.Generator().manual_seed(3)
        self.watching = Watching()
        self.add_callback(self.watching)

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        outputs = model(**inputs)
        loss = cross_entropy(outputs, inputs)
        if self.state.global_step >= LATE and model.training:
            loss = loss + self.keep(loss.detach(), outputs.logits)
        return (loss, outputs) if return_outputs else loss

    def keep(self, value: Tensor, logits: Tensor) -> Tensor:
        mean = logits.mean((0, 1))[:3]
        self.center += mean.detach()
        self.average.data.mul_(0.9).add_(mean.detach())
        self.bank[:3] += value
        self.last.append(value)
        self.counter["a"] += 2
        self.lists[self.counter["a"]].append(value)
        self.meters["a"].add(value)
        self.best = self.meters["a"]
        self.slotted.count += 1
        self.array[1] += float(value)
        self.names.add(str(self.slotted.count))
        self.mood, self.fixed = Mood.GOOD, (value, Mood.GOOD, frozenset([1, 2]))
        self.norm(logits.detach().flatten(0, 1))
        self.watching.seen += 1
        self.state.extra = float(value)
        Keeping.counted += 1
        LISTED.append(value)
        drawn = torch.rand((), generator=self.generator) + torch.rand(()) + random.random() + np.random.rand()
        kept = self.best.total * 1e-3 + self.bank.sum() * 1e-3 + self.norm.running_mean.sum()
        return 0.01 * drawn + kept + (mean - self.average).pow(2).sum()

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        self.shown = [
            *map(float, (self.center.sum(), self.average.sum(), self.bank.sum(), self.array.sum(), sum(self.last))),
            *(float(sum(values)) for values in self.lists.values()),
            *(float(self.meters["a"].total), float(self.norm.running_mean.sum())),
            *(len(self.meters["a"].values), self.counter["a"], self.slotted.count, len(self.names), len(self.fixed)),
            *(self.mood.value, self.watching.seen, getattr(self.state, "extra", 0.0), Keeping.counted, len(LISTED)),
            *(float(torch.get_rng_state().sum()), float(np.random.get_state()[1].sum()), random.getstate()[1][-1]),
            float(self.best is None or self.best is self.meters["a"]),
        ]
        super().log(logs, *args, **kwargs)


def train(kind: str, folder: str, plugin: dict[str, Any] | None = None, **others: Any) -> Any:
    """The logs of a Trainer of this kind, and what it shows in the end."""
    with launched() if plugin else nullcontext(), mock.patch.object(TASKS["causal"], "kind", globals()[kind]):
        Keeping.counted = 0
        LISTED.clear()
        more = {"data_collator": weighted} if kind == "Noting" else {}
        options = {"max_steps": 5, "gradient_accumulation_steps": 2, "remove_unused_columns": False, **others}
        made = trainer("causal", folder, plugin, more, **options)
        made.train()
        made.evaluate()
        return logs(made), [float(value) for value in getattr(made, "shown", [])]


@pytest.mark.turns
@pytest.mark.parametrize("kind", ["Keeping", "Noting", "Penalized", "Filtering", "Early"])
def test_every_rank_keeps_what_one_process_keeps(pool: Pool, tmp_path: Path, kind: str) -> None:
    """What was no list, dict or number was neither undone after a trial nor told to other ranks; what compute_loss drew
    was compared for 8 batches. Metrics of columns that no loss reads were not-a-number, a penalty 0 in evaluation."""
    expected, shown = train(kind, str(tmp_path))
    for found, kept in pool.run(train, 2, kind, str(tmp_path), {"pp_size": 2}, timeout=120):
        assert differences(found, expected, 3e-6) == []
        assert kept == pytest.approx(shown, rel=1e-5, abs=1e-6)


def weighted(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {**padded(samples), "weights": torch.tensor([float(len(sample["input_ids"])) for sample in samples])}


class Noting(Trainer):
    """Its metrics read what its loss does not: a column, the mask, a hidden state. It counts in a large tensor."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.shown: list[Tensor] = []
        self.counts = torch.zeros(300_000)

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        weights = inputs.pop("weights")
        outputs = model(**inputs, output_hidden_states=True)
        self.counts[-1] += 1
        self.shown += [
            self.counts[-1].clone(),
            weights.mean(),
            outputs.hidden_states[1].detach().norm(),
            inputs["attention_mask"].float().mean(),
        ]
        return (outputs.loss, outputs) if return_outputs else outputs.loss


class Penalized(Trainer):
    """Its loss reads parameters of all stages, by the model that it is given and by its own."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        outputs = model(**inputs)
        penalty = sum(parameter.pow(2).sum() for parameter in model.parameters())
        penalty = penalty + sum(p.abs().sum() for name, p in self.model.named_parameters() if "norm" in name)
        loss = cross_entropy(outputs, inputs) + 0.01 * penalty
        return (loss, outputs) if return_outputs else loss


class Filtering(Trainer):
    """Its loss reads the trained parameters of all stages: those of other stages looked frozen in evaluation."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        outputs = model(**inputs)
        penalty = sum(parameter.pow(2).sum() for parameter in model.parameters() if parameter.requires_grad)
        penalty = penalty + sum(p.abs().sum() for p in self.model.parameters() if not is_released(p))
        loss = cross_entropy(outputs, inputs) + 0.01 * penalty
        return (loss, outputs) if return_outputs else loss


class Early(Trainer):
    """Its loss reads parameters of all stages before it calls the model, and expects numbers."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        penalty = 0.01 * sum(parameter.pow(2).sum() for parameter in model.parameters())
        outputs = model(**inputs)
        loss = cross_entropy(outputs, inputs) + penalty
        if not model.training and not loss.isfinite():
            raise ValueError("the loss diverges")
        return (loss, outputs) if return_outputs else loss


class Shifting(Trainer):
    """Passes positions to the model that depend on a parameter of another stage."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        norm: Any = self.model.get_submodule("model.norm")
        places = torch.arange(inputs["input_ids"].shape[1]) + norm.weight.isfinite().all().long()
        loss = model(**inputs, position_ids=places[None]).loss
        return (loss, {}) if return_outputs else loss


def shifted(folder: str) -> None:
    with launched(), mock.patch.object(TASKS["causal"], "kind", Shifting):
        trainer("causal", folder, {"pp_size": 2}, max_steps=1).train()


@pytest.mark.turns
def test_an_input_of_the_model_that_depends_on_another_stage_is_refused(pool: Pool, tmp_path: Path) -> None:
    """Its values on this rank are not those of the parameter."""
    with pytest.raises(
        WorkerError,
        match=r"UsageError: compute_loss reads .* the model inputs that compute_loss creates or changes "
        r"\(position_ids\)",
    ):
        pool.run(shifted, 2, str(tmp_path), timeout=120)


class Penalty:
    """A compute_loss_func that reads parameters of all stages."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __call__(self, outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        penalty = sum(parameter.pow(2).sum() for parameter in self.model.parameters())
        return cross_entropy(outputs, {"labels": labels}) + 0.01 * penalty


def with_a_penalty(folder: str, plugin: dict[str, Any] | None = None) -> list[dict[str, float]]:
    with launched() if plugin else nullcontext():
        model = TASKS["causal"].model()
        made = trainer("causal", folder, plugin, {"model": model, "compute_loss_func": Penalty(model)}, max_steps=2)
        made.train()
        made.evaluate()
        return logs(made)


@pytest.mark.turns
def test_a_loss_function_that_reads_parameters_is_evaluated_on_the_last_stage(pool: Pool, tmp_path: Path) -> None:
    """A compute_loss_func penalized all weights. In evaluation, ranks that lacked some of them failed, and the others
    waited for them."""
    expected = with_a_penalty(str(tmp_path))
    for found in pool.run(with_a_penalty, 2, str(tmp_path), {"pp_size": 2}, timeout=300):
        assert differences(found, expected, 3e-6) == []


class Writing(Trainer):
    """Writes to a file, late."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        loss = model(**inputs).loss
        if self.state.global_step >= LATE:
            self.file.write("x")
        return loss


class Counting(Trainer):
    """Takes from an iterator, late."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        loss = model(**inputs).loss
        if self.state.global_step >= LATE:
            next(self.numbers)
        return loss


class Lambdas(Trainer):
    """Keeps a function that no other rank can find, late."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        loss = model(**inputs).loss
        if self.state.global_step >= LATE:
            self.rule = lambda: 1.0
        return loss


class Gathering(Trainer):
    """Compares a batch with those of other replicas, late."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        loss = model(**inputs).loss
        return loss if self.state.global_step < LATE else loss + self.accelerator.gather(loss.detach()).mean()


class Drawing(Trainer):
    """Scales its loss by a random number."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        loss = model(**inputs).loss * (1 + torch.rand(()))
        return (loss, {}) if return_outputs else loss


@pytest.mark.turns
def test_a_loss_that_draws_numbers_trains_with_replicas(pool: Pool, tmp_path: Path) -> None:
    """It was refused as one that gathers from other ranks: its trial without gathering drew other numbers."""
    for found, _ in pool.run(train, 2, "Drawing", str(tmp_path), {"pp_size": 1}, max_steps=1):
        assert found[0]["loss"] > 0


def refused(kind: str, folder: str, what: str) -> None:
    """At the first step that keeps it, before the optimizer's."""
    with launched(), mock.patch.object(TASKS["causal"], "kind", globals()[kind]):
        made = trainer("causal", folder, {"pp_size": 2}, max_steps=5, gradient_accumulation_steps=2)
        made.numbers = iter(range(100))
        with (Path(folder) / f"notes{dist.get_rank()}").open("w") as made.file, pytest.raises(UsageError, match=what):
            made.train()
        assert made.state.global_step == LATE


def all_refused(folder: str) -> None:
    refused("Writing", folder, r"the open file self\.file.*in log\(\)")
    refused("Counting", folder, r"self\.numbers.* holds an instance of range_iterator")
    refused("Lambdas", folder, r"self\.rule.*use tensors, arrays, numbers")


def replicas_refused(folder: str) -> None:
    refused("Gathering", folder, "without gathering from other replicas")


@pytest.mark.turns
def test_what_cannot_be_told_is_refused_when_it_changes(pool: Pool, tmp_path: Path) -> None:
    """A file, an iterator or a function of no name that compute_loss changes would differ between ranks; so would a
    loss of what replicas gather. Both were let through after 8 batches."""
    pool.run(all_refused, 2, str(tmp_path), timeout=120)
    pool.run(replicas_refused, 4, str(tmp_path), timeout=120)


class Holding:
    """The state of two ranks: an object for each."""

    def __init__(self) -> None:
        self.callback_handler = SimpleNamespace(callbacks=[])
        self.meters: dict[str, Any] = {"a": Meter(), "b": Meter()}
        self.pool, self.of_moods, self.best = {Slotted()}, {Mood.GOOD: Meter()}, None

    def sent_to(self, other: Holding, kept: KeptState, value: Any) -> Any:
        return KeptState.adopt(other, decode(encode(kept.told(value))), torch.device("cpu"))


def test_changes_and_results_keep_their_identities_on_another_rank() -> None:
    """An entry that was removed from a dict was refused as part of a frozenset. A new object in a change and in the
    result arrived as two."""
    first, second = Holding(), Holding()
    before, kept = second.meters["a"], KeptState(first)
    first.new, first.best = Meter(), first.meters["a"]
    first.meters["a"].values += [first.new, first.new.values]
    first.meters["a"].total = when = datetime.datetime(2026, 1, 2)
    del first.meters["b"]
    result = first.sent_to(second, kept, [first.new, first.best])
    assert second.best is before is result[1] and list(second.meters) == ["a"]
    assert result[0] is second.new is before.values[0] and before.values[1] is second.new.values
    assert before.total == when


def test_the_error_of_what_cannot_be_sent_names_its_place() -> None:
    held = Holding()
    for change, what in {
        lambda: held.meters["a"].values.append(lambda: 1.0): r"self\.meters\['a'\]\.values .*local object",
        lambda: setattr(held, "new", [Meter(threading.Lock())]): r"self\.new .*cannot pickle '_thread.lock' object",
        lambda: setattr(held, "best", held.of_moods[Mood.GOOD]): r"self\.best .*path contains an object",
        lambda: setattr(next(iter(held.pool)), "count", 1): r"self\.pool.*it is in a set",
        lambda: held.of_moods.update({Mood.BAD: 1}): r"self\.of_moods.*keys are objects",
    }.items():
        kept = KeptState(held)
        change()
        with pytest.raises(UsageError, match=rf"{what}.*: use tensors, arrays, numbers"):
            kept.told(None)
        kept.restore()
    with pytest.raises(UsageError, match=r"the result or log of compute_loss .*cannot pickle 'module' object"):
        KeptState(held).told(collections)


class Monitor(TrainerCallback):
    """A thread of it samples the time until training ends."""

    def __init__(self) -> None:
        self.samples: list[Any] = []
        self.is_over = threading.Event()

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        threading.Thread(target=self.run, daemon=True).start()

    def run(self) -> None:
        while not self.is_over.wait(0.001):
            self.samples.append(datetime.datetime.now())

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        self.is_over.set()


class Scheduled(Monitor):
    """Another object holds the thread, as in energy monitors."""

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self.meters = SimpleNamespace(thread=threading.Thread(target=sample, args=(self,), daemon=True))
        self.meters.thread.start()


class Passed(Monitor):
    """Nothing holds the thread, which has the monitor as an argument."""

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        threading.Thread(target=sample, args=(self,), daemon=True).start()


def test_a_thread_s_plain_arguments_are_no_callback() -> None:
    """A thread that pins memory has a device's number and None as arguments, which callbacks hold, too: none of these
    callbacks was compared."""
    monitor, other = Monitor(), SimpleNamespace(number=0, rate=None, names=())
    thread = threading.Thread(target=print, args=(monitor.is_over.wait, 0, None, (), monitor.samples))
    trainer = SimpleNamespace(callback_handler=SimpleNamespace(callbacks=[monitor, other]))
    with mock.patch.object(threading, "enumerate", lambda: [thread]):
        assert _changed_by_threads(trainer) == {id(monitor)}


def test_a_memory_tracker_s_peak_is_the_rank_s_own() -> None:
    """With skip_memory_metrics=False, the peak that a thread of each rank measures during a step was replaced with that
    of the last stage, or set back after a trial."""
    tracker = TrainerMemoryTracker()
    thread = threading.Thread(target=tracker.peak_monitor_func)
    trainer = SimpleNamespace(_memory_tracker=tracker, other=Slotted(), callback_handler=SimpleNamespace(callbacks=[]))
    tracker.cpu_mem_used_peak = 1
    with mock.patch.object(threading, "enumerate", lambda: [thread]):
        kept = KeptState(trainer)
    tracker.cpu_mem_used_peak, trainer.other.count = 2, 1
    kept.restore()
    assert (tracker.cpu_mem_used_peak, trainer.other.count) == (2, 0)


def test_a_large_array_that_compute_loss_writes_to_is_refused() -> None:
    counts = np.full(200_000, np.nan)
    trainer = SimpleNamespace(counts=counts, part=counts[:2], callback_handler=SimpleNamespace(callbacks=[]))
    kept = KeptState(trainer, copies=True)
    trainer.counts[0] = 1.0  # is restored with the part
    kept.restore()
    assert np.isnan(trainer.counts).all() and not any(kept.changes())
    trainer.counts[3] = 1.0
    for refuse in (kept.restore, lambda: kept.told(None)):
        with pytest.raises(UsageError, match=r"self\.counts \(1\.5 MiB\) in place, but .* tensor and change it after"):
            refuse()


def sample(monitor: Monitor) -> None:
    monitor.run()


def monitored(folder: str, kind: type[Monitor]) -> tuple[int, int]:
    """The steps of a Trainer with its own loss and a monitor, and the changes of another callback by the loss."""
    with launched(), mock.patch.object(TASKS["causal"], "kind", Keeping):
        made = trainer("causal", folder, {"pp_size": 2}, {"callbacks": [kind()]}, max_steps=LATE + 1)
        made.train()
        return made.state.global_step, made.watching.seen


@pytest.mark.turns
@pytest.mark.parametrize("kind", [Monitor, Scheduled, Passed])
def test_what_a_thread_of_a_callback_changes_is_its_own(pool: Pool, tmp_path: Path, kind: type[Monitor]) -> None:
    """A callback sampled the memory once a second in a thread: its samples counted as changes by compute_loss, which
    ended the run, or replaced the samples of the other ranks."""
    first, second = pool.run(monitored, 2, str(tmp_path), kind, timeout=120)
    assert first == second and first[0] == LATE + 1 and first[1] > 0


def one_after_another(case: str, folder: str, plugin: dict[str, Any] | None) -> Any:
    """Two Trainers train one model. Returns their logs, the last evaluation, and the folder that the second saves."""
    with launched() if plugin else nullcontext():
        options: dict[str, Any] = {"max_steps": 3, "gradient_accumulation_steps": 2}
        others = {**options, "learning_rate": 0.1, "optim": "sgd", "per_device_train_batch_size": 3}
        own, more = {"compute_loss_func": halved}, {"model": zoo.build("llama-tied")}
        is_early = case == "is made first"
        first = trainer("causal", folder, plugin, more | ({} if is_early else own), **options)
        if not is_early:
            first.train()
            more["model"] = first.model if case == "follows" else first.model_wrapped
        second = trainer("causal", folder, plugin, more | (own if is_early else {}), **others)
        found = []
        if is_early:
            first.train()
        if case == "remains":
            found.append(logs(first))
            del first, more
            gc.collect()
        second.train()
        found += [logs(second), [second.evaluate()]]
        second.save_model(f"{folder}/{case}/{plugin is None}")
        if case != "remains":
            first.train()
            found += [logs(first), [first.evaluate()]]
        return [[{key: entry[key] for key in LOGGED if key in entry} for entry in each] for each in found]


@pytest.mark.turns
@pytest.mark.parametrize("case", ["is made first", "follows", "remains"])
def test_a_second_trainer_goes_on_with_the_model_of_the_first(pool: Pool, tmp_path: Path, case: str) -> None:
    """In a notebook, one Trainer followed the other on one model, with another loss or data. On several stages, the
    second was refused; now it trains the stages of the first, whose own training may go on after that, too."""
    expected = one_after_another(case, str(tmp_path), None)
    for found in pool.run(one_after_another, 2, case, str(tmp_path), {"pp_size": 2}, timeout=120):
        for one, other in zip(found, expected, strict=True):
            assert differences(one, other, 3e-6) == []
    saved, plain = (AutoModelForCausalLM.from_pretrained(tmp_path / case / str(kind)) for kind in (False, True))
    pairs = zip(saved.parameters(), plain.parameters(), strict=True)
    assert largest_error((one - other).detach().abs().max() for one, other in pairs) < 1e-6


def again(folder: str) -> None:
    with launched():
        first = trainer("causal", folder, {"pp_size": 2}, max_steps=1)
        first.train()
        with pytest.raises(ConfigurationError, match=r"num_microbatches=1, but PipelineTrainer.*save_model\(folder\)"):
            trainer("causal", folder, {"pp_size": 2, "num_microbatches": 6}, {"model": first.model}).train()
        boosted = zoo.build("llama-tied")
        pipeshard.PipelinePlugin(pp_size=2, num_microbatches=1, dry_run_input=padded(texts(2))).configure(boosted)
        with pytest.raises(ConfigurationError, match=r"booster.boost.*save_model\(folder\)"):
            trainer("causal", folder, {"pp_size": 2}, {"model": boosted}).train()
        first.train()


@pytest.mark.turns
def test_a_model_that_was_split_in_another_way_is_not_trained(pool: Pool, tmp_path: Path) -> None:
    """A second Trainer on it said that ranks differ in what is trained."""
    pool.run(again, 2, str(tmp_path))


def test_a_copy_of_a_split_model_has_no_stages() -> None:
    """A copy of a sharded model also copied process groups, which raised TypeError."""
    boosted: Any = SimpleNamespace()
    assert copy.deepcopy({SPLIT: KeptStages(boosted)}) == {SPLIT: None}
