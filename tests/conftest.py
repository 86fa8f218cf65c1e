"""Fixtures for all tests."""

import os
import signal
from collections.abc import Iterator

import pytest

os.environ.setdefault("MKL_CBWR", "COMPATIBLE")  # sums that do not depend on where in memory the numbers are
os.environ.setdefault("OMP_NUM_THREADS", "1")  # several tests run at a time

from tests.pool import Pool

_pool = Pool()


def pytest_itemcollected(item: pytest.Item) -> None:
    """The first test that needs workers makes them import while the other tests are still being collected."""
    if "pool" in getattr(item, "fixturenames", ()):
        _pool.prepare()


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Worker processes: `pool.run(function, world_size, *args)` calls a function on every rank."""
    yield _pool
    (forkserver,) = _pool.run(os.getppid, 1)
    _pool.shutdown()
    os.kill(forkserver, signal.SIGKILL)  # else it would spend seconds on unloading what it has imported
