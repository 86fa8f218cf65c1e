"""Fixtures for all tests."""

import gc
import os
import signal
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings

os.environ.setdefault("MKL_CBWR", "COMPATIBLE")  # sums do not depend on memory addresses
os.environ.setdefault("OMP_NUM_THREADS", "1")  # several tests run at a time
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read once, when huggingface_hub is imported

from tests.covering import ALL, SEED, SHARE, drawn, is_of_share, one_in, waiting

if TYPE_CHECKING:
    from tests.pool import Pool  # imports torch, which the process that distributes tests does not need

settings.register_profile("untimed", deadline=None)  # a busy machine is not a failure
settings.load_profile("untimed")

PROCESSES = 12  # of the tests whose ranks may be threads, one in PROCESSES runs on processes
RANKS = os.environ.get("RANKS", "")  # "threads" or "processes", for all tests that support both
TURNS = int(os.environ.get("TURNS") or 64)  # of the tests that take turns, one in TURNS runs


@pytest.hookimpl(trylast=True)  # after tests have been deselected by their marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect all but n cases of each test marked `@pytest.mark.sampled(n)`, the tests marked `turns` whose turn it is
    not (unless a test is named), and all tests outside this run's share. With -k or a named case, keep all tests."""
    if config.option.keyword or any("[" in argument for argument in config.args):
        return
    cases = defaultdict(list)
    for item in items:
        if marker := item.get_closest_marker("sampled"):
            cases[item.nodeid.partition("[")[0], *marker.args].append(item)
    kept = {item for (_, count), of_test in cases.items() for item in drawn(of_test, count, kind_of)}
    left = {item for of_test in cases.values() for item in of_test if item not in kept}
    if not ALL and not any("::" in argument for argument in config.args):
        left.update(waiting_of([item for item in items if item not in left]))
    left.update(item for item in items if not is_of_share(item.nodeid))
    config.hook.pytest_deselected(items=[item for item in items if item in left])
    items[:] = [item for item in items if item not in left]


def pytest_collection_finish(session: pytest.Session) -> None:
    """Start the workers' forkserver as a copy of this process, which has imported the tests, and has not run any."""
    from tests.pool import prepare

    gc.collect()
    gc.freeze()  # otherwise, each collection scans a million objects that stay
    if any("workers" in getattr(item, "fixturenames", ()) for item in session.items):
        prepare(copied=True)


def kind_of(item: pytest.Item) -> Any:
    """The result of `kind` in `@pytest.mark.sampled(n, kind=function)` for a case's parameters, or None."""
    marker = item.get_closest_marker("sampled")
    kind = marker.kwargs.get("kind") if marker else None
    return kind(**item.callspec.params) if kind else None  # type: ignore[attr-defined]


def waiting_of(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """The tests marked `turns` whose turn it is not."""
    taking = {item.nodeid: str(item.path) for item in items if item.get_closest_marker("turns")}
    left = waiting(taking, {str(item.path) for item in items if item.nodeid not in taking}, TURNS)
    return [item for item in items if item.nodeid in left]


def pytest_report_header() -> str:
    if ALL:
        return f"every case of every test, share {SHARE}"
    return f"tests and cases of seed {SEED} (SAMPLE_SEED=N selects others)"


def is_local(item: pytest.Item) -> bool:
    """Whether a test's ranks are threads. In `make exact`, they are processes, unless RANKS is "threads"."""
    if item.get_closest_marker("local") is None or item.get_closest_marker("processes") is not None:
        return False
    return RANKS == "threads" if RANKS else not ALL and not one_in(PROCESSES, item.nodeid)


@pytest.fixture(autouse=True)
def no_group() -> Iterator[None]:
    """Destroy a process group that a test has left in this process, which would change later tests."""
    yield
    if (distributed := sys.modules.get("torch.distributed")) is not None and distributed.is_initialized():
        distributed.destroy_process_group()


@pytest.fixture
def pool(request: pytest.FixtureRequest, workers: "Pool") -> "Pool":
    """The ranks: `pool.run(function, world_size, *args)` calls a function on every rank. Ranks are worker processes, or
    the threads of one worker if the test or its module is marked `local` (see `is_local`)."""
    from tests.local import LocalPool  # imports the engine, which not every run of tests needs

    return LocalPool(workers) if is_local(request.node) else workers


@pytest.fixture(scope="session")
def workers() -> Iterator["Pool"]:
    """The worker processes."""
    from tests.pool import Pool

    pool = Pool()
    yield pool
    (forkserver,) = pool.run(os.getppid, 1)
    pool.shutdown()
    os.kill(forkserver, signal.SIGKILL)  # otherwise it would take seconds to unload its modules
