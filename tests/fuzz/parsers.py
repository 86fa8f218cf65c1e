"""Parsers: those that read what strangers may have written, with valid inputs, and what is certain of their answers."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import torch
from safetensors.torch import save, save_file

from pipeshard.checkpoint.manifest import MANIFEST, flaw
from pipeshard.checkpoint.safetensors_files import INDICES, WEIGHTS, Source, check_shards, join, read_shards
from pipeshard.errors import CheckpointError
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
    source = Source(file)
    for key, shape in source.shapes.items():
        tensor = source.read(key)
        assert tuple(tensor.shape) == shape and tensor.nbytes <= file.stat().st_size
    if "another" not in source.shapes:
        joined = file.with_name("joined.safetensors")
        join([file, file.with_name("another")], joined)
        assert Source(joined).shapes == source.shapes | {"another": (2,)}


def _prepare_index(folder: Path) -> None:
    for name in ("a", "b"):
        save_file({f"{name}.0": torch.ones(2), f"{name}.1": torch.ones(3)}, folder / f"{name}.safetensors")
    save_file({name: torch.ones(1) for name in ("a.0", "a.1", "b.0")}, folder / "../outside")
    (folder / "inside").mkdir()
    (folder / "link.safetensors").symlink_to(folder / "a.safetensors")


def _parse_index(file: Path) -> None:
    """No tensor comes from another folder."""
    source = Source(file.parent)
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


def _parse_manifest(file: Path) -> None:
    """What is complete has a manifest that names files of its folder alone, with the sizes that they have."""
    if why := flaw(file.parent):
        raise CheckpointError(why)
    for name, size in json.loads(file.read_bytes())["files"].items():
        assert not PurePosixPath(name).is_absolute() and ".." not in PurePosixPath(name).parts
        assert type(size) is int and (file.parent / name).stat().st_size == size


def _manifest(files: dict[str, int]) -> Seed:
    return Seed(json.dumps({"format": 1, "step": 3, "stages": 2, "versions": {"torch": "2"}, "files": files}))


WHOLE = {
    "state.w.step": torch.tensor(3.0),
    "state.w.exp_avg": torch.arange(8.0).view(4, 2),
    "state.v.exp_avg": torch.ones(3, dtype=torch.bfloat16),
}
NOWHERE = -77.0  # a value that no file has


def _prepare_shards(folder: Path) -> None:
    """The file of another rank, which has the last rows of a tensor, and all of a further one."""
    rest = {"state.w.exp_avg": WHOLE["state.w.exp_avg"][2:].clone(), "state.v.exp_avg": WHOLE["state.v.exp_avg"]}
    save_file(rest, folder / "another.safetensors", _told({"state.w.exp_avg": [2, 0], "state.v.exp_avg": [0]}))


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
LISTED = ('"files"', '"format"', '"training.pt"', "100", '{"training.pt":100}', '["training.pt"]', '"model"', '"empty"')
TOLD = ('"DCP_SHARDING_INFO"', '"{}"', '"[[0]]"', r'"{\"state.w.step\":1}"', r'"{\"state.w.exp_avg\":{}}"', '"[[[[[[["')

PARSERS = (
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
        (_manifest(FILES), _manifest({"training.pt": 100})),
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
