"""Tests of all schedules in all sizes: complete, legal, free of deadlocks, and with the documented time and memory."""

import dataclasses
from collections import defaultdict
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from pipeshard.errors import ConfigurationError, DeadlockError
from pipeshard.schedule.given import program_of
from pipeshard.schedule.passes import add_communication
from pipeshard.schedule.program import Action, Kind, Program, StageStep, forward_only
from pipeshard.schedule.schedules import IN_A_V, SCHEDULES, make_program
from pipeshard.schedule.simulate import Simulation, simulate
from tests.legal import check

F, B, W = Kind.F, Kind.B, Kind.W
ALL = [(name, v) for name in SCHEDULES for v in ((2, 3) if name == "interleaved" else (2,) if name in IN_A_V else (1,))]
P, M = range(1, 9), range(1, 25)
schedules, ps, ms, costs = st.sampled_from(ALL), st.sampled_from(P), st.sampled_from(M), st.integers(1, 20)


@pytest.mark.turns
@pytest.mark.sampled(15)
@pytest.mark.parametrize("p", P)
@pytest.mark.parametrize(("name", "v"), ALL)
def test_every_program_is_complete_ends_and_keeps_what_it_says(name: str, v: int, p: int) -> None:
    for m in M:
        program = make_program(name, p, m, v)
        assert program.name == name
        assert program.placement == placement(name, p, v)
        complete = add_communication(program)
        check(complete)
        assert_ascending(program)
        assert_edges_agree(complete)
        simulation = simulate(complete, 2, 2, 2)
        assert_peaks(v, simulation)
        assert_bubble(v, simulation, 2, 2, 2)
        evaluation = forward_only(program)
        check(evaluation)
        assert simulate(evaluation, 2).peak_activations == (1,) * p


def placement(name: str, p: int, v: int) -> tuple[int, ...]:
    return tuple(s if s < p else 2 * p - 1 - s for s in range(2 * p)) if name in IN_A_V else tuple(range(p)) * v


def assert_ascending(program: Program) -> None:
    """Each step takes the microbatches in order: so sums of gradients are in one order, whatever the schedule."""
    for rank, actions in enumerate(program.ranks):
        order: defaultdict[StageStep, list[int]] = defaultdict(list)
        for kind, i, stage in actions:
            order[kind, stage].append(i)
        held = [stage for stage, holder in enumerate(program.placement) if holder == rank]
        kinds = (F, B, W) if program.has_weight else (F, B)
        assert order == {(kind, stage): [*range(program.num_microbatches)] for kind in kinds for stage in held}


def assert_edges_agree(program: Program) -> None:
    """The two ends of each directed edge post its messages in one order."""
    ends: defaultdict[tuple[int, int], tuple[list[Action], list[Action]]] = defaultdict(lambda: ([], []))
    for rank, actions in enumerate(program.ranks):
        for action in actions:
            if not action.kind.is_compute:
                other = program.placement[action.partner.stage]
                if action.kind.is_receive:
                    ends[other, rank][0].append(action)
                else:
                    ends[rank, other][1].append(action.partner)
    assert all(received == sent for received, sent in ends.values())


def assert_peaks(v: int, simulation: Simulation) -> None:
    name, m, p = simulation.program.name, simulation.program.num_microbatches, len(simulation.program.ranks)
    expected = {
        "gpipe": [m] * p,
        "1f1b": [min(m, p - r) for r in range(p)],
        "interleaved": [min(v * m, 2 * (p - r - 1) + (v - 1) * p + 1) for r in range(p)],
        "zb-h1": [min(m, p)] * p,
        "zbv": [min(2 * m, 2 * p)] * p,
        "v-half": [min(2 * m, (p + 2) // 2 * 2)] * p,
        "v-min": [min(2 * m, (p + 4) // 3 * 2)] * p,
    }[name]
    is_bound = name.startswith("v-") or (name == "interleaved" and m % p) or (name == "zbv" and m < 2 * p - 1)
    if is_bound:
        assert all(peak <= most for peak, most in zip(simulation.peak_activations, expected, strict=True))
    else:
        assert list(simulation.peak_activations) == expected


def assert_bubble(v: int, simulation: Simulation, forward: int, backward: int, weight: int) -> None:
    """The time that a rank idles is what is said, given what F, B and W cost on each stage."""
    name, m, p = simulation.program.name, simulation.program.num_microbatches, len(simulation.program.ranks)
    work = m * v * (forward + backward + (weight if simulation.program.has_weight else 0))
    idle = simulation.makespan - work
    assert simulation.busy == (work,) * p
    assert simulation.bubble == pytest.approx(idle / simulation.makespan)
    if name in ("gpipe", "1f1b"):
        assert idle == (p - 1) * (forward + backward)
    elif name == "interleaved":
        least, surplus = (p - 1) * (forward + backward), (v - 1) * (-m % p) * (forward + backward)
        assert idle == least + surplus if m <= p else least <= idle <= least + surplus
    elif name == "zb-h1" and m >= p:
        assert idle == (p - 1) * max(forward, backward, forward + backward - weight)
    elif name == "zb-h1" and weight <= min(forward, backward):
        assert idle == (p - 1) * (forward + backward) - (m - 1) * weight
    elif name == "zbv" and m >= 2 * p - 2 and max(forward, weight) <= backward:
        assert idle == (p - 1) * max(backward, 2 * (backward - weight))
        if weight <= forward <= backward <= forward + weight:
            assert idle <= (p - 1) * (forward + backward - weight)
    elif name == "zbv" and forward == backward == weight:
        assert idle == forward * (p - 1 + max(2 * p - 2 - m, 3 * (p - m)))
    elif name in ("v-half", "v-min") and forward == backward == weight:
        # F is that of one of the two stages of a rank; 1F1B idles for 6 (p-1) of it.
        assert idle <= (p - 1) * forward * (3.5 if name == "v-half" and m >= p else 4)
    assert idle >= (p - 1) * forward


@given(schedules, ps, ms, costs, costs, costs)
def test_even_stages_idle_as_long_as_is_said(
    schedule: tuple[str, int], p: int, m: int, forward: int, backward: int, weight: int
) -> None:
    name, v = schedule
    simulation = simulate(make_program(name, p, m, v), forward, backward, weight)
    assert_bubble(v, simulation, forward, backward, weight)


@given(ps, ms, costs, costs, costs)
def test_zbv_idles_as_long_as_is_said(p: int, m: int, forward: int, backward: int, weight: int) -> None:
    """With costs and sizes for which something is said."""
    forward, backward = min(forward, backward), max(forward, backward)
    weight = min(weight, backward)
    simulation = simulate(make_program("zbv", p, max(m, 2 * p - 2), 2), forward, backward, weight)
    assert_bubble(2, simulation, forward, backward, weight)


@pytest.mark.parametrize(("p", "m", "idle"), [(4, 8, (27.3, 15.8, 11.1, 5.9)), (8, 32, (17.9, 9.9, 6.8, 3.5))])
def test_the_idle_shares_of_the_literature(p: int, m: int, idle: tuple[float, ...]) -> None:
    """With F = B = W."""
    whole = [simulate(make_program(name, p, m, v), 1, 2) for name, v in (("1f1b", 1), ("interleaved", 2))]
    split = [simulate(make_program(name, p, m), 1, 1, 1) for name in ("zb-h1", "zbv")]
    assert [100 * simulation.bubble for simulation in whole + split] == pytest.approx(idle, abs=0.05)


@given(st.data(), schedules, ps, ms, st.sampled_from([0.0, 0.3, 5.0]))
def test_uneven_stages_run_in_order_and_no_faster_than_is_possible(
    data: st.DataObject, schedule: tuple[str, int], p: int, m: int, latency: float
) -> None:
    name, v = schedule
    program = make_program(name, p, m, v)
    per_stage = st.lists(st.floats(0.1, 10.0), min_size=p * v, max_size=p * v)
    forward, backward, weight = data.draw(per_stage), data.draw(per_stage), data.draw(per_stage)
    simulation = simulate(program, forward, backward, weight, latency)
    assert tuple(tuple(span.action for span in row) for row in simulation.spans) == program.ranks
    assert_times_follow(simulation, latency)
    crossings = sum(here != there for here, there in pairwise(program.placement))
    one_microbatch = sum(forward) + sum(backward) + 2 * crossings * latency
    assert simulation.makespan >= max(one_microbatch, *simulation.busy) * (1 - 1e-9)
    assert 0 <= simulation.bubble < 1


def assert_times_follow(simulation: Simulation, latency: float) -> None:
    """Each action starts after what it needs; exactly then, where messages take no time."""
    program = simulation.program
    end = {span.action: span.end for row in simulation.spans for span in row}
    for row in simulation.spans:
        free = 0.0
        for span in row:
            inputs = needed(program, span.action)
            ready = [
                end[a] + latency * (program.placement[a.stage] != program.placement[span.action.stage]) for a in inputs
            ]
            earliest = max([free, *ready])
            assert span.start == earliest if latency == 0 else span.start >= earliest - 1e-9
            free = span.end


def needed(program: Program, action: Action) -> list[Action]:
    """The computations, on any rank, that `action` takes something from."""
    kind, i, stage = action
    inputs = {F: [(F, stage - 1)], B: [(F, stage), (B, stage + 1)], W: [(B, stage)]}[kind]
    return [Action(before, i, at) for before, at in inputs if 0 <= at < len(program.placement)]


@given(st.data(), schedules, ps, ms)
@pytest.mark.turns
def test_a_program_with_two_actions_swapped_ends_unless_something_waits_for_itself(
    data: st.DataObject, schedule: tuple[str, int], p: int, m: int
) -> None:
    program = swapped(data, make_program(schedule[0], p, m, schedule[1]))
    order: TopologicalSorter[Action] = TopologicalSorter()
    for actions in program.ranks:
        for before, action in pairwise((None, *actions)):
            order.add(action, *needed(program, action), *[before] * (before is not None))
    try:
        order.prepare()
    except CycleError:
        with pytest.raises(DeadlockError, match=r"cannot finish:\n  rank \d+ waits in"):
            simulate(program)
    else:
        check(program)
        assert_times_follow(simulate(program), 0.0)


def swapped(data: st.DataObject, program: Program) -> Program:
    """`program` with two actions of one rank, not far apart, in each other's place."""
    rank = data.draw(st.integers(0, len(program.ranks) - 1))
    actions = list(program.ranks[rank])
    first = data.draw(st.integers(0, len(actions) - 2))
    second = data.draw(st.integers(first + 1, min(first + 8, len(actions) - 1)))
    actions[first], actions[second] = actions[second], actions[first]
    return dataclasses.replace(program, ranks=(*program.ranks[:rank], tuple(actions), *program.ranks[rank + 1 :]))


@given(st.data(), schedules, ps, ms)
@pytest.mark.turns
def test_an_action_before_what_it_needs_on_its_rank_is_refused(
    data: st.DataObject, schedule: tuple[str, int], p: int, m: int
) -> None:
    program = make_program(schedule[0], p, m, schedule[1])
    moved = swapped(data, program)
    position = {action: k for actions in moved.ranks for k, action in enumerate(actions)}
    rank = program.placement
    local = [
        (a, b) for actions in moved.ranks for a in actions for b in needed(program, a) if rank[a.stage] == rank[b.stage]
    ]
    assume(any(position[a] < position[b] for a, b in local))
    with pytest.raises((ConfigurationError, DeadlockError), match=r"waits in|forwards of a stage must run in"):
        program_of(moved, p, m)
