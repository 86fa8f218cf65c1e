"""Passed: the classes of transformers that docs/parity.md shows exact, and the version of transformers it used.

`make parity` writes passed.json. Another minor version of transformers may have changed any of them.
"""

import functools
import json
from importlib.metadata import version
from importlib.resources import files


@functools.cache
def passed() -> frozenset[str]:
    """The names of the classes; empty if the version of transformers differs from that of the page."""
    found = json.loads(files("pipeshard.verify").joinpath("passed.json").read_text())
    same = found["transformers"].split(".")[:2] == version("transformers").split(".")[:2]
    return frozenset(found["classes"]) if same else frozenset()
