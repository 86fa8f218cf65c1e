"""Tests of ghosts: a tensor that a stage has released has a shape and a name, but no values to read, write or save."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from pipeshard.errors import UsageError
from pipeshard.ghost import Ghost, as_if_held, inside_pipeshard
from pipeshard.split.materialize import is_released
from tests.pool import Pool
from tests.unsplit import Split, largest_error

pytestmark = pytest.mark.local

# They were expanded zeros: whoever read, averaged or saved them got zeros without a word.
READS: dict[str, Callable[[Tensor], Any]] = {
    "sum": lambda p: p.sum(),
    "norm": lambda p: torch.linalg.vector_norm(p),
    "pow": lambda p: p**2,
    "item": lambda p: p[0, 0].item(),
    "data": lambda p: p.data,
    "detach": lambda p: p.detach(),
    "numpy": lambda p: p.numpy(),
    "clone": lambda p: p.clone(),
    "from": lambda p: torch.zeros(3, 4).copy_(p),
    "fill": lambda p: p.fill_(1),
    "half": lambda p: p.half(),
    "put": lambda p: p.__setitem__(0, 1.0),
    "foreach": lambda p: torch._foreach_mul_([torch.ones(2), p], 2.0),
    "set": lambda p: setattr(p, "data", torch.ones(3, 4)),
    "deepcopy": copy.deepcopy,
    "pickle": pickle.dumps,
    "safetensors": lambda p: safetensors.torch.save({"weight": p}),
    "safetensors of one element": lambda p: safetensors.torch.save({"weight": ghost(1)}),
}


def ghost(*shape: int) -> Ghost:
    return Ghost.of(nn.Parameter(torch.randn(shape or (3, 4))), torch.device("cpu"), "layer.weight is on stage 1")


@pytest.mark.parametrize("read", READS)
def test_values_are_refused_by_name(read: str) -> None:
    """A script that saved the adapters of the whole model with safetensors was told to call `.contiguous()`, and a
    gate of one element was saved as NaN."""
    with pytest.raises(UsageError, match=r"layer\.weight is on stage 1.*(booster\.save_model|before booster\.boost)"):
        READS[read](ghost())


def test_a_loop_is_told_which_parameters_to_omit() -> None:
    """A loop that clamps `model.parameters()` got advice on saving alone."""
    with pytest.raises(UsageError, match=r"clamp_: .*skip the parameters for which .*is_released.* is True"):
        ghost().clamp_(-1, 1)


def test_what_tells_nothing_of_the_values_works() -> None:
    p = ghost()
    assert isinstance(p, nn.Parameter) and p.pipeshard_trainable and not p.requires_grad
    assert (p.shape, p.size(0), p.dim(), p.numel(), len(p), p.stride()) == ((3, 4), 3, 2, 12, 3, (0, 0))
    assert (p.dtype, p.device.type, p.type()) == (torch.float32, "cpu", "torch.FloatTensor")
    assert (p.layout, p.is_meta, p.grad, p._version) == (torch.strided, False, None, 0)
    assert p.is_floating_point() and torch.is_floating_point(p) and p.is_leaf and p.element_size() == 4
    assert p.untyped_storage().nbytes() == 4 and p.to("cpu") is p and p.float() is p
    assert p.data_ptr() == p.untyped_storage().data_ptr()  # transformers counts embeddings so for 8-bit optimizers
    assert torch.zeros_like(p).sum() == 0 and p.new_ones(2).sum() == 2
    assert p.requires_grad_().requires_grad and "layer.weight" in repr(p) and {p: 1}[p] == 1
    torch.optim.AdamW([p]).zero_grad()
    holder = nn.Linear(4, 3)
    holder.weight = p
    assert holder.to("cpu").weight is p


def test_inside_pipeshard_values_are_unknown_and_writes_are_dropped() -> None:
    """Glue runs on every stage: RWKV's rescales the weights of all blocks in place, of other stages' too."""
    p, held, free = ghost(), nn.Parameter(torch.ones(3, 4)), torch.ones(3, 4)
    with inside_pipeshard(), torch.no_grad():
        assert torch.isnan(p * 2).all() and torch.isnan(p.data[0]).all()
        p.mul_(2).div_(3)
        p.data.add_(1)
        p[0] = 1.0
        p.data = torch.ones(3, 4)
        nn.init.normal_(p)
        torch._foreach_mul_([p, free], 2.0)
        assert (free == 2).all() and p.untyped_storage().nbytes() == 4
        with pytest.raises(UsageError, match=r"add_ from another stage's parameter to one of this rank: layer\.weight"):
            held.add_(p)
    assert (held == 1).all()


def test_a_function_that_all_ranks_must_finish_runs_with_unknown_values() -> None:
    """A filter of trained parameters left out those of other stages, without an error, in one function of a loss."""
    p = ghost()
    with as_if_held() as errors:
        with inside_pipeshard():
            assert torch.isnan(p + 1).all() and not p.requires_grad and is_released(p)
        assert p.requires_grad and not is_released(p) and not errors
        assert torch.isnan(p.detach().pow(2).sum()) and not p.grad_fn
        p.mul_(2)
        with pytest.raises(UsageError, match=r"deepcopy: layer\.weight"):
            copy.deepcopy(p)
    assert [str(error).split(":")[0] for error in errors] == ["detach", "pow", "mul_"]
    assert not p.requires_grad and is_released(p)
    with pytest.raises(UsageError):
        p.pow(2)


def rescaled() -> list[float]:
    from transformers import RwkvConfig, RwkvForCausalLM

    sizes = {"hidden_size": 16, "attention_hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 4}
    config = RwkvConfig(vocab_size=23, rescale_every=2, context_length=32, use_cache=False, **sizes)
    torch.manual_seed(0)
    alone, model = RwkvForCausalLM(config), RwkvForCausalLM(config)
    model.load_state_dict(alone.state_dict())
    batch = {"input_ids": (ids := torch.randint(0, 23, (4, 6))), "labels": ids}
    split = Split(model, 2, batch, num_microbatches=2)
    optimizer, gaps = torch.optim.AdamW(alone.parameters(), lr=1e-3), []
    for _ in range(2):
        gaps.append(split.backward(batch)["loss"] - (loss := alone.train()(**batch).loss))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        split.step()
        split.model.eval()
        with torch.no_grad():
            gaps += [split.evaluate(batch)["loss"] - alone.eval()(**batch).loss for _ in range(2)]
        split.model.train()
    return [abs(float(gap)) for gap in gaps]


@pytest.mark.turns
def test_rwkv_evaluates_between_steps(pool: Pool) -> None:
    """Its glue writes to weights when the mode changes: once, on whichever stage holds them, and not in a trace."""
    assert all(largest_error(gaps) < 1e-5 for gaps in pool.run(rescaled, 2))
