"""Legal: whether a program is complete and ordered, read from its rules alone, without the simulation."""

from __future__ import annotations

from collections import Counter

from pipeshard.errors import ConfigurationError, counted
from pipeshard.schedule import Action, Kind, Program

FORWARD = {Kind.F, Kind.SEND_F, Kind.RECV_F}


def check(program: Program) -> None:
    """Raise ConfigurationError unless the program is legal. Each kind of compute action in the program must occur
    exactly once per microbatch and stage (W at most once), on the stage's rank, after the actions that it needs on this
    rank. The messages, if any, must be exactly those that the placement requires."""
    outside = sorted({r for r in program.placement if not 0 <= r < len(program.ranks)})
    if outside:
        raise ConfigurationError(
            f"{program.name}: stages are placed on ranks {outside}, but the program has only "
            f"{counted(len(program.ranks), 'rank')}"
        )
    kinds = _kinds(program)
    for rank, actions in enumerate(program.ranks):
        expected = _expected(program, rank, kinds)
        counts = Counter(actions)
        for action in [*(sorted(expected - counts.keys())), *counts]:
            count, wanted = counts[action], int(action in expected)
            if count != wanted and (count, action.kind) != (0, Kind.W):
                times = counted(count, "time")
                raise ConfigurationError(f"{program.name}: rank {rank} has {action} {times}, not {wanted}")
        position = {action: k for k, action in enumerate(actions)}
        for action in actions:
            for before, at in program.needs(action.kind, action.stage):
                needed = Action(before, action.microbatch, at)
                if position.get(needed, -1) > position[action]:
                    raise ConfigurationError(f"{program.name}: rank {rank} has {action} before {needed}")


def _kinds(program: Program) -> list[Kind]:
    """The kinds of actions that a complete program has, given the kinds in `program`."""
    used = program.kinds
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
