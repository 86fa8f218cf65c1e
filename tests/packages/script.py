"""Script: runs a script with torchvision's operators declared: `python -m tests.packages.script FILE ...`."""

from __future__ import annotations

import runpy
import sys
from functools import partial

from pipeshard import launch

if __name__ == "__main__":  # importing tests.packages has declared them
    sys.argv = sys.argv[1:]
    launch.start = partial(launch.start, program=["--module", "tests.packages.script", *sys.argv])  # its ranks, too
    runpy.run_path(sys.argv[0], run_name="__main__")
