"""Clock: how far the clocks of a pipeline's processes are apart."""

import statistics
import time
from pathlib import Path

import torch
import torch.distributed as dist

from pipeshard.runtime.agreement import device_of, gather

ROUNDS = 21
BOOT = Path("/proc/sys/kernel/random/boot_id")


def offsets(group: dist.ProcessGroup) -> list[float]:
    """What to take from each rank's `time.perf_counter()` to get the first rank's, in seconds; all ranks call it.

    Processes of one running system share that clock. Otherwise each rank sends the first one its time in answer to a
    message and the answer belongs to the middle of the round trip; of `ROUNDS` trips the quickest counts (Cristian
    1989, "Probabilistic clock synchronization").
    """
    system = int(BOOT.read_text().replace("-", "")[:15], 16) if BOOT.exists() else 0
    if system and len(set(gather(torch.tensor(system), group).tolist())) == 1:
        return [0.0] * group.size()
    ranks = dist.get_process_group_ranks(group)
    mine = torch.zeros(group.size(), dtype=torch.float64)
    for rank in range(1, group.size()):
        if group.rank() == 0:
            mine[rank] = _asked(ranks[rank], group)
        elif group.rank() == rank:
            _answer(ranks[0], group)
    return [float(offset) for offset in gather(mine, group)[0]]


def _asked(other: int, group: dist.ProcessGroup) -> float:
    trips = []
    message = torch.zeros(1, dtype=torch.float64, device=device_of(group))
    for _ in range(ROUNDS):
        sent = time.perf_counter()
        dist.send(message, other, group=group)
        dist.recv(message, other, group=group)
        received = time.perf_counter()
        trips.append((received - sent, message.item() - (sent + received) / 2))
    quickest = sorted(trips)[: ROUNDS // 4]
    return statistics.median(offset for _, offset in quickest)


def _answer(first: int, group: dist.ProcessGroup) -> None:
    message = torch.zeros(1, dtype=torch.float64, device=device_of(group))
    for _ in range(ROUNDS):
        dist.recv(message, first, group=group)
        message.fill_(time.perf_counter())
        dist.send(message, first, group=group)
