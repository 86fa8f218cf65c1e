"""Legal: whether a program is complete and ordered, read from its rules alone, without the simulation."""

from __future__ import annotations

from pipeshard.schedule import Action, Kind, Program


def check(program: Program) -> None:
    """Assert that the program is legal. Each kind of compute action in the program must occur exactly once per
    microbatch and stage (W at most once), on the stage's rank, after the actions that it needs on this rank. The
    messages, if any, must be exactly those that the placement requires."""
    assert len(program.ranks) > max(program.placement), program.placement
    kinds = _kinds(program)
    for rank, actions in enumerate(program.ranks):
        expected = _expected(program, rank, kinds)
        position = {action: k for k, action in enumerate(actions)}
        assert len(position) == len(actions) and position.keys() <= expected, (program.name, rank)
        assert all(action.kind is Kind.W for action in expected - position.keys()), (program.name, rank)
        for action in actions:
            for before, at in program.needs(action.kind, action.stage):
                needed = Action(before, action.microbatch, at)
                assert position.get(needed, -1) < position[action], f"{program.name}: {action} is before {needed}"


def _kinds(program: Program) -> list[Kind]:
    """The kinds of actions that a complete program has, given the kinds in `program`."""
    forward, backward = (Kind.F, Kind.SEND_F, Kind.RECV_F), (Kind.B, Kind.W, Kind.SEND_B, Kind.RECV_B)
    kinds = forward + backward * (not program.kinds <= {*forward})
    return [kind for kind in kinds if kind.is_compute or program.has_communication]


def _expected(program: Program, rank: int, kinds: list[Kind]) -> set[Action]:
    everything = (
        Action(kind, i, stage)
        for kind in kinds
        for i in range(program.num_microbatches)
        for stage, holder in enumerate(program.placement)
        if holder == rank
    )
    return {action for action in everything if action.kind.is_compute or program.crosses(action.kind, action.stage)}
