"""Tests of programs on GPU streams: an accepted program terminates, and the error of a deadlock names both ends."""

import dataclasses
import itertools
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeshard.errors import ConfigurationError, DeadlockError
from pipeshard.schedule.passes import add_communication, shorten_cooldown
from pipeshard.schedule.program import PARTNER, RECEIVE, Action, Kind, Program, forward_only
from pipeshard.schedule.schedules import make_program
from pipeshard.schedule.simulate import simulate
from pipeshard.schedule.streams import add_ordered_communication
from tests.legal import check
from tests.schedule.test_communicate import assert_edges_agree
from tests.streams import PLAIN, WORST, Device, Lanes, check_streams

BROADCAST, ISEND = Lanes("edge", numbered=True), Lanes("edge")
ALL = [Lanes(per, numbered) for per in ("edge", "pair", "world") for numbered in (False, True)]
SCHEDULES = [
    ("gpipe", 1),
    ("1f1b", 1),
    ("zb-h1", 1),
    ("interleaved", 2),
    ("interleaved", 3),
    ("zbv", 2),
    ("v-half", 2),
    ("v-min", 2),
]
SYNCHRONIZED = Device(synchronizes=True)
schedules = st.sampled_from(SCHEDULES)


def bare(name: str, p: int, m: int, v: int = 1, train: bool = True) -> Program:
    program = shorten_cooldown(make_program(name, p, m, v))
    return program if train else forward_only(program)


def ends(program: Program, lanes: Lanes, device: Device = PLAIN) -> bool:
    try:
        check_streams(program, lanes, device)
    except DeadlockError:
        return False
    return True


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("name", "v"), SCHEDULES)
def test_in_one_order_every_schedule_ends_whatever_a_device_does(name: str, v: int) -> None:
    for p, m, train in itertools.product((2, 3, 4, 8), (1, 2, 3, 8), (True, False)):
        plain = bare(name, p, m, v, train)
        program = add_ordered_communication(plain)
        check(program)
        assert_edges_agree(program)
        for lanes in ALL:
            check_streams(program, lanes, WORST)
        assert simulate(program, 1, 1, 1).makespan == simulate(plain, 1, 1, 1).makespan


@pytest.mark.turns
@settings(deadline=None, max_examples=40)
@given(schedules, st.integers(2, 16), st.integers(1, 64), st.booleans())
def test_in_one_order_sizes_do_not_matter(schedule: tuple[str, int], p: int, m: int, train: bool) -> None:
    check_streams(add_ordered_communication(bare(schedule[0], p, m, schedule[1], train)), BROADCAST, WORST)


def test_the_largest_programs_take_a_moment() -> None:
    """Messages are added once for each number of microbatches."""
    began = time.process_time()
    check_streams(add_ordered_communication(bare("interleaved", 16, 64, 2)), BROADCAST, WORST)
    assert time.process_time() - began < 1


@pytest.mark.parametrize(("name", "v"), SCHEDULES)
def test_receives_that_are_early_end_by_their_own_streams_until_something_waits_for_the_device(
    name: str, v: int
) -> None:
    for p, m in itertools.product((2, 3, 4), (1, 2, 3, 8)):
        program = add_communication(bare(name, p, m, v))
        for lanes, device in itertools.product((BROADCAST, ISEND), (PLAIN, Device(in_order=True), Device(resident=3))):
            check_streams(program, lanes, device)
        assert not ends(program, BROADCAST, SYNCHRONIZED) and not ends(program, BROADCAST, Device(resident=1))


def late(program: Program) -> Program:
    """With each receive right before the compute action that takes it, as others have it."""
    ranks: list[list[Action]] = []
    for actions in add_communication(program).ranks:
        ranks.append([])
        for action in actions:
            taken = action._replace(kind=RECEIVE.get(action.kind, action.kind))
            ranks[-1] += [taken] * (taken != action and taken in actions) + [action] * (not action.kind.is_receive)
    return dataclasses.replace(program, ranks=tuple(map(tuple, ranks)))


def test_late_receives_would_do_for_schedules_with_one_stage_a_rank_alone() -> None:
    for name, m in itertools.product(("gpipe", "1f1b", "zb-h1"), (1, 2, 8)):
        check_streams(late(bare(name, 3, m)), BROADCAST, SYNCHRONIZED)
    program = late(bare("interleaved", 2, 4, 2))
    check_streams(program, BROADCAST)
    assert not ends(program, BROADCAST, Device(in_order=True)) and not ends(program, BROADCAST, SYNCHRONIZED)


def test_what_a_pair_shares_is_found_and_both_ends_are_named() -> None:
    """p2p="isend" had one communicator a pair, or one for all, with NCCL: no schedule but evaluation ended. With
    broadcasts on it, other messages would have arrived, without a word."""
    for name, m in itertools.product(("gpipe", "1f1b", "zb-h1", "zbv"), (1, 2, 8)):
        program = add_communication(bare(name, 2, m))
        assert not any(ends(program, lanes) for lanes in (Lanes("pair"), Lanes("pair", numbered=True), Lanes("world")))
        assert name == "zbv" or ends(add_communication(bare(name, 2, m, train=False)), Lanes("world"))
    program = add_communication(bare("1f1b", 2, 1))
    with pytest.raises(DeadlockError) as caught:
        check_streams(add_communication(bare("1f1b", 2, 4)), Lanes("pair"))
    assert str(caught.value) == (
        "program '1f1b' deadlocks with one stream for each pair of ranks:\n"
        "  rank 0 starts SendF3@0 only after RecvB2@0 ends\n"
        "  rank 1 starts SendB2@1 only after RecvF3@1 ends"
    )
    with pytest.raises(DeadlockError, match=r"between ranks 0 and 1 .* rank 0 has RecvB0@0, rank 1 has RecvF0@1"):
        check_streams(program, Lanes("pair", numbered=True))
    with pytest.raises(DeadlockError, match="rank 0 ends F0@0 only after RecvB0@0 ends\n"):
        check_streams(program, BROADCAST, SYNCHRONIZED)


def test_a_message_with_one_end_is_found() -> None:
    first, last = add_ordered_communication(bare("gpipe", 2, 1)).ranks
    program = Program("torn", 1, (0, 1), (first, tuple(a for a in last if a.kind is not Kind.SEND_B)))
    with pytest.raises(DeadlockError, match=r"between ranks 0 and 1 .* rank 0 has RecvB0@0, rank 1 has none"):
        check_streams(program, BROADCAST)
    with pytest.raises(ConfigurationError, match="'gpipe' already has communication"):
        add_ordered_communication(add_communication(bare("gpipe", 2, 1)))


def runs(program: Program, lanes: Lanes, device: Device) -> bool:
    """The slow way: whatever can start does, until nothing can."""
    started: set[Action] = set()
    ended: set[Action] = set()  # each rank's own end of a message
    ranks = [list(actions) for actions in program.ranks]

    def lane(action: Action) -> tuple[int, ...]:
        here, there = program.placement[action.stage], program.placement[action.partner.stage]
        return lanes.of(there, here) if action.kind.is_receive else lanes.of(here, there)

    def may_start(actions: list[Action], k: int) -> bool:
        action, before = actions[k], actions[:k]
        kernels = [other for other in before if not other.kind.is_compute]
        free = ended.issuperset(set(before) - set(kernels))
        if device.in_order or device.resident:
            free &= started.issuperset(kernels)
        if action.kind.is_compute:
            free &= not device.synchronizes or ended.issuperset(kernels)
            taken = action._replace(kind=RECEIVE[action.kind]) if action.kind in RECEIVE else None
            return free and (taken not in actions or taken in ended)
        unended = [other for other in kernels if other not in ended]
        return free and not any(device.resident or lane(other) == lane(action) for other in unended)

    before: tuple[int, int] | None = None
    while before != (before := (len(started), len(ended))):
        for actions in ranks:
            for k, action in enumerate(actions):
                if action not in started and may_start(actions, k):
                    started.add(action)
                    if action.kind.is_compute:
                        ended.add(action)
                if action in started and action not in ended and action.partner in started:
                    ended |= {action, action.partner}
    return len(ended) == sum(map(len, ranks))


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """A schedule with messages, of which some stand earlier or later than they did."""
    name, v = draw(schedules)
    add = draw(st.sampled_from([add_communication, add_ordered_communication]))
    program = add(bare(name, draw(st.integers(2, 3)), draw(st.integers(1, 3)), v))
    ranks = [list(actions) for actions in program.ranks]
    for _ in range(draw(st.integers(0, 4))):
        actions = draw(st.sampled_from(ranks))
        k = draw(st.integers(0, len(actions) - 2))
        if not (actions[k].kind.is_compute and actions[k + 1].kind.is_compute):
            actions[k], actions[k + 1] = actions[k + 1], actions[k]
    return dataclasses.replace(program, ranks=tuple(map(tuple, ranks)))


@settings(deadline=None)
@given(
    programs(),
    st.sampled_from([Lanes(per) for per in ("edge", "pair", "world")]),
    st.sampled_from([PLAIN, Device(in_order=True), Device(resident=1), SYNCHRONIZED, WORST]),
)
def test_what_is_said_is_what_happens(program: Program, lanes: Lanes, device: Device) -> None:
    assert ends(program, lanes, device) == (runs(program, lanes, device) and edges_agree(program))


def edges_agree(program: Program) -> bool:
    try:
        assert_edges_agree(program)
    except AssertionError:
        return False
    return True


@pytest.mark.turns
@settings(deadline=None)
@given(st.data())
def test_any_order_of_one_s_own_ends(data: st.DataObject) -> None:
    """Microbatches in any order that stages can keep to."""
    m, p = data.draw(st.integers(1, 5)), data.draw(st.integers(2, 4))
    left = [Action(kind, i, s) for kind in (Kind.F, Kind.B) for i in range(m) for s in range(p)]
    ranks: list[list[Action]] = [[] for _ in range(p)]
    done: set[Action] = set()
    while left:
        ready = [a for a in left if done.issuperset(inputs(a, p))]
        action = data.draw(st.sampled_from(ready))
        left.remove(action)
        done.add(action)
        ranks[action.stage].append(action)
    program = add_ordered_communication(Program("drawn", m, tuple(range(p)), tuple(map(tuple, ranks))))
    for lanes in ALL:
        check_streams(program, lanes, WORST)


def inputs(action: Action, p: int) -> list[Action]:
    message = Action(RECEIVE[action.kind], *action[1:])
    neighbour = action.stage + PARTNER[message.kind][1]
    own = [action._replace(kind=Kind.F)] if action.kind is Kind.B else []
    return own + [action._replace(stage=neighbour)] * (0 <= neighbour < p)
