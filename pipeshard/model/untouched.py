"""Untouched: a model that was run and is as it was before."""

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn


def without_cache(model: nn.Module) -> list[Any]:
    """Turn key-value caches off in every (sub-)config that has them on, and return those configs.

    Caches are for generation; filled inside units, they would carry values past the boundaries.
    """
    configs = {id(module.config): module.config for module in model.modules() if hasattr(module, "config")}
    parts = [part for config in configs.values() for part in (config, *getattr(config, "__dict__", {}).values())]
    cached = [part for part in parts if getattr(part, "use_cache", None) is True]
    for part in cached:
        part.use_cache = False
    return cached


@contextlib.contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Undo what a run leaves in the modules: cached tensors, counters, statistics, hooks. No caches inside."""
    cached = without_cache(model)
    before = [
        (module, dict(module.__dict__), {k: dict(v) for k, v in module.__dict__.items() if isinstance(v, dict)})
        for module in model.modules()
    ]
    values = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        for buffer, value in values:
            buffer.data.copy_(value)
        for config in cached:
            config.use_cache = True
        for module, attributes, inner in before:
            module.__dict__.clear()
            module.__dict__.update(attributes)
            for key, content in inner.items():
                module.__dict__[key].clear()
                module.__dict__[key].update(content)
