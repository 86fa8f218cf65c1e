"""Tests of untrusted checkpoints: their code does not run, and implausible sizes are not allocated."""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import shutil
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from pipeshard import PipelinePlugin, load_training_state, save_training_state
from pipeshard.checkpoint import safetensors_files as shards
from pipeshard.checkpoint import state_folder, untrusted
from pipeshard.checkpoint.optimizer import DESCRIPTION, _read_content
from pipeshard.checkpoint.optimizer_content import OPTIMIZER_FORMAT, VALUE, content_flaw
from pipeshard.checkpoint.safetensors_files import (
    StoredTensors,
    check_shards,
    file_contents,
    joined_file,
    read_shards,
    write_files,
)
from pipeshard.checkpoint.untrusted import load_plain, plain
from pipeshard.errors import CheckpointError
from tests import zoo
from tests.checkpoint.test_training_state import Training
from tests.messages import assert_told
from tests.pool import Pool
from tests.unsplit import Split


class Harmful:
    """Leaves a mark where it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = str(mark)

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.mark,)


def plant(file: Path, mark: Path) -> None:
    """A pickle that runs code in the place of a file."""
    if file.name == ".metadata":
        file.write_bytes(pickle.dumps(Harmful(mark)))
    else:
        torch.save({"a": Harmful(mark)}, file)


def complete(place: Path) -> None:
    (place / state_folder.MANIFEST).unlink()
    files = [path for path in place.rglob("*") if path.is_file()]
    sums = {str(path.relative_to(place)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
    state_folder.write_manifest(place, 1, 2, sums)


def stranger(folder: Path) -> list[str]:
    """A training state with harm in each file that torch reads, in turn."""
    training = Training("llama", 0)
    training.run(1)
    save_training_state(folder / "good", 1, **training.parts)
    step, first = "step-00000001", dist.get_rank() == 0
    rest = torch.load(folder / "good" / step / "training.pt", weights_only=True)
    others = strange_rests(rest)
    names = ["optimizer/.metadata", "training.pt", "optimizer/optimizer.pt", "model/model.safetensors.index.json"]
    if first:
        for k, name in enumerate(names):
            place = folder / f"bad{k}" / step
            shutil.copytree(folder / "good", place.parent)
            if k == 3:
                shutil.rmtree(place / "model")
                (place / "model").mkdir()
                name = "model/pytorch_model.bin"
            plant(place / name, folder / "mark")
            complete(place)
        for k, other in enumerate(others):
            place = folder / f"rest{k}" / step
            shutil.copytree(folder / "good", place.parent)
            torch.save(other, place / "training.pt")
            complete(place)
    dist.barrier()
    load_training_state(folder / "bad0", **training.parts)  # nobody reads it
    before, messages = training.values, []
    for name in [*(f"bad{k}" for k in (1, 2, 3)), *(f"rest{k}" for k in range(len(others)))]:
        with pytest.raises(CheckpointError) as caught:
            load_training_state(folder / name, **training.parts)
        messages.append(str(caught.value))
    assert all(torch.equal(value, before[key]) for key, value in training.values.items())
    return messages


def strange_rests(rest: dict[str, Any]) -> list[Any]:
    numpy, python = rest["random"]["numpy"], rest["random"]["python"]
    randoms = [
        *(
            {},
            None,
            {"numpy": [numpy[0], numpy[1], 10**6, *numpy[3:]]},
            {"numpy": [numpy[0], numpy[1][:9], *numpy[2:]]},
        ),
        *({"python": (3, python[1][:-1], None)}, {"torch": torch.zeros(7, dtype=torch.uint8)}, {"torch": [1]}),
    ]
    return [
        *([], {}, {**rest, "steps": "one"}, {**rest, "lr_scheduler": [1]}, {**rest, "dataloader": 3}),
        *({**rest, "ranks": [{**rest["random"], **other} if other else other] * 2} for other in randoms),
        *({**rest, "ranks": ranks} for ranks in (rest["ranks"][:1], [rest["random"], {}])),
    ]


@pytest.mark.turns
def test_a_stranger_s_training_state_runs_no_code(pool: Pool, tmp_path: Path) -> None:
    """Whoever resumed with another class of LR scheduler was told to load another step, which fails in the same way."""
    ranks = pool.run(stranger, 2, tmp_path)
    assert ranks[0] == ranks[1]
    expected = [
        r"is not the training.pt of a training state \(ValueError: .*GLOBAL posix.mkdir.*\): load another step",
        r"is not an optimizer checkpoint \(ValueError: .*GLOBAL posix.mkdir.*\): pass .* that booster.save",
        r"pytorch_model.bin is not a checkpoint that weights_only=True can load .*posix.mkdir.*convert it to",
        "training.pt cannot be restored .TypeError: .*: pass objects of the same classes .*, or load another step",
        "step-00000001 was saved without lr_scheduler, dataloader: pass only objects",
        "training.pt cannot be restored .ValueError: invalid literal for int",
        "training.pt cannot be restored .TypeError: ",
        "training.pt cannot be restored .TypeError: ",
        "training.pt cannot be restored .KeyError: 'torch'",
        "training.pt cannot be restored .TypeError: ",
        "training.pt cannot be restored .ValueError: NumPy's position is 1000000",
        "training.pt cannot be restored .IndexError",
        "training.pt cannot be restored .ValueError",
        "training.pt cannot be restored .RuntimeError: .* size to be 7",
        "training.pt cannot be restored .TypeError",
        "rank 1 .*training.pt cannot be restored .IndexError",
        "rank 1 .*training.pt cannot be restored .KeyError: 'torch'",
    ]
    assert_told(ranks[0], expected)
    assert not (tmp_path / "mark").exists()
    for file in (tmp_path / "good").rglob("*.*"):  # what is saved can be read without running anything
        if file.suffix == ".safetensors":
            assert safe_open(file, "pt").keys() is not None
        elif file.suffix == ".json":
            assert json.loads(file.read_text())
        elif file.name != state_folder.LOCK:
            assert file.suffix == ".pt" and torch.load(file, weights_only=True)


def refused(parse: Callable[[], Any], what: str) -> None:
    with pytest.raises(CheckpointError, match=what):
        parse()


def test_files_that_claim_more_than_they_have_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "x.bin"
    wide = torch.as_strided(torch.zeros(1), (2**30, 2**20), (0, 0))
    for tensor in (wide, torch.empty(2**40, 2**20, device="meta")):
        torch.save({"a": tensor}, file)
        refused(lambda: StoredTensors(file), "has no values for 'a': pass a file with the weights of a model")
    torch.save({"a": torch.eye(2).to_sparse()}, file)
    refused(lambda: StoredTensors(file), "_rebuild_sparse_tensor is not a plain value")
    torch.save({"a": torch.zeros(9)}, file)
    with zipfile.ZipFile(file) as whole, zipfile.ZipFile(tmp_path / "packed.bin", "w", zipfile.ZIP_DEFLATED) as packed:
        for entry in whole.infolist():
            packed.writestr(entry.filename, whole.read(entry))
    refused(lambda: StoredTensors(tmp_path / "packed.bin"), "data.pkl' is compressed, but torch.save does not compress")
    file.write_bytes(b"")
    refused(lambda: load_plain(file, "what", "do that"), r"x.bin is not what \(ValueError: pickle exhausted.*\): do")
    file.write_bytes(b"\x80\x02]q\x01." + b"1" * 99)
    refused(lambda: StoredTensors(file), "x.bin ")


def index_of(folder: Path, content: Any) -> Callable[[], StoredTensors]:
    text = content if isinstance(content, str) else json.dumps({"weight_map": content})
    (folder / "model.safetensors.index.json").write_text(text)
    return lambda: StoredTensors(folder)


def test_an_index_stays_in_its_folder(tmp_path: Path) -> None:
    folder, outside = tmp_path / "snapshot", tmp_path / "outside.safetensors"
    folder.mkdir()
    for path in (outside, folder / "a.safetensors"):
        save_file({"a": torch.ones(1)}, path)
    (folder / "link.safetensors").symlink_to("../outside.safetensors")  # as in the caches of the hub
    assert torch.equal(index_of(folder, {"a": "link.safetensors"})().read("a"), torch.ones(1))
    for name in ("../outside.safetensors", str(outside), "", ".", "..", "a\0", "./a.safetensors", 3, None, ["a"], {}):
        refused(index_of(folder, {"a": name}), "but may only list names of files in its own folder")
    refused(index_of(folder, {"a": "a" * 300}), "cannot be read as a checkpoint index: OSError: .*name too long")
    refused(index_of(folder, {"a": "\ud800"}), r"refers to '\\ud800', which is missing: the checkpoint is incomplete")
    refused(index_of(folder, {"a": "snapshot"}), "which is missing")
    for weights in (None, [], True, 3):
        refused(index_of(folder, weights), "the weight_map must be a JSON object")
    for text, what in (
        ("[]", "must contain a JSON object, but contains a value of type list"),
        ("[" * 10**5, "nested too deeply"),
        ("{}", "KeyError"),
    ):
        refused(index_of(folder, text), f"cannot be read as a checkpoint index: .*{what}")
    refused(index_of(folder, '{"weight_map": ' + "1" * 5000 + "}"), "cannot be read as a checkpoint index: ValueError")
    (folder / "model.safetensors.index.json").unlink()
    os.mkfifo(folder / "model.safetensors.index.json")  # of which a reader would wait for a writer
    refused(lambda: StoredTensors(folder), "index.json does not exist")


class Gigabytes:
    def __reduce__(self) -> tuple[Any, ...]:
        return bytearray, (6 << 30,)


def doubled(times: int) -> bytes:
    """The pickle of a dict, of which a key is a tuple of itself twice, and so on."""
    key: Any = (1,)
    for _ in range(times):
        key = (key, key)
    pickle._Pickler(file := io.BytesIO(), 2).dump([key, 2])  # type: ignore[attr-defined]
    return file.getvalue()


@pytest.mark.parametrize("legacy", [False, True])
def test_a_pickle_takes_no_more_than_its_file_says(tmp_path: Path, legacy: bool) -> None:
    """900 bytes made 6 GiB (a bytearray), 1,200 a tuple that is hashed for ever, in C, which only SIGKILL ends."""
    file = tmp_path / "a.pt"

    def refused(what: str) -> None:
        with pytest.raises(CheckpointError, match=what):
            load_plain(file, "a state", "load another")

    torch.save({"a": Gigabytes()}, file, _use_new_zipfile_serialization=not legacy)
    refused("GLOBAL __builtin__.bytearray is not a plain value")
    torch.save({"a": 1}, file, _use_new_zipfile_serialization=not legacy)
    content = file.read_bytes()
    if legacy:
        file.write_bytes(content.replace(pickle.dumps({"a": 1}, 2), doubled(60)))
    else:
        with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(file, "w") as new:
            for name in old.namelist():
                new.writestr(name, doubled(60) if name.endswith("data.pkl") else old.read(name))
    refused("the pickle expands to more than 4000000 values")
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], momentum=0.9)
    steps = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 1, 2])
    honest = {
        "steps": steps.state_dict(),
        "dtype": torch.bfloat16,
        "size": torch.Size([2]),
        "bytes": b"1",
        "t": (1, (2,)),
    }
    torch.save(honest, file, _use_new_zipfile_serialization=not legacy)
    assert load_plain(file, "a state", "load another") == honest


def test_a_state_that_could_not_be_loaded_is_not_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    """A position in the data with a dict of millions of numbers was saved at each step, and refused at each resume."""
    monkeypatch.setattr(untrusted, "MOST_STEPS", 1000)
    assert plain({"order": list(range(900))}, "the state of this Loader") == {"order": list(range(900))}
    problem = "the state of this Loader cannot be saved .*more than 1000 steps: store long lists as tensors"
    with pytest.raises(CheckpointError, match=problem):
        plain({"order": list(range(1100))}, "the state of this Loader")


def test_a_stranger_s_code_is_not_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A config that names code of its own had the terminal asked whether to run it, and `yes |` ran it."""
    config = {"model_type": "strange", "auto_map": {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "code.py").write_text(f"open({str(tmp_path / 'mark')!r}, 'w')\nclass Config: ...\n")
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    with pytest.raises(CheckpointError, match="trust_remote_code=True"):
        PipelinePlugin.from_pretrained(transformers.AutoModelForCausalLM, tmp_path)
    assert not (tmp_path / "mark").exists()


CODE = """
from transformers import LlamaConfig, LlamaForCausalLM

class Config(LlamaConfig):
    model_type = "mine"

class Model(LlamaForCausalLM):
    config_class = {config}
"""


def with_code(folder: Path, config: str) -> Path:
    """Write a folder whose model, and perhaps config, is code of its own."""
    zoo.build("llama").save_pretrained(folder)  # type: ignore[operator]
    described = json.loads((folder / "config.json").read_text())
    described["auto_map"] = {"AutoModelForCausalLM": "code_of_mine.Model"}
    if config == "Config":
        described |= {"model_type": "mine", "auto_map": described["auto_map"] | {"AutoConfig": "code_of_mine.Config"}}
    (folder / "config.json").write_text(json.dumps(described))
    (folder / "code_of_mine.py").write_text(CODE.format(config=config))
    return folder


@contextmanager
def copied_to(modules: Path) -> Iterator[None]:
    """The code that transformers trusts is copied to this folder."""
    with (
        mock.patch.object(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(modules)),
        mock.patch.object(sys, "path", [str(modules), *sys.path]),
    ):
        yield


@pytest.mark.parametrize("config", ["Config", "LlamaConfig"])
def test_code_that_is_trusted_runs(tmp_path: Path, config: str) -> None:
    """`from_pretrained(..., trust_remote_code=True)` asked for `trust_remote_code=True`; where only the model, not its
    config, was code of the folder, it built transformers' class instead."""
    auto, folder = transformers.AutoModelForCausalLM, with_code(tmp_path / "folder", config)
    with copied_to(tmp_path / "modules"):
        model = PipelinePlugin.from_pretrained(auto, folder, trust_remote_code=True)
    assert type(model).__name__ == "Model" and type(model.config).__name__ == config
    assert next(model.parameters()).is_meta


def save_with_code(place: Path) -> list[str]:
    """Save a model of custom code into a folder and a training state, and load both; their classes."""
    auto = transformers.AutoModelForCausalLM
    with copied_to(place / f"modules{dist.get_rank()}"):
        model = auto.from_pretrained(place / "folder", trust_remote_code=True).train()
        split = Split(model, 2, zoo.batch("llama"), num_microbatches=2)
        split.booster.save_model(split.model, str(place / "out"), shard=True)
        save_training_state(place / "state", 1, split.model)
        folders = place / "out", place / "state" / "step-00000001" / "model"
        return [type(auto.from_pretrained(folder, trust_remote_code=True)).__name__ for folder in folders]


@pytest.mark.turns
def test_custom_code_is_saved_with_its_model(pool: Pool, tmp_path: Path) -> None:
    """The saved folder of a model that was loaded with `trust_remote_code=True` had no code: it could not be loaded."""
    with_code(tmp_path / "folder", "LlamaConfig")
    assert pool.run(save_with_code, 2, tmp_path) == [["Model", "Model"]] * 2
    assert (tmp_path / "out" / "code_of_mine.py").is_file()


@pytest.mark.parametrize("name", ["model.safetensors.index.json", "manifest.json"])
def test_a_document_that_is_too_large_is_not_read(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / name).touch()
    os.truncate(tmp_path / name, untrusted.LARGEST_JSON + 1)
    monkeypatch.setattr(Path, "read_text", None)
    said = state_folder.flaw(tmp_path)
    if name != "manifest.json":
        with pytest.raises(CheckpointError) as caught:
            StoredTensors(tmp_path)
        said = str(caught.value)
    assert "the file is 67108865 bytes long, more than the limit of 67108864" in said


def test_headers_are_checked_before_anything_is_allocated(tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    four = {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}
    headers: list[tuple[Any, int | None]] = [
        ({}, 2**63),
        ({}, 10**8),
        ({"a": {"dtype": "F32", "shape": [2**62], "data_offsets": [0, 4]}}, None),
        ({"a": {"dtype": "F32", "shape": [2**32, 2**32], "data_offsets": [0, 0]}}, None),
        ({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 2**64]}}, None),
        ({"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}, None),
        ({"a": {"dtype": "F4", "shape": [8], "data_offsets": [0, 4]}}, None),  # torch sees 4 elements
        ({"a": {"dtype": "U8", "shape": [0, 2**63], "data_offsets": [0, 0]}, "b": four}, None),
    ]
    for header, length in headers:
        text = json.dumps(header).encode()
        file.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + bytes(4))
        refused(
            lambda: [StoredTensors(file).read(key) for key in StoredTensors(file).shapes],
            "cannot be read as safetensors",
        )


def test_a_part_that_is_not_whole_is_not_joined(tmp_path: Path) -> None:
    parts = [tmp_path / "a", tmp_path / "b"]
    save_file({"a": torch.ones(2)}, parts[0], {"format": "pt"})
    save_file({"b": torch.ones(3)}, parts[1])
    joined_file(parts, tmp_path / "whole.safetensors")
    assert StoredTensors(tmp_path / "whole.safetensors").shapes == {"a": (2,), "b": (3,)}
    parts[1].write_bytes(parts[1].read_bytes()[:-1])
    refused(lambda: joined_file(parts, tmp_path / "whole.safetensors"), "b cannot be read as safetensors")


def test_shards_of_any_tensors_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "LARGEST_FILE", 100)
    base = torch.arange(24.0).view(4, 6)
    tensors = {
        "state.a.b.step": torch.tensor(3.0),
        "same": base,
        "again": base,
        "turned": base.t(),
        "wide": torch.ones(1).expand(5),
        "none": torch.zeros(0, 3),
        "flags": torch.tensor([True, False]),
        "whole": torch.tensor([2**40]),
        "half": torch.ones(3, dtype=torch.bfloat16),
        "ä /\0": torch.zeros(1),
    }
    write_files(file_contents(tensors), tmp_path, 0)
    assert len(list(tmp_path.iterdir())) > 3
    check_shards(tmp_path, tensors)
    found = {key: torch.zeros_like(value).contiguous() for key, value in tensors.items()}
    read_shards(tmp_path, found)
    assert all(torch.equal(value, tensors[key]) for key, value in found.items())
    for key, other, what in (
        ("same", torch.zeros(4, 7), r"same is torch.float32 of shape \(4, 6\), but is described as .*\(4, 7\)"),
        ("flags", torch.zeros(2), "flags is torch.bool"),
        ("more", torch.zeros(2), "more is missing"),
    ):
        refused(lambda tensors={**tensors, key: other}: check_shards(tmp_path, tensors), f"is damaged: {what}")
    refused(lambda: check_shards(tmp_path, {}), "is damaged: 'again' is unexpected")


def test_slices_have_no_holes_and_do_not_overlap(tmp_path: Path) -> None:
    told = {"x": torch.empty(4, 2, device="meta")}

    def write(rank: int, begin: list[Any], rows: int) -> None:
        metadata = {"DCP_SHARDING_INFO": json.dumps({"x": {"saved_offsets": begin}})}
        save_file({"x": torch.ones(rows, 2)}, tmp_path / f"rank-{rank:05d}-00000.safetensors", metadata)

    write(0, [0, 0], 1)
    write(1, [1, 0], 3)
    check_shards(tmp_path, told)
    write(0, [1, 0], 1)
    write(1, [1, 0], 3)
    refused(
        lambda: check_shards(tmp_path, told),
        "x is incomplete: the slices in the files do not cover the tensor exactly once",
    )
    write(0, [0, 0], 1)
    for begin, rows in (
        ([1, 0], 2),
        ([2, 0], 2),
        ([2, 0], 3),
        ([0, 0], 4),
        ([-1, 0], 4),
        ([1], 3),
        ([1, 0, 0], 3),
        (["1", 0], 3),
        (1, 3),
    ):
        write(1, begin, rows)  # type: ignore[arg-type]
        refused(lambda: check_shards(tmp_path, told), "is damaged: ")


def test_a_description_that_is_none_is_refused(tmp_path: Path) -> None:
    """An optimizer whose own state has a key such as Q::left was saved, and then refused by every load; a sound folder
    of 0.2.0 with tensors in lists was called damaged, and to be replaced by another, which has the same tensors."""
    meta = torch.empty(3, device="meta")
    good: dict[str, Any] = {
        "parameters": {"w": meta},
        "param_groups": [{"params": ["w"], "lr": 0.1}],
        "state": {"w": {"step": torch.empty((), device="meta"), "kind": 3, "Q::left": meta}},
    }
    assert content_flaw(good, described=True) == ""
    assert content_flaw(good, described=False) == "step of w has no values"
    value: Tensor | str
    for part, value, what in (
        *(
            ("parameters", value, "its parameters are not a dict from names to tensors")
            for value in (None, [], {"w": 1}, {3: meta})
        ),
        ("param_groups", {}, "not a list of dicts"),
        ("param_groups", [3], "not a list of dicts"),
        ("param_groups", [{}], "one of its groups has no list of params"),
        ("param_groups", [{"params": ["w", "w"]}], "not exactly its parameters, each listed once"),
        ("param_groups", [{"params": [["w"]]}], "not exactly its parameters, each listed once"),
        ("param_groups", [], "not exactly its parameters, each listed once"),
        ("state", [], "its state is not a dict of dicts, or belongs to unknown parameters"),
        ("state", {"v": {}}, "its state is not a dict of dicts, or belongs to unknown parameters"),
        ("state", {"w": {3: 3}}, "the state of w is not a dict with string keys"),
        ("state", {"w": {"step": torch.zeros(())}}, "step of w is stored in the description"),
        (
            "state",
            {"w": {VALUE: torch.empty(4, device="meta")}},
            "pipeshard.value of w does not have the parameter's shape",
        ),
        ("state", {"w": {VALUE: 3}}, "pipeshard.value of w does not have the parameter's shape"),
    ):
        assert what in content_flaw({**good, part: value}, described=True), (part, value)
    of_file = {"w": {"Q": {"left": [torch.zeros(2)]}}}  # also of version 0.2.0
    assert content_flaw({**good, "state": of_file}, described=False) == ""
    torch.save({**good, "format": OPTIMIZER_FORMAT, "state": of_file}, tmp_path / DESCRIPTION)
    refused(
        lambda: _read_content(tmp_path),
        r"with pipeshard 0.2.0, which stored Q\['left'\]\[0\] of w .*Load the folder with version 0.2.0",
    )
    twice = {"w": {"Q": [meta], "Q[0]": torch.empty(2, device="meta")}}
    refused(
        lambda: content_flaw({**good, "state": twice}, described=True), "two tensors in the state of w have the name"
    )
