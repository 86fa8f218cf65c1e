"""Legality: whether a program is complete and its order within each rank legal; deadlock is `simulate`'s to find."""

from collections import Counter

from pipeshard.errors import ConfigurationError
from pipeshard.schedule.action import Action, Kind
from pipeshard.schedule.program import Program

FORWARD = {Kind.F, Kind.SEND_F, Kind.RECV_F}


def check(program: Program) -> None:
    """Raise ConfigurationError unless each kind of compute in use occurs exactly once for each microbatch and stage (W
    once at most), on the stage's rank, after what it needs there; and the messages, if there are any, are those the
    placement asks for."""
    outside = sorted({r for r in program.placement if not 0 <= r < len(program.ranks)})
    if outside:
        raise ConfigurationError(f"{program.name}: stages are placed on ranks {outside} of {len(program.ranks)}")
    kinds = _kinds(program)
    for rank, actions in enumerate(program.ranks):
        expected = _expected(program, rank, kinds)
        counts = Counter(actions)
        for action in [*(sorted(expected - counts.keys())), *counts]:
            count, wanted = counts[action], int(action in expected)
            if count != wanted and (count, action.kind) != (0, Kind.W):
                raise ConfigurationError(f"{program.name}: rank {rank} has {action} {count} times, not {wanted}")
        position = {action: k for k, action in enumerate(actions)}
        for action in actions:
            for before, at in program.needs(action.kind, action.stage):
                needed = Action(before, action.microbatch, at)
                if position.get(needed, -1) > position[action]:
                    raise ConfigurationError(f"{program.name}: rank {rank} has {action} before {needed}")


def _kinds(program: Program) -> list[Kind]:
    """The kinds of action that a complete program has, given those that this one has."""
    used = {action.kind for actions in program.ranks for action in actions}
    backward = not used <= FORWARD
    kinds = [Kind.F, *[Kind.B] * backward, *[Kind.W] * (Kind.W in used)]
    messages = [kind for kind in Kind if not kind.is_compute and (backward or kind in FORWARD)]
    return kinds + messages * program.has_communication


def _expected(program: Program, rank: int, kinds: list[Kind]) -> set[Action]:
    everything = (
        Action(kind, i, stage)
        for kind in kinds
        for i in range(program.num_microbatches)
        for stage, holder in enumerate(program.placement)
        if holder == rank
    )
    return {action for action in everything if action.kind.is_compute or program.crosses(action.kind, action.stage)}
