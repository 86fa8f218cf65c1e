"""Tests of the drawings: whole schedules as text, and a picture that is written."""

import inspect
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeshard.schedule.draw import draw_text, draw_timeline
from pipeshard.schedule.program import Action, Kind, Program, forward_only, gpipe, one_f_one_b
from pipeshard.schedule.simulate import simulate


def drawing(text: str) -> str:
    return textwrap.dedent(text).strip()


def test_1f1b_as_text() -> None:
    assert draw_text(one_f_one_b(3, 4)) == drawing("""
        rank 0  F0 F1 F2 .. .. B0 F3 B1 .. B2 .. B3
        rank 1  .. F0 F1 .. B0 F2 B1 F3 B2 .. B3 ..
        rank 2  .. .. F0 B0 F1 B1 F2 B2 F3 B3 .. ..
    """)


def test_fewer_microbatches_than_ranks() -> None:
    assert draw_text(one_f_one_b(3, 2)) == drawing("""
        rank 0  F0 F1 .. .. .. B0 .. B1
        rank 1  .. F0 F1 .. B0 .. B1 ..
        rank 2  .. .. F0 B0 F1 B1 .. ..
    """)


@pytest.mark.parametrize("schedule", [gpipe, one_f_one_b, forward_only])
def test_the_drawing_beside_each_schedule_is_true(schedule: Callable[[int, int], Program]) -> None:
    assert draw_text(schedule(3, 4)) in (inspect.getdoc(schedule) or "")


def test_a_simulation_is_drawn_in_its_own_times() -> None:
    assert draw_text(simulate(one_f_one_b(2, 2), forward=0.5, backward=1.0)) == drawing("""
        rank 0  F0 F1 .. .. B0 -- .. B1 --
        rank 1  .. F0 B0 -- F1 B1 -- .. ..
    """)


def test_cells_are_as_wide_as_the_longest_label() -> None:
    first, last = draw_text(forward_only(2, 11)).splitlines()
    assert first == "rank 0  F0  F1  F2  F3  F4  F5  F6  F7  F8  F9  F10 ..."
    assert last == "rank 1  ... F0  F1  F2  F3  F4  F5  F6  F7  F8  F9  F10"


def test_a_rank_of_several_stages_names_them() -> None:
    ranks = (Action(Kind.F, 0, 0), Action(Kind.F, 0, 2)), (Action(Kind.F, 0, 1),)
    assert draw_text(Program("loop", 1, (0, 1, 0), ranks)) == drawing("""
        rank 0  F0@0 .... F0@2
        rank 1  .... F0@1 ....
    """)


def test_times_that_are_no_multiple_of_the_shortest_keep_every_action() -> None:
    text = draw_text(simulate(one_f_one_b(4, 6), [1.0, 1.37, 1.5, 1.21], [2.5, 2.1, 1.9, 2.49], latency=0.25))
    for line in text.splitlines():
        assert sum(word[0] in "FB" for word in line.split()[2:]) == 12


def test_nothing_is_drawn_where_nothing_takes_time() -> None:
    assert draw_text(simulate(gpipe(1, 1), 0, 0)) == "rank 0"


def test_a_picture_is_written(tmp_path: Path) -> None:
    simulation = simulate(one_f_one_b(3, 4), 0.01, 0.02)
    draw_timeline([("", simulation.spans)], tmp_path / "one.png", "1F1B")
    assert (tmp_path / "one.png").read_bytes().startswith(b"\x89PNG")
    panels = [("measured", simulation.spans), ("simulated", simulate(gpipe(3, 4), 0.01, 0.02).spans)]
    draw_timeline(panels, tmp_path / "two.svg", "1F1B and GPipe")
    svg = (tmp_path / "two.svg").read_text()
    for text in ("1F1B and GPipe", "measured", "simulated", "stage 2", "time (ms)", "backward"):
        assert text in svg


def test_a_picture_of_nothing_is_written(tmp_path: Path) -> None:
    draw_timeline([("", [[], []])], tmp_path / "empty.png")
    assert (tmp_path / "empty.png").exists()
