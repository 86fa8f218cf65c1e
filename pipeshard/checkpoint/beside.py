"""Beside: what all ranks write together under another name, and one of them renames last."""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import torch.distributed as dist

from pipeshard.errors import CheckpointError, PipeshardError
from pipeshard.runtime.agreement import gather_objects
from pipeshard.runtime.watching import named


@contextmanager
def together(group: dist.ProcessGroup) -> Iterator[None]:
    """All ranks leave together: what one of them raised inside, each of them raises, as CheckpointError."""
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = error
    mine = str(failure) if isinstance(failure, PipeshardError) else failure and f"{type(failure).__name__}: {failure}"
    messages = gather_objects(mine, group)
    first = next((rank for rank, message in enumerate(messages) if message is not None), None)
    if first is not None:
        message, rank = str(messages[first]), dist.get_process_group_ranks(group)[first]
        own = len(set(messages)) == 1 or message.startswith("rank ")  # of all ranks, or of one that is named
        raise CheckpointError(message if own else f"{named(rank)}: {message}") from failure


def new_folder(target: Path, group: dist.ProcessGroup, mark: str) -> AbstractContextManager[Path]:
    """An empty folder for all ranks to write in, which at the end takes the place and the name of `target`.

    At every moment `existing(target)` is the previous folder or the new one, whole. `mark` is a file that each such
    folder has: a folder without it holds something else, and is refused, not replaced.
    """

    def prepare() -> None:
        if target.is_file():
            raise CheckpointError(f"{target} is a file, but a folder is to be written: choose another name")
        if target.exists() and any(target.iterdir()) and not (target / mark).exists():
            raise CheckpointError(f"{target} holds something else, which saving would replace: choose another folder")
        restore(target)

    def place(writing: Path) -> None:
        old = _hidden(target, "old")
        if target.exists():
            os.rename(target, old)
        os.rename(writing, target)
        remove(old)

    return _written(target, group, prepare, place)


def new_file(target: Path, group: dist.ProcessGroup) -> AbstractContextManager[Path]:
    """An empty folder for all ranks, in which the first one leaves a file called as `target`, which becomes it."""

    def prepare() -> None:
        if target.is_dir():
            raise CheckpointError(f"{target} is a folder, but a file is to be written: name a file in it")

    return _written(target, group, prepare, lambda writing: os.replace(writing / target.name, target))


@contextmanager
def _written(
    target: Path, group: dist.ProcessGroup, prepare: Callable[[], None], place: Callable[[Path], None]
) -> Iterator[Path]:
    """A hidden folder beside `target`; the first rank prepares before, and places it after all have written."""
    writing = _hidden(target, "writing")
    first = group.rank() == 0
    try:
        with together(group):
            if first:
                prepare()
                remove(writing)
                writing.mkdir(parents=True)
        with together(group):
            yield writing
        with together(group):
            if first:
                sync(writing, *writing.rglob("*"))
                place(writing)
                sync(target.parent)
    finally:
        if first:
            shutil.rmtree(writing, ignore_errors=True)


def existing(target: Path) -> Path:
    """`target`, or the folder that had its place when a save was killed between its two renames."""
    old = _hidden(target, "old")
    return old if old.exists() and not target.exists() else target


def restore(target: Path) -> None:
    """Undo what a save left that was killed at its renames: afterwards `target` alone is there."""
    old = _hidden(target, "old")
    if old.exists() and not target.exists():
        os.rename(old, target)
    remove(old)


def sync(*paths: Path) -> None:
    """Have what was written to these files and folders on disk."""
    for path in paths:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def remove(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)


def _hidden(target: Path, what: str) -> Path:
    return target.with_name(f".{target.name}.{what}")
