"""Call stack: the line of the model's code that is running, and the modules whose methods are running."""

import inspect
import os
import sysconfig
import traceback
from collections.abc import Mapping

import torch

STANDARD_LIBRARY = sysconfig.get_paths()["stdlib"]  # may contain site-packages


def running_modules(modules: Mapping[int, str]) -> list[str]:
    """The names of the given modules that have a method on the call stack, innermost first."""
    found: dict[str, None] = {}
    frame = inspect.currentframe()
    while frame is not None and frame.f_back is not None:
        frame = frame.f_back
        name = modules.get(id(frame.f_locals.get("self")))
        if name is not None:
            found[name] = None
    return list(found)


def where() -> str:
    """The innermost line of the model's code on the call stack, with its file and number."""
    for frame in reversed(traceback.extract_stack()):
        if _is_model_code(frame.filename):
            name = frame.filename.rpartition("site-packages" + os.sep)[2]
            return f"{name}:{frame.lineno}: {frame.line}"
    return "an unknown line"


def _is_model_code(file: str) -> bool:
    """Whether a file belongs neither to pipeshard, nor to torch, nor to Python's standard library."""
    package, library = os.path.dirname(os.path.dirname(__file__)), os.path.dirname(torch.__file__)
    if file.startswith((package + os.sep, library + os.sep, "<")):
        return False
    installed = f"{os.sep}site-packages{os.sep}" in file or f"{os.sep}dist-packages{os.sep}" in file
    return installed or not file.startswith(STANDARD_LIBRARY + os.sep)
