"""Parsers: the functions that read untrusted files, with valid inputs, and properties that hold for every result."""

import contextlib
import hashlib
import io
import json
import tempfile
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import save, save_file
from torch import nn
from transformers import AutoConfig, GenerationConfig

from pipeshard.checkpoint import state_folder
from pipeshard.checkpoint.lora import enable_lora
from pipeshard.checkpoint.safetensors_files import (
    INDICES,
    WEIGHTS,
    StoredTensors,
    check_shards,
    joined_file,
    read_shards,
)
from pipeshard.checkpoint.state_folder import MANIFEST, damage, flaw, sum_of
from pipeshard.checkpoint.untrusted import folder_config, generation_config_of, has_content, load_plain
from pipeshard.errors import CheckpointError
from pipeshard.hf import ADAPTER_CONFIG
from pipeshard.private import tree_leaves
from tests.fuzz.mutation import Seed

NAMES = (
    *(f'"{name}"' for name in ("../outside", "/etc/passwd", "inside/../../outside", "..", ".", "./a", "a/", "/", "//")),
    *(f'"{name}"' for name in ("link.safetensors", "inside", "model.safetensors.index.json", "nowhere", r"..\\a", "~")),
)


@dataclass(frozen=True)
class Parser:
    """`parse` reads the file called `name` of a folder that `prepare` has filled; it returns or raises CheckpointError.

    A folder beside it, and a file of that one, must not be reached. `share` is the part of all inputs that it gets.
    """

    name: str
    file: str
    seeds: tuple[Seed, ...]
    tokens: tuple[str, ...]
    prepare: Callable[[Path], None]
    parse: Callable[[Path], None]
    share: float = 1 / 3


def seed_of(content: bytes) -> Seed:
    """A safetensors file, as its header and what is behind."""
    end = 8 + int.from_bytes(content[:8], "little")
    return Seed(content[8:end].decode().rstrip(), content[end:], framed=True)


def _tensors() -> list[dict[str, torch.Tensor]]:
    small = {"a": torch.arange(6.0).view(2, 3), "b.c": torch.tensor(1, dtype=torch.int64), "d": torch.zeros(0, 4)}
    kinds = ("bool", "uint8", "bfloat16", "float8_e4m3fn", "complex64", "uint64")
    other = {name: torch.zeros(4).to(getattr(torch, name)) for name in kinds}
    return [small, other, {"w": torch.ones(16)}]


def _prepare_header(folder: Path) -> None:
    save_file({"another": torch.ones(2)}, folder / "another")


def _parse_header(file: Path) -> None:
    """Every tensor is no larger than the file, and a file that is joined with another has the tensors of both."""
    source = StoredTensors(file)
    for key, shape in source.shapes.items():
        tensor = source.read(key)
        assert tuple(tensor.shape) == shape and tensor.nbytes <= file.stat().st_size
    if "another" not in source.shapes:
        joined = file.with_name("joined.safetensors")
        joined_file([file, file.with_name("another")], joined)
        assert StoredTensors(joined).shapes == source.shapes | {"another": (2,)}


def _prepare_index(folder: Path) -> None:
    for name in ("a", "b"):
        save_file({f"{name}.0": torch.ones(2), f"{name}.1": torch.ones(3)}, folder / f"{name}.safetensors")
    save_file({name: torch.ones(1) for name in ("a.0", "a.1", "b.0")}, folder / "../outside")
    (folder / "inside").mkdir()
    (folder / "link.safetensors").symlink_to(folder / "a.safetensors")


def _parse_index(file: Path) -> None:
    """No tensor comes from another folder."""
    source = StoredTensors(file.parent)
    assert all(path.parent == file.parent for path in source._files.values())
    for key in source.shapes:
        source.read(key)


def _index(weight_map: dict[str, str]) -> Seed:
    return Seed(json.dumps({"metadata": {"total_size": 40}, "weight_map": weight_map}))


def _prepare_manifest(folder: Path) -> None:
    (folder.parent / "outside").write_bytes(b"x" * FILES["training.pt"])
    (folder / "model").mkdir()
    for name, size in FILES.items():
        (folder / name).write_bytes(b"x" * size)


FILES = {"training.pt": 100, "model/config.json": 20, "model/model.safetensors": 3000, "empty": 0}
SUMS = {name: hashlib.sha256(b"x" * size).hexdigest() for name, size in FILES.items()}


def _parse_manifest(file: Path) -> None:
    """What is complete has a manifest that names files of its folder alone, with their sizes and checksums, if any."""
    if why := flaw(file.parent) or _damage(file.parent):
        raise CheckpointError(why)
    manifest = json.loads(file.read_bytes())
    for name, size in manifest["files"].items():
        path, parts = file.parent / name, PurePosixPath(name).parts
        assert not PurePosixPath(name).is_absolute() and ".." not in parts
        assert type(size) is int and path.stat().st_size == size
        assert manifest.get("sha256", {}).get(name, own := sum_of(path)) == own


def _damage(folder: Path) -> str:
    """`damage` on the one rank of a group without a backend."""
    alone: Any = SimpleNamespace(rank=lambda: 0, size=lambda: 1)
    with (
        mock.patch.object(state_folder, "together", contextlib.nullcontext),
        mock.patch.object(state_folder, "gather_objects", lambda value, group: [value]),
    ):
        return damage(folder, alone)


def _manifest(files: dict[str, int], **more: Any) -> Seed:
    return Seed(json.dumps({"format": 1, "step": 3, "stages": 2, "versions": {"torch": "2"}, "files": files, **more}))


WHOLE = {
    "state.w.step": torch.tensor(3.0),
    "state.w.exp_avg": torch.arange(8.0).view(4, 2),
    "state.v.exp_avg": torch.ones(3, dtype=torch.bfloat16),
}
NOWHERE = -77.0  # a value that no file has


def _prepare_shards(folder: Path) -> None:
    """The file of another rank, which has the last rows of a tensor, and all of a further one."""
    rest = {"state.w.exp_avg": WHOLE["state.w.exp_avg"][2:].clone(), "state.v.exp_avg": WHOLE["state.v.exp_avg"]}
    save_file(rest, folder / "rank-00001-00000.safetensors", _told({"state.w.exp_avg": [2, 0], "state.v.exp_avg": [0]}))


def _parse_shards(file: Path) -> None:
    """What is read fills every tensor."""
    check_shards(file.parent, {key: value.to("meta") for key, value in WHOLE.items()})
    filled = {key: torch.full_like(value, NOWHERE) for key, value in WHOLE.items()}
    read_shards(file.parent, filled)
    assert not any((value == NOWHERE).any() for value in filled.values())


def _told(begins: dict[str, list[int]]) -> dict[str, str]:
    """The metadata of a file with slices."""
    return {"DCP_SHARDING_INFO": json.dumps({key: {"saved_offsets": begin} for key, begin in begins.items()})}


def _shards() -> tuple[Seed, ...]:
    states = {"state.w.step": WHOLE["state.w.step"], "state.w.exp_avg": WHOLE["state.w.exp_avg"][:2].clone()}
    return seed_of(save(states, _told({"state.w.step": [], "state.w.exp_avg": [0, 0]}))), seed_of(save(states))


# Two values of four bits in each byte, for which torch has another shape.
HALVES = Seed('{"a":{"dtype":"F4","shape":[8],"data_offsets":[0,4]}}', bytes(4), framed=True)
DTYPES = (
    *('"F64"', '"F32"', '"F16"', '"BF16"', '"I64"', '"U8"', '"BOOL"', '"F8_E5M2"', '"F8_E8M0"', '"C64"'),
    *('"F4"', '"F6_E2M3"', '"F6_E3M2"', '"f32"', '"E1M1"'),
)
KEYS = ('"dtype"', '"shape"', '"data_offsets"', '"__metadata__"', '{"format":"pt"}', "[0,0]", "[0,24]", "[0,4]", "[4]")
MAPPED = ('"a.0"', '"weight_map"', '"a.safetensors"', '"b.safetensors"', '["a.safetensors"]', '{"a.0":"a.safetensors"}')
LISTED = (
    *('"files"', '"format"', '"training.pt"', "100", '{"training.pt":100}', '["training.pt"]', '"model"', '"empty"'),
    '"sha256"',
)
TOLD = ('"DCP_SHARDING_INFO"', '"{}"', '"[[0]]"', r'"{\"state.w.step\":1}"', r'"{\"state.w.exp_avg\":{}}"', '"[[[[[[["')


class Tiny(nn.Module):
    """What adapters are put on."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(self.up(x))
        return out


def _prepare_adapter(folder: Path) -> None:
    get_peft_model(Tiny(), LoraConfig(r=2, target_modules=["up"])).save_pretrained(str(folder))


def _parse_adapter(file: Path) -> None:
    enable_lora(Tiny(), str(file.parent), None, None)


def _adapters() -> tuple[Seed, ...]:
    with tempfile.TemporaryDirectory() as folder:
        _prepare_adapter(Path(folder))
        plain = json.loads((Path(folder) / ADAPTER_CONFIG).read_text())
    return Seed(json.dumps(plain)), Seed(json.dumps(plain | {"target_modules": "u.|d+", "rank_pattern": {"up": 3}}))


def _nothing(folder: Path) -> None:
    pass


def _parse_config(file: Path) -> None:
    folder_config(file.parent, trust_remote_code=False)


def _configs() -> tuple[Seed, ...]:
    kinds = ("llama", "t5", "mixtral", "vit", "whisper", "qwen2_vl", "xlnet")
    return tuple(Seed(AutoConfig.for_model(kind).to_json_string(use_diff=kind != "llama")) for kind in kinds)


def _parse_generation_config(file: Path) -> None:
    generation_config_of(file.parent)


def _pickled(value: object, zipped: bool) -> Seed:
    """A file as torch wrote it before archives, or the pickle in an archive."""
    buffer = io.BytesIO()
    torch.save(value, buffer, _use_new_zipfile_serialization=zipped)
    content = buffer.getvalue()
    if zipped:
        with zipfile.ZipFile(buffer) as archive:
            (name,) = (name for name in archive.namelist() if name.endswith("/data.pkl"))
            content = archive.read(name)
    return Seed(content.decode("latin-1"), codec="latin-1")


STATE = {
    "state": {0: {"step": torch.tensor(3.0), "exp_avg": torch.ones(2, 3)}},
    "param_groups": [{"lr": 1e-3, "betas": (0.9, 0.95), "foreach": None, "params": [0]}],
    "names": OrderedDict(a=torch.Size([2, 3]), b=torch.bfloat16),
    "half": torch.zeros(4, dtype=torch.bfloat16)[1:],
}
MAGIC = b"\x80\x02\x8a\n"  # of a file that is no archive


def _parse_pickle(file: Path) -> None:
    """What is read is no larger than the file."""
    content = file.read_bytes()
    if not content.startswith(MAGIC):
        with zipfile.ZipFile(file, "w") as archive:
            archive.writestr("archive/data.pkl", content)
            archive.writestr("archive/byteorder", "little")
            archive.writestr("archive/version", "3\n")
            for key in range(3):
                archive.writestr(f"archive/data/{key}", bytes(64))
    for tensor in tree_leaves(load_plain(file, "a state", "save it again")):
        if isinstance(tensor, torch.Tensor) and has_content(tensor):
            assert tensor.untyped_storage().nbytes() <= file.stat().st_size


OPCODES = (
    *("cbuiltins\nbytearray\n", "cposix\nsystem\n", "ctorch\nFloatStorage\n", "ccollections\nOrderedDict\n"),
    *("ctorch._utils\n_rebuild_tensor_v2\n", "c_codecs\nencode\n", "I9999999999999\n", "(I1099511627776\ntR"),
    *("(lp9\n", "}", "]", "(", "t", "R", "b", "2" * 40, "h\x01", "q\x01", "h\x01h\x01\x86q\x01" * 9),
    *("s", "u", "a", "e", "Q"),
)

PARSERS = (
    Parser(
        "configs",
        "config.json",
        _configs(),
        ("1000000000", "99999999", '"num_labels"', '"num_hidden_layers"', '"model_type"', '"t5"', '"auto_map"'),
        _nothing,
        _parse_config,
        share=1 / 30,
    ),
    Parser(
        "generation configs",
        "generation_config.json",
        (Seed(GenerationConfig(max_new_tokens=3, eos_token_id=[1, 2]).to_json_string(use_diff=False)),),
        ('"max_length"', '"eos_token_id"', "[1,2]", '"cache_config"', '"quantized"', '"watermarking_config"'),
        _nothing,
        _parse_generation_config,
        share=1 / 30,
    ),
    Parser(
        "adapter configs",
        ADAPTER_CONFIG,
        _adapters(),
        ("20000000", '"r"', '"up"', '["up"]', '"(u+)+x"', '"LORA"', '"peft_type"', '"PROMPT_TUNING"', '"rank_pattern"'),
        _prepare_adapter,
        _parse_adapter,
        share=1 / 100,
    ),
    Parser(
        "pickles",
        "training.pt",
        (_pickled(STATE, False), _pickled(STATE, True)),
        OPCODES,
        _nothing,
        _parse_pickle,
        share=1 / 5,
    ),
    Parser(
        "safetensors headers",
        WEIGHTS[0],
        (*(seed_of(save(tensors, {"format": "pt"})) for tensors in _tensors()), HALVES),
        DTYPES + KEYS,
        _prepare_header,
        _parse_header,
    ),
    Parser(
        "indices",
        INDICES[0],
        (
            _index({"a.0": "a.safetensors", "a.1": "a.safetensors", "b.0": "b.safetensors"}),
            _index({"a.0": "link.safetensors"}),
        ),
        NAMES + MAPPED,
        _prepare_index,
        _parse_index,
    ),
    Parser(
        "manifests",
        MANIFEST,
        (_manifest(FILES, sha256=SUMS), _manifest({"training.pt": 100})),
        NAMES + LISTED,
        _prepare_manifest,
        _parse_manifest,
    ),
    Parser(
        "slices of an optimizer",
        "rank-00000-00000.safetensors",
        _shards(),
        DTYPES[:6] + KEYS + TOLD,
        _prepare_shards,
        _parse_shards,
        share=1 / 10,
    ),
)
