"""Given: user-defined schedules (a Program, a function or a file), which are checked before they run."""

import itertools
from collections import Counter
from collections.abc import Callable

from pipeshard.errors import ConfigurationError, counted
from pipeshard.schedule.program import Action, Kind, Program
from pipeshard.schedule.schedules import make_program, num_chunks
from pipeshard.schedule.simulate import simulate

Schedule = str | Program | Callable[[int, int, int], Program]


def program_of(schedule: Schedule, p: int, m: int, v: int = 1) -> Program:
    """The training program of a schedule for `p` ranks, `m` microbatches and `v` chunks per rank, without
    communication.

    If the schedule is a Program, `m` may not exceed its number of microbatches. If the schedule is a function, it is
    called with (p, m, v). Raises ConfigurationError for a program that was made for other sizes, lacks actions,
    contains messages, places stages neither in a loop nor in a V, or runs the forwards of a stage out of order. Raises
    DeadlockError for a program that cannot finish, such as a program with a B before its F.
    """
    if isinstance(schedule, str):
        return make_program(schedule, p, m, v)
    if not isinstance(schedule, Program) and not callable(schedule):
        raise ConfigurationError(f"schedule must be a name, a Program or a function of (p, m, v), got {schedule!r}")
    program = schedule if isinstance(schedule, Program) else schedule(p, m, v)
    if not isinstance(program, Program):
        raise ConfigurationError(
            f"{name_of(schedule)}({p}, {m}, {v}) must return a Program, but returned a {type(program).__name__}"
        )
    program = _first(program, m)
    _check(program, p)
    return program


def chunks_of(schedule: Schedule, p: int, v: int = 1, m: int = 1) -> int:
    """The number of model chunks per rank, for `p` ranks, `v` requested chunks per rank and `m` microbatches. Raises
    ConfigurationError if the schedule does not support `v`."""
    if isinstance(schedule, str):
        return num_chunks(schedule, v)
    chunks = len(program_of(schedule, p, m, v).placement) // p
    if v not in (1, chunks):
        raise ConfigurationError(f"schedule {name_of(schedule)!r} requires num_model_chunks={chunks}, got {v}")
    return chunks


def is_v(placement: tuple[int, ...], p: int) -> bool:
    """Whether the placement is a V on several ranks: stages 0 to p-1 on ranks 0 to p-1, and stages p to 2p-1 on ranks
    p-1 to 0."""
    return p > 1 and placement == (*range(p), *reversed(range(p)))


def name_of(schedule: Schedule) -> str:
    if isinstance(schedule, str | Program):
        return schedule if isinstance(schedule, str) else schedule.name
    return getattr(schedule, "__name__", type(schedule).__name__)


def _first(program: Program, m: int) -> Program:
    """The part of `program` for its first m microbatches. This part is legal if `program` is legal."""
    if m > program.num_microbatches:
        raise ConfigurationError(
            f"schedule {program.name!r} is for num_microbatches={program.num_microbatches}, but the step has {m}: pass "
            f"a program for {m} microbatches, or a function of (p, m, v)"
        )
    ranks = (tuple(action for action in actions if action.microbatch < m) for actions in program.ranks)
    return Program(program.name, m, program.placement, tuple(ranks))


def _check(program: Program, p: int) -> None:
    v, rest = divmod(len(program.placement), max(len(program.ranks), 1))
    if len(program.ranks) != p or rest:
        raise ConfigurationError(
            f"schedule {program.name!r} is for {counted(len(program.ranks), 'rank')} and "
            f"{counted(len(program.placement), 'stage')}, but pp_size={p}: pass a program for "
            f"pp_size={p} with the same number of stages on each rank"
        )
    _count(program)
    if program.placement != tuple(range(p)) * v and not is_v(program.placement, p):
        raise ConfigurationError(
            f"schedule {program.name!r} places its stages on ranks {program.placement}: stage s must be on rank s % p, "
            "or, with two stages per rank, in a V (0, 1, ..., p-1, p-1, ..., 1, 0)"
        )
    forwards = [action for actions in program.ranks for action in actions if action.kind is Kind.F]
    for earlier, later in itertools.pairwise(sorted(forwards, key=lambda action: action.stage)):  # a stable sort
        if earlier.stage == later.stage and earlier.microbatch > later.microbatch:
            raise ConfigurationError(
                f"schedule {program.name!r} has {later} after {earlier}: forwards of a stage must run in microbatch "
                "order, because a model may carry state (such as running statistics) from one microbatch to the next"
            )
    simulate(program)


def _count(program: Program) -> None:
    """Raise ConfigurationError unless the program has exactly one F, one B and at most one W for each microbatch and
    stage, all on the stage's rank, and no other actions."""
    kinds = Kind.F, Kind.B, Kind.W
    for rank, actions in enumerate(program.ranks):
        stages = [stage for stage, holder in enumerate(program.placement) if holder == rank]
        steps = itertools.product(kinds, range(program.num_microbatches), stages)
        expected = set(map(Action._make, steps))
        counts = Counter(actions)
        for action in [*sorted(expected - counts.keys()), *counts]:
            count, wanted = counts[action], int(action in expected)
            if count != wanted and (count, action.kind) != (0, Kind.W):
                raise ConfigurationError(
                    f"schedule {program.name!r}: rank {rank} has {action} {counted(count, 'time')}, not {wanted}: pass "
                    "only the F, B and W actions of a training step (pipeshard adds the messages)"
                )
