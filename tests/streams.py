"""Streams: the check that a program with messages on GPU streams terminates.

A graph of the GPUs' waits is built from the program, and the program terminates if the graph has no cycle. The programs
of `add_ordered_communication` always pass, for every choice of streams.
"""

from collections import defaultdict
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise, zip_longest
from typing import NamedTuple

from pipeshard.errors import DeadlockError
from pipeshard.schedule.passes import crossing
from pipeshard.schedule.program import RECEIVE, Action, Program

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
