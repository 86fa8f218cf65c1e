"""Script: runs a training script for `pipeshard launch`, so that an error that several ranks raise is printed once.

`python -m pipeshard.script train.py ...` is like `python train.py ...`, and `python -m pipeshard.script -m
package.train` is like `python -m package.train`. The differences are the handling of SIGUSR1 and the output of errors.
The module imports little, so it also works if the script's first import fails.
"""

import builtins
import hashlib
import logging
import os
import re
import runpy
import signal
import sys
import traceback
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, NoReturn

ERRORS_FOLDER = "PIPESHARD_ERRORS"  # environment variable: the folder in which an agent's ranks record their errors
TORCHRUN = "TORCHELASTIC_ERROR_FILE"  # environment variable: torchrun's file for a rank's error, .../ATTEMPT/RANK/FILE
# Classes of errors that another rank caused.
CAUSED_BY_OTHERS = ("RankError", "DistBackendError", "DistNetworkError", "DistStoreError")
# Parts of an error's text that differ between ranks: addresses, torch's prefix, and the note of `Watch`.
_DIFFERS = re.compile(r"0x[0-9a-f]+|\[rank\d+\]: ?|^pipeshard: this is rank .*$", re.MULTILINE)


def main(arguments: Sequence[str]) -> None:
    """Run a script as `__main__`. `arguments` are the script's path (or -m and the name of a module) and the script's
    own arguments.

    Until the script installs a handler, the process ignores SIGUSR1, which Slurm sends to all processes of a job step
    if the job has --signal=USR1.
    """
    if signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL:
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    sys.modules["pipeshard.script"] = sys.modules["__main__"]  # otherwise this module would be freed
    if arguments[0] == "-m":
        sys.argv[:] = arguments[1:]
        sys.excepthook = tell_once
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        return
    path = Path.cwd() / arguments[0]
    sys.argv[:] = arguments
    sys.path[0] = str(path.resolve().parent)
    module = sys.modules["__main__"] = ModuleType("__main__")
    module.__dict__.update(__file__=str(path), __builtins__=builtins, __spec__=None)
    sys.excepthook = tell_once
    exec(compile(path.read_bytes(), str(path), "exec"), module.__dict__)


def exit_now(status: int) -> NoReturn:
    """End the process without Python's own cleanup, which may wait for threads forever or abort the process."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def tell_once(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """An exception hook that records an error, and prints it unless another rank of this agent has recorded the same
    error in this attempt."""
    if issubclass(kind, KeyboardInterrupt):
        return
    while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, "<frozen runpy>"):
        trace = trace.tb_next
    text = "".join(traceback.format_exception(kind, error, trace))
    folder = notes()
    if folder is None or record_error(folder, kind.__name__, text):
        sys.stderr.write(text)
    elif ERRORS_FOLDER not in os.environ:  # `pipeshard launch` prints the number of these ranks
        sys.stderr.write(f"rank {os.environ.get('RANK')} ended with the same {kind.__name__} as another rank\n")


def fold() -> None:
    """Install `tell_once` on a rank that torchrun started, unless the user has installed an exception hook."""
    if os.environ.get(TORCHRUN) and _is_default(sys.excepthook):
        sys.excepthook = tell_once


def _is_default(hook: Any) -> bool:
    """Whether the exception hook is Python's own, possibly with the prefix that `init_process_group` adds."""
    if getattr(hook, "__module__", None) == "torch.distributed.distributed_c10d":
        return any(cell.cell_contents is sys.__excepthook__ for cell in hook.__closure__ or ())
    return hook is sys.__excepthook__


def notes() -> Path | None:
    """The folder in which ranks record errors, or None if no folder is available. With torchrun, there is one folder
    per stderr file."""
    if ERRORS_FOLDER in os.environ or not os.environ.get(TORCHRUN):
        return Path(os.environ[ERRORS_FOLDER]) if ERRORS_FOLDER in os.environ else None
    try:
        place = os.fstat(sys.stderr.fileno())
        folder = Path(os.environ[TORCHRUN]).parent.parent / f"errors-{place.st_dev}-{place.st_ino}"
        folder.mkdir(exist_ok=True)
    except (OSError, AttributeError, ValueError):  # stderr is not a file
        return None
    return folder


def record_error(folder: Path, kind: str, text: str) -> bool:
    """Record an error. Returns whether this rank is the first to record it. Each rank adds a byte to the error's
    file."""
    digest = hashlib.blake2b(_DIFFERS.sub("", text).encode(), digest_size=8).hexdigest()
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    try:
        file = os.open(folder / f"{attempt}-{kind}-{digest}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    except OSError:
        return True
    os.write(file, b".")
    first = os.lseek(file, 0, os.SEEK_CUR) == 1  # the end of this rank's byte
    os.close(file)
    return first


def endless(folder: Path, attempts: int, seconds: float) -> str | None:
    """The class of an error with which each of the last `attempts` attempts ended, if each ended within `seconds` of
    the previous attempt. None if no error meets this condition. Errors that another rank caused do not count."""
    ends: dict[tuple[str, str], dict[int, float]] = {}
    for file in folder.iterdir():
        attempt, kind, digest = file.name.split("-")
        if kind not in CAUSED_BY_OTHERS:
            ends.setdefault((kind, digest), {})[int(attempt)] = file.stat().st_mtime
    for (kind, _), times in ends.items():
        last = [times.get(max(times) - k, -float("inf")) for k in range(attempts)]
        if all(later - before < seconds for later, before in pairwise(last)):
            return kind
    return None


def repeated(folder: Path) -> list[tuple[str, int]]:
    """For each error that several ranks raised in the last attempt: its class, and the number of ranks that raised it
    after the first rank."""
    files = {file.name: file.stat().st_size for file in folder.iterdir()}
    last = max((int(name.split("-")[0]) for name in files), default=0)
    return [(name.split("-")[1], size - 1) for name, size in files.items() if name.startswith(f"{last}-") and size > 1]


if __name__ == "__main__":
    main(sys.argv[1:])
