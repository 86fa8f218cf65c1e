"""Garbage: a pause of Python's garbage collector."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """Context manager and decorator for code that creates many objects and keeps them, such as a trace of a large
    model. The collector would visit all these objects repeatedly. These visits took a third of the time of a plan for
    80 layers. Objects without reference cycles are freed as usual."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
