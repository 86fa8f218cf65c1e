"""Plant: leaks that are put into a soak, which it must detect."""

from __future__ import annotations

import threading
from typing import Any

import torch.distributed as dist

KINDS = ("batches", "memory", "files", "threads", "groups", "restart")


class Plant:
    """In each step `rank` keeps one more of this kind for ever; "restart" makes all ranks go on one batch too early."""

    def __init__(self, text: str) -> None:
        """From "kind:rank"."""
        self.kind, _, rank = text.partition(":")
        if self.kind not in KINDS:
            raise ValueError(f"{text!r} is not one of {', '.join(KINDS)}, a colon and a rank")
        self.rank = int(rank or 0)
        self.kept: list[Any] = []

    def __call__(self, rank: int, batch: Any) -> None:
        """Called on every rank after each step."""
        match self.kind:
            case "groups":
                self.kept.append(dist.new_group([self.rank]))  # which the others have to make with it
            case _ if rank != self.rank:
                return
            case "batches":
                self.kept.append(batch)
            case "memory":
                self.kept.append(b"1" * 2**20)
            case "files":
                self.kept.append(open("/dev/null"))  # noqa: SIM115
            case "threads":
                self.kept.append(threading.Event())
                threading.Thread(target=self.kept[-1].wait, daemon=True).start()
