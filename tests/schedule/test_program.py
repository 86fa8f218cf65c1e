"""Tests of the programs: the actions of each rank, their order, and invalid programs, which are refused."""

import ast
import dataclasses
import sys
from pathlib import Path

import pytest

import pipeshard.schedule.program as program_module
from pipeshard.errors import ConfigurationError, DeadlockError
from pipeshard.schedule.given import program_of
from pipeshard.schedule.passes import add_communication
from pipeshard.schedule.program import Action, Kind, Program, forward_only
from pipeshard.schedule.schedules import make_program, num_chunks
from tests.legal import check

F, B, W = Kind.F, Kind.B, Kind.W


def replace_rank(program: Program, rank: int, actions: tuple[Action, ...]) -> Program:
    ranks = (*program.ranks[:rank], actions, *program.ranks[rank + 1 :])
    return dataclasses.replace(program, ranks=ranks)


def test_an_action_labels_itself() -> None:
    assert str(Action(F, 3, 1)) == "F3@1"
    assert str(Action(Kind.RECV_B, 0, 2)) == "RecvB0@2"


@pytest.mark.parametrize(
    ("end", "other"),
    [(Action(Kind.SEND_F, 4, 1), Action(Kind.RECV_F, 4, 2)), (Action(Kind.SEND_B, 4, 2), Action(Kind.RECV_B, 4, 1))],
)
def test_partners_are_each_others(end: Action, other: Action) -> None:
    assert end.partner == other
    assert other.partner == end


def test_forward_only_has_the_forwards_of_the_program_and_nothing_else() -> None:
    program = forward_only(make_program("zbv", 2, 2))
    check(program)
    assert (program.name, program.num_microbatches, program.placement) == ("forward", 2, (0, 1, 1, 0))
    assert " ".join(map(str, program.ranks[0])) == "F0@0 F1@0 F0@3 F1@3"
    assert " ".join(map(str, program.ranks[1])) == "F0@1 F0@2 F1@1 F1@2"
    assert forward_only(add_communication(make_program("zbv", 2, 2))) == program


@pytest.mark.parametrize(("name", "weight"), [("gpipe", False), ("interleaved", False), ("zb-h1", True), ("zbv", True)])
def test_a_program_knows_whether_weight_gradients_are_apart(name: str, weight: bool) -> None:
    program = make_program(name, 2, 1)
    assert (program.has_weight, forward_only(program).has_weight) == (weight, False)


def test_1f1b_alternates_after_its_warmup() -> None:
    program = make_program("1f1b", 4, 4)
    assert " ".join(map(str, program.ranks[2])) == "F0@2 F1@2 B0@2 F2@2 B1@2 F3@2 B2@2 B3@2"


def test_an_unknown_schedule_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigurationError, match=r"'1F1B1': did you mean '1f1b'\? Known schedules: 1f1b, gpipe"):
        make_program("1F1B1", 2, 2)
    with pytest.raises(ConfigurationError, match=r"unknown schedule 'zzz'\. Known schedules"):
        make_program("zzz", 2, 2)


@pytest.mark.parametrize(
    ("name", "asked", "chunks"),
    [
        ("gpipe", 1, 1),
        ("interleaved", 1, 2),
        ("interleaved", 2, 2),
        ("interleaved", 5, 5),
        ("zbv", 1, 2),
        ("zbv", 2, 2),
    ],
)
def test_the_chunks_of_a_rank(name: str, asked: int, chunks: int) -> None:
    assert num_chunks(name, asked) == chunks
    assert len(make_program(name, 3, 2, asked).placement) == 3 * chunks


@pytest.mark.parametrize(
    ("name", "asked", "message"),
    [
        ("interleaved", 0, "'interleaved' requires num_model_chunks=2 or more, got 0"),
        ("zbv", 3, "'zbv' requires num_model_chunks=2, got 3"),
        ("zb-h1", 2, "'zb-h1' requires num_model_chunks=1, got 2"),
        ("1f1b", 0, "'1f1b' requires num_model_chunks=1, got 0"),
    ],
)
def test_chunks_that_a_schedule_cannot_have_are_refused(name: str, asked: int, message: str) -> None:
    for refusing in (lambda: num_chunks(name, asked), lambda: make_program(name, 2, 2, asked)):
        with pytest.raises(ConfigurationError, match=message):
            refusing()


@pytest.mark.parametrize(("p", "m"), [(0, 4), (2, 0), (-1, 1)])
def test_sizes_below_one_are_refused(p: int, m: int) -> None:
    with pytest.raises(ConfigurationError, match=f"p={p}, m={m}"):
        make_program("gpipe", p, m)


def test_what_is_missing_doubled_or_misplaced_is_refused() -> None:
    program = make_program("gpipe", 2, 2)
    first = program.ranks[0]
    with pytest.raises(ConfigurationError, match="rank 0 has B1@0 0 times, not 1"):
        program_of(replace_rank(program, 0, first[:-1]), 2, 2)
    with pytest.raises(ConfigurationError, match="rank 0 has F0@0 2 times, not 1"):
        program_of(replace_rank(program, 0, first[:1] + first), 2, 2)
    with pytest.raises(ConfigurationError, match="rank 0 has F0@1 1 time, not 0"):
        program_of(replace_rank(program, 0, (*first, Action(F, 0, 1))), 2, 2)
    one = make_program("gpipe", 1, 1)
    with pytest.raises(ConfigurationError, match="rank 0 has B0@0 0 times"):
        program_of(replace_rank(one, 0, (Action(F, 0, 0), Action(W, 0, 0))), 1, 1)


def test_split_backwards_and_neighbours_on_one_rank_are_known() -> None:
    folded = [Action(F, 0, 0), Action(F, 0, 1), Action(B, 0, 1), Action(W, 0, 1), Action(B, 0, 0), Action(W, 0, 0)]
    program = Program("folded", 1, (0, 0), (tuple(folded),))
    assert program_of(program, 1, 1, 2) == program
    folded[:2] = folded[1::-1]
    with pytest.raises(DeadlockError, match="rank 0 waits in F0@1 for F0@0"):
        program_of(replace_rank(program, 0, tuple(folded)), 1, 1, 2)


def test_the_package_imports_only_the_standard_library() -> None:
    for path in Path(program_module.__file__).parent.glob("*.py"):
        for node in ast.parse(path.read_text()).body:  # top level: what is imported when the module is
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            modules += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for module in modules:
                own = module in ("pipeshard.errors", "pipeshard.garbage") or module.startswith("pipeshard.schedule")
                assert own or module.split(".")[0] in sys.stdlib_module_names, (path.name, module)
