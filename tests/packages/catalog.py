"""Catalog: all models of all packages, with one file per package."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache

from tests.packages.model import Model

FILES = {  # the package as it is called on PyPI: its file here
    "timm": "timm",
    "diffusers": "diffusers",
    "torchvision": "torchvision",
    "torchaudio": "torchaudio",
    "sentence-transformers": "sentence_transformers",
    "open_clip_torch": "open_clip",
    "monai": "monai",
    "segmentation-models-pytorch": "segmentation_models",
    "x-transformers": "x_transformers",
    "vit-pytorch": "vit_pytorch",
    "torch_geometric": "torch_geometric",
    "fair-esm": "fair_esm",
    "speechbrain": "speechbrain",
    "pytorch-metric-learning": "metric_learning",
}
COMPLETE = ("diffusers", "timm")  # packages each of whose models has an entry, or a reason why it has none
SAMPLE = {"sample": "sample"}  # of torch alone, for the runner's own test


@lru_cache
def models_of(package: str) -> dict[str, Model]:
    """A package's models by their names."""
    found: list[Model] = importlib.import_module(f"tests.packages.{(FILES | SAMPLE)[package]}").MODELS
    named = {model.name: model for model in found}
    if len(named) < len(found):
        raise ValueError(f"{package}: two models of one name")
    return named


def all_models() -> list[Model]:
    return [model for package in FILES for model in models_of(package).values()]


def find(text: str) -> list[Model]:
    """The models of a package, or one by "package/name"."""
    package, _, name = text.partition("/")
    own = models_of(package) if package in FILES | SAMPLE else {}
    return [model for model in own.values() if name in ("", model.name)]


def gaps(packages: Iterable[str] = COMPLETE) -> list[str]:
    """What is wrong with the entries of packages whose files name all their models."""
    found = []
    for package in packages:
        file = importlib.import_module(f"tests.packages.{FILES[package]}")
        found += [f"{package}: {gap}" for gap in gaps_of(file.every(), models_of(package), file.APART)]
    return found


def gaps_of(every: set[str], entries: Iterable[str], apart: Mapping[str, str]) -> Iterator[str]:
    """Models without an entry or a reason, and reasons for models that have an entry or are there no more.

    An entry's name begins with the model's; what is trained of it may follow.
    """
    covered = {entry.split()[0] for entry in entries}
    for name in sorted(every - covered - apart.keys()):
        yield f"{name} has no entry, and APART no reason why"
    for name in sorted(apart.keys() & covered):
        yield f"{name} has an entry, and APART says why it has none"
    for name in sorted(apart.keys() - every):
        yield f"APART names {name}, which the package does not have"
