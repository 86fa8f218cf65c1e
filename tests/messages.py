"""Messages: the texts of errors, in the order of the attempts that raised them."""

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest


def messages_of(attempts: Iterable[Callable[[], Any]], *kinds: type[Exception]) -> list[str]:
    """The message of the error, of one of these kinds, that each attempt raises."""
    messages = []
    for attempt in attempts:
        with pytest.raises(kinds) as caught:
            attempt()
        messages.append(str(caught.value))
    return messages


def assert_told(messages: Sequence[str], expected: Sequence[str]) -> None:
    """Each message matches its pattern, and there is none beside."""
    assert len(messages) == len(expected)
    for what, message in zip(expected, messages, strict=True):
        assert re.search(what, message, re.DOTALL), message


def assert_told_alike(messages_of_ranks: Sequence[Sequence[str]], expected: Sequence[str]) -> None:
    """Every rank has the same messages, which match their patterns."""
    first, *others = messages_of_ranks
    assert all(messages == first for messages in others)
    assert_told(first, expected)
