"""Tests of random models: each trains like the unsplit model, however its layers and its glue are combined."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.hunt.programs import case, source
from tests.hunt.run import run
from tests.pool import Pool

pytestmark = pytest.mark.local


def differences(seed: int, file: Path) -> list[str]:
    return run(case(seed, file))


@pytest.mark.sampled(12)
@pytest.mark.parametrize("seed", range(200))
def test_a_random_model_trains_like_the_unsplit_model(pool: Pool, tmp_path: Path, seed: int) -> None:
    """Such models found a gradient hook that one stage bypassed, cuts that were refused for a view, and losses that
    ignored a label and were refused."""
    file = tmp_path / f"program_{seed}.py"  # errors show its lines
    file.write_text(source(seed))
    assert pool.run(differences, 2, seed, file, timeout=120) == [[], []], source(seed)
