"""Notebook: runs a function of a notebook on ranks that a cell starts.

The ranks are new processes, and each rank receives a copy of the function. Forks of the notebook's process could not
train: autograd and CUDA do not work in a fork if the parent process has used them.
"""

import io
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from pipeshard.errors import ConfigurationError, RankError, explained, summary
from pipeshard.launch import threads
from pipeshard.script import CAUSED_BY_OTHERS, fold

T = TypeVar("T")
CALL, ERROR = "call", ".error"  # the file with the function, and the suffix of a file with a rank's error


def notebook_launch(fn: Callable[..., T], ranks: int, *args: Any) -> list[T]:
    """Run `fn(*args)` on `ranks` processes of this machine. Returns the list of the ranks' results.

        losses = pipeshard.notebook_launch(train, 2)[0]

    cloudpickle copies `fn` to each rank, together with the notebook's functions, classes and values that `fn` uses.
    Create engines inside `fn`. The output of all ranks appears in the cell. Interrupting the cell terminates the ranks.

    Args:
        fn: a function that a cell or a module defines.
        ranks: the number of processes: pp_size * dp_size * tp_size (or ep_size).
        args: the arguments of `fn`.

    Raises ConfigurationError if `ranks` is invalid, or if cloudpickle is missing or cannot copy `fn`. Raises RankError
    if a rank fails. The error names the rank and, if the rank raised an exception, the exception. The traceback is in
    the cell's output.
    """
    if not isinstance(ranks, int) or ranks < 1:
        raise ConfigurationError(f"ranks must be a positive integer, got {ranks!r}")
    with tempfile.TemporaryDirectory(prefix="pipeshard-") as name:
        folder = Path(name)
        (folder / CALL).write_bytes(_copied(fn, args))
        if (status := _run_agent(folder, ranks)) or _failure(folder):
            unknown = f"the launcher exited with status {status}, but no rank raised an exception: see the output above"
            raise RankError(_failure(folder) or unknown)
        return [pickle.loads((folder / str(rank)).read_bytes()) for rank in range(ranks)]


def _copied(fn: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    try:
        import cloudpickle
    except ImportError:
        raise ConfigurationError("notebook_launch requires cloudpickle: pip install 'pipeshard[notebook]'") from None
    with explained(
        lambda error: ConfigurationError(
            f"{getattr(fn, '__name__', fn)}{' or an argument' * bool(args)} cannot be copied to the ranks "
            f"({summary(error)}): create models, engines and files inside the function"
        )
    ):
        return cloudpickle.dumps((fn, args))


def _run_agent(folder: Path, ranks: int) -> int:
    """Run the ranks and forward their output until all ranks have exited. Returns the exit status of the agent that
    started them."""
    command = [sys.executable, "-m", "pipeshard.launch", f"--nproc-per-node={ranks}", "--max-restarts=0"]
    path = os.pathsep.join(filter(None, sys.path))
    environment = {"OMP_NUM_THREADS": threads(ranks)} | os.environ | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
    agent = subprocess.Popen(
        [*command, "--module", __name__, str(folder)],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert agent.stdout is not None
    shown = io.TextIOWrapper(agent.stdout, errors="replace", newline="")  # keeps the "\r" of progress bars
    try:
        for line in shown:
            sys.stdout.write(line)
    finally:
        agent.terminate()  # has no effect if the agent has exited
        agent.wait()
    return agent.returncode


def _failure(folder: Path) -> str | None:
    """A message that names the rank that failed first and its error, or None if no rank wrote an error. An error that
    another rank's failure caused is reported only if there are no other errors."""
    texts = {path: path.read_text() for path in sorted(folder.glob(f"*{ERROR}"), key=lambda path: path.stat().st_mtime)}
    first = min(texts, key=lambda path: texts[path].startswith(CAUSED_BY_OTHERS), default=None)
    return f"rank {first.stem} failed: {texts[first]}" if first else None


def _be_rank(folder: Path) -> None:
    """Call the function on this rank, and write the result or the error to the folder."""
    import cloudpickle
    import torch.distributed as dist

    fold()
    own = folder / os.environ["RANK"]
    try:
        fn, args = pickle.loads((folder / CALL).read_bytes())
        own.write_bytes(cloudpickle.dumps(fn(*args)))
    except BaseException as error:
        own.with_suffix(ERROR).write_text(summary(error))
        raise
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    _be_rank(Path(sys.argv[1]))
