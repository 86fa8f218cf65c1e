"""Tests of the figures that a recording computes from given times."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from pipeshard.engine.recording import Recording
from pipeshard.errors import ConfigurationError
from pipeshard.schedule import Kind, add_communication, one_f_one_b, shorten_cooldown
from tests import zoo
from tests.pool import Pool
from tests.unsplit import Split

pytestmark = pytest.mark.local


def test_costs_of_a_step_where_some_backwards_are_split_are_those_of_its_parts() -> None:
    """On the second rank: whole B take 6 s, and one 3.5 s and its W 2 s."""
    program = add_communication(shorten_cooldown(one_f_one_b(2, 3)))
    first = [(0, 1), (1, 2), (9, 14), (14, 15), (16, 21), (22, 27)]
    last = [(1, 3), (3, 9), (9, 11), (11, 17), (17, 19), (19, 22.5), (22.5, 24.5)]
    recording = Recording.of(program, [first, last], [(0, 0), (0, 0)], 0)
    assert [recording.cost(kind) for kind in (Kind.F, Kind.B, Kind.W)] == [(1, 2), (5, 4), (0, 2)]
    simulation = recording.simulation()
    spans = {str(span.action): span.end - span.start for row in simulation.spans for span in row}
    assert (spans["B0@0"], spans["B0@1"], spans["B2@1"], spans["W2@1"]) == (5, 6, 4, 2)
    assert simulation.makespan == pytest.approx(1 + 3 * 8 - 2 + 5)


def test_costs_of_a_step_where_every_backward_is_split() -> None:
    program = shorten_cooldown(one_f_one_b(2, 1))
    recording = Recording.of(program, [[(0, 1), (6, 9)], [(1, 2), (2, 6), (6, 8)]], [(0, 0), (0, 0)], 0)
    assert [recording.cost(kind) for kind in (Kind.F, Kind.B, Kind.W)] == [(1, 1), (3, 4), (0, 2)]


def tracked(folder: Path) -> dict[str, float]:
    """What a tracker gets of a step of two replicas, and what is in the files."""
    data = zoo.batch("gpt2")
    split = Split(zoo.build("gpt2"), 2, data, num_microbatches=2, dp_size=2)
    split.backward(data)
    recording = split.plugin.recording()
    mine = folder / f"{dist.get_rank()}.json"
    recording.save(mine)
    assert Recording.load(mine) == recording
    recording.save(mine, format="perfetto")
    with pytest.raises(ConfigurationError, match="format must be"):
        recording.save(mine, format="chrome")
    metrics = recording.metrics()
    assert (recording.samples, recording.tokens) == (2 * len(data["labels"]), 2 * data["labels"].numel())
    assert metrics["pipeline/tokens_per_second"] == pytest.approx(recording.tokens / recording.makespan)
    return metrics


@pytest.mark.turns
def test_a_step_in_numbers_and_as_a_trace(pool: Pool, tmp_path: Path) -> None:
    ranks = pool.run(tracked, 4, tmp_path)
    assert ranks[0] == ranks[1] and ranks[0].keys() == ranks[2].keys()
    assert all(isinstance(value, float) for value in ranks[0].values()) and 0 < ranks[0]["pipeline/bubble"] < 1
    assert 0.05 < ranks[0]["pipeline/memory_gb/rank1"] < 20
    events: list[dict[str, Any]] = json.loads((tmp_path / "0.json").read_text())["traceEvents"]
    actions = [event for event in events if event["ph"] == "X"]
    assert len(actions) % 2 == 0  # measured and simulated
    assert {"F0@0", "F1@0", "B0@0", "B1@0", "F0@1", "F1@1", "B0@1", "B1@1"} <= {event["name"] for event in actions}
    assert all(event["dur"] >= 0 and event["ts"] >= 0 for event in actions)
    assert {event["args"]["name"] for event in events if event["ph"] == "M"} >= {"rank 1", "measured, step 0"}
