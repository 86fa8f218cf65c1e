"""Switches: models that depend on state outside of them: a global of another module, or state of Python itself."""

import functools
import threading
from contextvars import ContextVar
from typing import Any

IS_ON = False
LOCAL = threading.local()
LOCAL.is_on = False
CONTEXT: ContextVar[bool] = ContextVar("is_on", default=False)


def function() -> Any:
    return function.is_on  # type: ignore[attr-defined]


function.is_on = False  # type: ignore[attr-defined]


@functools.cache
def cached() -> dict[str, bool]:
    return {"is_on": False}


def switch(is_on: bool) -> None:
    global IS_ON
    IS_ON = LOCAL.is_on = function.is_on = cached()["is_on"] = is_on  # type: ignore[attr-defined]
    CONTEXT.set(is_on)
