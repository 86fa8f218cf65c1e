"""Passed: the transformers classes that docs/parity.md shows as exact, for the transformers version of that page.

`make parity` writes passed.json. With another minor version of transformers, the result for a class may differ.
"""

import functools
import json
from importlib.metadata import version
from importlib.resources import files


@functools.cache
def passed() -> frozenset[str]:
    """The names of the classes, or an empty set if the minor versions of the installed transformers and of the page
    differ."""
    found = json.loads(files("pipeshard.verify").joinpath("passed.json").read_text())
    same = found["transformers"].split(".")[:2] == version("transformers").split(".")[:2]
    return frozenset(found["classes"]) if same else frozenset()
