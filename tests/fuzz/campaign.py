"""Campaign: many inputs for the parsers, in separate processes, and the result of each."""

import os
import re
import resource
import shutil
import signal
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import ceil
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from tqdm import tqdm

from pipeshard.distributed.collectives import reason
from pipeshard.errors import CheckpointError
from tests.fuzz.mutation import Mutator
from tests.fuzz.parsers import Parser

PATIENCE = 5.0  # seconds of the processor that one input may take
GROWTH = 64 << 10  # KiB by which one input may raise the memory that a process has had at most
SPACE = 1 << 30  # bytes of addresses that a worker may take beyond those that it begins with
CHUNK = 500
MEMORY = Path("/dev/shm")


class Overtime(BaseException):
    """An input that takes too long."""


@dataclass
class Crash:
    """An input of which a parser did something else than to read it or to refuse it by name."""

    parser: str
    number: int
    what: str
    content: bytes


@dataclass
class Tally:
    """What became of the inputs of one parser. `refusals` counts them by what was said."""

    accepted: int = 0
    refusals: Counter[str] = field(default_factory=Counter)
    crashes: list[Crash] = field(default_factory=list)
    peak: int = 0  # MiB that a process has had at most

    @property
    def refused(self) -> int:
        return self.refusals.total()

    @property
    def inputs(self) -> int:
        return self.accepted + self.refused + len(self.crashes)

    def add(self, other: "Tally") -> None:
        self.accepted += other.accepted
        self.refusals += other.refusals
        self.crashes += other.crashes
        self.peak = max(self.peak, other.peak)


def campaign(parsers: Sequence[Parser], inputs: int, seed: int, processes: int, show: bool = True) -> dict[str, Tally]:
    """Try `inputs` times each parser's share of inputs; it ends when a worker dies, with what it was trying."""
    base = Path(tempfile.mkdtemp(prefix="fuzz-", dir=MEMORY if MEMORY.is_dir() else None))
    tallies = {parser.name: Tally() for parser in parsers}
    jobs = iter(_jobs(parsers, inputs, seed))
    total = sum(ceil(inputs * parser.share) for parser in parsers)
    executor = ProcessPoolExecutor(processes, get_context("fork"), _limit)
    try:
        with executor, tqdm(total=total, unit="input", disable=not show) as bar:
            running: dict[Any, tuple[Parser, range]] = {}
            while True:
                while len(running) < 2 * processes and (job := next(jobs, None)) is not None:
                    running[executor.submit(trial, *job, base)] = job
                if not running:
                    break
                for done in wait(running, return_when=FIRST_COMPLETED).done:
                    parser, numbers = running.pop(done)
                    tallies[parser.name].add(done.result())
                    bar.update(len(numbers))
    except BrokenProcessPool:
        for parser in parsers:
            for file in sorted(base.glob(f"*/{parser.name}/inside/{parser.file}")):
                what = "a process died; this is what one of them was trying"
                tallies[parser.name].crashes.append(Crash(parser.name, -1, what, file.read_bytes()))
    finally:
        shutil.rmtree(base, ignore_errors=True)
    return tallies


def trial(parser: Parser, numbers: range, base: Path) -> Tally:
    """Try the inputs of these numbers, in a folder of this process within `base`."""
    folder = base / str(os.getpid()) / parser.name / "inside"
    if not folder.is_dir():
        folder.mkdir(parents=True)
        parser.prepare(folder)
    tally, mutator = Tally(), Mutator(parser.seeds, parser.tokens)
    for number in numbers:
        content = mutator.make(number)
        try:
            refusal = attempt(parser, content, folder)
        except Unnamed as error:
            tally.crashes.append(Crash(parser.name, number, str(error), content))
            continue
        if refusal:
            tally.refusals[refusal] += 1
        else:
            tally.accepted += 1
    tally.peak = _peak() >> 10
    return tally


class Unnamed(Exception):
    """What a parser raised that is no CheckpointError, or that it did."""


def attempt(parser: Parser, content: bytes, folder: Path) -> str:
    """The kind of refusal; "" for what was read. Raises Unnamed for anything else."""
    file, before = folder / parser.file, _peak()
    file.write_bytes(content)
    refusal = ""
    try:
        with _timed():
            parser.parse(file)
    except CheckpointError as error:
        refusal = _kind(str(error), folder, parser.file)
        if cause := _absurd(error):
            raise Unnamed(f"it was allocated, in vain: {cause}") from error
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a panic of Rust is no Exception
        raise Unnamed(reason(error)) from error
    if _peak() - before > GROWTH:
        raise Unnamed(f"it took {(_peak() - before) >> 10} MiB")
    return refusal


def _absurd(error: BaseException | None) -> str:
    """What of the causes of an error was a lack of memory."""
    while error is not None:
        if isinstance(error, MemoryError) or "allocate memory" in str(error):
            return reason(error)
        error = error.__cause__ or error.__context__
    return ""


def _kind(message: str, folder: Path, name: str) -> str:
    """A message without what is particular to the input."""
    text = message.replace(str(folder), "").replace("Error while deserializing header: ", "").replace(f"/{name}", "")
    return re.sub(r"'[^']*'|\"[^\"]*\"|`[^`]*`|\[[^]]*\]|\([\d, ]*\)|-?\d[\w.+]*", "_", text)[:160]


def _jobs(parsers: Sequence[Parser], inputs: int, seed: int) -> Iterator[tuple[Parser, range]]:
    """Chunks of numbers, the parsers' in turn."""
    lengths = {parser.name: ceil(inputs * parser.share) for parser in parsers}
    for start in range(0, max(lengths.values()), CHUNK):
        for parser in parsers:
            if start < lengths[parser.name]:
                first = (seed << 40) + start
                yield parser, range(first, first + min(CHUNK, lengths[parser.name] - start))


def _limit() -> None:
    """In a worker: what allocates absurdly is to fail, whether it uses the memory or not."""
    pages = int(Path("/proc/self/statm").read_text().split()[0]) if Path("/proc/self/statm").exists() else None
    if pages is not None:
        size = pages * resource.getpagesize() + SPACE
        resource.setrlimit(resource.RLIMIT_AS, (size, size))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


@contextmanager
def _timed() -> Iterator[None]:
    def end(*_: Any) -> None:
        raise Overtime(f"it took more than {PATIENCE} s")

    before = signal.signal(signal.SIGVTALRM, end)
    signal.setitimer(signal.ITIMER_VIRTUAL, PATIENCE)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def _peak() -> int:
    """KiB that this process has had at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
