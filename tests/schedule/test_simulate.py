"""Tests of the simulator: the meaning of each time and size, and programs that cannot finish."""

import gc
import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeshard.errors import ConfigurationError, DeadlockError
from pipeshard.schedule.passes import add_communication
from pipeshard.schedule.program import Action, Kind, Program, forward_only
from pipeshard.schedule.schedules import SCHEDULES, make_program, num_chunks
from pipeshard.schedule.simulate import simulate

F, B, W = Kind.F, Kind.B, Kind.W
RECV_F, SEND_F = Kind.RECV_F, Kind.SEND_F


def actions(text: str, stage: int) -> tuple[Action, ...]:
    """`"F0 RecvB0"` as actions of `stage`."""
    words = (re.fullmatch(r"(\D+)(\d+)", word) for word in text.split())
    return tuple(Action(Kind(word[1]), int(word[2]), stage) for word in words if word)


def two_ranks(first: str, second: str, m: int = 2) -> Program:
    return Program("broken", m, (0, 1), (actions(first, 0), actions(second, 1)))


def test_latency_delays_and_an_edge_carries_one_message_at_a_time() -> None:
    simulation = simulate(forward_only(make_program("1f1b", 2, 3)), forward=1, latency=3)
    assert [(span.start, span.end) for span in simulation.spans[0]] == [(0, 1), (1, 2), (2, 3)]
    assert [(span.start, span.end) for span in simulation.spans[1]] == [(4, 5), (7, 8), (10, 11)]
    assert simulation.bubble == pytest.approx(1 - 6 / 22)


def test_a_transfer_waits_until_its_receive_is_posted() -> None:
    late = two_ranks("F0 SendF0 F1 SendF1", "RecvF0 F0 RecvF1 F1")
    early = two_ranks("F0 SendF0 F1 SendF1", "RecvF0 RecvF1 F0 F1")
    assert simulate(late, forward=(1, 4), latency=2).makespan == 1 + 2 + 4 + 2 + 4
    assert simulate(early, forward=(1, 4), latency=2).makespan == 1 + 2 + 4 + 4


def test_messages_of_1f1b_by_hand() -> None:
    """F 1, B 2, an input 0.5, gradients 0.25.

    rank 0  F0 F1 .  .  . B0 B0 . B1 B1
    rank 1  .  F0 B0 B0 F1 B1 B1
    """
    simulation = simulate(make_program("1f1b", 2, 2), 1, 2, latency=(0, 0.5), returned=(0, 0.25))
    first, second = ([(str(span.action), span.start, span.end) for span in row] for row in simulation.spans)
    assert first == [("F0@0", 0, 1), ("F1@0", 1, 2), ("B0@0", 4.75, 6.75), ("B1@0", 7.75, 9.75)]
    assert second == [("F0@1", 1.5, 2.5), ("B0@1", 2.5, 4.5), ("F1@1", 4.5, 5.5), ("B1@1", 5.5, 7.5)]
    assert simulation.bubble == pytest.approx(1 - 12 / (2 * 9.75))


def test_each_edge_has_its_own_time() -> None:
    """All messages were counted as large as the largest, also between ranks that share a machine."""
    program = make_program("1f1b", 3, 1)
    assert simulate(program, 1, 2, latency=(9, 0.5, 4)).makespan == 3 * 3 + 2 * 4.5
    assert simulate(program, 1, 2, latency=(9, 0.5, 4), returned=(9, 0, 1)).makespan == 3 * 3 + 4.5 + 1
    assert simulate(program, 1, 2, latency=0.5).spans == simulate(program, 1, 2, latency=[0.5] * 3).spans


TIMES = st.lists(st.floats(0, 5), min_size=6, max_size=6)


@given(st.sampled_from(list(SCHEDULES)), st.integers(1, 3), st.integers(1, 6), TIMES, TIMES, TIMES)
def test_no_message_is_free_of_charge_and_none_speeds_a_step_up(
    name: str, p: int, m: int, times: list[float], back: list[float], more: list[float]
) -> None:
    program = make_program(name, p, m, num_chunks(name))
    stages = len(program.placement)
    free, sent, returned = [0.0] * stages, times[:stages], back[:stages]
    slower = [a + b for a, b in zip(sent, more, strict=False)]
    assert simulate(program, latency=free, returned=free) == simulate(program)
    fast = simulate(program, latency=sent, returned=returned).makespan
    assert (
        fast == simulate(program, latency=[9, *sent[1:]], returned=[9, *returned[1:]]).makespan
    )  # nothing enters there
    assert simulate(program).makespan <= fast <= simulate(program, latency=slower, returned=returned).makespan
    assert fast <= simulate(program, latency=sent, returned=[max(pair) for pair in zip(slower, returned)]).makespan


def test_weight_gradients_fill_the_bubble_and_keep_activations() -> None:
    split = Program("split", 2, (0, 1), (actions("F0 F1 B0 W0 B1 W1", 0), actions("F0 B0 F1 B1 W0 W1", 1)))
    simulation = simulate(split, forward=1, backward=1, weight=1)
    assert simulation.makespan == 7
    assert [str(span.action) for span in simulation.spans[1]] == ["F0@1", "B0@1", "F1@1", "B1@1", "W0@1", "W1@1"]
    assert simulation.peak_activations == (2, 2)  # the second rank would need 1, did W not come last
    assert simulation.busy == (6, 6)


def test_neighbour_stages_on_one_rank_wait_for_no_message() -> None:
    rank0 = tuple(Action(kind, 0, stage) for kind, stage in [(F, 0), (F, 3), (B, 3), (B, 0)])
    rank1 = tuple(Action(kind, 0, stage) for kind, stage in [(F, 1), (F, 2), (B, 2), (B, 1)])
    simulation = simulate(Program("v", 1, (0, 1, 1, 0), (rank0, rank1)), latency=10)
    assert simulation.makespan == 4 * (1 + 2) + 4 * 10
    assert simulation.peak_activations == (2, 2)


def test_communication_is_added_only_where_there_is_none() -> None:
    program = make_program("1f1b", 3, 4)
    assert simulate(program).spans == simulate(add_communication(program)).spans
    assert not simulate(program).program.has_communication and simulate(program, latency=1).program.has_communication


def test_work_that_costs_nothing_has_no_bubble() -> None:
    simulation = simulate(make_program("gpipe", 2, 2), 0, 0)
    assert (simulation.makespan, simulation.bubble) == (0, 0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"forward": (1.0, 2.0, 3.0)}, "forward has 3 values for 2 stages"),
        ({"backward": -1.0}, "backward must be finite and non-negative"),
        ({"weight": (0.0, float("nan"))}, "weight must be finite"),
        ({"latency": -0.5}, "latency must be finite"),
        ({"latency": (1.0, 2.0, 3.0)}, "latency has 3 values for 2 stages"),
        ({"returned": (1.0, -2.0)}, "returned must be finite and non-negative"),
    ],
)
def test_bad_costs_are_refused(arguments: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        simulate(make_program("gpipe", 2, 2), **arguments)


def test_ranks_that_wait_for_each_other_are_a_deadlock() -> None:
    with pytest.raises(DeadlockError) as caught:
        simulate(two_ranks("F0 B0 F1 B1", "F0 F1 B0 B1"))
    message = str(caught.value)
    assert "rank 0 waits in B0@0 for RecvB0@0: rank 1 has not reached SendB0@1" in message
    assert "rank 1 waits in F1@1 for RecvF1@1: rank 0 has not reached SendF1@0" in message


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ("B0 F0", "F0 B0", "rank 0 waits in B0@0 for F0@0, which it runs only later"),
        ("F0 W0 B0", "F0 B0 W0", "rank 0 waits in W0@0 for B0@0, which it runs only later"),
        ("B0", "F0 B0", "rank 0 waits in B0@0 for F0@0, which it never runs"),
        ("SendF0 F0", "RecvF0 F0", "rank 0 waits in SendF0@0 for F0@0, which it runs only later"),
        ("F0 SendF0", "F0 RecvF0", "rank 1 waits in F0@1 for RecvF0@1, which it runs only later"),
        ("F0 SendF0", "F0", "rank 0 posts SendF0@0, which rank 1 does not receive"),
        ("F0", "RecvF0 F0", "rank 1 waits in F0@1 for RecvF0@1: rank 0 never runs SendF0@0"),
        ("F0 SendF0 F1", "RecvF0 F0 RecvF1", "rank 1 posts RecvF1@1, which rank 0 does not send"),
        ("RecvF0 F0 SendF0", "RecvF0 F0", "rank 0 posts RecvF0@0, but no other rank posts the matching message"),
    ],
)
def test_a_broken_program_is_a_deadlock(first: str, second: str, message: str) -> None:
    with pytest.raises(DeadlockError, match=message):
        simulate(two_ranks(first, second))


def test_ends_that_disagree_on_the_order_are_named() -> None:
    broken = two_ranks("F0 SendF0 F1 SendF1", "RecvF1 RecvF0 F0 F1")
    with pytest.raises(DeadlockError, match=r"message 0 from rank 0 to rank 1: rank 0 posts SendF0@0.* posts RecvF1@1"):
        simulate(broken)


def test_peak_memory_counts_each_stage_by_its_size() -> None:
    simulation = simulate(make_program("interleaved", 2, 2, 2), forward=1)
    assert [str(span.action) for span in simulation.spans[0]][:5] == ["F0@0", "F1@0", "F0@2", "F1@2", "B0@2"]
    assert simulation.peak_activations == (4, 3)
    assert simulation.peak_memory(0.5) == (2.0, 1.5)
    assert simulation.peak_memory([1, 10, 100, 1000]) == (202, 1020)
    with pytest.raises(ConfigurationError, match="size has 3 values for 4 stages"):
        simulation.peak_memory([1, 2, 3])


def test_memory_is_held_until_the_weight_gradients_are_made() -> None:
    split = simulate(Program("split", 2, (0,), (actions("F0 B0 F1 B1 W0 W1", 0),)))
    whole = simulate(Program("whole", 2, (0,), (actions("F0 B0 F1 B1", 0),)))
    assert (split.peak_memory(3), whole.peak_memory(3)) == ((6,), (3,))


def test_a_backward_that_is_not_split_costs_both_parts_where_others_are() -> None:
    program = Program("mixed", 2, (0,), (actions("F0 B0 F1 B1 W1", 0),))
    simulation = simulate(program, forward=1, backward=2, weight=5)
    assert [span.end - span.start for span in simulation.spans[0]] == [1, 7, 1, 2, 5]


@pytest.mark.turns
@pytest.mark.parametrize(("name", "v"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zb-h1", 1), ("zbv", 2)])
def test_a_large_program_is_quick(name: str, v: int) -> None:
    program = make_program(name, 64, 1024, v)
    start = time.process_time()
    simulation = simulate(program)
    assert time.process_time() - start < 2
    assert simulation.busy == (1024 * v * 3,) * 64


def test_the_garbage_collector_is_left_as_it_was() -> None:
    gc.enable()  # a command of an earlier test has disabled it
    simulate(make_program("1f1b", 2, 2))
    assert gc.isenabled()
    with pytest.raises(DeadlockError):
        simulate(two_ranks("F0 SendF0", "F0"))
    assert gc.isenabled()
    gc.disable()
    try:
        simulate(make_program("1f1b", 2, 2))
        assert not gc.isenabled()
    finally:
        gc.enable()
