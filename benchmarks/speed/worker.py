"""The worker: one rank of a contender, a process that trains when it is told to and sleeps in between."""

import ctypes
import importlib
import json
import os
import signal
import sys
import time
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.resident import peak, reset_peak, resident
from benchmarks.speed.trainers import Trainer
from benchmarks.speed.work import Work

PR_SET_PDEATHSIG = 1  # of Linux


def main() -> None:
    """`worker.py FD '{"trainer": ..., "work": ..., ...}'`: answers rounds over the socket FD until it closes."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # a stopped process would stay when the driver dies
    connection = Connection(int(sys.argv[1]))
    order = json.loads(sys.argv[2])
    try:
        _serve(connection, order)
    except EOFError:
        os._exit(0)  # the driver has gone; some libraries hang when they leave their groups one by one
    except BaseException as error:
        traceback.print_exc()
        connection.send({"error": f"{type(error).__name__}: {error}", "at": time.monotonic()})
        os._exit(1)


def _serve(connection: Connection, order: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    work = Work(**order["work"])
    rank, size = order["rank"], order["size"]
    dist.init_process_group("gloo", init_method=f"file://{order['store']}", rank=rank, world_size=size)
    module = importlib.import_module(f"benchmarks.speed.trainers.{order['trainer']}")
    trainer: Trainer = module.Trainer(work, rank, size, **order["options"])
    connection.send({"ready": True})
    asleep = time.perf_counter(), time.process_time()
    while True:
        batches = connection.recv()
        wall, cpu = time.perf_counter() - asleep[0], time.process_time() - asleep[1]
        figures = _round(work, trainer, batches)
        connection.send({**figures, "report": trainer.report(), "asleep": (wall, cpu)})
        asleep = time.perf_counter(), time.process_time()


def _round(work: Work, trainer: Trainer, batches: list[tuple[int, int | None]]) -> dict[str, Any]:
    """One step for each (seed, length): when it began and ended, each loss, the most memory it took beyond the
    start's and in all, and the bytes that left by the network."""
    data = [work.batch(*batch) for batch in batches]
    reset_peak()
    floor, before = resident(), _sent()
    start = time.perf_counter()
    losses = [trainer.step(batch) for batch in data]
    end = time.perf_counter()  # of a clock that all processes share
    figures = {"memory": peak() - floor, "resident": peak(), "sent": _sent() - before}
    return {"start": start, "end": end, "losses": losses, **figures}


def _sent() -> int:
    return int(Path(f"/sys/class/net/{os.environ['GLOO_SOCKET_IFNAME']}/statistics/tx_bytes").read_text())


if __name__ == "__main__":
    main()
