"""Tests of the oldest supported transformers: names that it lacks are imported only where they are used."""

from __future__ import annotations

import subprocess
import sys

import pytest

LACKING = """
from transformers import cache_utils
for name in ("DummyLayer", "DynamicIndexedLayer", "LinearAttentionAndFullAttentionLayer",
             "LinearAttentionAndSlidingWindowAttentionLayer", "LinearAttentionLayer"):
    delattr(cache_utils, name)
import pipeshard.entry, pipeshard.trainer, pipeshard.generate.generate
from pipeshard.errors import ConfigurationError
from pipeshard.slices.refusals import refuse_unsliceable
from tests import zoo
try:
    refuse_unsliceable(zoo.build("llama"))
except ConfigurationError as error:
    print(error)
"""


@pytest.mark.turns
def test_slices_alone_need_the_caches_of_transformers_5() -> None:
    """With 4.57.6, `import pipeshard` failed for everybody: slices are classes of caches that came later."""
    ended = subprocess.run([sys.executable, "-W", "ignore", "-c", LACKING], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    assert "Install transformers 5, or use num_slices=1" in ended.stdout
