"""Tests of the drawings: whole schedules as text, and as image files."""

import inspect
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeshard.schedule.draw import _shade, draw_text, draw_timeline
from pipeshard.schedule.passes import shorten_cooldown
from pipeshard.schedule.program import Action, Kind, Program, forward_only
from pipeshard.schedule.schedules import gpipe, interleaved, make_program, one_f_one_b, v_half, v_min, zb_h1, zbv
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


@pytest.mark.parametrize(
    ("schedule", "sizes"),
    [
        (gpipe, (3, 4)),
        (one_f_one_b, (3, 4)),
        (interleaved, (3, 3, 2)),
        (zb_h1, (3, 4)),
        (zbv, (2, 3)),
        (v_half, (2, 3)),
        (v_min, (2, 3)),
    ],
)
def test_the_drawing_beside_each_schedule_is_true(schedule: Callable[..., Program], sizes: tuple[int, ...]) -> None:
    assert draw_text(schedule(*sizes)) in (inspect.getdoc(schedule) or "")


def test_the_drawing_of_evaluation_is_true() -> None:
    assert draw_text(forward_only(one_f_one_b(3, 4))) in (inspect.getdoc(forward_only) or "")


def test_a_simulation_is_drawn_in_its_own_times() -> None:
    assert draw_text(simulate(one_f_one_b(2, 2), forward=0.5, backward=1.0)) == drawing("""
        rank 0  F0 F1 .. .. B0 -- .. B1 --
        rank 1  .. F0 B0 -- F1 B1 -- .. ..
    """)


def test_cells_are_as_wide_as_the_longest_label() -> None:
    first, last = draw_text(forward_only(one_f_one_b(2, 11))).splitlines()
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


@pytest.mark.turns
def test_a_picture_is_written(tmp_path: Path) -> None:
    simulation = simulate(one_f_one_b(3, 4), 0.01, 0.02)
    draw_timeline([("", simulation.spans)], tmp_path / "one.png", "1F1B")
    assert (tmp_path / "one.png").read_bytes().startswith(b"\x89PNG")
    panels = [("measured", simulation.spans), ("simulated", simulate(gpipe(3, 4), 0.01, 0.02).spans)]
    draw_timeline(panels, tmp_path / "two.svg", "1F1B and GPipe")
    svg = (tmp_path / "two.svg").read_text()
    for text in ("1F1B and GPipe", "measured", "simulated", "rank 2: stage 2", "time (ms)", "backward"):
        assert text in svg

    assert "chunk" not in svg
    assert "split" not in svg and "input gradients" not in svg


@pytest.mark.turns
def test_a_split_backward_is_said(tmp_path: Path) -> None:
    """Only the last backwards of a 1F1B were short, and nothing said why."""
    for program, said in (
        (shorten_cooldown(one_f_one_b(3, 4)), "backward (input gradients if split)"),
        (zb_h1(3, 4, 1), "input gradients"),
    ):
        draw_timeline([("", simulate(program, 0.01, 0.01, 0.01).spans)], tmp_path / "split.svg")
        assert (
            f">{said}<" in (tmp_path / "split.svg").read_text()
            or f"<!-- {said} -->" in (tmp_path / "split.svg").read_text()
        )


@pytest.mark.parametrize(("name", "v", "rank1"), [("interleaved", 3, "stages 1, 3, 5"), ("zbv", 2, "stages 1, 2")])
def test_chunks_of_a_rank_have_shades_of_their_own(name: str, v: int, rank1: str, tmp_path: Path) -> None:
    spans = simulate(make_program(name, 2, 4, v), 0.01, 0.01, 0.01).spans
    draw_timeline([("", spans)], tmp_path / "chunks.svg", name)
    svg = (tmp_path / "chunks.svg").read_text()
    kinds = {span.action.kind for row in spans for span in row}
    colours = [colour for kind in kinds for chunk in range(v) for colour in [_shade(kind, chunk)]]
    assert len(set(colours)) == len(kinds) * v
    backward = f"{'input gradients' if Kind.W in kinds else 'backward'}, chunk {v}"
    for text in (f"rank 1: {rank1}", "forward, chunk 1", backward, *map(str.lower, colours)):
        assert text in svg
    assert f"chunk {v + 1}" not in svg


def size_in_inches(path: Path) -> tuple[float, float]:
    """Of a png drawn with 150 pixels an inch."""
    header = path.read_bytes()[16:24]
    return int.from_bytes(header[:4], "big") / 150, int.from_bytes(header[4:], "big") / 150


@pytest.mark.turns
def test_a_large_picture_stays_within_bounds(tmp_path: Path) -> None:
    for p, m, expected in ((2, 4, (12, 2.64)), (2, 100, (12, 2.64)), (2, 256, (24, 2.64)), (64, 4, (12, 15.8))):
        draw_timeline([("", simulate(one_f_one_b(p, m)).spans)], tmp_path / "picture.png")
        assert size_in_inches(tmp_path / "picture.png") == pytest.approx(expected, abs=0.02)


def test_numbers_are_left_out_where_they_do_not_fit(tmp_path: Path) -> None:
    for m, shown in (24, True), (240, False):
        draw_timeline([("", simulate(gpipe(1, m), 1, 1).spans)], tmp_path / "numbers.svg")
        assert ("<!-- 23 -->" in (tmp_path / "numbers.svg").read_text()) is shown


def test_a_picture_of_nothing_is_written(tmp_path: Path) -> None:
    draw_timeline([("", [[], []])], tmp_path / "empty.png")
    assert (tmp_path / "empty.png").exists()
