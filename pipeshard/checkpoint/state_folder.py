"""State folder: a whole training state on disk, its files, and how they are written.

A folder is complete if it has its manifest and every file has the size given there. Disks flip
bits and people mix folders, so the manifest also has each file's SHA-256, as `sha256sum` prints it. Reading files that
have just been written costs little, as they are still in the page cache; the ranks divide the work.

Two jobs that save into one folder (a requeued one and its zombie) would remove each other's unfinished saves, so the
first rank locks the folder while its model exists. The kernel releases such a lock when a process ends in any way;
forked children do not have it. NFS cannot lock folders: there a file `.writer` is locked.

In the background, every rank writes its part from copies:

    all ranks, between two steps      copy weights, optimizer and the rest ──▶ go on training
    a thread of each rank             writes its files into a hidden folder, with their sums ──▶ marks its part done
    the first rank's thread           waits for all marks ──▶ manifest ──▶ the folder gets its name
"""

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import socket
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from reprlib import repr as short
from typing import Any

import torch
import torch.distributed as dist

from pipeshard.checkpoint.files import Save, place, sync, together, writes
from pipeshard.checkpoint.optimizer import DESCRIPTION
from pipeshard.checkpoint.safetensors_files import Content as FileContent
from pipeshard.checkpoint.safetensors_files import write_files
from pipeshard.checkpoint.save import FolderSave
from pipeshard.checkpoint.untrusted import is_inside, read_document
from pipeshard.distributed.collectives import gather_objects
from pipeshard.errors import CheckpointError, summary

MANIFEST_FORMAT = 1
MANIFEST, LOCK = "manifest.json", ".writer"
MODEL, OPTIMIZER, REST = "model", "optimizer", "training.pt"  # the parts of a state
MARKS = ".marks"  # in the hidden folder, of ranks whose part is done


def seal(folder: Path, step: int, stages: int, group: dist.ProcessGroup) -> None:
    """Write the manifest of all files that the first rank finds in the folder. Call it on all ranks: each reads
    some."""
    with together(group):
        here = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
        sums = _shared_out(folder, gather_objects(here, group)[0], group)
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
    """The reason why the folder is not a complete training state (of that step), by the names and sizes of its files;
    "" if it is. Never raises."""
    try:
        manifest = read_document(folder / MANIFEST)
        if manifest.get("format") != MANIFEST_FORMAT:
            return f"its format is {short(manifest.get('format'))}, not {MANIFEST_FORMAT}"
        files = manifest.get("files")
        if not isinstance(files, dict) or not files:
            return f"{MANIFEST} lists no files"
        if not isinstance(manifest.get("sha256", {}), dict):
            return f"{MANIFEST} has no checksums by file"
        if step not in (None, manifest.get("step")):
            return f"{MANIFEST} belongs to step {short(manifest.get('step'))}"
        for name, size in files.items():
            if not is_inside(name):
                return f"{MANIFEST} lists {short(name)}, which is not a file in its folder"
            if type(size) is not int or (folder / name).stat().st_size != size:
                return f"the size of {short(name)} is not {short(size)}, the size in {MANIFEST}"
    except (OSError, ValueError) as error:
        return summary(error)
    return ""


def damage(folder: Path, group: dist.ProcessGroup) -> str:
    """A text that names the files of a complete state that have changed since the save; "" if none has. Call it on all
    ranks: each reads its share. States from before 0.2 have no checksums, and pass."""
    manifest = read_document(folder / MANIFEST)
    expected = manifest.get("sha256", {})
    names = sorted(manifest["files"].keys() & expected.keys())
    found = _shared_out(folder, names, group)
    changed = [name for name in names if found[name] != expected[name]]
    more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
    return f"{', '.join(changed[:3])}{more}: the SHA-256 checksum has changed since the save" if changed else ""


def _shared_out(folder: Path, names: list[str], group: dist.ProcessGroup) -> dict[str, str]:
    """The SHA-256 of each file, or why it cannot be read; each rank reads some."""
    own = {name: _file_sum(folder / name) for name in names[group.rank() :: group.size()]}
    return {name: value for of_rank in gather_objects(own, group) for name, value in of_rank.items()}


def sum_of(file: Path) -> str:
    """The SHA-256 of a file; raises OSError if the file cannot be read."""
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def _file_sum(file: Path) -> str:
    try:
        return sum_of(file)
    except OSError as error:
        return summary(error)


def lock(parent: Path, owner: Any) -> None:
    """Let no other process save into `parent` until `owner` is freed; raises CheckpointError if another process may.

    A file system without locks does not prevent this.
    """
    parent.mkdir(parents=True, exist_ok=True)
    key = str(parent.resolve())
    if key in _held:
        return
    _held[key] = _locked(parent)
    weakref.finalize(owner, lambda: os.close(_held.pop(key)))


def _locked(parent: Path) -> int:
    """A handle of the folder, which is locked."""
    handle = os.open(parent, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return handle
    except BlockingIOError as error:
        who = _holder(handle)
        os.close(handle)
        raise _other_writer(parent, who) from error
    except OSError:  # NFS locks files alone
        os.close(handle)
        return _locked_file(parent)


def _locked_file(parent: Path) -> int:
    """The lock on a file in the folder, if the file system cannot lock folders."""
    handle = os.open(parent / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError) as error:
        who = os.pread(handle, 200, 0).decode(errors="replace").strip()
        os.close(handle)
        raise _other_writer(parent, who) from error
    except OSError:  # no locks here
        pass
    os.ftruncate(handle, 0)
    os.pwrite(handle, f"process {os.getpid()} of {socket.gethostname()}\n".encode(), 0)
    return handle


def _holder(handle: int) -> str:
    """The process that holds the lock of this folder, according to the kernel; "" if unknown."""
    number = f":{os.fstat(handle).st_ino}"
    with contextlib.suppress(OSError):
        for line in Path("/proc/locks").read_text().splitlines():
            fields = line.split()  # "1: FLOCK ADVISORY WRITE <process> <device>:<inode> 0 EOF"
            if "FLOCK" in fields and fields[5].endswith(number):
                return f"process {fields[4]} of {socket.gethostname()}"
    return ""


def _other_writer(parent: Path, who: str) -> CheckpointError:
    return CheckpointError(
        f"{who or 'another process'} is writing to {parent}: two jobs that save into one folder would delete each "
        "other's states. Stop the other process first, or save to another folder"
    )


_held: dict[str, int] = {}  # of this process, by folder: to close any other handle of a file would give its lock back


def _leave_locks() -> None:
    """Release the locks in a forked child, which may outlive this process."""
    for handle in _held.values():
        os.close(handle)
    _held.clear()


os.register_at_fork(after_in_child=_leave_locks)


@dataclass
class StateSave(Save):
    """A Save whose stages are all ranks: they plan together, and each copies the part that it writes."""

    writing: Path  # the hidden folder
    model: FolderSave | None  # on the ranks of the first replica
    optimizer: tuple[list[FileContent], dict[str, Any] | None]  # of `part_of`
    rest: dict[str, Any] | None  # on the first rank: what training.pt holds
    step: int
    pipeline_stages: int
    finish: Callable[[], None]  # on the first rank, once the state is complete

    def write(self) -> None:
        own: list[Path] = []
        if self.model is not None:
            self.model.write()
            shards = [self.model.target / name for name in self.model.parts]
            own += [shard for shard in shards if shard.exists()]  # a single one is still hidden
        files, description = self.optimizer
        own += write_files(files, self.writing / OPTIMIZER, self.stage)
        for content, file in (description, self.writing / OPTIMIZER / DESCRIPTION), (self.rest, self.writing / REST):
            if content is not None:
                with writes(file):
                    torch.save(content, file)
                own.append(file)
        sums = {str(path.relative_to(self.writing)): sum_of(path) for path in own}
        self.beside(f"sums{self.stage}").write_text(json.dumps(sums))

    def commit(self) -> None:
        if self.model is not None:
            self.model.commit()
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
        if self.model is not None:
            self.model.abandon()
        if self.stage == 0:
            shutil.rmtree(self.writing, ignore_errors=True)

    def beside(self, name: str) -> Path:
        return self.writing / MARKS / name
