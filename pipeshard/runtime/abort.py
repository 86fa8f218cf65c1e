"""Abort: ends every wait of this process for other ranks, and their waits for it."""

import contextlib
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

TAG = 7919  # of a message that nobody sends


def abort_groups() -> None:
    """Break the connections of all process groups, so that what waits in one, in any thread, raises at once.

    Collectives of gloo cannot be aborted, but a receive that is given up takes the connections of its group along, and
    with them all that is on its way there; one over a connection that is broken already does not. Without this a
    process whose messages nobody takes would not even end: the threads that carry them are joined at its end.
    """
    for group in list(dist.distributed_c10d._world.pg_map):
        if isinstance(group, dist.ProcessGroup) and group.size() > 1:
            _abort(group)


def _abort(group: dist.ProcessGroup) -> None:
    devices = {str(device) for device in group._device_types}
    for device in sorted(devices):
        backend: Any = group._get_backend(torch.device(device))
        if backend.name() != "gloo":
            with contextlib.suppress(RuntimeError):
                backend.abort()
            continue
        for other in range(group.size()):
            if other != group.rank() and _gives_up(backend, other):
                break


def _gives_up(backend: Any, other: int) -> bool:
    """Whether a receive was begun, and given up."""
    try:
        backend.recv([torch.empty(1)], other, TAG).wait(timedelta(milliseconds=1))
    except RuntimeError as error:
        return "Timed out" in str(error)
    return False
