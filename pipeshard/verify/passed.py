"""Passed: the transformers classes that docs/parity.md shows as exact, for the transformers version of that page.

`make parity` writes passed.json. Another minor version of transformers may have changed any of the classes.
"""

import functools
import json
from importlib.metadata import version
from importlib.resources import files


@functools.cache
def passed() -> frozenset[str]:
    """The names of the classes; empty if the minor version of the installed transformers differs from the page's."""
    found = json.loads(files("pipeshard.verify").joinpath("passed.json").read_text())
    same = found["transformers"].split(".")[:2] == version("transformers").split(".")[:2]
    return frozenset(found["classes"]) if same else frozenset()
