"""Tests of a sample of `make fuzz`: structured inputs, and parsers with deliberate faults."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeshard.checkpoint import safetensors_files as shards
from pipeshard.checkpoint import safetensors_files as source
from pipeshard.checkpoint import state_folder, untrusted
from pipeshard.errors import CheckpointError
from tests.covering import ALL
from tests.fuzz.__main__ import save
from tests.fuzz.campaign import Tally, Unnamed, attempt, campaign, trial
from tests.fuzz.mutation import Mutator
from tests.fuzz.parsers import PARSERS, Parser

SAMPLE = 3000 if ALL else 1000
few = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def parser_of(name: str) -> Parser:
    return next(parser for parser in PARSERS if parser.name == name)


HEADERS = parser_of("safetensors headers")


@pytest.mark.parametrize("parser", PARSERS, ids=lambda parser: parser.name)
def test_a_sample_is_read_or_refused_by_name(parser: Parser, tmp_path: Path) -> None:
    tally = trial(parser, range(round(SAMPLE * 3 * parser.share)), tmp_path)
    assert not tally.crashes, [crash.what for crash in tally.crashes]
    assert tally.accepted > 0.03 * tally.inputs  # it reaches what is behind JSON
    assert len(tally.refusals) >= min(20, tally.inputs // 10)


def test_the_same_number_makes_the_same_input() -> None:
    for parser in PARSERS:
        one, other = (Mutator(parser.seeds, parser.tokens) for _ in range(2))
        assert [one.make(k) for k in range(50)] == [other.make(k) for k in reversed(range(50))][::-1]


@contextmanager
def careless(file: Path) -> Iterator[None]:
    yield


FAULTS: dict[str, tuple[str, Any, str, Any, str, int]] = {
    "an error is not named": (
        "safetensors headers",
        source,
        "_naming_file",
        careless,
        "SafetensorError|RuntimeError",
        1000,
    ),
    "another folder is read": ("indices", source, "_of_folder", lambda index, name: str(name), "AssertionError", 1000),
    "a manifest leads elsewhere": ("manifests", state_folder, "is_inside", lambda name: True, "AssertionError", 1000),
    "a key is not looked for": (
        "manifests",
        state_folder,
        "short",
        lambda value: {}[value],
        "KeyError|TypeError",
        1000,
    ),
    "a header is believed": (
        "slices of an optimizer",
        shards,
        "_is_whole",
        lambda stored: True,
        "AssertionError",
        3000,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name, module, attribute, value, what, tries = FAULTS[fault]
    monkeypatch.setattr(module, attribute, value)
    tally = trial(parser_of(name), range(tries), tmp_path)
    assert tally.crashes
    assert {crash.what.partition(":")[0] for crash in tally.crashes} >= set(what.split("|"))
    crash = tally.crashes[0]
    with pytest.raises(Unnamed):
        attempt(parser_of(name), crash.content, tmp_path / str(os.getpid()) / name / "inside")
    assert save({name: tally}, tmp_path / "kept") == 1
    assert crash.content in {path.read_bytes() for path in (tmp_path / "kept").iterdir()}


def slow(file: Path) -> None:
    end = time.process_time() + 20
    while time.process_time() < end:
        pass


def greedy(file: Path) -> None:
    b"1" * (100 << 20)


def greedy_in_vain(file: Path) -> None:
    try:
        bytearray(1 << 40)  # which the system may give to who does not use it
    except MemoryError as error:
        raise CheckpointError("it is too large") from error


@pytest.mark.parametrize(
    ("parse", "what"), [(slow, "Overtime: "), (greedy, "it took .* MiB"), (greedy_in_vain, "in vain: MemoryError")]
)
def test_time_and_memory_are_limited(parse: Callable[[Path], None], what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.fuzz.campaign.PATIENCE", 0.3)
    tallies = campaign([replace(HEADERS, parse=parse)], 3, seed=0, processes=1, show=False)
    (crash,) = tallies[HEADERS.name].crashes
    assert re.search(what, crash.what)


def dies(file: Path) -> None:
    if b"F16" in file.read_bytes():
        os.kill(os.getpid(), signal.SIGKILL)
    raise CheckpointError("it is none")


def test_a_process_that_dies_leaves_its_input() -> None:
    tallies = campaign([replace(HEADERS, parse=dies)], 6000, seed=0, processes=1, show=False)
    (crash,) = tallies[HEADERS.name].crashes
    assert b"F16" in crash.content and "died" in crash.what


def test_a_campaign_counts_every_input() -> None:
    tallies = campaign(PARSERS, 1500, seed=1, processes=2, show=False)
    assert [tally.inputs for tally in tallies.values()] == [50, 50, 15, 300, 500, 500, 500, 150]
    assert save(tallies, Path("nowhere")) == 0 and not Path("nowhere").exists()
    total = Tally()
    for tally in tallies.values():
        total.add(tally)
    assert total.accepted + total.refused == 2065 and total.peak > 0


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.sampled_from(["../a", "a", "/a", "b/a"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
names = st.sampled_from(["a", "b", "../outside", "/a", ".", "a/b", "\ud800", "a" * 300, "a\0"]) | st.text(max_size=9)
sizes = st.integers(-1, 2) | st.integers() | values
entries = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "U8", "F4", "F64"]) | values,
        "shape": st.lists(sizes, max_size=3) | values,
        "data_offsets": st.lists(st.integers(0, 24) | sizes, min_size=2, max_size=2) | values,
    }
)


def only_named(parse: Callable[[], Any]) -> None:
    try:
        parse()
    except CheckpointError as error:
        assert str(error)


@few
@given(st.dictionaries(names, entries | values, max_size=3), st.integers(0, 32), st.integers(-8, 8))
def test_any_header_is_read_or_refused(tmp_path: Path, header: dict[str, Any], body: int, off: int) -> None:
    text = json.dumps(header).encode()
    file = tmp_path / "model.safetensors"
    file.write_bytes(max(0, len(text) + (off if off % 4 == 1 else 0)).to_bytes(8, "little") + text + bytes(body))
    only_named(lambda: [source.StoredTensors(file).read(key) for key in source.StoredTensors(file).shapes])


@few
@given(st.dictionaries(names, names | values, max_size=4) | values, values)
def test_any_index_is_read_or_refused(tmp_path: Path, weight_map: Any, metadata: Any) -> None:
    file = tmp_path / "model.safetensors.index.json"
    file.write_text(json.dumps({"weight_map": weight_map, "metadata": metadata}))
    only_named(lambda: source.StoredTensors(tmp_path))


@few
@given(st.dictionaries(names, sizes, max_size=4) | values, st.just(1) | values)
def test_any_manifest_is_whole_or_flawed(tmp_path: Path, files: Any, form: Any) -> None:
    (tmp_path / "a").write_bytes(b"1")
    (tmp_path / "manifest.json").write_text(json.dumps({"files": files, "format": form}))
    whole = form == 1 and isinstance(files, dict) and set(files) <= {"a"} and all(size == 1 for size in files.values())
    assert whole or state_folder.flaw(tmp_path)


@few
@given(names)
def test_a_name_inside_is_inside(tmp_path: Path, name: str) -> None:
    if untrusted.is_inside(name):
        path = Path(os.path.normpath(tmp_path / name))
        assert path != tmp_path and path.is_relative_to(tmp_path)
