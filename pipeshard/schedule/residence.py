"""Residence: the activations on a rank's device while each action runs, if all other activations are on the host.

The device then holds the activations of at most two (microbatch, stage) pairs: the pair of the action, and the pair of
the next B or W. The activations of the second pair are copied back while the action runs, unless they are already on
the device.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from pipeshard.schedule.program import Action, Kind

Holding = tuple[int, int]  # the activations of a microbatch on a stage


class Residence(NamedTuple):
    """The activations on the device while an action runs: the action's own activations, and `next`, the activations of
    the next B or W. `next` is None if no B or W follows, or if the corresponding F has not run yet. If `stays`, the
    action's own activations stay on the device during the following action."""

    next: Holding | None
    stays: bool


def residences(actions: Sequence[Action]) -> dict[Action, Residence]:
    """The residence of each F, B and W of a rank, in order."""
    compute = [action for action in actions if action.kind.is_compute]
    made = {action[1:]: k for k, action in enumerate(compute) if action.kind is Kind.F}
    following: Holding | None = None  # the activations that the next B or W needs
    later = next_later = None  # the activations on the device in the action after this one
    found = []
    for k, action in reversed([*enumerate(compute)]):
        own = action[1:]
        if own == later:  # such as B and its W
            known = next_later
        else:
            known = following if following is not None and made[following] <= k else None
        found.append((action, Residence(known, own in (later, next_later))))
        later, next_later = own, known
        if action.kind is not Kind.F:
            following = own
    return dict(reversed(found))


def resident(actions: Sequence[Action]) -> Iterator[set[Holding]]:
    """For each compute action, yield the activations on the device."""
    return (here for here, _ in _moments(actions))


def most_on_host(actions: Sequence[Action], sizes: Sequence[int]) -> int:
    """The largest total size of the activations on the host at any time. `sizes` contains the size of a microbatch's
    activations on each stage."""
    return max(sum(sizes[stage] for _, stage in away) for _, away in _moments(actions))


def _moments(actions: Sequence[Action]) -> Iterator[tuple[set[Holding], set[Holding]]]:
    """For each compute action, yield the activations on the device and the activations on the host."""
    for (action, residence), living in zip(residences(actions).items(), alive(actions), strict=True):
        own = action[1:]
        here = {own, residence.next or own}
        yield here, living - here


def alive(actions: Sequence[Action]) -> Iterator[set[Holding]]:
    """For each compute action, yield the activations that are alive, on the device or on the host. A microbatch's
    activations are alive on a stage from its F to its last compute action on this stage."""
    compute = [action for action in actions if action.kind.is_compute]
    last = {action[1:]: action for action in compute}
    holdings = set[Holding]()
    for action in compute:
        holdings.add(action[1:])
        yield set(holdings)
        if last[action[1:]] is action:
            holdings.remove(action[1:])
