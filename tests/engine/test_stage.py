"""Tests of one stage: its units, its results, the tensors that it keeps alive, and its overhead per step."""

from __future__ import annotations

import copy
import statistics
import time
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeshard import P2P
from pipeshard.batch.batch import Batch
from pipeshard.distributed.p2p import BroadcastP2P
from pipeshard.engine.interpreter import Interpreter
from pipeshard.engine.stage import Stage
from pipeshard.graph.tracer import Tracer
from pipeshard.schedule import Action, Kind, add_communication, one_f_one_b
from pipeshard.split.materialize import is_released
from tests import zoo
from tests.pool import Pool
from tests.unsplit import Split, Unsplit, differences

pytestmark = pytest.mark.local


def held(name: str) -> tuple[set[str], int, int]:
    """The held names, the bytes that the model's parameters keep alive, and those of the held ones."""
    split = Split(zoo.build(name), dist.get_world_size(), zoo.batch(name), num_microbatches=2)
    split.backward(zoo.batch(name))
    storages = {p.untyped_storage()._cdata: p.untyped_storage().nbytes() for p in split.model.parameters()}
    return set(split.held), sum(storages.values()), sum(p.nbytes for p in split.held.values())


@pytest.mark.turns
@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", zoo.MODELS)
def test_stages_hold_the_model_once_but_for_ties(pool: Pool, name: str) -> None:
    whole = zoo.build(name)
    first = [name for name, _ in whole.named_parameters()]
    tied = {names[0] for names in _groups(whole)}
    stages = pool.run(held, 3, name)
    assert set().union(*(names for names, _, _ in stages)) == set(first)
    for n in first:
        holders = sum(n in names for names, _, _ in stages)
        assert holders == 1 or n in tied, f"{n} is held {holders} times"
    for names, alive, own in stages:
        released = len(first) - len(names)
        assert alive <= own + 8 * released  # a released parameter is one number
    assert sum(own for _, _, own in stages) < 2 * sum(p.nbytes for p in whole.parameters())


def _groups(model: nn.Module) -> list[list[str]]:
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return [group for group in names.values() if len(group) > 1]


def released_parameters() -> list[bool]:
    split = Split(zoo.build("gpt2"), dist.get_world_size(), zoo.batch("gpt2"), num_microbatches=2)
    module = split.model.unwrap()
    whole = dict(zoo.build("gpt2").named_parameters(remove_duplicate=False))
    checks = []
    for name, parameter in module.named_parameters(remove_duplicate=False):
        checks.append(parameter.shape == whole[name].shape and parameter.dtype == whole[name].dtype)
        checks.append(not is_released(parameter) or not parameter.requires_grad)
    checks.append(module.transformer.wte.weight is module.lm_head.weight)  # tied within a stage, held or not
    return checks


def test_released_parameters_stay_visible(pool: Pool) -> None:
    assert all(all(checks) for checks in pool.run(released_parameters, 2))


def losses() -> list[float]:
    split = Split(zoo.build("llama"), dist.get_world_size(), zoo.batch("llama"), num_microbatches=4)
    return [split.backward(zoo.batch("llama", seed=k))["loss"].item() for k in range(3)]


@pytest.mark.turns
def test_the_loss_is_one_number_on_every_rank(pool: Pool) -> None:
    ranks = pool.run(losses, 4)
    assert all(rank == ranks[0] for rank in ranks)


def last_token_changed(name: str) -> Any:
    data = zoo.batch(name)
    split = Split(zoo.build(name), dist.get_world_size(), data, num_microbatches=2)
    split.model.eval()
    changed = {**data, "input_ids": data["input_ids"].clone()}
    changed["input_ids"][:, -1] = (changed["input_ids"][:, -1] + 1) % zoo.VOCABULARY
    before, after = (split.evaluate(d, return_outputs=True)["outputs"] for d in (data, changed))
    if before is None:
        return None
    difference = (before.logits - after.logits).abs().amax(dim=(0, 2))
    return difference[:-1].max().item(), difference[-1].item()


@pytest.mark.turns
@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["gpt2", "llama", "granite", "gemma2", "mixtral"])
def test_the_last_token_changes_no_earlier_logit(pool: Pool, name: str) -> None:
    earlier, last = pool.run(last_token_changed, 2, name)[-1]
    rounding = 1e-6 if name == "mixtral" else 0.0  # the last token may go to an expert, whose product grows with it
    assert earlier <= rounding and last > 1e-6


def peaks(schedule: str, m: int) -> list[int]:
    """The largest number of microbatches whose graphs one held layer keeps alive, seen by hooks alone."""
    data = zoo.batch("llama", rows=m)
    data["labels"] = data["input_ids"]
    p = dist.get_world_size()
    split = Split(zoo.build("llama"), p, data, num_microbatches=m, schedule=schedule, partition=[2, 1, 1, 3])
    alive, peak = set(), [0]

    def entered(module: nn.Module, arguments: Any, output: Tensor) -> None:
        number = len(seen)
        seen.append(number)
        alive.add(number)
        peak[0] = max(peak[0], len(alive))
        output.register_hook(lambda gradient: alive.discard(number))

    seen: list[int] = []
    rank = dist.get_rank()
    layer = split.model.unwrap().model.layers[rank].mlp
    layer.register_forward_hook(
        lambda module, arguments, output: entered(module, arguments, output) if torch.is_grad_enabled() else None
    )
    split.backward(data)
    assert len(seen) == m and not alive
    return peak


@pytest.mark.turns
@pytest.mark.parametrize("m", [2, 4, 8])
def test_1f1b_keeps_p_minus_r_microbatches_alive(pool: Pool, m: int) -> None:
    assert [peak[0] for peak in pool.run(peaks, 4, "1f1b", m)] == [min(m, 4 - r) for r in range(4)]


@pytest.mark.turns
def test_gpipe_keeps_all_microbatches_alive(pool: Pool) -> None:
    assert [peak[0] for peak in pool.run(peaks, 4, "gpipe", 8)] == [8, 8, 8, 8]


class NoStage(Stage):
    """Computes nothing."""

    def __init__(self) -> None:
        pass

    def values_in(self, i: int) -> list[Any]:
        return []

    def gradients_in(self, i: int) -> list[Any]:
        return []

    def forward(self, i: int, entering: Any) -> list[Tensor]:
        return []

    def backward(self, i: int, gradients: Any) -> list[Tensor]:
        return []


def test_the_interpreter_costs_microseconds_an_action() -> None:
    program = add_communication(one_f_one_b(4, 64))
    interpreter = Interpreter(program.placement, NoP2P(), torch.device("cpu"))
    actions, stage = program.ranks[1], NoStage()
    times = []
    for _ in range(20):
        start = time.process_time()
        interpreter.run({1: stage}, actions)
        times.append((time.process_time() - start) / len(actions))
    assert statistics.median(times) < 20e-6


class NoP2P(P2P):
    def __init__(self) -> None:
        pass

    def send(self, tensor: Tensor, destination: int) -> Any:
        raise AssertionError

    receive = send


class CountingP2P(BroadcastP2P):
    """A user's own transport: counts the bytes of every message."""

    sent: list[int]

    def send(self, tensor: Tensor, destination: int) -> Any:
        self.sent = [*getattr(self, "sent", []), tensor.numel()]
        return super().send(tensor, destination)


def with_own_transport() -> Any:
    model = zoo.build("llama")
    unsplit = Unsplit(copy.deepcopy(model))
    split = Split(model, dist.get_world_size(), zoo.batch("llama"), num_microbatches=4, p2p=CountingP2P)
    found = differences(split, unsplit, zoo.batch("llama"), num_microbatches=4)
    return found, split.model.pipeline.interpreter.p2p.sent


@pytest.mark.processes
@pytest.mark.turns
def test_a_transport_of_one_s_own_gets_one_message_a_value(pool: Pool) -> None:
    hidden = 2 * 12 * 32 * 4  # two samples, in bytes; no header, nothing else
    assert pool.run(with_own_transport, 2) == [([], [hidden] * 4), ([], [hidden] * 4)]


def new_lengths() -> int:
    """The number of traces that planning steps of eight new lengths takes."""
    split = Split(zoo.build("llama"), dist.get_world_size(), zoo.batch("llama", length=16), num_microbatches=4)
    split.backward(zoo.batch("llama", length=16))
    with mock.patch.object(Tracer, "run", autospec=True, side_effect=Tracer.run) as run:
        for length in range(17, 25):
            batches = Batch.of(zoo.batch("llama", length=length)).split(num_microbatches=4)
            split.model.pipeline.traces.plan_each([batches], None, None, False, True)
    return run.call_count


@pytest.mark.processes
@pytest.mark.turns
def test_a_new_sequence_length_is_not_traced(pool: Pool) -> None:
    assert pool.run(new_lengths, 2) == [0, 0]


def new_documents() -> tuple[list[str], int]:
    model = zoo.build("llama")
    unsplit = Unsplit(copy.deepcopy(model))
    split = Split(model, dist.get_world_size(), zoo.packed(21, 7, 8), num_microbatches=1)
    found = differences(split, unsplit, zoo.packed(21, 7, 8), num_microbatches=1)
    with mock.patch.object(Tracer, "run", autospec=True, side_effect=Tracer.run) as run:
        for lengths in ((25, 11), (4, 20, 12), (15, 5, 7, 9, 4)):
            found += differences(split, unsplit, zoo.packed(*lengths), num_microbatches=1)
    return found, run.call_count


@pytest.mark.turns
def test_other_documents_in_a_packed_row_are_not_traced(pool: Pool) -> None:
    """In every batch, TRL passes kernels the boundaries of a row's documents and the length of the longest: the model
    was traced again for nearly every microbatch."""
    assert pool.run(new_documents, 2) == [([], 0), ([], 0)]


def test_every_kind_of_action_is_known_to_the_interpreter() -> None:
    interpreter = Interpreter((0,), None, torch.device("cpu"))
    interpreter.run({0: NoStage()}, [Action(Kind.F, 0, 0), Action(Kind.B, 0, 0)])
    assert [str(span.action) for span in interpreter.timeline.spans] == ["F0@0", "B0@0"]
