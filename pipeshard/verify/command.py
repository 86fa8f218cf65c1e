"""Command: what `pipeshard verify` does with a script, or with a model by name."""

import os
import runpy
import socket
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeshard.errors import PipeshardError
from pipeshard.model.made_up import made_up
from pipeshard.planner.source import build
from pipeshard.verify.alone import Proven, alone
from pipeshard.verify.result import DIFFERENT, EXACT, UNPROVEN, Proof

CODES = {EXACT: 0, DIFFERENT: 1, UNPROVEN: 2}  # what the command exits with


def prove_script(path: Path, arguments: Sequence[str], pp_size: int | None) -> Proven:
    """Run a training script as one process that stands for all ranks, up to its booster.boost."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1")  # as torchrun tells it
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    sys.argv = [str(path), *arguments]
    sys.path.insert(0, str(path.resolve().parent))
    try:
        with alone(pp_size):
            runpy.run_path(str(path), run_name="__main__")
    except Proven as proven:
        return proven
    except PipeshardError as error:
        return Proven(Proof(UNPROVEN, f"{type(error).__name__}: {error}"), path.name)
    except SystemExit as ended:
        return Proven(Proof(UNPROVEN, f"it ended with {ended.code!r} before booster.boost"), path.name)
    return Proven(Proof(UNPROVEN, "it ended without booster.boost"), path.name)


def prove_model(
    source: str, fields: Sequence[str], pp_size: int, seq_len: int, dtype: str, plugin: dict[str, Any]
) -> Proven:
    """Build the model, see `source.build`, with drawn weights, and boost it with a batch of random samples."""
    from colossalai.booster import Booster

    from pipeshard.plugin import PipelinePlugin

    model = build(source, fields, dtype)
    data = drawn_batch(model, 10, seq_len)
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", f"file://{folder}/meeting", rank=0, world_size=1)
        try:
            with alone():
                booster = Booster(plugin=PipelinePlugin(pp_size, dry_run_input=data, **plugin))
                booster.boost(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
        except Proven as proven:
            return proven
        finally:
            dist.destroy_process_group()
    raise AssertionError("booster.boost has not come to a proof")


def drawn_batch(model: nn.Module, rows: int, length: int) -> dict[str, Tensor]:
    """Random samples, with labels of which each sample has another number."""
    config: Any = getattr(model, "config", None)
    generator = torch.Generator().manual_seed(0)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config

    def drawn(name: str, leaf: Tensor) -> Tensor:
        if name == "attention_mask":
            return leaf
        if leaf.is_floating_point():
            return torch.randn(leaf.shape, generator=generator)
        many = getattr(config, "num_labels", 2) if leaf.ndim == 1 else getattr(text, "vocab_size", 2)
        return torch.randint(many, leaf.shape, generator=generator)

    batch = {name: drawn(name, leaf) for name, leaf in made_up(model, rows, length).items()}
    if (labels := batch.get("labels")) is not None and labels.ndim == 2:
        first = torch.arange(rows)[:, None] % max(1, length - 1)
        batch["labels"] = labels.masked_fill(torch.arange(length) < first, -100)
    return batch
