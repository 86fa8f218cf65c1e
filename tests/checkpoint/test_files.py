"""Tests of files: links, truncated files, checkpoints of some tensors, and configs that transformers does not save."""

from __future__ import annotations

import logging
from pathlib import Path
from unittest import mock

import pytest
import torch
from transformers import AutoModelForCausalLM

from pipeshard import PipelinePlugin
from pipeshard.errors import CheckpointError
from tests import zoo
from tests.messages import texts_of
from tests.pool import Pool
from tests.unsplit import Split

pytestmark = pytest.mark.local


def split() -> Split:
    return Split(zoo.build("llama"), 2, zoo.batch("llama"), num_microbatches=2, verify=False)


def saved(file: Path) -> None:
    of = split()
    of.booster.save_model(of.model, file)


def test_a_save_to_a_link_replaces_the_file_behind_it(pool: Pool, tmp_path: Path) -> None:
    """A link to a file on a larger disk became a file, and the file behind it kept the weights of an earlier save."""
    behind, link = tmp_path / "behind.pt", tmp_path / "link.pt"
    behind.write_bytes(b"earlier")
    link.symlink_to(behind)
    pool.run(saved, 2, link)
    assert link.is_symlink() and torch.load(behind).keys() == zoo.build("llama").state_dict().keys()


def loaded(file: Path, strict: bool) -> list[str]:
    """The warnings of a load."""
    of = split()
    with mock.patch.object(logging.getLogger("pipeshard"), "warning") as warning:
        of.booster.load_model(of.model, file, strict)
    return texts_of(warning)


def test_a_truncated_file_is_incomplete(pool: Pool, tmp_path: Path) -> None:
    """The error of a file whose copy had been interrupted was that "weights_only=True" cannot load it, with the advice
    to trust it."""
    file = tmp_path / "x.pt"
    torch.save(zoo.build("llama").state_dict(), file)
    file.write_bytes(file.read_bytes()[:-4000])
    for message in pool.run_expecting(CheckpointError, loaded, 2, file, True):
        assert message == f"{file} is incomplete (its end is missing): copy or save it again"


def test_a_checkpoint_of_some_tensors_is_named(pool: Pool, tmp_path: Path) -> None:
    """With strict=False, a file of another model left all weights as they were, without a word."""
    state, file = zoo.build("llama").state_dict(), tmp_path / "x.pt"
    torch.save({name: value for name, value in state.items() if "norm" in name}, file)
    (said,), others = pool.run(loaded, 2, file, False)
    assert not others and "strict=False) ignores names of " in said and "model.embed_tokens.weight is missing" in said
    torch.save({f"other.{name}": value for name, value in state.items()}, file)
    for message in pool.run_expecting(CheckpointError, loaded, 2, file, False):
        assert f"{file} contains no tensor of LlamaForCausalLM: " in message
    torch.save(state, file)
    assert pool.run(loaded, 2, file, False) == [[], []]


def invalid(folder: Path) -> list[str]:
    """The warnings of a save with a generation config that transformers does not save."""
    of = split()
    of.model.unwrap().generation_config.update(do_sample=False, temperature=0.5)
    with mock.patch.object(logging.getLogger("pipeshard"), "warning") as warning:
        of.booster.save_model(of.model, folder, shard=True)
    return texts_of(warning)


def test_an_invalid_generation_config_is_saved(pool: Pool, tmp_path: Path) -> None:
    """A model could not be saved after hours of training, since its generation config set a temperature without
    sampling."""
    (said,), others = pool.run(invalid, 2, tmp_path / "x")
    assert not others and "contains an invalid generation config: ValueError: GenerationConfig is invalid" in said
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "x")
    assert read.generation_config.temperature == 0.5


def test_options_without_effect_are_accepted(tmp_path: Path) -> None:
    """A script with low_cpu_mem_usage=True, as in transformers' own examples, had to be changed."""
    zoo.build("llama").save_pretrained(tmp_path)
    options = {"low_cpu_mem_usage": True, "use_safetensors": True, "device_map": None, "output_loading_info": False}
    assert PipelinePlugin.from_pretrained(AutoModelForCausalLM, tmp_path, **options).config.model_type == "llama"
