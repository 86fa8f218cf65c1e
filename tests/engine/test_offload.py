"""Tests of activation offload: it is exact, and at most two microbatches of a rank are on the device at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F

from pipeshard.config import PipelineConfig
from pipeshard.distributed.collectives import local
from pipeshard.engine import stages
from pipeshard.engine.mixed_precision import Precision
from pipeshard.engine.offload import SMALL, Offload, transfer_of
from pipeshard.schedule import SCHEDULES, Kind, make_program
from pipeshard.schedule.residence import most_on_host, residences, resident
from tests import zoo
from tests.engine.test_loss_of_units import Codebook, Net, off
from tests.pool import Pool
from tests.unsplit import Split, largest_error, refusal


class Device:
    """A device in the memory of a CPU, which counts the bytes of saved tensors on it.

    Attributes:
        peak: the most at a time.
        largest: the most that one action leaves.
        stores: how many storages were copied to the host.
    """

    def __init__(self) -> None:
        self.peak = self.largest = self.stores = self.left = 0
        self._here: dict[int, tuple[StorageWeakRef, int]] = {}

    def store(self, tensor: Tensor) -> Tensor:
        self.stores += 1
        self.count(tensor)
        return tensor.clone()

    def load(self, copy: Tensor) -> Tensor:
        tensor = copy.clone()
        self.count(tensor, is_new=False)
        return tensor

    def wait(self) -> None:
        """Called before each action."""
        self.left = 0

    def count(self, tensor: Tensor, is_new: bool = True) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        self._here = {k: (ref, of_one) for k, (ref, of_one) in self._here.items() if not ref.expired()}
        if key not in self._here:
            self._here[key] = StorageWeakRef(storage), size
            self.left += size if is_new else 0
        self.peak = max(self.peak, sum(size for _, size in self._here.values()))
        self.largest = max(self.largest, self.left)


@contextlib.contextmanager
def offloading(device: Any) -> Iterator[None]:
    """Inside, models are boosted with this device."""
    with mock.patch.object(stages, "transfer_of", lambda _: device):
        yield


@contextlib.contextmanager
def counting(device: Device) -> Iterator[None]:
    """Inside, the device also counts what is saved there and stays."""
    plain = Offload.saving

    @contextlib.contextmanager
    def saving(offload: Offload, i: int, stage: int) -> Iterator[Any]:
        def counted(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            is_weight = storage._cdata in offload._held or isinstance(tensor._base, nn.Parameter)
            if storage.nbytes() >= SMALL and not is_weight:
                device.count(tensor)
            return tensor.detach()

        with saved_tensors_hooks(counted, lambda tensor: tensor), plain(offload, i, stage) as save:
            yield save

    with offloading(device), mock.patch.object(Offload, "saving", saving):
        yield


def steps(
    name: str, layers: int, device: Device, dropout: float = 0.0, change: Callable[[Any], Any] | None = None, **how: Any
) -> list[Tensor]:
    """The losses and gradients of two steps of training, and the loss of an evaluation, which stores nothing."""
    model, data = zoo.build(name, layers=layers), zoo.batch(name, rows=8)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = dropout
    with offloading(device):
        torch.manual_seed(1)
        model = change(model) if change is not None else model
        split = Split(model, 2 if dist.get_world_size() == 4 else dist.get_world_size(), data, verify=False, **how)
        values = []
        for _ in range(2):
            values.append(split.backward(data)["loss"])
            values += [local(p.grad).clone() for p in split.held.values() if p.grad is not None]
            split.step()
        stores = device.stores
        values.append(split.evaluate(data, return_loss=True)["loss"])
        assert device.stores == stores
    return [value for value in values if value is not None]


def differing(name: str, layers: int = 6, kind: Callable[[], Device] = Device, **how: Any) -> tuple[int, int]:
    """How many values differ from those without offload, and how many storages went to the host."""
    how = {"num_microbatches": 8, "schedule": "gpipe", **how}
    if how["schedule"] == "interleaved":
        how["num_model_chunks"] = 2
    device = kind()
    expected, found = steps(name, layers, device, **how), steps(name, layers, device, offload="activations", **how)
    return sum(not torch.equal(*pair) for pair in zip(expected, found, strict=True)), device.stores


def is_exact(ended: list[tuple[int, int]]) -> bool:
    return all(different == 0 for different, _ in ended) and any(stores for _, stores in ended)


@pytest.mark.local
@pytest.mark.sampled(1)
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("name", "dropout"), [("gpt2", 0.2), ("llama", 0.0), ("t5", 0.2)])
def test_every_schedule_is_exact(pool: Pool, name: str, dropout: float, schedule: str, recompute: bool) -> None:
    p = 3 if schedule == "1f1b" else 2  # with two ranks, 1F1B has two microbatches at most
    assert is_exact(pool.run(differing, p, name, schedule=schedule, recompute=recompute, dropout=dropout))


def checkpointed(model: Any) -> Any:
    model.gradient_checkpointing_enable()
    return model


def with_adapters(model: Any) -> Any:
    return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.1))


OPTIONS: dict[str, tuple[int, dict[str, Any]]] = {  # the ranks, and the arguments
    "autocast": (2, {"precision": "bf16", "autocast": True}),
    "bf16": (2, {"precision": "bf16"}),
    "slices": (2, {"num_slices": 2, "schedule": "zb-h1"}),
    "half": (2, {"recompute": 0.5, "check_finite": True}),
    "checkpointed": (2, {"change": checkpointed}),
    "adapters": (2, {"change": with_adapters}),
    "fsdp": (4, {"fsdp": True, "num_microbatches": 4}),
    "tp": (4, {"tp_size": 2}),
}


@pytest.mark.turns
@pytest.mark.local
@pytest.mark.sampled(1)
@pytest.mark.parametrize("which", OPTIONS)
def test_with_other_options(pool: Pool, which: str) -> None:
    world, how = OPTIONS[which]
    assert is_exact(pool.run(differing, world, "llama", **how))


def codebook() -> float:
    with offloading(Device()):
        return off(Net(Codebook()), (8, 8), offload="activations", num_microbatches=4)


@pytest.mark.turns
@pytest.mark.local
def test_a_loss_of_a_layer_crosses_a_cut(pool: Pool) -> None:
    """The tensor without dimensions that a layer returned as its loss, and that crossed a cut, ended the first step
    with torch's error about expand."""
    assert largest_error(pool.run(codebook, 2)) < 1e-5


class OfAnother(Device):
    """Gives back what was stored before."""

    last: Any = None

    def store(self, tensor: Tensor) -> Tensor:
        before, self.last = self.last, super().store(tensor)
        return before if before is not None and before.shape == self.last.shape else self.last


@pytest.mark.local
def test_a_wrong_tensor_is_seen(pool: Pool) -> None:
    ended = pool.run(differing, 2, "llama", kind=OfAnother)
    assert all(different for different, _ in ended)


def peaks(schedule: str, offloads: bool, **how: Any) -> float:
    """The most that is on this rank's device, in the activations of one microbatch (or what its B leaves for its W)."""
    device, data = Device(), zoo.batch("llama", rows=8)
    how |= {"num_microbatches": 8, "schedule": schedule}
    stays = contextlib.nullcontext() if offloads else mock.patch.object(Offload, "_stays", lambda *_: True)
    with counting(device), stays:
        split = Split(zoo.build("llama", layers=10), dist.get_world_size(), data, offload="activations", **how)
        split.backward(data)
    return device.peak / max(device.largest, 1)


@pytest.mark.turns
@pytest.mark.local
@pytest.mark.sampled(3)
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_two_microbatches_at_most_are_on_a_device(pool: Pool, schedule: str, recompute: bool) -> None:
    assert max(pool.run(peaks, 4, schedule, True, recompute=recompute)) <= 2


def of_sharded_layers() -> list[bool]:
    """Whether each large DTensor that is saved for a backward, and is no weight, goes to the host."""
    save, stored, data = Offload._save, list[bool](), zoo.batch("llama", rows=8)

    def noted(offload: Offload, holding: Any, tensor: Tensor) -> Any:
        saved, storage = save(offload, holding, tensor), local(tensor).untyped_storage()
        if isinstance(tensor, DTensor) and storage.nbytes() >= SMALL and storage._cdata not in offload._held:
            stored.append(saved.block is not None)
        return saved

    how: dict[str, Any] = {"tp_size": 2, "num_microbatches": 8, "schedule": "gpipe", "offload": "activations"}
    with offloading(Device()), mock.patch.object(Offload, "_save", noted):
        Split(zoo.build("llama"), 1, data, verify=False, **how).backward(data)
    return stored


@pytest.mark.turns
def test_activations_of_sharded_layers_are_offloaded(pool: Pool) -> None:
    """With `tp_size`, the inputs of linear layers are DTensors, which stayed on the device: a third of what a plan
    counts as offloaded."""
    for stored in pool.run(of_sharded_layers, 2):
        assert len(stored) > 50 and all(stored)


def test_a_dtensor_is_offloaded_with_its_placements() -> None:
    device, (actions,) = Device(), make_program("gpipe", 1, 3).ranks
    mesh = DeviceMesh("cpu", torch.arange(2), _init_backend=False, _rank=0)
    offload = Offload(device, torch.device("cpu"))
    offload.begin(actions, ())
    parts = [torch.rand(400, requires_grad=True) for _ in range(2)]
    x, written = (DTensor.from_local(part, mesh, [Shard(0)], run_check=False) for part in parts)
    with offload.saving(1, 0):
        y, z = x.exp(), written.exp()
    assert device.stores == 2
    y.to_local().sum().backward()
    assert parts[0].grad is not None and torch.equal(parts[0].grad, parts[0].exp())
    z.detach().add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.to_local().sum().backward()


@pytest.mark.turns
@pytest.mark.local
def test_without_offload_there_are_more(pool: Pool) -> None:
    assert pool.run(peaks, 4, "1f1b", False) == [4, 3, 2, 1]
    assert pool.run(peaks, 4, "1f1b", True) == [2, 2, 2, 1]


@pytest.mark.parametrize("size", [4, 400])  # which stays, and which is stored
def test_a_tensor_that_is_written_to_is_refused(size: int) -> None:
    """With hooks, autograd does not look whether a saved tensor was written to since: the gradient would be another."""
    device, (actions,) = Device(), make_program("gpipe", 1, 3).ranks
    offload = Offload(device, torch.device("cpu"))
    offload.begin(actions, ())
    x = torch.ones(size, requires_grad=True)
    with offload.saving(1, 0):
        y = x.exp()
        z = y.sum()
    assert device.stores == (size == 400)
    y.detach().add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.backward()


def test_weights_stay() -> None:
    device, (actions,), layer = Device(), make_program("gpipe", 1, 3).ranks, nn.Linear(64, 64)
    offload = Offload(device, torch.device("cpu"))
    offload.begin(actions, layer.parameters())
    x = torch.ones(2, 64, requires_grad=True)  # small
    with offload.saving(1, 0):
        y = layer(x)
    assert device.stores == 0
    y.sum().backward()


@pytest.mark.parametrize("shares", [True, False])
def test_casts_that_microbatches_share_stay(shares: bool) -> None:
    """With `autocast=True`, the 16-bit copy of every weight went to the host and back in each step, and was twice on
    the GPU in between: autocast's cache keeps it until the end of the step."""
    device, (actions,), layer = Device(), make_program("gpipe", 1, 3).ranks, nn.Linear(64, 64)
    precision = Precision("bf16", autocast=True, device=torch.device("cpu"))
    offload = Offload(device, torch.device("cpu"))
    offload.begin(actions, layer.parameters(), shares_casts=shares)
    x = torch.ones(2, 64, requires_grad=True)  # small
    sharing = precision.sharing_casts([]) if shares else contextlib.nullcontext()
    with sharing, offload.saving(1, 0), precision.running():
        y = layer(x)
    assert device.stores == (0 if shares else 1)
    y.sum().backward()
    assert layer.weight.grad is not None


def test_casts_that_a_forward_makes_itself_are_offloaded() -> None:
    """A tied head that cast its weight itself kept one 16-bit copy of it for each microbatch on the GPU: autocast's
    cache has none of them."""
    device, (actions,), layer = Device(), make_program("gpipe", 1, 4).ranks, nn.Linear(64, 64)
    precision = Precision("bf16", autocast=True, device=torch.device("cpu"))
    offload = Offload(device, torch.device("cpu"))
    offload.begin(actions, layer.parameters(), shares_casts=True)
    x = torch.ones(2, 64, requires_grad=True)  # small
    with precision.sharing_casts([]):
        for i in range(4):  # B0 is next after the last forward, so the activations of microbatch 0 stay
            with offload.saving(i, 0), precision.running():
                y = F.linear(x, layer.weight.to(torch.bfloat16))
    assert device.stores == 2
    y.sum().backward()


def test_bad_input() -> None:
    assert "offload='activation' is unknown: did you mean activations?" in refusal(offload="activation")
    assert "is not supported with compile=True" in refusal(offload="activations", compile=True)


def test_a_cpu_has_the_host_s_memory() -> None:
    assert transfer_of(torch.device("cpu")) is None


def test_residence() -> None:
    actions = make_program("1f1b", 4, 8).ranks[0]
    assert max(map(len, resident(actions))) == 2
    assert most_on_host(actions, [10, 0, 0, 0]) == 20
    for actions in PipelineConfig(pp_size=4, num_microbatches=8).program(8).ranks[2:]:  # which never have more than two
        assert all(residence.stays for action, residence in residences(actions).items() if action.kind is Kind.F)
