"""Tests of state dicts: hooks and overrides that convert, rename, omit or add entries, in states and saved models."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn

from pipeshard import load_training_state, save_training_state
from pipeshard.errors import CheckpointError
from tests.pool import Pool
from tests.unsplit import Split, largest_error, parameter_error

pytestmark = pytest.mark.local


class Transposed(nn.Linear):
    """Saves its weight transposed, as TensorFlow stores it."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight"] = destination[f"{prefix}weight"].t()

    def _load_from_state_dict(self, state: Any, prefix: str, *args: Any) -> None:
        super()._load_from_state_dict({**state, f"{prefix}weight": state[f"{prefix}weight"].t()}, prefix, *args)


class Halved(nn.Linear):
    """Saves its weight in fp16."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight"] = destination[f"{prefix}weight"].half()


class Renamed(nn.Linear):
    """Saves its weight as "kernel"."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}kernel"] = destination.pop(f"{prefix}weight")


class Forgetting(nn.Linear):
    """Does not save its bias, which it can compute again."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        del destination[f"{prefix}bias"]


class Counting(nn.Linear):
    """Has an extra state."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.steps = torch.tensor(3)

    def get_extra_state(self) -> Tensor:
        return self.steps

    def set_extra_state(self, state: Tensor) -> None:
        self.steps = state


KINDS = [Transposed, Halved, Renamed, Forgetting, Counting]
CONVERTING = [(Transposed, "converts"), (Halved, "converts"), (Renamed, "adds or renames")]


class Net(nn.Module):
    def __init__(self, kind: type[nn.Linear], seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.ModuleList(kind(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return {"loss": x.square().mean()}


def batch(seed: int) -> dict[str, Tensor]:
    return {"x": torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))}


def split(model: nn.Module) -> Split:
    return Split(model, dist.get_world_size(), batch(0), num_microbatches=2, verify=False)


def trained(of: Split, first: int) -> None:
    for seed in (first, first + 1):
        of.backward(batch(seed))
        of.step()


def resumed(folder: Path, kind: type[nn.Linear]) -> float:
    """The largest error of a parameter of a resumed model, after two more steps."""
    begun = split(Net(kind))
    trained(begun, 1)
    save_training_state(folder, 2, begun.model, begun.optimizer)
    trained(begun, 3)
    other = split(Net(kind, seed=1))
    load_training_state(folder, other.model, other.optimizer)
    trained(other, 3)
    expected = copy.deepcopy(begun.held)
    return largest_error(float((p - expected[name]).abs().max()) for name, p in other.held.items())


@pytest.mark.parametrize("kind", KINDS)
def test_a_training_state_holds_the_model_s_own_tensors(pool: Pool, tmp_path: Path, kind: type[nn.Linear]) -> None:
    """A layer stored its weight transposed: the state contained this weight, which a resumed job took without
    transposing it back, and without an error. A weight stored in fp16 lost its lower bits."""
    assert largest_error(pool.run(resumed, 2, tmp_path, kind)) == 0.0


def saved(folder: Path, kind: type[nn.Linear], shard: bool) -> None:
    of = split(Net(kind))
    of.booster.save_model(of.model, folder / ("model" if shard else "model.safetensors"), shard=shard)


@pytest.mark.parametrize("shard", [False, True])
@pytest.mark.parametrize(("kind", "what"), CONVERTING)
def test_a_model_that_converts_its_tensors_is_not_saved(
    pool: Pool, tmp_path: Path, kind: type[nn.Linear], what: str, shard: bool
) -> None:
    """A stage saved the converted weight of a layer, and `load_model` took it for the layer's own."""
    (tmp_path / "model").mkdir()
    found = pool.run_expecting(CheckpointError, saved, 2, tmp_path, kind, shard)
    for message in found:
        assert f"the state_dict of Net {what} layers." in message and "remove the hook or the override" in message


def loaded(folder: Path, kind: type[nn.Linear]) -> float:
    """The largest error of a parameter that was saved and loaded."""
    of, other = split(Net(kind)), split(Net(kind, seed=1))
    of.booster.save_model(of.model, folder / "model", shard=True)
    of.booster.load_model(other.model, folder / "model")
    return parameter_error(other, Net(kind))


@pytest.mark.parametrize("kind", [Forgetting, Counting])
def test_a_model_that_omits_tensors_is_saved_with_them(pool: Pool, tmp_path: Path, kind: type[nn.Linear]) -> None:
    """The entries that a hook omits, and extra states, are no obstacle."""
    assert largest_error(pool.run(loaded, 2, tmp_path, kind)) == 0.0
    names = {name for file in (tmp_path / "model").glob("*.safetensors") for name in load_file(file)}
    assert {f"layers.{k}.bias" for k in range(4)} <= names
