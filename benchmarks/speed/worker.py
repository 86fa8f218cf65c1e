"""Worker: the process of one rank of a contender. It trains when the driver requests it, and is stopped otherwise."""

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

PR_SET_PDEATHSIG = 1  # Linux


def main() -> None:
    """Run `worker.py FD '{"trainer": ..., "work": ..., ...}'`: serve rounds over the socket FD until it closes."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # else a stopped process would outlive the driver
    connection = Connection(int(sys.argv[1]))
    order = json.loads(sys.argv[2])
    try:
        _serve(connection, order)
    except EOFError:
        os._exit(0)  # the driver exited; some libraries hang while they destroy their process groups
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
    """Run one step per (seed, length). Returns the start and end times, the losses, the peak memory (total, and above
    the start), and the bytes sent over the network."""
    data = [work.batch(*batch) for batch in batches]
    reset_peak()
    floor, before = resident(), _sent()
    start = time.perf_counter()
    losses = [trainer.step(batch) for batch in data]
    end = time.perf_counter()  # all processes share this clock
    figures = {"memory": peak() - floor, "resident": peak(), "sent": _sent() - before}
    return {"start": start, "end": end, "losses": losses, **figures}


def _sent() -> int:
    return int(Path(f"/sys/class/net/{os.environ['GLOO_SOCKET_IFNAME']}/statistics/tx_bytes").read_text())


if __name__ == "__main__":
    main()
