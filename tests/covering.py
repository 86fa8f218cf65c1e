"""Covering: few of many cases: enough of a product that each value or pair occurs, or cases chosen with a seed."""

from __future__ import annotations

import itertools
import os
import random
import subprocess
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")


def seed_of_commit() -> int:
    """A number that each commit has another one of; one for all where there is no repository."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short=6", "HEAD"]
    try:
        return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout, 16)
    except (OSError, subprocess.CalledProcessError):
        return 202648


ALL = os.environ.get("EXACT") == "all"  # as in `make exact`
SEED = int(os.environ.get("SAMPLE_SEED") or seed_of_commit())
os.environ["SAMPLE_SEED"] = str(SEED)  # for the processes of this run
SHARE = os.environ.get("SHARE", "1/1")  # of `make exact`: 2/8 is the second of eight shares of the tests
FILES = 6  # of the files whose tests all take turns, one in FILES has a test with each seed


def one_in(count: int, name: str) -> bool:
    """Whether this is one of the few names, one in `count`, that the seed draws."""
    return zlib.crc32(f"{SEED} {name}".encode()) % count == 0


def is_of_share(name: str) -> bool:
    number, count = map(int, SHARE.split("/"))
    return zlib.crc32(name.encode()) % count == number - 1


def waiting(tests: Mapping[str, str], others: Collection[str], turns: int) -> set[str]:
    """Of tests that take turns, given with their files, those that wait for another seed. One of so many `turns` is
    theirs. Of the files that are not among the `others`, one in FILES keeps one of its tests in any case."""
    left = {name for name in tests if not one_in(turns, name)}
    for file in sorted({*tests.values()} - {*others}):
        if not one_in(FILES, file):
            continue
        of_file = [name for name in tests if tests[name] == file]
        if left.issuperset(of_file):
            left.remove(sample(of_file, 1, SEED)[0])
    return left


def sample(cases: Sequence[T], count: int, seed: int) -> list[T]:
    """Some of the cases, in their order; all where there are no more."""
    return [cases[k] for k in sorted(random.Random(seed).sample(range(len(cases)), min(count, len(cases))))]


def drawn(cases: Sequence[T], count: int, kind: Callable[[T], Any] | None = None) -> list[T]:
    """Some of the cases, and one of each `kind` at least. In `make exact`: all of them."""
    if ALL or count >= len(cases):
        return list(cases)
    of_kind: dict[Any, list[int]] = defaultdict(list)
    for k, case in enumerate(cases):
        of_kind[kind(case) if kind else None].append(k)
    chosen = {sample(places, 1, SEED)[0] for places in of_kind.values()}
    rest = [k for k in range(len(cases)) if k not in chosen]
    chosen.update(sample(rest, max(0, count - len(chosen)), SEED))
    return [cases[k] for k in sorted(chosen)]


def covering(*factors: Sequence[Any], strength: int = 2) -> list[tuple[Any, ...]]:
    """Cases of the product of `factors`, in its order, in which all combinations of values of any `strength` factors
    occur. They are chosen greedily, and prefer values that have occurred less. In `make exact`: the whole product."""
    cases = list(itertools.product(*factors))
    if ALL:
        return cases
    places = list(itertools.product(*(range(len(factor)) for factor in factors)))
    covered = [set(itertools.combinations(enumerate(place), strength)) for place in places]
    missing, used, chosen = set().union(*covered), Counter[tuple[int, int]](), []
    while missing:
        new = [(len(covered[k] & missing), -sum(used[at] for at in enumerate(place))) for k, place in enumerate(places)]
        best = new.index(max(new))
        missing -= covered[best]
        used.update(enumerate(places[best]))
        chosen.append(best)
    return [cases[k] for k in sorted(chosen)]
