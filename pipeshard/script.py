"""Script: a training script as `pipeshard launch` runs it; ranks with the same error print it once.

`python -m pipeshard.script train.py ...` is `python train.py ...`, except for the output of an error. It imports
little, so it also serves a script whose first import fails.
"""

import builtins
import hashlib
import os
import re
import sys
import traceback
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from types import ModuleType, TracebackType

FOLDER = "PIPESHARD_ERRORS"  # names the folder in which the ranks of an agent note how they ended
TORCHRUN = "TORCHELASTIC_ERROR_FILE"  # names a file in the folder that each of torchrun's ranks has, attempt by attempt
OTHERS = ("RankError", "OtherBatchError", "DistBackendError", "DistNetworkError", "DistStoreError")  # of another rank
_DIFFERS = re.compile(r"0x[0-9a-f]+|\[rank\d+\]: ?")


def main(arguments: Sequence[str]) -> None:
    """Run a script in its own `__main__`, with these arguments, its name first."""
    path = Path.cwd() / arguments[0]
    sys.argv[:] = arguments
    sys.path[0] = str(path.resolve().parent)
    sys.modules["pipeshard.script"] = sys.modules["__main__"]  # or it would go, with what it defines
    module = sys.modules["__main__"] = ModuleType("__main__")
    module.__dict__.update(__file__=str(path), __builtins__=builtins, __spec__=None)
    sys.excepthook = tell_once
    exec(compile(path.read_bytes(), str(path), "exec"), module.__dict__)


def tell_once(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """An exception hook that prints an error if no other rank of this agent has printed it in this attempt, and notes
    it."""
    if issubclass(kind, KeyboardInterrupt):
        return
    while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, "<frozen runpy>"):
        trace = trace.tb_next
    text = "".join(traceback.format_exception(kind, error, trace))
    folder = notes()
    if folder is None or note(folder, kind.__name__, text):
        sys.stderr.write(text)
    elif FOLDER not in os.environ:  # `pipeshard launch` counts them
        sys.stderr.write(f"rank {os.environ.get('RANK')} ended with the same {kind.__name__} as another rank\n")


def fold() -> None:
    """Make a rank that torchrun started print errors once, too, unless something else prints its errors."""
    if os.environ.get(TORCHRUN) and sys.excepthook is sys.__excepthook__:
        sys.excepthook = tell_once


def notes() -> Path | None:
    """Where ranks note how they ended; with torchrun a folder of the ranks that print to the same place."""
    if FOLDER in os.environ or not os.environ.get(TORCHRUN):
        return Path(os.environ[FOLDER]) if FOLDER in os.environ else None
    try:
        place = os.fstat(sys.stderr.fileno())
        folder = Path(os.environ[TORCHRUN]).parent.parent / f"errors-{place.st_dev}-{place.st_ino}"
        folder.mkdir(exist_ok=True)
    except (OSError, AttributeError, ValueError):  # stderr is not a file
        return None
    return folder


def note(folder: Path, kind: str, text: str) -> bool:
    """Whether this rank is the first to end with this error; each adds a byte to a file of the attempt."""
    digest = hashlib.blake2b(_DIFFERS.sub("", text).encode(), digest_size=8).hexdigest()
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    try:
        file = os.open(folder / f"{attempt}-{kind}-{digest}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    except OSError:
        return True
    os.write(file, b".")
    first = os.lseek(file, 0, os.SEEK_CUR) == 1  # where its own byte ended
    os.close(file)
    return first


def endless(folder: Path, attempts: int, seconds: float) -> str | None:
    """The kind of error with which the last attempts ended, each within some seconds of the one before; not one
    caused by another rank's."""
    ends: dict[tuple[str, str], dict[int, float]] = {}
    for file in folder.iterdir():
        attempt, kind, digest = file.name.split("-")
        if kind not in OTHERS:
            ends.setdefault((kind, digest), {})[int(attempt)] = file.stat().st_mtime
    for (kind, _), times in ends.items():
        last = [times.get(max(times) - k, -float("inf")) for k in range(attempts)]
        if all(later - before < seconds for later, before in pairwise(last)):
            return kind
    return None


def repeated(folder: Path) -> list[tuple[str, int]]:
    """The errors of the last attempt that several ranks had: their kind, and the number of further ranks."""
    files = {file.name: file.stat().st_size for file in folder.iterdir()}
    last = max((int(name.split("-")[0]) for name in files), default=0)
    return [(name.split("-")[1], size - 1) for name, size in files.items() if name.startswith(f"{last}-") and size > 1]


if __name__ == "__main__":
    main(sys.argv[1:])
