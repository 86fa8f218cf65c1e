"""Tests of given schedules: Programs, functions and torch's files, and the ones that are refused."""

from __future__ import annotations

import csv
import re
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.pipelining import schedules as torch_schedules

from pipeshard.config import PipelineConfig
from pipeshard.errors import ConfigurationError, DeadlockError, PipeshardError
from pipeshard.schedule import (
    Action,
    Kind,
    Program,
    add_communication,
    interleaved,
    make_program,
    program_of,
    simulate,
    zbv,
)
from pipeshard.schedule.given import chunks_of

P, M = 2, 4


class Stage:
    """What torch's schedules ask of a stage before they run."""

    is_first, is_last, has_backward, submod = True, False, True, None

    def __init__(self, index: int, stages: int) -> None:
        self.stage_index, self.num_stages, self.group_size, self.group_rank = index, stages, P, 0
        self.is_first, self.is_last = index == 0, index == stages - 1


def by_torch(name: str) -> dict[int, list[Any]]:
    """The order of actions that a schedule of torch has planned."""
    if name == "ScheduleGPipe":
        schedule: Any = object.__new__(torch_schedules.ScheduleGPipe)
        schedule._num_stages, schedule._n_microbatches = P, M
        return schedule._get_pipeline_order()  # type: ignore[no-any-return]
    kind = getattr(torch_schedules, name)
    stages = [Stage(s, 2 * P) for s in ((0, 2 * P - 1) if "ZBV" in name or "DualPipe" in name else (0, P))]
    return kind(stages, M, loss_fn=lambda *_: None).pipeline_order  # type: ignore[no-any-return]


NAMES = "ScheduleGPipe ScheduleInterleaved1F1B ScheduleZBVZeroBubble ScheduleInterleavedZeroBubble ScheduleDualPipeV"


@pytest.mark.parametrize("name", NAMES.split())
def test_torch_s_orders_are_read_and_legal(name: str, tmp_path: Path) -> None:
    """Each action of torch's own order is there, in its place, and the program ends; `schedule=` took names alone."""
    order, path = by_torch(name), tmp_path / f"{name}.csv"
    with path.open("w", newline="") as file:
        csv.writer(file).writerows(order[rank] for rank in sorted(order))
    program = Program.from_csv(path)
    assert program_of(program, P, M) == program and program.name == name and program.num_microbatches == M
    inner = [[sub for a in order[rank] if a is not None for sub in (a.sub_actions or (a,))] for rank in range(P)]
    letters = {"F": "F", "B": "B", "I": "B", "W": "W"}
    for actions, theirs in zip(program.ranks, inner, strict=True):
        expected = [
            (a.stage_index, letters[a.computation_type.value], a.microbatch_index)
            for a in theirs
            if a.microbatch_index is not None
        ]
        assert [(a.stage, str(a.kind), a.microbatch) for a in actions] == expected
    if name == "ScheduleGPipe":
        assert program.ranks == make_program("gpipe", P, M).ranks
    assert program_of(program, P, 2).num_microbatches == 2 and simulate(program).makespan > 0


def test_functions_say_how_many_chunks_there_are() -> None:
    assert (chunks_of(zbv, P), chunks_of(interleaved, P, 3), chunks_of(zbv(P, 1), P, 2)) == (2, 3, 2)
    with pytest.raises(ConfigurationError, match="schedule 'zbv' requires num_model_chunks=2, got 3"):
        chunks_of(zbv, P, 3)


def multiples(p: int, m: int, v: int) -> Program:
    assert m % p == 0, f"{m} microbatches"
    return make_program("1f1b", p, m)


def test_a_function_is_asked_for_the_microbatches_of_a_step() -> None:
    """A function of (p, m, v) for multiples of p microbatches, as Megatron's interleaved order requires.

    The plugin first called it for one microbatch, so its own assertion failed, although num_microbatches was right."""
    config = PipelineConfig(pp_size=P, num_microbatches=2 * P, schedule=multiples)
    assert config.placement == tuple(range(P)) and config.program(2 * P).num_microbatches == 2 * P


F, B, W = Kind.F, Kind.B, Kind.W
FB = make_program("1f1b", P, 1)


@pytest.mark.parametrize(
    ("schedule", "error", "message"),
    [
        (3, ConfigurationError, "schedule must be a name, a Program or a function"),
        (lambda p, m, v: None, ConfigurationError, "must return a Program, but returned a NoneType"),
        (make_program("1f1b", P, M - 1), ConfigurationError, "is for num_microbatches=3, but the step has 4"),
        (make_program("1f1b", 3, M), ConfigurationError, "is for 3 ranks and 3 stages, but pp_size=2"),
        (lambda p, m, v: Program("x", m, (0, 1, 0), FB.ranks), ConfigurationError, "for 2 ranks and 3 stages"),
        (
            lambda p, m, v: Program("x", m, (1, 0), make_program("1f1b", p, m).ranks[::-1]),
            ConfigurationError,
            "places its stages on ranks (1, 0): stage s must be on rank s % p",
        ),
        (lambda p, m, v: Program("x", m, (0, 1), ((), ())), ConfigurationError, "rank 0 has B0@0 0 times, not 1: pass"),
        (lambda p, m, v: add_communication(make_program("1f1b", p, m)), ConfigurationError, "SendF0@0 1 time, not 0"),
        (lambda p, m, v: Program("x", m, (0, 1), FB.ranks), ConfigurationError, "rank 0 has B1@0 0 times, not 1"),
        (
            lambda p, m, v: Program("x", 2, (0,), ((*(Action(F, i, 0) for i in (1, 0)), *two_backwards()),)),
            ConfigurationError,
            "has F0@0 after F1@0: forwards of a stage",
        ),
        (lambda p, m, v: waiting(), DeadlockError, "rank 0 waits in B0@0"),
    ],
)
def test_what_cannot_run_is_refused(schedule: Any, error: type[PipeshardError], message: str) -> None:
    m, p = (2, 1) if "after" in message else (2 if error is DeadlockError else M, P)
    with pytest.raises(error, match=re.escape(message)):
        program_of(schedule, p, m)


def two_backwards() -> list[Action]:
    return [Action(B, 0, 0), Action(B, 1, 0)]


def waiting() -> Program:
    """The first rank does not send the second microbatch before the first is back, the last wants both at once."""
    first = Action(F, 0, 0), Action(B, 0, 0), Action(F, 1, 0), Action(B, 1, 0)
    last = Action(F, 0, 1), Action(F, 1, 1), Action(B, 0, 1), Action(B, 1, 1)
    return Program("waiting", 2, (0, 1), (first, last))


@pytest.mark.parametrize(
    ("order", "message"),
    [
        ([B, F], "rank 0 waits in B0@0 for F0@0, which it runs only later"),
        ([F, W, B], "rank 0 waits in W0@0 for B0@0, which it runs only later"),
    ],
)
def test_an_order_in_which_an_action_lacks_its_input_is_refused(order: list[Kind], message: str) -> None:
    program = Program("x", 1, (0,), (tuple(Action(kind, 0, 0) for kind in order),))
    with pytest.raises(DeadlockError, match=re.escape(message)):
        program_of(program, 1, 1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0SEND_F0,0B0", "expected a compute action (such as 0F0, 1B2, 1I2 or 1W2), got '0SEND_F0'"),
        (
            "0F0,0B0\n0F1,0B1",
            "must be on exactly one rank, but the pairs (stage, rank) of the file are [(0, 0), (0, 1)]",
        ),
        (
            "0F0,0B0\n2F0,2B0",
            "each stage from 0 to p*v-1 must be on exactly one rank, but the pairs (stage, rank) of the file",
        ),
        ("", "the pairs (stage, rank) of the file are []"),
    ],
)
def test_files_that_say_something_else_are_refused(text: str, message: str, tmp_path: Path) -> None:
    """A simulation of a file without stage 1 ended in an IndexError, and one of a file with stage 0 on two ranks had no
    bubble."""
    path = tmp_path / "order.csv"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        Program.from_csv(path)


def test_blank_lines_of_a_file_are_no_ranks(tmp_path: Path) -> None:
    """A line break at the end made one more rank, and pp_size=2 was refused: "pass a program for 2 ranks"."""
    path = tmp_path / "order.csv"
    path.write_text("0F0,,0B0\n1F0,1B0\n\n")
    assert program_of(Program.from_csv(path), 2, 1).ranks == make_program("1f1b", 2, 1).ranks
