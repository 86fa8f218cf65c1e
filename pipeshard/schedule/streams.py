"""Streams: an order of messages that cannot deadlock on GPU streams.

A host queues all actions of a step on its GPU and does not wait. With NCCL, each message runs as a kernel on the
sending rank and a kernel on the receiving rank. Each kernel waits on its communicator's stream for earlier messages,
then for the other rank's kernel. Ranks that post messages in different orders may therefore deadlock, although no host
waits. An operation that synchronizes the device (`cudaFree`, lazy kernel loading, an autotuner) also waits for all
posted messages, including messages that the other rank may post only after this operation. torch.distributed.pipelining
and Megatron-LM order messages by hand for each schedule. Here, one order serves every schedule.
"""

import dataclasses

from pipeshard.errors import ConfigurationError
from pipeshard.schedule.program import SEND, Action, Program
from pipeshard.schedule.simulate import simulate


def add_ordered_communication(program: Program) -> Program:
    """Add messages whose two ends have the same position in a global order of all ranks' actions.

    Each rank runs its part of this order. The earliest unfinished action can therefore always complete, regardless of
    which messages share a communicator, and even if an action waits for the device. `add_communication` does not
    guarantee this: it posts receives early, so an action that waits for the device also waits for these receives.
    Actions are ordered by time, with F = B = W and messages that take no time. A receive is ordered by the time at
    which its message is sent: it follows the computations that its rank starts before this time. For example, rank 1 of
    1F1B with p=3:

        RecvF0 F0 RecvF1 SendF0 F1 RecvF2 SendF1 RecvB0 B0 SendB0 F2 SendF2 RecvB1 B1 ...

    Raises ConfigurationError if the program already has communication, and DeadlockError if it cannot finish.
    """
    if program.has_communication:
        raise ConfigurationError(f"program {program.name!r} already has communication: pass it without messages")
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
