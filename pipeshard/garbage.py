"""Garbage: a pause of Python's garbage collector."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """Context manager, also a decorator, for code that creates many objects which it keeps, such as a trace of a large
    model. The collector visits all of them again and again: it took a third of the time of a plan for 80 layers.
    Objects without cycles are freed as usual."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
