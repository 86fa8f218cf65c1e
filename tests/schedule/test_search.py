"""Tests of searched programs: for any stage costs, they are complete, terminate, and stay within the memory."""

import math
import random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pipeshard.schedule.given import program_of
from pipeshard.schedule.program import Kind
from pipeshard.schedule.schedules import make_program
from pipeshard.schedule.search import Rule, Searched, StageCosts, climb, estimate, rules, scheduled, varied
from pipeshard.schedule.simulate import simulate
from pipeshard.schedule.streams import add_ordered_communication
from tests.legal import check
from tests.streams import WORST, Lanes, check_streams

costs = st.integers(0, 9).map(float)


@st.composite
def works(draw: st.DrawFn) -> StageCosts:
    p, v = draw(st.integers(1, 5)), draw(st.integers(1, 3))
    in_v = v == 2 and p > 1 and draw(st.booleans())
    placement = (*range(p), *reversed(range(p))) if in_v else (*range(p),) * v

    def each(values: st.SearchStrategy[float]) -> tuple[float, ...]:
        return tuple(draw(st.lists(values, min_size=p * v, max_size=p * v)))

    sizes = each(st.integers(0, 4).map(float))
    least = [sum(size for size, at in zip(sizes, placement) if at == rank) for rank in range(p)]
    room = tuple(size * draw(st.sampled_from((1.0, 1.5, 3.0, 9.0))) for size in least)
    messages = st.just(0.0) if draw(st.booleans()) else st.sampled_from((0.0, 0.5, 2.0))
    return StageCosts(placement, each(costs), each(costs), each(costs), sizes, room, each(messages), each(messages))


NONE = (0.0,) * 12
# A microbatch that had ended left memory that two behind the next one took on a rank's first stage: that one had too
# little for the rank's third stage, and the program ended without its backward.
FREED = StageCosts(
    (0, 1, 2, 3) * 3,
    NONE,
    (*NONE[1:], 1.0),
    NONE,
    (0.0, 1.0, *NONE[2:9], 2.0, 0.0, 0.0),
    (0.0, 3.0, 0.0, 0.0),
    NONE,
    NONE,
)


@pytest.mark.turns
@given(works(), st.integers(1, 9), st.integers(0, 2**32))
@example(FREED, 3, 479001601)
def test_a_searched_program_is_complete_ends_and_stays_in_memory(work: StageCosts, m: int, seed: int) -> None:
    p, draws = len(work.room), random.Random(seed)
    rule = draws.choice([*rules(work, m)])
    for _ in range(20):
        rule = varied(rule, m, draws)
    searched = Searched(work, rule, m)
    for count in (m, m + 1):
        program = program_of(searched, p, count)
        check(program)
        for stage, weight in enumerate(work.weight):
            assert program.splits(stage) == frozenset(range(count) if weight else ())
        check_streams(add_ordered_communication(program), Lanes(), WORST)
        simulation = simulate(program, work.forward, work.backward, work.weight, work.latency, work.returned)
        assert all(peak <= room for peak, room in zip(simulation.peak_memory(work.sizes), work.room))
    if not any((*work.latency, *work.returned)):  # messages of an edge are sent one after the other
        program = searched(p, m)
        assert simulate(program, *work[1:4]).makespan == scheduled(work, m, rule)[0]


def test_equal_stages_take_no_longer_than_the_best_known_schedule() -> None:
    for p, m in ((2, 4), (4, 8), (8, 16)):
        ones = (0.5,) * (2 * p)
        work = StageCosts(
            make_program("zbv", p, m).placement, ones, ones, ones, ones, (float(p),) * p, *[(0.0,) * (2 * p)] * 2
        )
        shortest = min(scheduled(work, m, rule)[0] for rule in rules(work, m))
        assert shortest <= simulate(make_program("zbv", p, m), 0.5, 0.5, 0.5).makespan
        assert estimate(work, m)[0] <= shortest


def test_several_stages_a_rank_take_no_longer_than_interleaved() -> None:
    """A rank that always ran a B before an F gave the next rank its F's too late."""
    for p, m, v in ((2, 8, 4), (4, 8, 2), (4, 8, 4)):
        ones, twos, nothing = (1.0,) * (p * v), (2.0,) * (p * v), (0.0,) * (p * v)
        work = StageCosts((*range(p),) * v, ones, twos, nothing, nothing, (0.0,) * p, nothing, nothing)
        known = simulate(make_program("interleaved", p, m, v), 1.0, 2.0).makespan
        assert min(scheduled(work, m, rule)[0] for rule in rules(work, m)) <= known


def test_a_trial_ends_when_it_is_certain_to_be_slower() -> None:
    ones, nothing = (1.0,) * 3, (0.0,) * 3
    work = StageCosts((0, 1, 2), ones, ones, ones, ones, (9.0,) * 3, nothing, nothing)
    for rule in rules(work, 6):
        time, rows = scheduled(work, 6, rule)
        assert scheduled(work, 6, rule, time) == (time, rows)
        assert scheduled(work, 6, rule, 0.9 * time)[0] == math.inf


def test_what_is_kept_decides_how_long_a_step_takes() -> None:
    """Memory for one microbatch: each waits for the one before it."""
    ones, nothing = (1.0,) * 3, (0.0,) * 3
    work = StageCosts((0, 1, 2), ones, ones, ones, ones, ones, nothing, nothing)
    tight, wide = (scheduled(work._replace(room=(room,) * 3), 6, next(rules(work, 6)))[0] for room in (1.0, 3.0))
    assert tight > 1.5 * wide
    assert estimate(work._replace(room=(0.5,) * 3), 6) == (float("inf"), 1.5)
    assert estimate(work._replace(sizes=nothing, room=nothing), 6)[0] < float("inf")


def test_the_earliest_microbatch_can_always_go_on() -> None:
    """The first stage filled a rank's memory with microbatches that the rank's later stage had no memory for."""
    ones, nothing = (1.0,) * 4, (0.0,) * 4
    work = StageCosts((0, 1, 0, 1), ones, ones, ones, ones, (3.0, 3.0), (0.0, 9.0, 9.0, 9.0), nothing)
    rule = Rule(False, False, False, 0.0, (6,) * 4, reserved=1)
    assert scheduled(work, 6, rule)[0] < scheduled(work, 6, rule._replace(reserved=0))[0] == math.inf


def test_a_climb_never_gets_worse() -> None:
    draws = random.Random(0)
    assert climb(100, 100, lambda x, _: abs(x), lambda x: x + draws.choice((-5, 5)), 200) == (0, 0)


def test_a_stage_without_weight_gradients_has_no_w() -> None:
    work = StageCosts((0, 1), (1.0, 1.0), (1.0, 1.0), (0.0, 1.0), (1.0, 1.0), (2.0, 2.0), (0.0, 0.0), (0.0, 0.0))
    rule = Rule(False, False, False, 0.0, (2, 2), 1)
    kinds = [{action.kind for action in actions} for actions in Searched(work, rule, 2)(2, 2).ranks]
    assert kinds == [{Kind.F, Kind.B}, {Kind.F, Kind.B, Kind.W}]
