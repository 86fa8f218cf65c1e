"""Streams: the check that a program with messages on GPU streams terminates, and an order of messages that always does.

A host queues all actions of a step on its GPU and does not wait. With NCCL, a message is a kernel on both ranks: the
kernel waits on its communicator's stream for earlier messages, then for the kernel of the other rank. Ranks that post
messages in different orders may therefore deadlock, although no host waits. An operation that waits for the device
(`cudaFree`, a kernel that is loaded late, an autotuner) also waits for messages whose other ends may be posted only
after this operation. torch.distributed.pipelining and Megatron-LM order messages by hand for each schedule. Here a
graph of the GPUs' waits is built from the program, and the program terminates if the graph has no cycle.
"""

import dataclasses
from collections import defaultdict
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise, zip_longest
from typing import NamedTuple

from pipeshard.errors import ConfigurationError, DeadlockError
from pipeshard.schedule.passes import crossing
from pipeshard.schedule.program import RECEIVE, SEND, Action, Program
from pipeshard.schedule.simulate import simulate

Node = tuple[str, Action]  # "starts" or "ends"; both ends of a message end together, as ("ends", its send)


class Lanes(NamedTuple):
    """The choice of the messages that share a communicator, and therefore a stream on each rank.

    Attributes:
        per: "edge" (messages from one rank to another), "pair" (messages between two ranks) or "world" (all).
        numbered: whether the ends of a message are matched by its number in the communicator, as in a broadcast,
            instead of by its number among the messages in the same direction.
    """

    per: str = "world"
    numbered: bool = False

    def of(self, source: int, target: int) -> tuple[int, ...]:
        return {"edge": (source, target), "pair": (min(source, target), max(source, target)), "world": ()}[self.per]

    def __str__(self) -> str:
        what = {"edge": "direction between two ranks", "pair": "pair of ranks", "world": "rank"}[self.per]
        return f"one stream for each {what}"


class Device(NamedTuple):
    """Additional waits of a GPU.

    Attributes:
        in_order: whether the kernels of all streams start in the order in which the host queued them
            (CUDA_DEVICE_MAX_CONNECTIONS=1).
        resident: the number of message kernels that fit on the GPU at the same time; each kernel waits for the end of
            the kernel that is `resident` messages before it. None means any number.
        synchronizes: whether the host waits for the whole device in each compute action.
    """

    in_order: bool = False
    resident: int | None = None
    synchronizes: bool = False


PLAIN, WORST = Device(), Device(in_order=True, resident=1, synchronizes=True)


def check_streams(program: Program, lanes: Lanes, device: Device = PLAIN) -> None:
    """Raise DeadlockError if a program with messages deadlocks on streams, or if the ends of its messages do not match.
    If the program deadlocks, the error lists the cycle of waits. The result does not depend on any durations."""
    _check_ends(program, lanes)
    try:
        TopologicalSorter(_graph(program, lanes, device)).prepare()
    except CycleError as error:
        lines = _circle_lines(program, error.args[1])
        raise DeadlockError(f"program {program.name!r} deadlocks with {lanes}:\n  " + "\n  ".join(lines)) from None


def add_ordered_communication(program: Program) -> Program:
    """Add messages. Both ends of each message have the same position in a global order of all ranks' actions.

    Each rank runs its part of this order. Therefore, for all lanes, and even if an action waits for the device, the
    earliest unfinished action can always complete. `add_communication` does not guarantee this: it posts receives
    early, so an action that waits for the device also waits for these receives. Actions are ordered by time, with F = B
    = W and messages that take no time: a receive has the time at which its message is sent, and follows the
    computations that its rank has started before this time. Rank 1 of 1F1B, p=3:

        RecvF0 F0 RecvF1 SendF0 F1 RecvF2 SendF1 RecvB0 B0 SendB0 F2 SendF2 RecvB1 B1 ...

    Raises ConfigurationError if the program already has communication, and DeadlockError if it cannot finish.
    """
    if program.has_communication:
        raise ConfigurationError(f"program {program.name!r} already has communication")
    events: list[tuple[float, bool, int, Action]] = []  # at equal times, messages come first
    for rank, row in enumerate(simulate(program, 1, 1, 1).spans):
        for action, start, end in row:
            kind, i, stage = action
            events.append((start, True, rank, action))
            if kind in SEND and program.crosses(SEND[kind], stage):
                events.append((end, False, rank, Action(SEND[kind], i, stage)))
    ranks: list[list[Action]] = [[] for _ in program.ranks]
    for _, is_compute, rank, action in sorted(events, key=lambda event: event[:3]):
        ranks[rank].append(action)
        if not is_compute:
            ranks[program.placement[action.partner.stage]].append(action.partner)
    return dataclasses.replace(program, ranks=tuple(map(tuple, ranks)))


def _ends(message: Action) -> tuple[Action, Action]:
    """The send and the receive of a message."""
    return (message.partner, message) if message.kind.is_receive else (message, message.partner)


def _check_ends(program: Program, lanes: Lanes) -> None:
    place = program.placement
    posted: defaultdict[tuple[tuple[int, ...], ...], dict[int, list[Action]]] = defaultdict(lambda: defaultdict(list))
    for rank, actions in enumerate(program.ranks):
        for action in actions:
            if not action.kind.is_compute:
                source, target = (place[end.stage] for end in _ends(action))
                among = tuple(sorted((source, target))) if lanes.numbered else (source, target)
                posted[lanes.of(source, target), among][rank].append(action)
    for (_, (a, b)), ends in posted.items():
        for number, (here, there) in enumerate(zip_longest(ends[a], ends[b])):
            if here is None or there is None or here.partner != there:
                raise DeadlockError(
                    f"program {program.name!r} with {lanes}: message {number} between ranks {a} and {b} does not "
                    f"match: rank {a} has {here or 'none'}, rank {b} has {there or 'none'}. List the messages between "
                    "two ranks in the same order on both"
                )


def _graph(program: Program, lanes: Lanes, device: Device) -> dict[Node, list[Node]]:
    """For each node (one end of a message, a full message or a compute action), the nodes for which it waits."""
    place = program.placement
    receive = crossing(program, RECEIVE)
    graph: defaultdict[Node, list[Node]] = defaultdict(list)
    for actions in program.ranks:
        computed: list[Node] = []  # the last compute action, if any
        streams: dict[tuple[int, ...], Node] = {}
        messages: list[tuple[Node, Node]] = []
        synchronized = 0  # the number of messages that the host has waited for
        for action in actions:
            kind, i, stage = action
            needs = list(computed)
            if kind.is_compute:
                if (kind, stage) in receive:
                    needs.append(("ends", Action(receive[kind, stage], i, stage).partner))
                # `in_order` adds no wait here: other ranks wait for a result only through a later message
                if device.synchronizes:
                    needs += [ends for _, ends in messages[synchronized:]]
                    synchronized = len(messages)
                computed = [("ends", action)]
                graph["ends", action] = needs
                continue
            send, taken = _ends(action)
            lane = lanes.of(place[send.stage], place[taken.stage])
            starts, ends = ("starts", action), ("ends", send)
            if lane in streams:
                needs.append(streams[lane])
            if messages and (device.in_order or device.resident):
                needs.append(messages[-1][0])
            if device.resident and len(messages) >= device.resident:
                needs.append(messages[-device.resident][1])
            graph[starts] = needs
            graph[ends].append(starts)
            streams[lane] = ends
            messages.append((starts, ends))
    return graph


def _circle_lines(program: Program, circle: list[Node]) -> list[str]:
    """A line for each wait in a cycle. In the cycle, each node follows the node for which it waits. The end of a
    message has no line, since it waits only for the start of both ends."""
    lines, place = [], program.placement
    for (what, before), (state, action) in pairwise(circle):
        if state == "starts" or action.kind.is_compute:
            rank = place[action.stage]
            if what == "ends" and not before.kind.is_compute and place[before.stage] != rank:
                before = before.partner
            lines.append(f"rank {rank} {state[:-1]}s {action} only after {before} {what}")
    return lines
