"""Packages: the Python modules whose code a walk of Python state enters, and the modules that it skips.

A model from a package (diffusers, timm) reaches tens of thousands of objects through the package's registries, loaders
and dependencies, but a forward changes none of these objects. So the walk is limited to the user's own code, and to
files of a package that define layers.
"""

import functools
import importlib.metadata
import json
import sys

from torch import nn

# The walk does not enter objects and functions of these packages: they have no model state.
LIBRARIES = {*sys.stdlib_module_names, "torch", "numpy", "pipeshard", "colossalai", "tqdm", "rich", "datasets"}
LIBRARIES |= {"pytest", "_pytest", "pluggy", "wandb", "trackio", "tensorboard", "matplotlib", "pandas", "scipy"}
CODE_OF_OTHERS = LIBRARIES | {"transformers", "peft", "accelerate"}
INSTALLED = ("site-packages", "dist-packages")  # folders that only installers write to


def is_library(module: str) -> bool:
    """Whether this Python module belongs to a package whose objects have no model state."""
    return module.partition(".")[0] in LIBRARIES


@functools.cache
def is_users(module: str | None) -> bool:
    """Whether the walk enters the code of this Python module: the user's own code, or a file that defines layers in a
    package outside CODE_OF_OTHERS."""
    if module is None:
        return False
    package = module.partition(".")[0]
    if package in CODE_OF_OTHERS:
        return False
    return not _is_installed(package) or _is_of_directory(package) or _has_modules(module)


def _is_installed(package: str) -> bool:
    """Whether the package is in a folder of installed packages. An editable installation is not in such a folder."""
    of = sys.modules.get(package)
    folders = [getattr(of, "__file__", None), *getattr(of, "__path__", ())]
    return any(name in str(folder) for folder in folders for name in INSTALLED)


def _is_of_directory(package: str) -> bool:
    """Whether the package was installed from a local folder (`pip install .`) instead of an index. The package may then
    be the user's own."""
    for distribution in _distributions().get(package, ()):
        origin = importlib.metadata.distribution(distribution).read_text("direct_url.json")
        if origin is not None and "dir_info" in json.loads(origin):
            return True
    return False


@functools.cache
def _distributions() -> dict[str, list[str]]:
    return dict(importlib.metadata.packages_distributions())


def _has_modules(module: str) -> bool:
    """Whether this Python module defines a subclass of nn.Module."""
    of = sys.modules.get(module)
    content = [] if of is None else list(vars(of).values())
    kinds = (value for value in content if isinstance(value, type) and issubclass(value, nn.Module))
    return any(kind.__module__ == module for kind in kinds)
