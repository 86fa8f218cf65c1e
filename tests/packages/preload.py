"""Preload: imports every package once, before workers are forked, instead of once in each of them."""

import contextlib
import gc

from tests.packages.catalog import FILES, models_of

for package in FILES:
    with contextlib.suppress(Exception):  # the package's own models show it
        models_of(package)

import tests.packages.check  # noqa: E402, F401

gc.collect()
gc.freeze()  # workers share these objects, and need not go through them at every collection
