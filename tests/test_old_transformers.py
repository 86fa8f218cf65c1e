"""Tests of the oldest supported transformers: names that it lacks are imported only where they are used."""

from __future__ import annotations

import subprocess
import sys

import pytest
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict

from pipeshard.checkpoint import load
from tests import zoo

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


def test_adapters_keep_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """With 4.57.6, adapters of a vision-language model were saved with the older names of its layers, which peft did
    not find: a PeftModel passes on its base model's renamings."""
    monkeypatch.setattr(load, "core_model_loading", None)
    base = zoo.build("llama")
    monkeypatch.setattr(type(base), "_checkpoint_conversion_mapping", {"^language_model": "model"}, raising=False)
    model = get_peft_model(base, LoraConfig(target_modules=["q_proj"]))
    state = get_peft_model_state_dict(model)
    assert load.revert(model, state).keys() == state.keys()
    assert load.revert(base, {"model.norm.weight": base.model.norm.weight}).keys() == {"language_model.norm.weight"}
