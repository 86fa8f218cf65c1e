"""Covering: selects cases of a test: enough that each value or pair of values occurs, or a sample with a seed."""

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
    """A number that depends on the commit, or a constant if there is no repository."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short=6", "HEAD"]
    try:
        return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout, 16)
    except (OSError, subprocess.CalledProcessError):
        return 202648


ALL = os.environ.get("EXACT") == "all"  # as in `make exact`
SEED = int(os.environ.get("SAMPLE_SEED") or seed_of_commit())
os.environ["SAMPLE_SEED"] = str(SEED)  # for the processes of this run
SHARE = os.environ.get("SHARE", "1/1")  # of `make exact`: 2/8 is the second of eight shares of the tests
FILES = 6  # of the files whose tests all take turns, one in FILES runs a test with each seed


def one_in(count: int, name: str) -> bool:
    """Whether the seed selects this name. It selects one in `count` names."""
    return zlib.crc32(f"{SEED} {name}".encode()) % count == 0


def is_of_share(name: str) -> bool:
    number, count = map(int, SHARE.split("/"))
    return zlib.crc32(name.encode()) % count == number - 1


def waiting(tests: Mapping[str, str], others: Collection[str], turns: int) -> set[str]:
    """The tests that do not run with this seed. `tests` are tests that take turns, with their files. One in `turns` of
    them runs and, for one in FILES of the files that are not in `others`, at least one test of the file."""
    left = {name for name in tests if not one_in(turns, name)}
    for file in sorted({*tests.values()} - {*others}):
        if not one_in(FILES, file):
            continue
        of_file = [name for name in tests if tests[name] == file]
        if left.issuperset(of_file):
            left.remove(sample(of_file, 1, SEED)[0])
    return left


def sample(cases: Sequence[T], count: int, seed: int) -> list[T]:
    """`count` of the cases, in their order, or all cases if there are fewer."""
    return [cases[k] for k in sorted(random.Random(seed).sample(range(len(cases)), min(count, len(cases))))]


def drawn(cases: Sequence[T], count: int, kind: Callable[[T], Any] | None = None) -> list[T]:
    """About `count` of the cases, at least one of each `kind`. In `make exact`, all cases."""
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
    occur. The greedy choice prefers values that have occurred less. In `make exact`, the whole product."""
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
