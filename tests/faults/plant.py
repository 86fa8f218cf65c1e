"""Plant: faults that are injected into one rank of a job, each at one moment of the faulty step."""

from __future__ import annotations

import errno
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeshard.checkpoint import safetensors_files as saving
from pipeshard.distributed.progress import OTHER_CALLS
from tests.faults.job import MICROBATCHES, SIZE, TIMEOUT, Job
from tests.hooks import register_unseen

CHILDHOOD = 12.0  # seconds that a forked child lives
STAGES = ("first", "middle", "last")
BARRIER = "barrier"  # between two steps, where the others wait in a collective of the user's
PHASES = ("batch", "warm-up", "steady", "cool-down", "tie sync", "optimizer", "save", BARRIER)
CHILD, GIL, MUTE, LEFT, EXIT = "kill -9, a child lives", "hang in C", "mute exception", "group destroyed", "sys.exit(1)"
KINDS = ("exception", "kill -9", "SIGSTOP", "SIGTERM", "hang", "NaN", "wrong shape", "different batch", "full disk",
         CHILD, GIL, MUTE, LEFT, EXIT)  # fmt: skip
ONLY = {  # kinds that make sense at some moments only
    "NaN": ("warm-up", "steady", "cool-down", "tie sync", "optimizer"),
    "wrong shape": ("warm-up", "steady", "cool-down"),
    "different batch": ("batch",),
    "full disk": ("save",),
    CHILD: ("steady", BARRIER),
    GIL: ("steady",),
    MUTE: ("steady", BARRIER),
    LEFT: (BARRIER,),
    EXIT: (BARRIER,),
}


@dataclass(frozen=True)
class Case:
    """One fault: its kind, the stage (and so the rank) that has it, and when."""

    kind: str
    stage: str
    phase: str

    @property
    def rank(self) -> int:
        return {"first": 0, "middle": SIZE // 2, "last": SIZE - 1}[self.stage]

    @property
    def leaves(self) -> bool:
        """Whether what is wrong would reach another stage, if nobody looked."""
        return self.phase != "cool-down" and self.stage != "last"

    @property
    def seconds(self) -> float:
        """In which all ranks have to be down."""
        if self.kind not in ("SIGSTOP", "hang", GIL):
            return 10.0
        return 10.0 + TIMEOUT * (
            OTHER_CALLS if self.phase in ("optimizer", "save") else 1
        )  # the others wait in the save

    @property
    def signs(self) -> tuple[str, ...]:
        """What the error of every other rank says."""
        who = f"rank {self.rank} (stage {self.rank})"
        return {
            "exception": (who, "ValueError: planted"),
            "kill -9": (who, "was killed"),
            "SIGSTOP": (who, "is suspended"),
            "SIGTERM": (who, "by SIGTERM"),
            "hang": (who, "plant.py"),
            "NaN": ("NonFiniteError",) if self.phase == "tie sync" else (who, "NonFiniteError"),
            "wrong shape": (who, "torch.float64, but the trace recorded" if self.leaves else "size"),
            "different batch": ("must read the same batch", f"stage {self.rank}"),
            "full disk": (who, "No space left on device"),
            CHILD: (who, "was killed"),
            GIL: (who, "it holds the GIL"),
            MUTE: (who, "Mute"),
            LEFT: (who, "ValueError: planted"),
            EXIT: (who, "with sys.exit(1) after ValueError: planted"),
        }[self.kind]

    @property
    def timeout(self) -> float | dict[str, float]:
        """Of the plugin. What ends those that are seen by their processes is not to be the watchdog."""
        if self.kind == CHILD or (self.kind, self.phase) == ("SIGSTOP", BARRIER):
            return 600.0
        return {"step": TIMEOUT, "between": TIMEOUT} if self.phase == BARRIER else TIMEOUT

    def __str__(self) -> str:
        return f"{self.kind} on the {self.stage} stage, {self.phase}"


def all_cases() -> Iterator[Case]:
    for kind in KINDS:
        for phase in ONLY.get(kind, PHASES):
            yield from (Case(kind, stage, phase) for stage in STAGES)


class Planter:
    """Puts a case's fault into a Job, on the rank that is to have it; `mark` gets the time at which it happens."""

    def __init__(self, case: Case, mark: Path) -> None:
        self.case, self.mark = case, mark

    def __call__(self, job: Job) -> None:
        if job.rank == self.case.rank:
            self._plant(job)
        elif self.case.phase == BARRIER:
            time.sleep(0.5)  # they come late, or wait already
            dist.barrier()

    def _plant(self, job: Job) -> None:
        blocks = [unit for unit in job.model.pipeline.policy.get_held_layers() if hasattr(unit, "mlp")]
        module = blocks[-1]
        act: Callable[[Any], Any] = self._act
        match self.case.phase:
            case "batch":
                job.batches = self._batches(job.batches)
            case "warm-up" | "steady":
                after = 1 if self.case.phase == "warm-up" else MICROBATCHES // 2 + 1
                register_unseen(module.mlp, counted(after, lambda module, args, output: act(output)))
            case "cool-down":
                module.mlp.c_fc.weight.register_hook(counted(MICROBATCHES, act))
            case "tie sync":
                before(job.model.pipeline.sync, "finish", lambda: self._in_gradients(job))
            case "optimizer":
                job.optimizer.optim.register_step_pre_hook(lambda *_: self._in_gradients(job))
            case "barrier":
                self._between()
            case "save":
                before(saving, "save_file", lambda *args: self._in_save(*args))

    def _happens(self) -> None:
        """Tell when it does; whole at once, since somebody waits for it."""
        beside = self.mark.with_suffix(".writing")
        beside.write_text(str(time.monotonic()))
        beside.rename(self.mark)

    def _act(self, value: Any) -> Any:
        """What happens; the value that goes on instead of this one."""
        self._happens()
        match self.case.kind:
            case "exception" | "group destroyed" | "sys.exit(1)":
                raise ValueError("planted")
            case "mute exception":
                raise Mute
            case "hang in C":
                re.match(r"(a+)+b", "a" * 60)
            case "kill -9, a child lives" if os.fork() == 0:
                time.sleep(CHILDHOOD)
                os._exit(0)
            case "kill -9" | "kill -9, a child lives":
                os.kill(os.getpid(), signal.SIGKILL)
            case "SIGSTOP":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "SIGTERM":
                os.kill(os.getpid(), signal.SIGTERM)
            case "hang":
                while True:
                    time.sleep(1)
            case "NaN":
                return value * float("nan")
            case "wrong shape":
                return value.double() if self.case.leaves else value[..., :-1]
        return value

    def _between(self) -> None:
        """What a script does between two steps."""
        if self.case.kind == EXIT:
            try:
                self._act(None)
            except ValueError:
                sys.exit(1)
        try:
            self._act(None)
        finally:
            if self.case.kind == LEFT:
                dist.destroy_process_group()

    def _batches(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            if self.case.kind == "different batch":
                self._happens()
                batch = {name: value.flip(0) for name, value in batch.items()}
            else:
                self._act(None)
            yield batch

    def _in_gradients(self, job: Job) -> None:
        shared = [parameter for _, parameter in job.model.pipeline.sync.shared]
        parameter = next(p for p in shared or trained(job) if p.grad is not None)
        parameter.grad = self._act(parameter.grad)

    def _in_save(self, tensors: dict[str, Tensor], path: Path, *_: Any) -> None:
        if self.case.kind == "full disk":
            self._happens()
            path.write_bytes(b"\0" * 100)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        self._act(None)


class Mute(Exception):
    """An exception without a text."""

    def __str__(self) -> str:
        raise TypeError("not a string")


def trained(job: Job) -> Iterator[nn.Parameter]:
    return iter(job.model.pipeline.holdings.held.values())


def counted(number: int, act: Callable[..., Any]) -> Callable[..., Any]:
    """A hook that acts in its call of this number alone."""
    calls = 0

    def hook(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        return act(*args) if calls == number else None

    return hook


def before(owner: Any, name: str, act: Callable[..., Any]) -> None:
    """Call `act`, once, before a function, with its arguments as far as it takes some."""
    original, done = getattr(owner, name), False

    def patched(*args: Any, **kwargs: Any) -> Any:
        nonlocal done
        if not done:
            done = True
            with torch.no_grad():
                act(*args) if act.__code__.co_argcount or act.__code__.co_flags & 4 else act()
        return original(*args, **kwargs)

    setattr(owner, name, patched)
