"""Call stack: the line of the model's code that is running, and the modules whose methods are running."""

import inspect
import linecache
import os
from collections.abc import Mapping
from traceback import walk_stack

from pipeshard.graph.packages import is_library


def running_modules(modules: Mapping[int, str]) -> list[str]:
    """The names of the given modules that have a method on the call stack, innermost first."""
    names = (modules.get(id(frame.f_locals.get("self"))) for frame, _ in walk_stack(inspect.currentframe()))
    return list(dict.fromkeys(name for name in names if name is not None))


def where() -> str:
    """The innermost line of the model's code on the call stack, with its file and number."""
    hint = ""
    for frame, line in walk_stack(inspect.currentframe()):
        file, module = frame.f_code.co_filename, frame.f_globals.get("__name__", "")
        if module == "torch.distributions.distribution":
            hint = " (torch.distributions validates these values: pass validate_args=False)"
        if not file.startswith("<") and not is_library(module):
            name = file.rpartition("site-packages" + os.sep)[2]
            return f"{name}:{line}: {linecache.getline(file, line, frame.f_globals).strip()}{hint}"
    return "an unknown line"
