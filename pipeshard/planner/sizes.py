"""Sizes: numbers of bytes, as people write them."""

import re

from pipeshard.errors import ConfigurationError

UNITS = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "kib": 2**10, "mib": 2**20, "gib": 2**30}


def parse_bytes(size: str | int) -> int:
    """The number of bytes that "80GB", "79.2 GiB" or a plain number says; ConfigurationError for anything else."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", str(size), re.IGNORECASE)
    unit = found[2].lower() if found else ""
    if found is None or (unit or "b") not in UNITS or float(found[1]) <= 0:
        raise ConfigurationError(f"device_memory={size!r} is no size: write 80GB, 40GiB, or a number of bytes")
    return int(float(found[1]) * UNITS[unit or "b"])


def format_bytes(size: float) -> str:
    """Three digits and a decimal unit: 1.23 GB."""
    units = ["B", "kB", "MB", "GB", "TB"]
    while size >= 999.5 and len(units) > 1:
        size /= 1000
        del units[0]
    digits = 0 if units[0] == "B" or size >= 99.95 else 1 if size >= 9.995 else 2
    return f"{size:.{digits}f} {units[0]}"
