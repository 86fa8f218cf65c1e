"""Tests of untrusted configs: a config that would exhaust the memory, or never finish, is refused in advance."""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path
from typing import Any

import peft
import pytest
from huggingface_hub.errors import StrictDataclassClassValidationError
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

from benchmarks.resident import peak, reset_peak, resident
from pipeshard import PipelinePlugin
from pipeshard.checkpoint import untrusted
from pipeshard.checkpoint.untrusted import VALUES, check_adapter, folder_config, generation_config_of, read_document
from pipeshard.errors import CheckpointError
from tests import zoo
from tests.parity.entries import all_entries


def folder_with(path: Path, **fields: Any) -> Path:
    document = json.loads(LlamaConfig(num_hidden_layers=1, hidden_size=32).to_json_string(use_diff=False)) | fields
    (path / "config.json").write_text(json.dumps(document))
    return path


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_hidden_layers": 3_000_000}, "num_hidden_layers=3000000 is more than the limit of 1000000"),
        ({"num_labels": 30_000_000}, "num_labels=30000000 is more than the limit of 500000"),
        ({"text_config": {"n_layer": [2, 10**12]}}, "n_layer=1000000000000 is more than"),
        ({"num_hidden_layers": 900_000}, "the model would have more than 2000 modules"),
        ({"hidden_size": 2**62, "num_attention_heads": 1}, "no model can be built from the config"),
        ({"attn_implementation": "stranger/kernel"}, "no model can be built|does not contain a valid model config"),
    ],
)
def test_absurd_configs_are_refused(
    fields: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """500 bytes took 6 GB, or minutes; some ended in torch's own error."""
    monkeypatch.setattr(untrusted, "MODULES", 2000)
    reset_peak()
    before, begin = resident(), time.process_time()
    with pytest.raises(CheckpointError, match=message):
        PipelinePlugin.from_pretrained(AutoModelForCausalLM, folder_with(tmp_path, **fields))
    assert peak() - before < 256 << 20
    assert time.process_time() - begin < 10


def test_a_document_is_measured_before_it_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()
    os.truncate(tmp_path / "config.json", 40 << 30)  # it takes no room on the disk
    with pytest.raises(
        CheckpointError, match="does not contain a valid model config: ValueError: the file is 42949672960 bytes"
    ):
        folder_config(tmp_path)
    (tmp_path / "config.json").write_text('{"a": [' + "[]," * VALUES + "1]}")
    with pytest.raises(ValueError, match=r"the file contains about 2\d{6} values, more than the limit of 1000000"):
        read_document(tmp_path / "config.json")
    (tmp_path / "generation_config.json").symlink_to(tmp_path)
    with pytest.raises(CheckpointError, match=r"the generation_config.json of .* cannot be read"):
        generation_config_of(tmp_path)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"r": 20_000_000}, "r=20000000 is more than the limit of 65536"),
        ({"rank_pattern": {"x": 10**9}}, "x=1000000000 is more than the limit of 65536"),
        ({"rank_pattern": {"q_proj|seed": 10**9}}, "seed=1000000000 is more than the limit of 65536"),
        ({"num_virtual_tokens": 60_000, "token_dim": 60_000}, "the virtual tokens would contain 3600000000 elements"),
        ({"target_modules": "((model|layers|[a-z.0-9]+)+)+!"}, "takes more than 3 seconds"),
        ({"target_modules": "(("}, "is not a valid regular expression: .*unterminated subpattern"),
    ],
)
@pytest.mark.turns
def test_absurd_adapters_are_refused(
    fields: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An adapter of 200 bytes took 10 GB; a regular expression held the interpreter for ever."""
    monkeypatch.setattr(untrusted, "MATCHING_SECONDS", 3.0)
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 8} | fields))
    with pytest.raises(CheckpointError, match=message):
        check_adapter(tmp_path, zoo.build("llama"))


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("Lora", {"trainable_token_indices": [128_256, 128_257]}),
        ("Lora", {"trainable_token_indices": {"embed_tokens": [151_700]}}),
        ("Lora", {"alora_invocation_tokens": [128_256]}),
        ("TrainableTokens", {"token_indices": [128_256]}),
        ("AdaLora", {"total_step": 200_000, "tinit": 70_000, "tfinal": 80_000}),
        ("Vera", {"projection_prng_key": 20_240_601}),
        ("FourierFT", {"random_loc_seed": 20_240_601}),
    ],
)
def test_ids_of_tokens_steps_and_seeds_are_no_sizes(tmp_path: Path, kind: str, fields: dict[str, Any]) -> None:
    """Adapters that train new tokens of Llama 3 were saved, but could not be loaded again: the ids of these tokens were
    more than the limit of a rank."""
    getattr(peft, f"{kind}Config")(**fields).save_pretrained(tmp_path)
    check_adapter(tmp_path, zoo.build("llama"))


@pytest.mark.turns
def test_honest_configs_are_read(tmp_path: Path) -> None:
    for kind in sorted({entry.model_type for entry in all_entries()}):
        with contextlib.suppress(StrictDataclassClassValidationError):  # of one whose defaults are wrong
            config = AutoConfig.for_model(kind)
            config.save_pretrained(tmp_path)
            assert type(folder_config(tmp_path)[0]) is type(config)
