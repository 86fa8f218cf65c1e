"""Residence: the activations on a rank's device while each action runs, if all others are offloaded to the host.

These are the activations of at most two microbatches: those that the action uses, and those that the next B or W needs.
If the latter are not on the device yet, they are copied back while the action runs.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from pipeshard.schedule.program import Action, Kind

Holding = tuple[int, int]  # the activations of a microbatch on a stage


class Residence(NamedTuple):
    """While an action runs, the activations of the action itself and those of the `next` B or W are on the device (None
    if its F has yet to run). `stays` says that this action's activations are also on the device during the following
    action."""

    next: Holding | None
    stays: bool


def residences(actions: Sequence[Action]) -> dict[Action, Residence]:
    """The residence of each F, B and W of a rank, in order."""
    compute = [action for action in actions if action.kind.is_compute]
    made = {action[1:]: k for k, action in enumerate(compute) if action.kind is Kind.F}
    following: Holding | None = None  # what the next B or W needs
    later = next_later = None  # what is there with the action after this one
    found = []
    for k, action in reversed([*enumerate(compute)]):
        own = action[1:]
        if own == later:  # as B and its W
            known = next_later
        else:
            known = following if following is not None and made[following] <= k else None
        found.append((action, Residence(known, own in (later, next_later))))
        later, next_later = own, known
        if action.kind is not Kind.F:
            following = own
    return dict(reversed(found))


def resident(actions: Sequence[Action]) -> Iterator[set[Holding]]:
    """While each compute action runs: the activations on the device."""
    return (here for here, _ in _moments(actions))


def most_on_host(actions: Sequence[Action], sizes: Sequence[int]) -> int:
    """The largest total of activations on the host at any time."""
    return max(sum(sizes[stage] for _, stage in away) for _, away in _moments(actions))


def _moments(actions: Sequence[Action]) -> Iterator[tuple[set[Holding], set[Holding]]]:
    """While each compute action runs: the activations on the device, and those on the host."""
    for (action, residence), living in zip(residences(actions).items(), alive(actions), strict=True):
        own = action[1:]
        here = {own, residence.next or own}
        yield here, living - here


def alive(actions: Sequence[Action]) -> Iterator[set[Holding]]:
    """While each compute action runs: the activations on the device and on the host. Those of a microbatch live on a
    stage from its F to its last compute action there."""
    compute = [action for action in actions if action.kind.is_compute]
    last = {action[1:]: action for action in compute}
    holdings = set[Holding]()
    for action in compute:
        holdings.add(action[1:])
        yield set(holdings)
        if last[action[1:]] is action:
            holdings.remove(action[1:])
