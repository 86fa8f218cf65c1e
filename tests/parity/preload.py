"""Preload: imports every architecture once, before workers are forked, instead of once in each of them."""

import contextlib
import gc

import transformers

import tests.parity.check  # noqa: F401
from tests.parity.entries import all_entries

for entry in all_entries():
    with contextlib.suppress(Exception):  # the entry's own check shows it
        getattr(transformers, entry.class_name)
gc.collect()
gc.freeze()  # workers share these objects, and need not go through them at every collection
