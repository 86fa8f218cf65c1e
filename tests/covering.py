"""Covering: few cases of a product of values, in which each value, or each pair of two factors, still occurs."""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Sequence
from typing import Any

ALL = os.environ.get("EXACT") == "all"  # as in `make exact`


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
