"""Packages: models of other packages than transformers, trained split and unsplit: `make parity-packages`."""

from tests.packages import native  # noqa: F401  before anything imports torchvision
