"""Tests of the shorter cooldown: the same work in the same order, never longer, and as short as documented."""

import inspect
import math
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeshard.schedule.draw import draw_text
from pipeshard.schedule.passes import add_communication, shorten_cooldown
from pipeshard.schedule.program import Kind, Program
from pipeshard.schedule.schedules import make_program, one_f_one_b
from pipeshard.schedule.simulate import ActionCost, Simulation, simulate

WHOLE = [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 3)]
P, M = range(1, 9), range(1, 25)
schedules, ps, ms, costs = st.sampled_from(WHOLE), st.sampled_from(P), st.sampled_from(M), st.integers(1, 20)


def run(
    program: Program, forward: ActionCost, backward: ActionCost, weight: ActionCost, latency: float = 0.0
) -> Simulation:
    """Where no B is split, each costs what B and W do together."""
    if program.has_weight:
        return simulate(program, forward, backward, weight, latency)
    if not isinstance(backward, Sequence) or not isinstance(weight, Sequence):
        return simulate(program, forward, backward + weight, latency=latency)  # type: ignore[operator]
    return simulate(program, forward, [b + w for b, w in zip(backward, weight)], latency=latency)


def without_weight(program: Program) -> tuple[tuple[object, ...], ...]:
    return tuple(tuple(action for action in actions if action.kind is not Kind.W) for actions in program.ranks)


@pytest.mark.sampled(7)
@pytest.mark.parametrize("p", P)
@pytest.mark.parametrize(("name", "v"), WHOLE)
def test_it_only_sends_between_b_and_w(name: str, v: int, p: int) -> None:
    for m in M:
        plain = make_program(name, p, m, v)
        short = shorten_cooldown(plain)
        assert (short.name, short.placement, without_weight(short)) == (plain.name, plain.placement, plain.ranks)
        for rank, actions in enumerate(short.ranks):
            last = max(k for k, action in enumerate(actions) if action.kind is Kind.F)
            for k, (action, following) in enumerate(pairwise([*actions, None])):
                if action and action.kind is Kind.B:
                    sends = action.stage > 0 and short.placement[action.stage - 1] != rank
                    split = following == action._replace(kind=Kind.W)
                    assert split == (sends and k > last)
        simulation, before = run(add_communication(short), 2, 2, 2), run(plain, 2, 2, 2)  # it ends
        assert simulation.peak_activations == before.peak_activations
        assert simulation.makespan < before.makespan or p == 1
        idle = simulation.makespan - m * v * 6
        if name == "gpipe" or (name == "1f1b" and m >= p) or (name == "interleaved" and m % p == 0 and m > p):
            assert idle == (p - 1) * 4


@given(ps, ms, costs, costs, costs)
def test_even_stages_idle_as_long_as_is_said(p: int, m: int, forward: int, backward: int, weight: int) -> None:
    work = m * (forward + backward + weight)
    gpipe = run(shorten_cooldown(make_program("gpipe", p, m)), forward, backward, weight)
    assert gpipe.makespan - work == (p - 1) * (forward + backward)
    one = run(shorten_cooldown(make_program("1f1b", p, max(m, p))), forward, backward, weight)
    assert one.makespan - one.busy[0] == (p - 1) * (backward + max(forward, weight))
    assert gpipe.busy == (work,) * p and set(one.busy) == {max(m, p) * (forward + backward + weight)}


@given(st.data(), schedules, ps, ms, st.sampled_from([0.0, 0.3, 5.0]))
@pytest.mark.turns
def test_uneven_stages_take_no_longer(
    data: st.DataObject, schedule: tuple[str, int], p: int, m: int, latency: float
) -> None:
    name, v = schedule
    plain = make_program(name, p, m, v)
    per_stage = st.lists(st.floats(0.1, 10.0), min_size=p * v, max_size=p * v)
    forward, backward, weight = data.draw(per_stage), data.draw(per_stage), data.draw(per_stage)
    before = run(plain, forward, backward, weight, latency)
    after = run(shorten_cooldown(plain), forward, backward, weight, latency)
    assert after.makespan <= before.makespan * (1 + 1e-12)
    assert all(math.isclose(*pair) for pair in zip(after.busy, before.busy))
    assert after.peak_activations == before.peak_activations


@pytest.mark.parametrize("name", ["zb-h1", "zbv"])
def test_what_is_split_already_stays_as_it_is(name: str) -> None:
    program = make_program(name, 4, 8)
    assert shorten_cooldown(program) == program


def test_the_drawing_is_true() -> None:
    assert draw_text(shorten_cooldown(one_f_one_b(3, 4))) in (inspect.getdoc(shorten_cooldown) or "")
