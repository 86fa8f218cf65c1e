"""Files: atomic writes of files and folders, by all ranks together or in the background."""

import atexit
import contextlib
import glob
import logging
import os
import shutil
import threading
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch.distributed as dist

from pipeshard.distributed.collectives import gather_objects, reason
from pipeshard.distributed.peers import own_host
from pipeshard.distributed.watching import named
from pipeshard.errors import CheckpointError, PipeshardError, UsageError, of_all, summary
from pipeshard.script import exit_now

T = TypeVar("T")
_unraised: list[Exception] = []  # errors of background saves that no later call has raised


@atexit.register  # registered at import: runs after the function that reports the exit to the other ranks
def _exit() -> None:
    """End the process with exit code 1 if a background save failed and no later call has raised the save's error."""
    if _unraised:
        exit_now(1)


@contextmanager
def together(group: dist.ProcessGroup) -> Iterator[None]:
    """Context manager that all ranks of `group` exit together: if one rank fails, every rank raises CheckpointError."""
    failure: Exception | None = None
    try:
        yield
    except Exception as error:  # of any type, since the other ranks must not wait for this rank
        failure = error
    mine = str(failure) if isinstance(failure, PipeshardError) else failure and summary(failure)
    messages = gather_objects(mine, group)
    first = next((rank for rank, message in enumerate(messages) if message is not None), None)
    if first is not None:
        message, rank = str(messages[first]), dist.get_process_group_ranks(group)[first]
        own = len(set(messages)) == 1 or message.startswith("rank ")  # the same on all ranks, or names a rank
        shared = CheckpointError(message if own else f"{named(rank)}: {message}")
        raise (of_all(shared) if group.size() == dist.get_world_size() else shared) from failure


def of_first(make: Callable[[], T], group: dist.ProcessGroup) -> T:
    """Call `make` on the first rank of `group`, and return the result on every rank. If `make` fails, every rank raises
    CheckpointError."""
    made: Any = None
    with together(group):
        if group.rank() == 0:
            made = make()
    made, *_ = gather_objects(made, group)
    return made


def refuse_differing_folders(what: str, folder: Path, group: dist.ProcessGroup) -> None:
    """Raise UsageError, on every rank, if `folder` differs between ranks. `what` names the folder in the message."""
    if apart := differing_folders(folder, group):
        raise UsageError(
            f"{what} differs between ranks: {apart}. Pass the same folder on every rank. If the path contains "
            "a timestamp, compute the path on one rank and broadcast it"
        )


def differing_folders(folder: Path, group: dist.ProcessGroup) -> str:
    """The first two folders that differ between ranks, each with its rank, or "" if all ranks pass the same folder.
    Across machines, only the folders' names are compared, since a shared disk may be mounted under different paths."""
    return differing_names(folder.name, group) or differing_names(str(folder.resolve()), group, own_host())


def differing_names(name: str, group: dist.ProcessGroup, host: Sequence[str] = ()) -> str:
    """The first two names that differ between ranks with the same `host`, each with its rank, or "" if these ranks
    pass the same name."""
    first: dict[tuple[str, ...], tuple[int, str]] = {}
    ranks = dist.get_process_group_ranks(group)
    for rank, (there, other) in zip(ranks, gather_objects((tuple(host), name), group), strict=True):
        before, expected = first.setdefault(there, (rank, other))
        if other != expected:
            return f"{expected} on {named(before)}, but {other} on {named(rank)}"
    return ""


@contextmanager
def writes(path: Path) -> Iterator[None]:
    """Context manager that converts an error while writing `path` to a CheckpointError that contains the path and, if
    known, the free disk space."""
    try:
        yield
    except PipeshardError:
        raise
    except Exception as error:  # torch and safetensors have their own errors for a full disk
        with contextlib.suppress(OSError):
            free = shutil.disk_usage(path.parent).free
            raise CheckpointError(
                f"{path} cannot be written ({reason(error)}; free on this disk: {free / 1e6:,.0f} MB): free some "
                "space, check the folder's permissions, or save to another disk. Earlier checkpoints are unchanged"
            ) from error
        raise CheckpointError(
            f"{path} cannot be written ({reason(error)}): check that its folder exists and is writable"
        ) from error


ALL = "*"  # the pattern `own` for a folder in which all files belong to saves


def new_folder(target: Path, group: dist.ProcessGroup, mark: str = "", own: str = ALL) -> AbstractContextManager[Path]:
    """Context manager that yields an empty folder shared by all ranks. On exit, this folder replaces `target`.

    At every moment, `existing(target)` is either the complete previous folder or the complete new folder. `mark` is
    passed to `make_way`. Files whose names match the pattern `own` belong to saves, and are removed with the previous
    folder. Other entries of the previous folder are kept, unless the new folder has an entry of the same name. (If the
    file system does not support hard links, a kept entry is missing from `target` until it has been moved.) If `target`
    is a link, the folder that the link points to is replaced.
    """
    target = _without_links(target)
    return _written_folder(
        target, group, lambda: make_way(target, mark, own), lambda writing: place(writing, target, own)
    )


def make_way(target: Path, mark: str, own: str = ALL) -> None:
    """Check that a folder may replace `target`, and call `complete_save`. Raises CheckpointError if `target` is a file,
    a folder that cannot be renamed (a mount point, the working folder or a parent of it), or a non-empty folder without
    the file `mark`, which every saved folder contains. If `mark` is "", this file is not required."""
    if target.is_file():
        raise CheckpointError(f"{target} is a file, but the save writes a folder: choose another name")
    is_mount = os.path.ismount(target)
    if is_mount or (target.exists() and Path.cwd().is_relative_to(target)):
        what = "a mount point" if is_mount else "the working folder or one of its parents"
        raise CheckpointError(f"{target} is {what}, so a save cannot replace it: choose a new folder inside it")
    if mark and target.exists() and any(target.iterdir()) and not (target / mark).exists():
        raise CheckpointError(
            f"{target} is not a folder that a save wrote: it contains files, but no {mark}. Saving would delete these "
            "files: choose another folder"
        )
    complete_save(target, own)


def place(writing: Path, target: Path, own: str = ALL) -> None:
    """Replace `target` with `writing`, a complete folder that is synced to disk. Entries of an existing `target` that
    do not match `own` are kept: `writing` gets hard links to these entries before it is renamed."""
    old = hidden(target, "old")
    if target.exists():
        if own != ALL:
            _keep_others(target, writing, own, _link)
        os.rename(target, old)
    os.rename(writing, target)
    complete_save(target, own)
    sync(target.parent)


def new_file(target: Path, group: dist.ProcessGroup) -> AbstractContextManager[Path]:
    """Context manager that yields an empty folder shared by all ranks. The first rank must write a file named
    `target.name` into this folder. On exit, the file replaces `target`."""

    def prepare() -> None:
        if target.is_dir():
            raise CheckpointError(f"{target} is a folder, but the save writes a file: pass the path of a file in it")

    return _written_folder(target, group, prepare, lambda writing: os.replace(writing / target.name, target))


@contextmanager
def _written_folder(
    target: Path, group: dist.ProcessGroup, prepare: Callable[[], None], place: Callable[[Path], None]
) -> Iterator[Path]:
    """Context manager that yields a hidden folder next to `target`. The first rank calls `prepare` on entry, and calls
    `place` with the folder when all ranks have left the block."""
    writing = hidden(target, "writing")
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
    """Return `target` or, if a save was killed between its two renames, the hidden previous folder."""
    old = hidden(_without_links(target), "old")
    return old if old.exists() and not target.exists() else target


def _without_links(target: Path) -> Path:
    """Resolve the links in `target`, since a save renames folders and must not replace the user's link with a
    folder."""
    return Path(os.path.realpath(target))


def complete_save(target: Path, own: str = ALL) -> None:
    """Complete a save that may have been killed: restore `target` if it is missing, move the entries that do not match
    `own` from the hidden previous folder to `target`, and remove the hidden folder. Call it before a save changes
    entries of `target` that do not match `own`."""
    old = hidden(target := _without_links(target), "old")
    if old.exists() and not target.exists():
        os.rename(old, target)
    if old.is_dir() and own != ALL:
        _keep_others(old, target, own, shutil.move)
        sync(target)
    _discard(old, target)


def _discard(old: Path, target: Path) -> None:
    """Rename the previous folder of `target`, then remove it. On NFS, a file that a process has open stays in its
    folder, under a hidden name. In this case, a later save removes the renamed folder."""
    if old.exists():
        os.rename(old, hidden(target, f"removed-{uuid.uuid4().hex}"))
    for removed in target.parent.glob(f".{glob.escape(target.name)}.removed-{'[0-9a-f]' * 32}"):
        shutil.rmtree(removed, ignore_errors=True)
        if removed.exists():
            logger.warning("%s could not be removed: a file in it may be open. The next save tries again", removed)


def _keep_others(old: Path, new: Path, own: str, keep: Callable[[Path, Path], object]) -> None:
    """For each entry of `old` that neither matches `own` nor exists in `new`, call `keep` with the entry's paths in
    `old` and in `new`. Subfolders that exist in both folders are searched too, but not through symbolic links."""
    for entry in old.iterdir():
        kept = new / entry.name
        if entry.is_dir() and not entry.is_symlink() and kept.is_dir():
            _keep_others(entry, kept, own, keep)
        elif not fnmatchcase(entry.name, own) and not os.path.lexists(kept):
            keep(entry, kept)


def _link(entry: Path, path: Path) -> None:
    """Create hard links to a file, or to all files of a folder, if the file system and the permissions allow it."""
    try:
        if entry.is_dir() and not entry.is_symlink():
            shutil.copytree(entry, path, symlinks=True, copy_function=os.link)
        else:
            os.link(entry, path, follow_symlinks=False)
    except OSError:  # `complete_save` then moves the entry
        remove(path)


def sync(*paths: Path) -> None:
    """Flush these files and folders to disk."""
    for path in paths:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def remove(folder: Path) -> None:
    if folder.is_symlink() or folder.is_file():
        folder.unlink()
    elif folder.exists():
        shutil.rmtree(folder)


def hidden(target: Path, what: str) -> Path:
    return target.with_name(f".{target.name}.{what}")


logger = logging.getLogger("pipeshard")
# In seconds: the interval between heartbeats of a background save, and the silence after which a save counts as killed
BEAT, SILENT = 1.0, 8.0


@dataclass
class Save(ABC):
    """A save in which every stage writes its part. The first stage completes the checkpoint when all stages have
    written their parts.

    A subclass defines four methods: `write` writes this stage's part, `commit` completes the checkpoint on the first
    stage, `abandon` removes the files that this stage has written, and `beside` returns the path of a hidden file. The
    stages synchronize through such hidden files.
    """

    unit: ClassVar[str] = "stage"  # the noun for the number `stage` in messages

    target: Path
    stage: int
    stages: int
    token: str  # distinguishes the hidden files of this save
    failed: Exception | None = field(default=None, init=False)
    thread: threading.Thread | None = field(default=None, init=False, repr=False)

    @abstractmethod
    def write(self) -> None: ...

    @abstractmethod
    def commit(self) -> None: ...

    @abstractmethod
    def abandon(self) -> None: ...

    @abstractmethod
    def beside(self, name: str) -> Path: ...

    @property
    def _room(self) -> Path:
        """This stage's folder for incomplete files."""
        return self.beside(f"stage{self.stage}.writing")

    def start(self) -> None:
        """Write in a background thread, which Python joins at exit."""
        self.thread = threading.Thread(target=self._in_background, name="pipeshard-save")
        self.thread.start()

    def join(self) -> None:
        """Wait for the thread. The caller must raise the save's error, if any."""
        if self.thread is not None:
            self.thread.join()
        if self.failed is not None:
            _unraised.remove(self.failed)

    def _in_background(self) -> None:
        try:
            with self._beating():
                self.write()
            self._status(self.stage).write_text("done")  # the last write: the first stage may now remove the file
            if self.stage == 0:
                self._await_others()
                self.commit()
        except Exception as error:  # an error would only end this thread; the next save raises it
            self.failed = error
            _unraised.append(error)
            logger.error("saving %s failed on %s %d: %s", self.target, self.unit, self.stage, error)
            self.abandon()
            with contextlib.suppress(OSError):  # the first stage may have removed the status file's folder
                self._status(self.stage).write_text("failed")

    @contextmanager
    def _beating(self) -> Iterator[None]:
        """Context manager that writes heartbeats, so that the first stage does not wait for a process that was
        killed."""
        over = threading.Event()
        thread = threading.Thread(target=self._beat, args=[over], daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def _beat(self, over: threading.Event) -> None:
        beats = 0
        while not over.wait(BEAT):
            beats += 1
            with contextlib.suppress(OSError):
                self._status(self.stage).write_text(f"alive {beats}")

    def _await_others(self) -> None:
        others = range(1, self.stages)
        for stage in others:  # NFS may cache that a file does not exist, but rereads an existing file
            self._status(stage).touch()
        heard = {stage: ("", time.monotonic()) for stage in others}  # the last status, and the time of its change
        while heard:
            for stage, (before, _) in heard.items():
                with contextlib.suppress(OSError):
                    if (now := self._status(stage).read_text()) != before:
                        heard[stage] = now, time.monotonic()
            heard = {stage: last for stage, last in heard.items() if last[0] != "done"}
            failed = [stage for stage, (said, _) in heard.items() if said == "failed"]
            silent = [stage for stage, (_, at) in heard.items() if time.monotonic() > at + SILENT]
            if failed or silent:
                gone = failed or silent
                why = "could not write to the checkpoint" if failed else "stopped before the checkpoint was complete"
                raise CheckpointError(
                    f"{self.unit}{'s' if len(gone) > 1 else ''} {', '.join(map(str, gone))} {why} (see the logs); "
                    f"{self.target} is unchanged"
                )
            time.sleep(0.05)

    def _status(self, stage: int) -> Path:
        """A stage's status file: the count of its heartbeats, or "done" or "failed" once its save has ended."""
        return self.beside(f"stage{stage}.status")
