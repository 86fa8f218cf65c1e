"""Tests of the communication pass: the messages that it adds, and their order on each edge."""

from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeshard.errors import ConfigurationError
from pipeshard.schedule.passes import add_communication
from pipeshard.schedule.program import Action, Kind, Program, forward_only
from pipeshard.schedule.schedules import make_program
from pipeshard.schedule.simulate import simulate
from tests.legal import check

F, B = Kind.F, Kind.B


def text(actions: tuple[Action, ...]) -> str:
    return " ".join(f"{action.kind}{action.microbatch}" for action in actions)


def edges(program: Program, kinds: tuple[Kind, Kind]) -> dict[tuple[int, int], list[Action]]:
    """The messages of `kinds` of each (own rank, other rank), in order."""
    found: defaultdict[tuple[int, int], list[Action]] = defaultdict(list)
    for rank, actions in enumerate(program.ranks):
        for action in actions:
            if action.kind in kinds:
                found[rank, program.placement[action.partner.stage]].append(action)
    return found


def assert_edges_agree(program: Program) -> None:
    sends = edges(program, (Kind.SEND_F, Kind.SEND_B))
    receives = edges(program, (Kind.RECV_F, Kind.RECV_B))
    expected = {(target, source): [m.partner for m in messages] for (source, target), messages in sends.items()}
    assert receives == expected


def test_receives_stand_one_compute_early_and_sends_right_after() -> None:
    first, middle, last = map(text, add_communication(make_program("1f1b", 3, 3)).ranks)
    assert first == "F0 SendF0 F1 SendF1 RecvB0 F2 SendF2 RecvB1 B0 RecvB2 B1 B2"
    assert middle == (
        "RecvF0 RecvF1 F0 SendF0 RecvB0 F1 SendF1 RecvF2 B0 SendB0 RecvB1 F2 SendF2 RecvB2 B1 SendB1 B2 SendB2"
    )
    assert last == "RecvF0 F0 RecvF1 B0 SendB0 F1 RecvF2 B1 SendB1 F2 B2 SendB2"


def test_forward_only_sends_no_gradients() -> None:
    first, last = map(text, add_communication(forward_only(make_program("1f1b", 2, 2))).ranks)
    assert first == "F0 SendF0 F1 SendF1"
    assert last == "RecvF0 RecvF1 F0 F1"


def test_one_rank_needs_no_messages() -> None:
    program = make_program("1f1b", 1, 3)
    assert add_communication(program) == program


def test_a_program_with_communication_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="'gpipe' already has communication"):
        add_communication(add_communication(make_program("gpipe", 2, 1)))


def test_neighbour_stages_on_one_rank_send_nothing() -> None:
    """A V: rank 0 holds the first and the last of four stages."""
    rank0 = tuple(Action(kind, 0, stage) for kind, stage in [(F, 0), (F, 3), (B, 3), (B, 0)])
    rank1 = tuple(Action(kind, 0, stage) for kind, stage in [(F, 1), (F, 2), (B, 2), (B, 1)])
    program = add_communication(Program("v", 1, (0, 1, 1, 0), (rank0, rank1)))
    check(program)
    assert_edges_agree(program)
    assert " ".join(map(str, program.ranks[0])) == "RecvF0@3 F0@0 SendF0@0 F0@3 RecvB0@0 B0@3 SendB0@3 B0@0"
    assert " ".join(map(str, program.ranks[1])) == "RecvF0@1 F0@1 RecvB0@2 F0@2 SendF0@2 B0@2 B0@1 SendB0@1"


@given(st.permutations(range(6)), st.permutations(range(6)))
def test_receives_follow_the_sender_where_they_are_used_in_another_order(sent: list[int], used: list[int]) -> None:
    ranks = tuple(Action(F, i, 0) for i in sent), tuple(Action(F, i, 1) for i in used)
    program = add_communication(Program("shuffled", 6, (0, 1), ranks))
    check(program)
    assert_edges_agree(program)
    assert simulate(program, latency=0.5).busy == (6.0, 6.0)
