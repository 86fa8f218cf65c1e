"""Tests of the package: the names that its import provides, and the errors if something is missing."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import pipeshard


def test_public_names_exist() -> None:
    assert sorted(pipeshard.__all__) == sorted(pipeshard._MODULES)
    assert all(hasattr(pipeshard, name) for name in pipeshard.__all__)
    modules = {path.stem for path in Path(pipeshard.__file__).parent.iterdir()}
    assert not modules & set(pipeshard.__all__), "importing the module would hide what has its name"


@pytest.mark.turns
def test_policies_are_a_part_of_the_package() -> None:
    """They import no adapters, of which not every model has some: to import peft took longer than all else."""
    code = "import sys, pipeshard.policies; print(pipeshard.policies.__doc__, 'peft' in sys.modules)"
    run = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=300)
    assert "register_policy" in run.stdout and run.stdout.endswith("False\n"), run.stderr


def test_a_number_on_meta_is_an_error() -> None:
    """ColossalAI puts kernels for torch 1.12 in the place of torch's: a number read on meta was 0, and a trace went
    the way of that."""
    assert pipeshard.PipelinePlugin
    with pytest.raises(RuntimeError, match="meta tensors"):
        bool(torch.ones(2, device="meta").any())
