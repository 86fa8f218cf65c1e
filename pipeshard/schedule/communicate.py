"""Communication: one pass that adds the sends and receives to a program of compute actions."""

import dataclasses
import math
from collections import defaultdict

from pipeshard.errors import ConfigurationError
from pipeshard.schedule.program import Action, Kind, Program

_SEND = {Kind.F: Kind.SEND_F, Kind.B: Kind.SEND_B}


def add_communication(program: Program) -> Program:
    """`program` with a send after each compute action that feeds another rank, and a receive before the one it feeds.

    A receive is a post and does not block. It stands one compute action early, so that the transfer overlaps that
    compute; or earlier still where the order of messages asks for it (see `_posts`). Rank 1 of 1F1B, p=3:

        RecvF0 RecvF1 F0 SendF0 RecvB0 F1 SendF1 RecvF2 B0 SendB0 RecvB1 F2 SendF2 ...

    Raises ConfigurationError if the program has communication already.
    """
    if program.has_communication:
        raise ConfigurationError(f"program {program.name!r} has communication already")
    position = {action: k for actions in program.ranks for k, action in enumerate(actions)}
    ranks = tuple(_with_messages(program, actions, position) for actions in program.ranks)
    return dataclasses.replace(program, ranks=ranks)


def _with_messages(program: Program, actions: tuple[Action, ...], position: dict[Action, int]) -> tuple[Action, ...]:
    result: list[Action] = []
    for action, receives in zip(actions, _posts(program, actions, position)):
        result += [*receives, action]
        if action.kind in _SEND:
            send = Action(_SEND[action.kind], action.microbatch, action.stage)
            result += [send] if program.crosses(send) else []
    return tuple(result)


def _posts(program: Program, actions: tuple[Action, ...], position: dict[Action, int]) -> list[list[Action]]:
    """For each of one rank's `actions`, the receives to post just before it.

    Messages on an edge arrive in the order they were sent, so a receive that is needed late but sent early is posted
    before those sent after it: its slot becomes the smallest of theirs. Posting earlier never blocks.
    """
    edges: defaultdict[int, list[tuple[float, int, Action]]] = defaultdict(list)
    for k, action in enumerate(actions):
        for needed in program.needs(action):
            if needed.kind.is_receive:
                source = needed.partner.stage
                made_by = Action(action.kind, action.microbatch, source)
                sent = position.get(made_by, math.inf)  # one never sent is the simulator's to report
                edges[program.placement[source]].append((sent, max(k - 1, 0), needed))
    posts: list[list[Action]] = [[] for _ in actions]
    for source in sorted(edges, reverse=True):
        earliest = len(actions)
        for _, slot, receive in sorted(edges[source], reverse=True):
            earliest = min(earliest, slot)
            posts[earliest].insert(0, receive)
    return posts
