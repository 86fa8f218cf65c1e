"""Mistakes: the mistakes in docs/errors.md and docs/troubleshooting.md, made first, and then corrected as advised."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import DistributedSampler

import pipeshard
from tests.hunt.loops import Sides
from tests.hunt.nets import Logits, Net, data
from tests.remedies.table import ONE, TWICE, Remedy, ragged
from tests.remedies.training import Training, run

Follow = Callable[[Sides, Path], object]
ERRORS, TROUBLES = "errors.md: ", "troubleshooting.md: "


def train(sides: Sides, folder: Path) -> None:
    """What the loop does anyway."""
    sides.train(sides.batches(5))
    sides.step()


@dataclass(frozen=True)
class Mistake:
    """`wrong` raises an error that `says` this, or logs it if it `warns`. `right` does what the page tells. The model
    then equals the unsplit one, and in two more steps; that is another model where the ranks `end` by the error.
    `rows` are beginnings of the clauses, rows and headings of the pages that promise it."""

    rows: tuple[str, ...]
    says: str
    wrong: Follow
    right: Follow = train
    options: Mapping[str, Any] = field(default_factory=dict)
    ends: bool = False


def follow(name: str, folder: Path) -> tuple[str, list[str]]:
    """The error of a mistake, and what differs once it is mended."""
    mistake = MISTAKES[name]
    sides = Sides({}, **mistake.options)
    train(sides, folder)
    error = raised(lambda: mistake.wrong(sides, folder))
    if mistake.ends:
        sides = Sides({}, **mistake.options)
    mistake.right(sides, folder)
    train(sides, folder)
    return error, sides.done()


def raised(call: Callable[[], object]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__module__}.{type(error).__name__}: {error}"
    return "nothing"


def backward(sides: Sides, folder: Path) -> None:
    sides.engine.execute_pipeline(sides.own(sides.batches(0)))["loss"].backward()


def booster_backward(sides: Sides, folder: Path) -> None:
    loss = sides.engine.execute_pipeline(sides.own(sides.batches(0)))["loss"]
    sides.engine.backward(loss, sides.optimizer)


def step_at_once(sides: Sides, folder: Path) -> None:
    """The gradients are those of one backward pass."""
    loss = sides.loss(sides.batches(0))
    sides.compare(loss, loss)
    sides.step()


def call(sides: Sides, folder: Path) -> None:
    sides.engine.model(**data(0))


def evaluate(sides: Sides, folder: Path) -> None:
    with torch.no_grad():
        loss = float(sides.engine.execute_pipeline(iter([data(0)]))["loss"])
        expected = float(sides.unsplit(**data(0))["loss"])
    if not abs(loss - expected) <= 1e-5:
        sides.found.append(f"evaluated {loss}, unsplit {expected}")


def save_stage(sides: Sides, folder: Path) -> None:
    torch.save(sides.model.state_dict(), folder / f"stage{dist.get_rank()}.pt")


def save(sides: Sides, folder: Path) -> None:
    sides.engine.save_model(sides.engine.model, str(folder / "trained"), shard=True)
    saved = {
        name: value for file in (folder / "trained").glob("*.safetensors") for name, value in load_file(file).items()
    }
    wanted = sides.unsplit.state_dict()
    if saved.keys() != wanted.keys():
        sides.found.append(f"names saved: {sorted(saved.keys() ^ wanted.keys())}")
    sides.found += [f"{name} saved" for name in saved if not torch.allclose(saved[name], wanted[name], atol=1e-5)]
    dist.barrier()


def load_another_optimizer(sides: Sides, folder: Path) -> None:
    rank = dist.get_rank()
    torch.save(sides.engine.optimizer.state_dict(), folder / f"optimizer{rank}.pt")
    dist.barrier()
    sides.engine.optimizer.load_state_dict(torch.load(folder / f"optimizer{rank}.pt"))  # its own
    sides.engine.optimizer.load_state_dict(torch.load(folder / f"optimizer{1 - rank}.pt"))


def keep_optimizer(sides: Sides, folder: Path) -> None:
    sides.engine.save_optimizer(sides.engine.optimizer, str(folder / "optimizer"), shard=True)
    sides.engine.load_optimizer(sides.engine.optimizer, str(folder / "optimizer"))


def save_on_the_first(sides: Sides, folder: Path) -> None:
    if dist.get_rank() == 0:
        sides.engine.save_model(sides.engine.model, str(folder / "first"), shard=True)
    else:
        train(sides, folder)


def clip_by_torch(sides: Sides, folder: Path) -> None:
    sides.split_loss(sides.batches(0))
    torch.nn.utils.clip_grad_norm_(sides.model.parameters(), 0.1)


def clip(sides: Sides, folder: Path) -> None:
    sides.loss(sides.batches(0))
    torch.nn.utils.clip_grad_norm_(sides.unsplit.parameters(), 0.1)
    sides.optimizer.clip_grad_by_norm(0.1)
    sides.step()


def step_another(sides: Sides, folder: Path) -> None:
    sides.split_loss(sides.batches(0))
    torch.optim.SGD(sides.model.parameters(), lr=0.1).step()


def step_the_returned(sides: Sides, folder: Path) -> None:
    sides.loss(sides.batches(0))
    sides.step()


def scale(sides: Sides, folder: Path) -> None:
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    sides.split_loss(sides.batches(0))
    scaler.step(sides.optimizer)


def replace_a_layer(sides: Sides, folder: Path) -> None:
    before = sides.model.layers[1]
    sides.model.layers[1] = nn.Linear(16, 16)
    try:
        sides.split_loss(sides.batches(0))
    finally:
        sides.model.layers[1] = before


def halve(sides: Sides, folder: Path) -> None:
    (sides.engine.execute_pipeline(sides.own(sides.batches(0)))["loss"] / 2).backward()


def read_outputs(sides: Sides, folder: Path) -> None:
    out = sides.engine.execute_pipeline(sides.own(sides.batches(0)), return_outputs=True)
    if dist.get_rank() == 0:
        out["outputs"].logits  # noqa: B018
    raise AttributeError("'NoneType' object has no attribute 'logits'")  # the last rank, to agree with the first


def summarize(sides: Sides, folder: Path) -> None:
    if "bubble" not in sides.plugin.recording().summary():
        sides.found.append("no share of idle time")


def sample_by_rank(sides: Sides, folder: Path) -> None:
    samples = [{name: leaf[0] for name, leaf in data(k, 1).items()} for k in range(8)]
    sides.plugin.prepare_dataloader(samples, batch_size=4, sampler=DistributedSampler(samples))


def prepare(sides: Sides, folder: Path) -> None:
    samples = [{name: leaf[0] for name, leaf in data(k, 1).items()} for k in range(10)]
    for batch in sides.plugin.prepare_dataloader(samples, batch_size=4, shuffle=True, seed=1):
        sides.train([batch])
        sides.step()


def empty(sides: Sides, folder: Path) -> None:
    sides.engine.execute_pipeline(iter([]))


def no_tensors(sides: Sides, folder: Path) -> None:
    sides.engine.execute_pipeline(iter([{"text": "none"}]))


def other_batches(sides: Sides, folder: Path) -> None:
    sides.engine.execute_pipeline(iter([data(dist.get_rank())]))


def other_modes(sides: Sides, folder: Path) -> None:
    with torch.set_grad_enabled(dist.get_rank() == 0):
        sides.engine.execute_pipeline(iter([data(0)]))


def load_nothing(sides: Sides, folder: Path) -> None:
    sides.engine.load_model(sides.engine.model, str(folder / "missing"))


def save_and_load(sides: Sides, folder: Path) -> None:
    save(sides, folder)
    sides.engine.load_model(sides.engine.model, str(folder / "trained"))


MISTAKES = {
    "a backward": Mistake(
        (ERRORS + '`UsageError`: `out["loss"].backward()`', TROUBLES + '`out["loss"].backward()`'),
        r"UsageError: .*remove booster.backward\(...\) and loss.backward\(\)",
        backward,
        step_at_once,
    ),
    "booster.backward": Mistake(
        (ERRORS + "`UsageError`: `booster.backward(loss, optimizer)`",),
        r"UsageError: .*remove booster.backward\(...\)",
        booster_backward,
        step_at_once,
    ),
    "a backward of a part": Mistake(
        (TROUBLES + "`RuntimeError: element 0 of tensors",),
        "element 0 of tensors does not require grad",
        halve,
        step_at_once,
    ),
    "a call": Mistake(
        (ERRORS + "`UsageError`: `model(x)`", TROUBLES + "`model(**batch)` with several"),
        r"UsageError: .*use execute_pipeline\(.*under torch.no_grad\(\)",
        call,
        evaluate,
    ),
    "a state of a stage": Mistake(
        (TROUBLES + "`model.unwrap().save_pretrained(folder)`",),
        r"UsageError: .*booster.save_model\(model, folder, shard=True\)",
        save_stage,
        save,
    ),
    "an optimizer's state of a stage": Mistake(
        (TROUBLES + "`torch.save(optimizer.state_dict(), file)` on rank 0",),
        r"UsageError: this state dict is from a rank that.*booster.save_optimizer\(optimizer, folder, shard=True\)",
        load_another_optimizer,
        keep_optimizer,
    ),
    "a norm": Mistake(
        (TROUBLES + "torch's `clip_grad_norm_",),
        r"UsageError: .*call optimizer.clip_grad_by_norm\(max_norm\)",
        clip_by_torch,
        clip,
    ),
    "another optimizer": Mistake(
        (TROUBLES + "step an optimizer",),
        r"UsageError: .*call step\(\) on the returned optimizer",
        step_another,
        step_the_returned,
    ),
    "a scaler": Mistake(
        (TROUBLES + "`torch.amp.GradScaler`",),
        r"UsageError: .*remove GradScaler and call optimizer.step\(\)",
        scale,
        step_the_returned,
    ),
    "a save on one rank": Mistake(
        (TROUBLES + "`if rank == 0",),
        "UsageError: .*Every rank must make the collective calls",
        save_on_the_first,
        save,
        ends=True,
    ),
    "a sampler by rank": Mistake(
        (TROUBLES + "`DistributedSampler`",),
        r"ConfigurationError: .*Pass a sampler over the whole dataset \(or shuffle=True\)",
        sample_by_rank,
        prepare,
    ),
    "a layer after boost": Mistake(
        (TROUBLES + "add adapters or replace layers",),
        "UsageError: .*change modules, parameters and adapters before",
        replace_a_layer,
    ),
    "outputs on each rank": Mistake(
        (TROUBLES + "`AttributeError: 'NoneType'",), "no attribute 'logits'", read_outputs, step_at_once
    ),
    "an empty iterator": Mistake(
        (ERRORS + "`BatchError`: an empty iterator",), r"BatchError: .*create a new one with iter\(dataloader\)", empty
    ),
    "no tensors": Mistake(
        (ERRORS + "`BatchError`: a batch without tensors",),
        "BatchError: .*whose first dimension is the batch dimension",
        no_tensors,
    ),
    "other batches": Mistake(
        (ERRORS + "`BatchError`: ranks that read different",),
        "BatchError: .*plugin.prepare_dataloader",
        other_batches,
        prepare,
    ),
    "other modes": Mistake(
        (ERRORS + "`BatchError`: ranks that",),
        "BatchError: all ranks must run a step in the same mode",
        other_modes,
        evaluate,
    ),
    "a missing folder": Mistake(
        (ERRORS + "`CheckpointError`: a path",), "CheckpointError: .*does not exist", load_nothing, save_and_load
    ),
    "idle ranks": Mistake((TROUBLES + "## It is slower",), "nothing", train, summarize),
}


class Single(nn.Module):
    """A model that is one unit."""

    def __init__(self) -> None:
        super().__init__()
        self.only = Net.block()

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": self.only(x).square().mean()}


def numbers() -> list[dict[str, Tensor]]:
    return [{"x": torch.randn(4, 16, generator=torch.Generator().manual_seed(seed))} for seed in range(2)]


def unreduced(model: nn.Module) -> Any:
    return lambda out, batch: F.cross_entropy(out["logits"].flatten(0, 1), batch["labels"].flatten(), reduction="none")


def reduced(model: nn.Module) -> Any:
    return lambda out, batch: F.cross_entropy(out["logits"].flatten(0, 1), batch["labels"].flatten())


BOOSTS = {
    "a world of another size": Remedy(
        (ERRORS + "`ConfigurationError`: the world size differs",),
        "start 3 processes .*torchrun --nproc-per-node 3 .* or choose sizes whose product is 2",
        Training(options={"pp_size": 3}),
        (Training(options={"pp_size": 2}), Training(options={"pp_size": 1, "dp_size": 2, **ONE})),
    ),
    "an unknown schedule": Remedy(
        (ERRORS + "`ConfigurationError`: an unknown schedule",),
        "did you mean '1f1b'.*zbv",
        Training(options={"schedule": "1f2b"}),
        (Training(options={"schedule": "1f1b"}), Training(options={"schedule": "zbv"})),
    ),
    "slices of a searched schedule": Remedy(
        (ERRORS + '`ConfigurationError`: an argument that `schedule="auto"` chooses',),
        "num_slices=2 is not supported with schedule='auto'.*omit num_slices",
        Training(options={"schedule": "auto", "num_slices": 2}),
        (Training(options={"schedule": "auto"}),),
    ),
    "a limit that is too low": Remedy(
        (ERRORS + "`PartitionError`: no program that fits within `memory_limit`",),
        r"found no program that fits in the memory of 2 ranks \(limit per rank: 1.00 kB\). .*more memory",
        Training(options={"schedule": "auto", "memory_limit": 1000}),
        (Training(options={"schedule": "auto", "memory_limit": "1GB"}),),
    ),
    "a loss of each token": Remedy(
        (ERRORS + "`ConfigurationError`: a criterion that returns no scalar",),
        "not a scalar tensor",
        Training(Logits, {"verify": False}, criterion=unreduced),
        (Training(Logits, criterion=reduced),),
    ),
    "one unit": Remedy(
        (ERRORS + "`PartitionError`: more stages than units",),
        r"Use pp_size=1, or cut inside a unit.* pass partition=\[...\] with the names of the modules to cut after",
        Training(Single, batches=numbers),
        (Training(Single, {"partition": ["only.a"]}, batches=numbers),),
    ),
    "two units, four stages": Remedy(
        (ERRORS + "`PartitionError`: more stages than units",),
        r"fewer than 4 \(pp_size=2 with 2 stages per rank\).* Use pp_size <= 2 with schedule='1f1b'",
        Training(lambda: Net(0), {"schedule": "zbv"}),
        (Training(lambda: Net(0), {"schedule": "1f1b"}),),
    ),
}
LESS_MEMORY: dict[str, Mapping[str, Any]] = {  # what "Out of memory" names
    "microbatches": {"num_microbatches": 4},
    "recompute": {"recompute": True},
    "gpipe": {"schedule": "gpipe"},
    "partition": {"partition": [2, 4]},
}


def of_less_memory() -> list[str]:
    return [f"{name}: {each}" for name, options in LESS_MEMORY.items() for each in run(Training(options=options))]


def of_another_mean() -> tuple[bool, list[str]]:
    """Whether a script that averages microbatches' means has another loss, and what differs with the remedy."""
    other = run(Training(Logits, criterion=reduced, batches=ragged, parts=2))
    return any("loss" in each for each in other), run(Training(Logits, TWICE, reduced, ragged, parts=2))


def in_a_notebook(folder: Path) -> list[str]:
    """What needs one process: a trace, a plan with its picture, and training that leaves signals alone."""
    pipeshard.trace(Net(), data(0))
    pipeshard.plan(Net(), data(0), pp_size=2, num_microbatches=2).draw(folder / "plan.png")
    if not (folder / "plan.png").exists():
        return ["no picture"]
    return run(Training(options={"pp_size": 1, "watchdog": False}))


def in_16_bits() -> list[str]:
    """Whether a bf16 model with fp32 precision is told of its remedy, which keeps fp32 values."""
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("pipeshard").addHandler(handler)
    found = []
    for options in ({"precision": "fp32"}, {"precision": "bf16"}):
        torch.manual_seed(0)
        model = Net().bfloat16()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
        told.clear()
        engine = pipeshard.initialize(
            model, optimizer, pp_size=dist.get_world_size(), num_microbatches=2, dry_run_input=data(0), **options
        )
        warned = any("pass PipelinePlugin(precision='bf16')" in each for each in told)
        if dist.get_rank() == 0 and warned != (options["precision"] == "fp32"):
            found.append(f"{options}: {told}")
    for seed in range(20):
        engine.execute_pipeline(iter([data(seed % 2)]))
        engine.optimizer.step()
        engine.optimizer.zero_grad()
    weights = [weight for weight in engine.optimizer.weights.values() if weight.name.endswith("bias")]
    found += [w.name for w in weights if torch.equal(w.master.detach(), w.master.detach().bfloat16().float())]
    logging.getLogger("pipeshard").removeHandler(handler)
    return found
