"""Replaced: attributes that are temporarily set to other values."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class StandIn:
    """Base class of objects that temporarily replace an attribute. When states of a model are compared, such an object
    counts as the value that it replaces, `instead_of`. `instead_of` is MISSING if only the class has the attribute."""

    instead_of: Any


@contextmanager
def replaced(owner: Any, **values: Any) -> Iterator[None]:
    """Context manager that sets attributes of `owner` to `values`, and restores the previous values on exit. An
    attribute that was not in `vars(owner)`, such as an attribute of the class, is deleted from `owner` on exit."""
    own = {name: vars(owner)[name] for name in values if name in vars(owner)}
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name in values:
            if name in own:
                setattr(owner, name, own[name])
            else:
                delattr(owner, name)
