"""Packages: models of packages other than transformers, trained split and unsplit: `make parity-packages`."""

from tests.packages import native  # noqa: F401  before anything imports torchvision
