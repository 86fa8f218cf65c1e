"""Catalog: all models of all packages, each package's in a file of its own."""

from __future__ import annotations

import importlib
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
