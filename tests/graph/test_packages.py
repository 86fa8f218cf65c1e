"""Tests of the walk of Python state: it stays in the user's code and in the files that define a model's layers."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pipeshard.graph import packages
from pipeshard.graph.packages import is_users
from pipeshard.graph.places import format_path
from pipeshard.graph.snapshot import Snapshot

LAYERS = """
import torch
from torch import nn
from .loading import fetch

kept = []

def keep(value):
    kept.append(value)

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def load(self):
        return fetch()

    def forward(self, x):
        keep(x)
        return self.linear(x)
"""
LOADING = """
registry = {k: [k] for k in range(1000)}

def fetch():
    return registry
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Writes a package of layers, and of what loads them, into a folder as installers do."""
    names: list[str] = []

    def write(name: str, folder: str, from_directory: bool = False) -> Any:
        package = tmp_path / folder / name
        package.mkdir(parents=True)
        (package / "__init__.py").write_text("from .layers import Layer\n")
        (package / "layers.py").write_text(LAYERS)
        (package / "loading.py").write_text(LOADING)
        info = tmp_path / folder / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "RECORD").write_text(f"{name}/__init__.py,,\n{name}/layers.py,,\n")
        if from_directory:
            (info / "direct_url.json").write_text(json.dumps({"url": "file:///home/me/project", "dir_info": {}}))
        monkeypatch.syspath_prepend(str(tmp_path / folder))
        names.append(name)
        packages._distributions.cache_clear()
        is_users.cache_clear()
        return importlib.import_module(name)

    yield write
    for module in [module for module in sys.modules if module.partition(".")[0] in names]:
        del sys.modules[module]
    packages._distributions.cache_clear()
    is_users.cache_clear()


def places(model: nn.Module) -> set[str]:
    return {format_path(holder.path) for holder in Snapshot({"model": model}).holders}


def test_the_loader_of_an_installed_package_is_not_walked_but_the_file_of_its_layers_is(install: Any) -> None:
    """An Unet of an installed package reached 22,377 objects through its registries and its downloader, and its first
    step took 28 s instead of 1: what layers keep in their own file is found, and the rest is left alone."""
    layers = install("installed_package", "site-packages")
    model = layers.Layer()
    before = Snapshot({"model": model})
    model(torch.ones(1, 2))
    assert any("kept" in format_path(change.path) for change in before.changes())
    assert len(before.holders) < 100
    assert not any("registry" in place for place in places(model))


@pytest.mark.parametrize(("folder", "from_directory"), [("project", False), ("site-packages", True)])
def test_all_code_of_ones_own_package_is_walked(install: Any, folder: str, from_directory: bool) -> None:
    """A package of the user's, in a folder of theirs or put in by `pip install .`, may keep losses in any of its
    files: all of them are looked into."""
    layers = install(f"own_package_{int(from_directory)}", folder, from_directory)
    assert any("registry" in place for place in places(layers.Layer()))
