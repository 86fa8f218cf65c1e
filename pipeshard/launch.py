"""Launch: torchrun's elastic agent, with defaults for pipelines that continue when ranks are lost or join.

Run `pipeshard launch --nnodes 2:4 --rdzv-endpoint HOST:PORT script.py ...` once on each machine. Alternatively, run it
several times on one machine. The command takes torchrun's flags.
"""

import argparse
import contextlib
import logging
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import psutil
from torch.distributed.argparse_util import env
from torch.distributed.elastic.multiprocessing import PContext, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousError
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint
from torch.distributed.run import get_args_parser, parse_min_max_nnodes, run

from pipeshard.errors import UsageError, counted
from pipeshard.replaced import replaced
from pipeshard.script import ERRORS_FOLDER, endless, exit_now, repeated

logger = logging.getLogger("pipeshard")

# A lost agent is detected after 5 seconds. Once the minimum number of agents is present, they wait 5 seconds for more.
RENDEZVOUS = {"keep_alive_interval": 1, "keep_alive_max_attempt": 5, "last_call_timeout": 5}
LOOPBACK, PORT = "127.0.0.1", 29400  # torch's defaults of --master-addr, and of the port of a rendezvous
RESTARTS = 100
LOOK_PERIOD = 0.5  # seconds between two checks of the workers
STUCK = 10  # checks after which this process ends, if all workers have exited and the agent does not notice
HANDLER_PERIOD = 0.1  # seconds between two checks of whether a worker has a handler for a signal
QUIET = {
    "PYTHONWARNINGS": "ignore::FutureWarning",  # peft uses names that transformers has renamed
    "TOKENIZERS_PARALLELISM": "false",
    "TQDM_DISABLE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
}
ALIKE, WITHIN = 3, 60.0  # stop after ALIKE attempts with the same error, each within WITHIN seconds of the previous
HELP = f"""\
usage: pipeshard launch [FLAGS] SCRIPT [ARGUMENTS]

Runs SCRIPT as N processes (ranks) on each machine, and restarts all of them, up to
{RESTARTS} times, when a process or a machine is lost or joins. An error that several processes raise is printed
once. After {ALIKE} consecutive attempts that end with the same error, each within {WITHIN:.0f} seconds of the
previous attempt, the job is not restarted.

  pipeshard launch --nproc-per-node 4 train.py --epochs 3                           on one machine
  pipeshard launch --nnodes 2:4 --nproc-per-node 8 --rdzv-endpoint HOST:29400 train.py   on 2 to 4 machines

flags (torchrun's; torchrun --help lists all):
  --nproc-per-node N       processes on this machine (default 1; gpu: one per GPU)
  --nnodes N or MIN:MAX    number of machines (default 1:1)
  --rdzv-endpoint H:P      rendezvous address: a host and port of one machine, the same on every machine
  --master-addr HOST       with --master-port (default {PORT}), an alternative to --rdzv-endpoint
  --rdzv-id NAME           name of the job, if several jobs share a rendezvous address (default pipeshard)
  --max-restarts N         maximum number of restarts (default {RESTARTS})
  --shutdown-timeout N     seconds that processes have after SIGTERM to save and exit (default 30)
  --local-addr ADDRESS     address at which other machines reach this machine
  --module, -m             SCRIPT is a module, as in python -m
"""


def main(arguments: Sequence[str] | None = None, at_signal: Callable[[], None] | None = None) -> int:
    """Run one agent until the job completes, its workers fail permanently, or a signal arrives. Returns the exit
    status. After a signal, calls `at_signal` and exits the process immediately, without returning."""
    args = parse(sys.argv[1:] if arguments is None else arguments)
    if not args.module and not args.no_python and (why := unable(args.training_script)):
        logger.error("error: %s", why)
        return 2
    with tempfile.TemporaryDirectory(prefix="pipeshard-") as folder:
        os.environ[ERRORS_FOLDER] = folder
        return _run_agent(_folded(args), Path(folder), at_signal)


def start(ranks: int, quiet: bool = False, program: Sequence[str] = ()) -> int:
    """Run the calling script, or `program`, as `ranks` processes on this machine, with RANK set in each process.
    Returns the exit status. With `quiet`, libraries show no progress bars and fewer warnings on the ranks.

    Raises UsageError if it is called on a rank, since each rank would start further ranks, endlessly."""
    if "RANK" in os.environ:
        raise UsageError(
            "a rank cannot start ranks: call start only if the environment variable RANK is not set "
            "(if 'RANK' not in os.environ: sys.exit(start(2)))"
        )
    for name, value in {"OMP_NUM_THREADS": threads(ranks), **(QUIET if quiet else {})}.items():
        os.environ.setdefault(name, value)
    return main([f"--nproc-per-node={ranks}", "--max-restarts=0", *(program or _called())])


def _called() -> list[str]:
    """The command line of the calling script. If Python runs the script with -m, the ranks also run it with -m, since
    the script may have relative imports."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if spec is None or spec.origin != sys.argv[0]:  # a profiler may run the script
        return sys.argv
    return ["-m", spec.name, *sys.argv[1:]]


def threads(ranks: int) -> str:
    """The value of OMP_NUM_THREADS that divides this machine's cores evenly among `ranks` ranks."""
    return str(max(1, len(os.sched_getaffinity(0)) // ranks))


def _run_agent(args: argparse.Namespace, folder: Path, at_signal: Callable[[], None] | None) -> int:
    # If torch shares the agents' store with the ranks, an agent that joins later never receives the ranks' address, and
    # a remaining agent keeps using the first address, even if the agent at this address is gone.
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    _forward(signal.SIGUSR1)
    in_vain = _watch_workers(folder, args.rdzv_endpoint, args.monitor_interval)
    try:
        with replaced(PContext, close=_closing(args.shutdown_timeout)):
            run(args)
    except SignalException as stop:
        _clean_up()
        if in_vain:
            logger.error("%d attempts in a row ended with the same %s: not restarting", ALIKE, in_vain[0])
        if at_signal is not None:
            at_signal()
        _leave_process(folder, 1 if in_vain else 128 + int(stop.sigval))
    except ChildFailedError as error:
        for kind, others in repeated(folder):
            logger.error("%s on this machine ended with the same %s", counted(others, "more rank"), kind)
        codes = {rank: failure.exitcode for rank, failure in sorted(error.failures.items())}
        own = {rank: code for rank, code in codes.items() if code != -signal.SIGTERM} or codes  # torch ends all others
        logger.error("the job failed: %s", ", ".join(f"rank {rank} ({_exit_text(code)})" for rank, code in own.items()))
        return 1
    except RendezvousClosedError:
        logger.error("the job %r at %s has already ended: choose another --rdzv-id", args.rdzv_id, args.rdzv_endpoint)
        return 1
    except RendezvousError as error:
        logger.error(
            "the rendezvous at %s failed (check that this machine can reach the address): %s", args.rdzv_endpoint, error
        )
        return 1
    return 0


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse torchrun's flags. Some flags have other defaults than in torchrun, unless a PET_... variable sets the
    flag."""
    parser = get_args_parser()
    parser.prog, parser.usage = "pipeshard launch", "pipeshard launch [FLAGS] SCRIPT [ARGUMENTS]"
    parser.format_help = lambda: HELP  # type: ignore[method-assign]
    with contextlib.suppress(argparse.ArgumentError):  # torch 2.12 and later already have this flag
        parser.add_argument("--shutdown-timeout", "--shutdown_timeout", action=env, type=int)
    defaults = {"rdzv_backend": "c10d", "rdzv_id": "pipeshard", "max_restarts": RESTARTS}
    defaults["shutdown_timeout"] = os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT")
    parser.set_defaults(**{name: value for name, value in defaults.items() if f"PET_{name.upper()}" not in os.environ})
    args = parser.parse_args(list(arguments))
    if args.rdzv_backend == "c10d":
        ours = [f"{name}={value}" for name, value in RENDEZVOUS.items()]
        args.rdzv_conf = ",".join([*ours, *filter(None, [args.rdzv_conf])])  # the last value of a name applies
        try:
            _, most = parse_min_max_nnodes(args.nnodes)
            if most > 1 and not args.rdzv_endpoint and args.master_addr != LOOPBACK:
                _meet_at_master(args)
            host, _ = parse_rendezvous_endpoint(args.rdzv_endpoint, default_port=0)
        except (ValueError, RuntimeError) as error:
            parser.error(f"argument --nnodes or --rdzv-endpoint: {error}")
        if not args.rdzv_endpoint:
            args.rdzv_endpoint = "localhost:0" if most == 1 else f"localhost:{PORT}"
        if args.local_addr is None and host in ("localhost", LOOPBACK, "::1"):
            args.local_addr = "localhost"  # all agents are on this machine, whose name may not resolve
    return args


def _closing(seconds: int | None) -> Callable[..., None]:
    """A replacement for PContext.close, which stops the workers. If torch passes a signal for the workers, the
    replacement waits at most `seconds` for them to exit, or at most torch's own limit if `seconds` is None. Without the
    replacement, --shutdown-timeout applies only if the agent receives a signal, not if the agent restarts the workers
    because another agent joins."""
    close = PContext.close

    def patient(context: Any, death_sig: signal.Signals | None = None, timeout: int = 30) -> None:
        # Without a signal, torch stops the remaining workers because one worker failed, so they cannot save.
        close(context, death_sig, timeout if death_sig is None or seconds is None else seconds)

    return patient


def _meet_at_master(args: argparse.Namespace) -> None:
    """Use --master-addr and --master-port, flags of torchrun's static rendezvous, as the rendezvous address."""
    args.rdzv_endpoint = f"{args.master_addr}:{args.master_port or PORT}"
    if args.node_rank:  # torch warns about a node rank that it does not use
        args.rdzv_conf, args.node_rank = f"is_host=0,{args.rdzv_conf}", 0


def count(text: str) -> int:
    """Parse a positive integer. Used as the type of argparse flags."""
    value = int(text) if text.isdecimal() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be a positive integer, got {text!r}")
    return value


def unable(script: str) -> str | None:
    """Why this script cannot be started, or None if it can."""
    try:
        compile(Path(script).read_bytes(), script, "exec")
    except OSError as error:
        return f"{script}: {error.strerror}"
    except (SyntaxError, ValueError) as error:
        return f"{script} is not a valid Python script: {error}"
    return None


def _folded(args: argparse.Namespace) -> argparse.Namespace:
    """Make the workers run the script or module through `pipeshard.script`, if it is Python code."""
    if not args.no_python and not args.run_path:
        args.training_script_args = [*["-m"] * args.module, args.training_script, *args.training_script_args]
        args.training_script, args.module = "pipeshard.script", True
    return args


def _exit_text(code: int) -> str:
    return f"exit status {code}" if code >= 0 else f"ended by {signal.Signals(-code).name}"


def _clean_up() -> None:
    """Kill the processes that torch left running because a second Ctrl-C interrupted torch."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    workers = psutil.Process().children(recursive=True)
    for worker in workers:
        with contextlib.suppress(psutil.NoSuchProcess):
            worker.kill()
    psutil.wait_procs(workers, timeout=10)


def _leave_process(folder: Path, status: int) -> NoReturn:
    """Exit without Python's own cleanup, which might abort because a signal has interrupted torch's threads."""
    shutil.rmtree(folder, ignore_errors=True)
    exit_now(status)


def _forward(number: signal.Signals) -> None:
    """Start a thread that forwards a signal to each worker. The thread waits until the worker has installed a handler,
    since the signal would kill a worker without a handler. This process handles the signal instead of blocking it,
    since workers inherit a signal mask, but do not inherit handlers."""
    received = threading.Event()
    signal.signal(number, lambda *_: received.set())

    def forward() -> None:
        while received.wait():
            received.clear()
            workers = psutil.Process().children()
            while workers and not received.is_set():
                workers = [worker for worker in workers if not _send(worker, number)]
                time.sleep(HANDLER_PERIOD)

    threading.Thread(target=forward, daemon=True).start()


def _send(worker: psutil.Process, number: signal.Signals) -> bool:
    """Send a signal to a worker. If the worker has not installed a handler yet, sends nothing and returns False."""
    with contextlib.suppress(OSError, psutil.NoSuchProcess):  # a worker that has ended needs no signal
        caught = re.search(r"^SigCgt:\s*(\w+)", Path(f"/proc/{worker.pid}/status").read_text(), re.MULTILINE)
        if caught is None or not int(caught[1], 16) >> (number - 1) & 1:
            return False
        worker.send_signal(number)
    return True


def _watch_workers(folder: Path, endpoint: str, interval: float) -> list[str]:
    """Start a thread that terminates this agent if consecutive attempts end with the same error. Returns a list, to
    which the thread adds the class of the error before it terminates the agent.

    The thread also ends this process if all workers have exited, but the agent does not detect this for a while. The
    agent polls its workers and the rendezvous store every `interval` seconds. If the network fails, the agent waits for
    the store's response until the kernel closes the connection, which takes a quarter of an hour.
    """
    found: list[str] = []

    def look() -> None:
        looks = 0
        while looks < STUCK + interval / LOOK_PERIOD:
            time.sleep(LOOK_PERIOD)
            with contextlib.suppress(OSError):  # the folder does not exist if this agent is done
                if not found and (kind := endless(folder, ALIKE, WITHIN)):
                    found.append(kind)
                    os.kill(os.getpid(), signal.SIGTERM)
            workers = psutil.Process().children()
            looks = looks + 1 if workers and all(_has_ended(worker) for worker in workers) else 0
        logger.error("all workers have exited, and the rendezvous store at %s does not respond: exiting", endpoint)
        os._exit(1)

    threading.Thread(target=look, daemon=True).start()
    return found


def _has_ended(worker: psutil.Process) -> bool:
    """Whether a worker has exited, although the agent has not yet read its exit status."""
    try:
        return bool(worker.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


if __name__ == "__main__":
    sys.exit(main())
