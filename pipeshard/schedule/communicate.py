"""Communication: one pass that adds the sends and receives to a program of compute actions."""

import math
from collections import defaultdict

from pipeshard.errors import ConfigurationError
from pipeshard.schedule.program import Action, Kind, Program

__all__ = ["add_communication"]

_SEND = {Kind.F: Kind.SEND_F, Kind.B: Kind.SEND_B}
_RECEIVE = {Kind.F: Kind.RECV_F, Kind.B: Kind.RECV_B}

# Where compute actions stand on their rank: (kind, stage) -> microbatch -> index.
Position = defaultdict[tuple[Kind, int], dict[int, int]]


def add_communication(program: Program) -> Program:
    """`program` with a send after each compute action that feeds another rank, and a receive before the one it feeds.

    A receive is a post and does not block. It stands one compute action early, so that the transfer overlaps that
    compute; or earlier still where the order of messages asks for it (see `_in_send_order`). Rank 1 of 1F1B, p=3:

        RecvF0 RecvF1 F0 SendF0 RecvB0 F1 SendF1 RecvF2 B0 SendB0 RecvB1 F2 SendF2 ...

    Raises ConfigurationError if the program has communication already.
    """
    if program.has_communication:
        raise ConfigurationError(f"program {program.name!r} has communication already")
    position: Position = defaultdict(dict)
    for actions in program.ranks:
        for k, action in enumerate(actions):
            position[action.kind, action.stage][action.microbatch] = k
    ranks = tuple(_with_messages(program, actions, position) for actions in program.ranks)
    return Program(program.name, program.num_microbatches, program.placement, ranks)


def _with_messages(program: Program, actions: tuple[Action, ...], position: Position) -> tuple[Action, ...]:
    posts = _posts(program, actions, position)
    result: list[Action] = []
    for k, action in enumerate(actions):
        result += posts[k]
        result.append(action)
        send = _SEND.get(action.kind)
        if send and program.crosses(send, action.stage):
            result.append(Action(send, action.microbatch, action.stage))
    return tuple(result)


def _posts(program: Program, actions: tuple[Action, ...], position: Position) -> list[list[Action]]:
    """For each of one rank's `actions`, the receives to post just before it."""
    edges: defaultdict[int, list[tuple[float, int, Action]]] = defaultdict(list)
    for k, action in enumerate(actions):
        receive = _RECEIVE.get(action.kind)
        if receive and program.crosses(receive, action.stage):
            made_by = action.kind, action.stage + (-1 if action.kind is Kind.F else +1)
            sent = position[made_by].get(action.microbatch, math.inf)  # one never sent is the simulator's to report
            message = Action(receive, action.microbatch, action.stage)
            edges[program.placement[made_by[1]]].append((sent, max(k - 1, 0), message))
    posts: list[list[Action]] = [[] for _ in actions]
    for source in sorted(edges):
        for slot, message in _in_send_order(edges[source]):
            posts[slot].append(message)
    return posts


def _in_send_order(edge: list[tuple[float, int, Action]]) -> list[tuple[int, Action]]:
    """Order one edge's receives, each (when it is sent, slot, receive), as the sender sends them.

    Messages on an edge arrive in the order they were sent, so a receive that is needed late but sent early is posted
    before those sent after it: its slot becomes the smallest of theirs. Posting earlier never blocks.
    """
    ordered: list[tuple[int, Action]] = []
    earliest: int | None = None
    for _, slot, message in sorted(edge, key=lambda entry: entry[0], reverse=True):
        earliest = slot if earliest is None else min(earliest, slot)
        ordered.append((earliest, message))
    return ordered[::-1]
