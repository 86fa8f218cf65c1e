"""Device: where this rank computes."""

import os

import torch
import torch.distributed as dist


def own_device() -> torch.device:
    """The GPU of this rank's number on its machine, which becomes the current one, or the CPU if there is none."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    index = int(os.environ.get("LOCAL_RANK", dist.get_rank())) % torch.cuda.device_count()
    torch.cuda.set_device(index)
    return torch.device("cuda", index)
