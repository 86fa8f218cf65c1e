"""Worker: a process that runs jobs, each as one rank of a separate gloo world."""

import contextlib
import faulthandler
import gc
import os
import pickle
import random
import signal
import sys
import threading
import time
import traceback
import warnings
from collections import OrderedDict
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import parent_process
from multiprocessing.connection import Connection
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from pipeshard.distributed import mesh
from pipeshard.private import leave_below, modes_entered

CLEAN, POLLUTED = b"clean", b"polluted"  # the state of a worker after a job
SETTLE = 0.3  # seconds that a failed rank stays in its groups, so that other ranks can fail by themselves


@dataclass
class Job:
    """The job of one rank."""

    rank: int
    world_size: int
    meeting_point: str  # a file that does not exist yet
    timeout: float
    call: bytes  # pickled (fn, args, kwargs)


@dataclass
class Outcome:
    """How a rank ended: it "returned", "raised", "died", or was "stuck" and killed."""

    kind: str
    value: Any = None
    message: str = ""
    text: str = ""  # a traceback, the stacks of all threads, or what the worker printed
    classes: tuple[str, ...] = ()  # the names of the exception's class and its bases
    at: float = 0.0  # time of the monotonic clock, which all processes share


def serve(connection: Connection, log: str) -> None:
    """Run jobs and send their outcomes, until the pool closes the connection.

    The worker's output, and the stacks of its threads after SIGUSR1 or a crash, are written to the file `log`.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the pool handles Ctrl-C
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    handle = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2))
    warnings.simplefilter("ignore")
    faulthandler.enable(2)
    faulthandler.register(signal.SIGUSR1, 2)
    torch.set_num_threads(1)
    state = _state()
    gc.freeze()  # otherwise collections scan half a million objects of imports, for a second or more
    with contextlib.suppress(EOFError):
        while True:
            job: Job = pickle.loads(connection.recv_bytes())
            outcome = _attempt(job)
            sys.stdout.flush()
            sys.stderr.flush()
            connection.send_bytes(outcome)
            if pickle.loads(outcome).kind != "returned":
                if not dist.is_initialized():
                    return  # after a failed init_process_group, torch's count of groups differs between ranks
                # A failed rank leaves its groups soon, which wakes the ranks that wait for it.
                if not connection.poll(SETTLE):
                    _leave()
            connection.recv_bytes()
            _leave()
            if modes_entered():  # modes that a job's models have entered
                gc.collect()
                leave_below(*modes_entered())
            connection.send_bytes(CLEAN if _state() == state else POLLUTED)


def _state() -> tuple[Any, ...]:
    """The global state that a job may change for later jobs. Raises an error if the job has broken the GPU context."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")
    settings = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled(), torch.is_anomaly_enabled()
    hooks = [len(hooks) for hooks in vars(nn.modules.module).values() if isinstance(hooks, OrderedDict)]
    patches = len(mock._patch._active_patches)  # type: ignore[attr-defined]
    return torch.get_default_dtype(), str(torch.get_default_device()), modes, settings, hooks, patches, os.getcwd()


def class_name(cls: type) -> str:
    """A class's full name, which identifies it in every process."""
    return f"{cls.__module__}.{cls.__qualname__}"


def _attempt(job: Job) -> bytes:
    """Run a job, and pickle its Outcome."""
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{job.meeting_point}",
            rank=job.rank,
            world_size=job.world_size,
            timeout=timedelta(seconds=job.timeout + 60),  # the pool's own timeout comes first and shows the stacks
        )
        random.seed(0)
        torch.manual_seed(0)
        fn, args, kwargs = pickle.loads(job.call)
        return pickle.dumps(Outcome("returned", fn(*args, **kwargs)))
    except BaseException as error:
        classes = tuple(class_name(cls) for cls in type(error).__mro__)
        message, text = str(error), traceback.format_exc()
        return pickle.dumps(Outcome("raised", None, message, text, classes, time.monotonic()))


def _leave() -> None:
    """Leave all groups at the same time, since each waits some 10 ms for each of its connections to close."""
    mesh._grids.clear()
    groups = list(dist.distributed_c10d._world.pg_map)
    if tensors := sys.modules.get("torch.distributed.tensor.debug"):
        tensors._clear_sharding_prop_cache()  # the cached meshes contain the names of these groups
    if dist.is_initialized():
        dist.destroy_process_group()
    threads = [threading.Thread(target=groups.pop) for _ in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _exit_with_parent() -> None:
    """Exit when the test process has ended, for whatever reason."""
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
