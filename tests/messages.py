"""Messages: the messages of errors, in the order of the attempts that raise them."""

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any
from unittest.mock import Mock

import pytest


def texts_of(log: Mock) -> list[str]:
    """The texts of the calls of a mocked logger method, such as `logger.warning`."""
    return [call.args[0] % call.args[1:] for call in log.call_args_list]


def messages_of(attempts: Iterable[Callable[[], Any]], *kinds: type[Exception]) -> list[str]:
    """Assert that each attempt raises an error of one of these classes. Returns the errors' messages."""
    messages = []
    for attempt in attempts:
        with pytest.raises(kinds) as caught:
            attempt()
        messages.append(str(caught.value))
    return messages


def assert_told(messages: Sequence[str], expected: Sequence[str]) -> None:
    """Assert that there is one message for each pattern, and that it matches the pattern."""
    assert len(messages) == len(expected)
    for what, message in zip(expected, messages, strict=True):
        assert re.search(what, message, re.DOTALL), message


def assert_told_alike(messages_of_ranks: Sequence[Sequence[str]], expected: Sequence[str]) -> None:
    """Assert that all ranks have the same messages, and that these match the patterns."""
    first, *others = messages_of_ranks
    assert all(messages == first for messages in others)
    assert_told(first, expected)
