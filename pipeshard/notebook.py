"""Notebook: a function of a notebook, run by ranks that a cell starts.

The ranks are new processes, to which the function is copied. Forks of the notebook's process could not train: neither
autograd nor CUDA works in a fork of a process that has used it.
"""

import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from pipeshard.errors import ConfigurationError, RankError, explained, summary
from pipeshard.launch import threads
from pipeshard.script import OTHERS, fold

T = TypeVar("T")
CALL, ERROR = "call", ".error"  # files for the ranks, and of a rank


def notebook_launch(fn: Callable[..., T], ranks: int, *args: Any) -> list[T]:
    """Run `fn(*args)` on `ranks` processes of this machine; returns the result of each.

        losses = pipeshard.notebook_launch(train, 2)[0]

    The function, and the functions, classes and values of the notebook that it uses, are copied to each rank by
    cloudpickle; engines must be created inside the function. The output of all ranks appears in the cell.
    Interrupting the cell ends the ranks.

    Args:
        fn: a function of a cell or of a module.
        ranks: the number of processes: stages, times replicas and slices.
        args: arguments of `fn`.

    Raises ConfigurationError if cloudpickle is missing or cannot copy the function, and RankError if a rank fails, with
    the rank and its error; the traceback is above.
    """
    if not isinstance(ranks, int) or ranks < 1:
        raise ConfigurationError(f"ranks must be a positive integer, got {ranks!r}")
    with tempfile.TemporaryDirectory(prefix="pipeshard-") as name:
        folder = Path(name)
        (folder / CALL).write_bytes(_copied(fn, args))
        if status := _run_agent(folder, ranks):
            raise RankError(_failure(folder) or f"the ranks ended with status {status}: see the output above")
        return [pickle.loads((folder / str(rank)).read_bytes()) for rank in range(ranks)]


def _copied(fn: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    try:
        import cloudpickle
    except ImportError:
        raise ConfigurationError("notebook_launch requires cloudpickle: pip install 'pipeshard[notebook]'") from None
    with explained(partial(_uncopied, fn)):
        return cloudpickle.dumps((fn, args))


def _uncopied(fn: Any, error: Exception) -> ConfigurationError:
    return ConfigurationError(
        f"{getattr(fn, '__name__', fn)} cannot be copied to the ranks ({summary(error)}): create models, engines and "
        "files inside the function"
    )


def _run_agent(folder: Path, ranks: int) -> int:
    """Start the ranks, and print what they print until the last one has ended; returns the exit status."""
    command = [sys.executable, "-m", "pipeshard.launch", f"--nproc-per-node={ranks}", "--max-restarts=0"]
    path = os.pathsep.join(filter(None, sys.path))
    environment = {"OMP_NUM_THREADS": threads(ranks)} | os.environ | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
    agent = subprocess.Popen(
        [*command, "--module", __name__, str(folder)],
        env=environment, text=True, errors="replace", stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert agent.stdout is not None
    try:
        for line in agent.stdout:
            sys.stdout.write(line)
    finally:
        agent.terminate()  # unless it has ended
        agent.wait()
    return agent.returncode


def _failure(folder: Path) -> str | None:
    """The rank that failed first and its error; not one that another rank's error caused."""
    texts = {path: path.read_text() for path in sorted(folder.glob(f"*{ERROR}"), key=lambda path: path.stat().st_mtime)}
    first = min(texts, key=lambda path: texts[path].startswith(OTHERS), default=None)
    return f"rank {first.stem} failed: {texts[first]}" if first else None


def _be_rank(folder: Path) -> None:
    """Call the function as this rank, and leave its result or error in the folder."""
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
