"""Tests of what a recording says of a step, given its times."""

import pytest

from pipeshard.engine.recording import Recording
from pipeshard.schedule import Kind, add_communication, one_f_one_b, shorten_cooldown


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
