"""Passes: transformations that add sends and receives to a program, split its backwards and shorten its cooldown."""

import dataclasses
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from pipeshard.errors import ConfigurationError
from pipeshard.schedule.program import PARTNER, RECEIVE, SEND, Action, Kind, Program, StageStep

Positions = Mapping[tuple[Kind, int, int], int]  # the index of each action in its rank's list


def add_communication(program: Program) -> Program:
    """Add a send after each compute action whose result another rank needs, and a receive before the action that uses
    this result.

    Posting a receive does not block. Each receive is posted one compute action early, so that the transfer overlaps
    with this action (a B and its W count as one action). A receive is posted even earlier if the order of messages
    requires it (see `_posts`). For example, rank 1 of 1F1B with p=3:

        RecvF0 RecvF1 F0 SendF0 RecvB0 F1 SendF1 RecvF2 B0 SendB0 RecvB1 F2 SendF2 ...

    Raises ConfigurationError if the program already has communication.
    """
    if program.has_communication:
        raise ConfigurationError(f"program {program.name!r} already has communication: pass it without messages")
    position: Positions = {action: k for actions in program.ranks for k, action in enumerate(actions)}
    ranks = tuple(_with_messages(program, actions, position) for actions in program.ranks)
    return dataclasses.replace(program, ranks=ranks)


def _with_messages(program: Program, actions: tuple[Action, ...], position: Positions) -> tuple[Action, ...]:
    sends, posts = crossing(program, SEND), _posts(program, actions, position)
    result: list[Action] = []
    for k, action in enumerate(actions):
        kind, i, stage = action
        result += [*posts[k], action]
        if (kind, stage) in sends:
            result.append(Action(sends[kind, stage], i, stage))
    return tuple(result)


def _posts(program: Program, actions: tuple[Action, ...], position: Positions) -> list[list[Action]]:
    """For each k, the receives to post directly before the k-th of one rank's `actions`.

    Messages on an edge arrive in the order in which they are sent, so their receives are posted in this order: a
    receive is never posted after the receive of a message that is sent later. Posting earlier never blocks.
    """
    receives = crossing(program, RECEIVE)
    edges: defaultdict[int, list[tuple[float, int, Action]]] = defaultdict(list)
    for k, (kind, i, stage) in enumerate(actions):
        if (kind, stage) in receives:
            message = receives[kind, stage]
            source = stage + PARTNER[message][1]
            sent = position.get((kind, i, source), math.inf)  # the simulator reports messages that are never sent
            edges[program.placement[source]].append((sent, _one_early(actions, k), Action(message, i, stage)))
    posts: list[list[Action]] = [[] for _ in actions]
    for source in sorted(edges, reverse=True):
        earliest = len(actions)  # the earliest slot of the receives of later messages
        for _, slot, receive in sorted(edges[source], reverse=True):
            earliest = min(earliest, slot)
            posts[earliest].insert(0, receive)
    return posts


def _one_early(actions: tuple[Action, ...], k: int) -> int:
    if k > 1 and actions[k - 1].kind is Kind.W and actions[k - 2] == actions[k - 1]._replace(kind=Kind.B):
        return k - 2
    return max(k - 1, 0)


def crossing(program: Program, messages: dict[Kind, Kind]) -> dict[StageStep, Kind]:
    """For each compute step (kind, stage) that exchanges a message with another rank, the kind of this message.
    `messages` selects received messages (RECEIVE) or sent messages (SEND)."""
    stages = range(len(program.placement))
    return {(kind, s): message for kind, message in messages.items() for s in stages if program.crosses(message, s)}


def shorten_cooldown(program: Program) -> Program:
    """After the last F of each rank, split each whole B into B and W if the B's gradient is sent to another rank.

    W runs right after B, so the only change is that the gradient is sent between B and W. For example, 1F1B with p=3
    and m=4, if a whole B takes as long as a separate B and W together:

    rank 0  F0 F1 F2 .. .. .. .. B0 -- F3 B1 -- B2 -- B3 --
    rank 1  .. F0 F1 .. .. B0 -- F2 B1 -- F3 B2 W2 B3 W3 ..
    rank 2  .. .. F0 B0 -- F1 B1 -- F2 B2 -- F3 B3 W3 .. ..

    In 1F1B and GPipe with W <= F, rank 0 then idles for (p-1)(F+B) instead of (p-1)(F+B+W). No rank keeps more
    microbatches of activations than before. This split is the first step toward a zero bubble schedule (Qi et al.
    2023, arXiv:2401.10241). Megatron-LM defers only the weight gradient of the head.
    """
    ranks = (tuple(_with_weights(actions, after=_last_forward(actions), sent=program)) for actions in program.ranks)
    return dataclasses.replace(program, ranks=tuple(ranks))


def split_backwards(program: Program) -> Program:
    """Split each whole B into a B and, right after it, a W. This is faster for many small backwards: a W accumulates
    the weight's gradient in the matrix multiplication, while a whole B first writes the product to memory and then
    adds it to the gradient."""
    return dataclasses.replace(program, ranks=tuple(tuple(_with_weights(actions)) for actions in program.ranks))


def _last_forward(actions: Sequence[Action]) -> int:
    return max((k for k, action in enumerate(actions) if action.kind is Kind.F), default=-1)


def _with_weights(actions: Sequence[Action], after: int = -1, sent: Program | None = None) -> Iterator[Action]:
    """Yield `actions` with a W right after each whole B whose index exceeds `after`. If `sent` is a program, add a W
    only if this program sends the B's gradient to another rank."""
    split = {action[1:] for action in actions if action.kind is Kind.W}
    for k, action in enumerate(actions):
        kind, i, stage = action
        yield action
        is_whole = kind is Kind.B and (i, stage) not in split
        if is_whole and k > after and (sent is None or sent.crosses(Kind.SEND_B, stage)):
            yield Action(Kind.W, i, stage)
