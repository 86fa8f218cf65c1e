"""Groups: the ranks of a process group, and the backend that sends its tensors."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from pipeshard.errors import UsageError

# By default, torch aborts a process (SIGABRT) if one of its NCCL communicators fails or is aborted. With these
# settings, the process continues: the watch aborts the communicators after a fault, and the waiting call raises an
# error that names the rank and the reason.
ERRORS_ARE_RAISED = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_DUMP_ON_TIMEOUT": "0"}


@contextmanager
def raising_errors() -> Iterator[None]:
    """Context manager for creating groups whose NCCL failures do not abort the process. Environment variables that the
    user has set are kept."""
    ours = {name: value for name, value in ERRORS_ARE_RAISED.items() if name not in os.environ}
    os.environ.update(ours)  # torch reads these variables when it creates a group
    try:
        yield
    finally:
        for name in ours:
            os.environ.pop(name, None)


def ranks_of(group: dist.ProcessGroup) -> list[int]:
    """The global ranks of a group, in the group's own order."""
    if isinstance(group, LocalGroup):
        return list(group.ranks)
    return dist.get_process_group_ranks(group)


def carrier(device: torch.device, group: dist.ProcessGroup | None = None) -> str:
    """The backend of a group (by default, the world) for tensors on `device`, or "" if the group has none."""
    if isinstance(group, LocalGroup):
        return "local"
    try:
        config = dist.get_backend_config(group)
    except (TypeError, ValueError) as error:  # torch raises these for a destroyed group
        raise UsageError(
            "the process group of this boosted model was destroyed with torch.distributed.destroy_process_group(): "
            "create a new process group, load saved weights into a new model, and boost the new model"
        ) from error
    backends = dict(part.split(":") for part in config.split(","))
    return backends.get(device.type, "")


class LocalGroup(dist.ProcessGroup):
    """A process group whose ranks all run in this process. `ranks` are the numbers of these ranks in the local
    world."""

    def __init__(self, ranks: tuple[int, ...], rank: int) -> None:
        super().__init__(ranks.index(rank), len(ranks))  # type: ignore[call-arg]  # torch's stub lacks this overload
        self.ranks = ranks
