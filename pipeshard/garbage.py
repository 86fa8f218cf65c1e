"""Garbage: a pause of Python's garbage collector, and functions that leave nothing for it."""

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


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


def weak(method: Callable[..., Any], otherwise: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """A function that calls `method` while its object exists, and `otherwise` afterwards. It does not keep the object
    alive. An optimizer that references its boosted optimizer would otherwise keep both, and all states, until Python's
    garbage collector runs, which it does at different times on each rank."""
    reference = weakref.WeakMethod(method)

    def call(*args: Any, **kwargs: Any) -> Any:
        present = reference() or otherwise
        return None if present is None else present(*args, **kwargs)

    return call
