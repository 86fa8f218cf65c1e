"""Messages: the texts of errors, in the order of the attempts that raised them."""

import re
from collections.abc import Sequence


def assert_told(messages: Sequence[str], expected: Sequence[str]) -> None:
    """Each message matches its pattern, and there is none beside."""
    assert len(messages) == len(expected)
    for what, message in zip(expected, messages, strict=True):
        assert re.search(what, message, re.DOTALL), message
