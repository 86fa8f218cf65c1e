"""The package: what its import offers, and what it says when something is missing."""

import subprocess
import sys

import pipeshard


def test_public_names_exist() -> None:
    assert len(set(pipeshard.__all__)) == len(pipeshard.__all__)
    assert all(hasattr(pipeshard, name) for name in pipeshard.__all__)


def test_without_colossalai_the_mending_command_is_named() -> None:
    code = "import sys; sys.modules['colossalai'] = None; import pipeshard"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert run.returncode != 0
    assert "pip install --no-deps colossalai==0.5.0" in run.stderr


def test_policies_are_a_part_of_the_package() -> None:
    code = "import pipeshard.policies; print(pipeshard.policies.__doc__)"
    run = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=60)
    assert "register_policy" in run.stdout, run.stderr
