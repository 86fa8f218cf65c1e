"""State folder: writing and checking the files of a training state, and locking their folder.

A folder is complete if it contains a manifest, and every file has the size that the manifest lists. The manifest also
contains the SHA-256 of each file, in the format of `sha256sum`, to detect flipped bits and files of other steps. Each
rank computes some of these checksums. After a save, reading the files again takes little time, since they are still in
the page cache.

Two jobs that save into one folder (such as a requeued job and an earlier run of this job that has not ended) would
remove each other's unfinished saves. Therefore, the first rank locks the folder. It holds the lock as long as a model
(or a Trainer) that saves into the folder exists. The kernel releases the lock when the process exits for any reason.
Forked children do not hold the lock. On NFS, which cannot lock folders, the first rank locks the file `.writer` in the
folder.

With `use_async=True`, every rank writes its part from copies:

    all ranks, between two steps      copy weights, optimizer and the rest ──▶ continue training
    a thread of each rank             writes its files and their checksums into a hidden folder ──▶ marks its part done
    the first rank's thread           waits for all marks ──▶ writes the manifest ──▶ renames the folder
"""

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import shutil
import socket
import time
import weakref
from collections.abc import Callable, Collection
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from reprlib import repr as short
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from pipeshard.checkpoint.files import Save, of_first, place, sync, together, writes
from pipeshard.checkpoint.optimizer import DESCRIPTION, OptimizerPart
from pipeshard.checkpoint.safetensors_files import write_files
from pipeshard.checkpoint.save import FolderSave
from pipeshard.checkpoint.untrusted import is_inside, read_document
from pipeshard.distributed.collectives import gather_objects
from pipeshard.errors import CheckpointError, summary

logger = logging.getLogger("pipeshard")
MANIFEST_FORMAT = 1
MANIFEST, LOCK = "manifest.json", ".writer"
MODEL, OPTIMIZER, REST = "model", "optimizer", "training.pt"  # the parts of a state
SCHEDULER = "lr_scheduler"  # a key of training.pt
MARKS = ".marks"  # a folder in the hidden folder, through which the ranks synchronize


def by_name(name: str, given: Any) -> dict[str, Any]:
    """The given objects (a single object, a list or tuple, or None), by their names in a training state: `name`,
    `name-1` and so on."""
    every = [] if given is None else given if isinstance(given, list | tuple) else [given]
    return {f"{name}-{k}" if k else name: each for k, each in enumerate(every)}


def seal(folder: Path, step: int, stages: int, group: dist.ProcessGroup, others: Collection[str] = frozenset()) -> None:
    """Write the manifest of all files that the first rank finds in the folder, except the relative paths in `others`.
    Call it on all ranks, since each rank computes some of the checksums."""

    def files() -> list[str]:
        here = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
        return sorted(here.difference(others))

    sums = _shared_out(folder, of_first(files, group), group)
    with together(group):
        if group.rank() == 0:
            write_manifest(folder, step, stages, sums)


def write_manifest(folder: Path, step: int, stages: int, sums: dict[str, str]) -> None:
    versions = {name: version(name) for name in ("pipeshard", "torch", "transformers")}
    files = {name: (folder / name).stat().st_size for name in sums}
    manifest = {
        "format": MANIFEST_FORMAT,
        "step": step,
        "stages": stages,
        "versions": versions,
        "files": files,
        "sha256": sums,
    }
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")


def flaw(folder: Path, step: int | None = None) -> str:
    """The reason why the folder is not a complete training state, or "" if the folder is complete. With `step`, the
    state must also belong to this step. Checks only the manifest, and the names and sizes of the files that it lists.
    Never raises an error."""
    try:
        manifest = read_document(folder / MANIFEST)
        if manifest.get("format") != MANIFEST_FORMAT:
            return f"its format is {short(manifest.get('format'))}, not {MANIFEST_FORMAT}"
        files = manifest.get("files")
        if not isinstance(files, dict) or not files:
            return f"{MANIFEST} lists no files"
        if not isinstance(manifest.get("sha256", {}), dict):
            return f"sha256 in {MANIFEST} is not a JSON object"
        if step not in (None, manifest.get("step")):
            return f"{MANIFEST} belongs to step {short(manifest.get('step'))}"
        for name, size in files.items():
            if not is_inside(name):
                return f"{MANIFEST} lists {short(name)}, which is not a file in its folder"
            if type(size) is not int or (folder / name).stat().st_size != size:
                return f"the size of {short(name)} differs from the {short(size)} bytes that {MANIFEST} lists"
    except (OSError, ValueError) as error:
        return summary(error)
    return ""


def damage(folder: Path, group: dist.ProcessGroup) -> str:
    """Compare the files of a complete state with their checksums. Returns a message that names the files that have
    changed since the save, or "" if no file has changed. Call it on all ranks, since each rank checks some of the
    files. States that were saved before version 0.2 have no checksums, and are not checked.

    Raises CheckpointError, on every rank, if a file cannot be read: such a file may be intact, so it is not reported as
    changed.
    """
    with together(group):
        manifest = read_document(folder / MANIFEST)
    expected = manifest.get("sha256", {})
    names = sorted(manifest["files"].keys() & expected.keys())
    found = _shared_out(folder, names, group)
    changed = [name for name in names if found[name] != expected[name]]
    more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
    return f"{', '.join(changed[:3])}{more}: the SHA-256 checksum has changed since the save" if changed else ""


def _shared_out(folder: Path, names: list[str], group: dist.ProcessGroup) -> dict[str, str]:
    """Compute the SHA-256 of each file. Each rank reads some of the files. Raises CheckpointError, on every rank, if a
    file cannot be read."""
    with together(group):
        own = {name: sum_of(folder / name) for name in names[group.rank() :: group.size()]}
    return {name: value for of_rank in gather_objects(own, group) for name, value in of_rank.items()}


def sum_of(file: Path) -> str:
    """The SHA-256 of a file. Raises CheckpointError if the file cannot be read."""
    try:
        with file.open("rb") as content:
            return hashlib.file_digest(content, "sha256").hexdigest()
    except OSError as error:
        raise CheckpointError(
            f"{file} cannot be read ({summary(error)}), so its checksum is unknown: check the disk and the file's "
            "permissions, then try again"
        ) from error


def lock(parent: Path, owner: Any, patience: float = 0.0) -> None:
    """Lock the folder `parent` until every owner of the lock is freed, so that no other process saves into this folder.
    Raises CheckpointError if another process holds the lock and, on NFS, does not release it within `patience` seconds.

    On a file system without locks, other processes can still save into `parent`.
    """
    parent.mkdir(parents=True, exist_ok=True)
    key = str(parent.resolve())
    if key not in _held:
        _held[key] = _locked(parent, patience), set()
    owners = _held[key][1]
    if id(owner) not in owners:
        owners.add(id(owner))
        weakref.finalize(owner, _release, key, id(owner))


def _release(key: str, owner: int) -> None:
    """Remove an owner that has been freed. If it was the last owner, release the folder's lock."""
    if key not in _held:  # in a forked child
        return
    handle, owners = _held[key]
    owners.discard(owner)
    if not owners:
        os.close(handle)
        del _held[key]


def _locked(parent: Path, patience: float) -> int:
    """Lock the folder or, if it cannot be locked, a file in it. Returns the file descriptor."""
    handle = os.open(parent, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return handle
    except BlockingIOError as error:
        who = _holder(handle)
        os.close(handle)
        raise _other_writer(parent, who) from error
    except OSError:  # NFS can only lock files
        os.close(handle)
        return _locked_file(parent, patience)


def _locked_file(parent: Path, patience: float) -> int:
    """Lock the file LOCK in the folder, if the file system supports locks. Returns the file descriptor."""
    handle = os.open(parent / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    waited = 0
    while (who := _other_holder(handle)) is not None:
        if waited >= patience:
            os.close(handle)
            raise _other_writer(parent, who)
        if not waited:
            logger.warning("%s holds the lock of %s: waiting for up to %g seconds", who or ANOTHER, parent, patience)
        time.sleep(1)
        waited += 1
    os.ftruncate(handle, 0)
    os.pwrite(handle, f"process {os.getpid()} of {socket.gethostname()}\n".encode(), 0)
    return handle


def _other_holder(handle: int) -> str | None:
    """Lock this file, if the file system supports locks. If another process holds the lock, returns a description of
    that process ("" if unknown), otherwise None."""
    try:
        fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return os.pread(handle, 200, 0).decode(errors="replace").strip()
    except OSError:  # this file system has no locks
        pass
    return None


def _holder(handle: int) -> str:
    """The process that holds this folder's lock according to the kernel, or "" if unknown."""
    number = f":{os.fstat(handle).st_ino}"
    with contextlib.suppress(OSError):
        for line in Path("/proc/locks").read_text().splitlines():
            fields = line.split()  # "1: FLOCK ADVISORY WRITE <process> <device>:<inode> 0 EOF"
            if "FLOCK" in fields and fields[5].endswith(number):
                return f"process {fields[4]} of {socket.gethostname()}"
    return ""


def _other_writer(parent: Path, who: str) -> CheckpointError:
    return CheckpointError(
        f"{who or ANOTHER} also saves to {parent}: two jobs that save into one folder would delete each "
        "other's states. Stop the other process first, or save to another folder"
    )


ANOTHER = "another process"
# By folder, the open file and the ids of the owners. Closing another descriptor of the file would release the lock.
_held: dict[str, tuple[int, set[int]]] = {}


def _leave_locks() -> None:
    """Close the locked files in a forked child. Otherwise, a child that outlives this process would keep the locks."""
    for handle, _ in _held.values():
        os.close(handle)
    _held.clear()


os.register_at_fork(after_in_child=_leave_locks)


@dataclass
class StateSave(Save):
    """A save of a training state, planned by all ranks together. Here, `stage` is this rank, and `stages` is the number
    of ranks. Each rank writes copies of its data."""

    unit: ClassVar[str] = "rank"

    writing: Path  # the hidden folder
    models: list[FolderSave]  # empty on ranks that do not write models
    optimizers: dict[str, OptimizerPart]  # by folder
    rest: dict[str, Any] | None  # on the first rank: the content of training.pt
    step: int
    pipeline_stages: int
    finish: Callable[[], None]  # called on the first rank once the state is complete

    def write(self) -> None:
        own: list[Path] = []
        for model in self.models:
            model.write()
            shards = [model.target / name for name in model.parts]
            own += [shard for shard in shards if shard.exists()]  # a single shard is still hidden
        documents = {self.writing / REST: self.rest}
        for name, (files, description) in self.optimizers.items():
            own += write_files(files, self.writing / name, self.stage)
            documents[self.writing / name / DESCRIPTION] = description
        for file, content in documents.items():
            if content is not None:
                with writes(file):
                    torch.save(content, file)
                own.append(file)
        sums = {str(path.relative_to(self.writing)): sum_of(path) for path in own}
        self.beside(f"sums{self.stage}").write_text(json.dumps(sums))

    def commit(self) -> None:
        for model in self.models:
            model.commit()
        sums: dict[str, str] = {}
        for stage in range(self.stages):
            sums |= json.loads(self.beside(f"sums{stage}").read_text())
        shutil.rmtree(self.writing / MARKS)
        names = [str(path.relative_to(self.writing)) for path in self.writing.rglob("*") if path.is_file()]
        found = {name: sums.get(name) or sum_of(self.writing / name) for name in sorted(names)}
        write_manifest(self.writing, self.step, self.pipeline_stages, found)
        sync(self.writing, *self.writing.rglob("*"))
        place(self.writing, self.target)
        self.finish()

    def abandon(self) -> None:
        for model in self.models:
            model.abandon()
        if self.stage == 0:
            shutil.rmtree(self.writing, ignore_errors=True)

    def beside(self, name: str) -> Path:
        return self.writing / MARKS / name
