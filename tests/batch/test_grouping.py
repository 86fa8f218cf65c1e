"""Tests of grouping: samples of different lengths as microbatches within a limit of padded tokens."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

from hypothesis import given, settings
from hypothesis import strategies as st

from pipeshard.batch.grouping import LEVELS, TokenCost, group

LIMIT = 40
COSTS = st.builds(TokenCost, st.sampled_from([0.0, 3.0, 20.0]), st.sampled_from([0.0, 0.1]))
IDLES = st.sampled_from([0.0, 1.0, 7.0])
ONE_SIDE = st.lists(st.integers(1, LIMIT), min_size=1, max_size=7).map(lambda found: [(n,) for n in found])
TWO_SIDES = st.lists(st.tuples(st.integers(1, 30), st.integers(1, 10)), min_size=1, max_size=40)


def padded(lengths: list[tuple[int, ...]], samples: list[int]) -> list[int]:
    return [max(sides) for sides in zip(*(lengths[k] for k in samples), strict=True)]


def time_of(lengths: list[tuple[int, ...]], groups: list[list[int]], cost: TokenCost, idle: float) -> float:
    times = [cost.of(len(samples), padded(lengths, samples)) for samples in groups]
    return sum(times) + idle * max(times)


def partitions(samples: list[int]) -> Iterator[list[list[int]]]:
    if not samples:
        yield []
        return
    first, *others = samples
    for groups in partitions(others):
        yield [[first], *groups]
        for k, one in enumerate(groups):
            yield [*groups[:k], [first, *one], *groups[k + 1 :]]


@given(TWO_SIDES, COSTS, IDLES)
def test_each_sample_is_in_one_group_within_the_limit(
    lengths: list[tuple[int, ...]], cost: TokenCost, idle: float
) -> None:
    groups = group(lengths, LIMIT, cost, idle)
    assert sorted(k for samples in groups for k in samples) == list(range(len(lengths)))
    assert all(len(samples) * sum(padded(lengths, samples)) <= LIMIT for samples in groups)
    assert all(samples == sorted(samples) for samples in groups)
    times = [cost.of(len(samples), padded(lengths, samples)) for samples in groups]
    assert times == sorted(times)


@settings(max_examples=60, deadline=None)
@given(ONE_SIDE, COSTS, IDLES)
def test_no_groups_of_any_samples_are_faster(lengths: list[tuple[int, ...]], cost: TokenCost, idle: float) -> None:
    legal = (
        groups
        for groups in partitions(list(range(len(lengths))))
        if all(len(samples) * sum(padded(lengths, samples)) <= LIMIT for samples in groups)
    )
    best = min(time_of(lengths, groups, cost, idle) for groups in legal)
    assert math.isclose(time_of(lengths, group(lengths, LIMIT, cost, idle), cost, idle), best)


def test_many_lengths_are_grouped_by_some_limits_for_the_longest_microbatch() -> None:
    lengths = [(k,) for k in range(1, LEVELS * 4)]
    groups = group(lengths, 4096, TokenCost(fixed=20.0), 3.0)
    assert sum(map(len, groups)) == len(lengths)
    assert all(max(first) < min(second) for first, second in itertools.combinations(sorted(groups), 2))
