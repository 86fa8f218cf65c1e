"""Codec: values as bytes, which run no code when they are read."""

import io
import re
from typing import Any

import torch

from pipeshard.errors import MessageError


def encode(value: Any) -> bytes:
    """The value as bytes, for `decode`.

    Raises MessageError for what is not made of None, numbers, strings, bytes, tensors, dtypes, torch.Sizes, and dicts,
    lists, tuples and sets of them: pickle would write much else, but only reads it by running code.
    """
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
        decode(buffer.getvalue())
    except Exception as error:
        raise MessageError(
            f"this {type(value).__name__} is not made of tensors, numbers and strings alone: {reason(error)}"
        ) from error
    return buffer.getvalue()


def decode(content: bytes) -> Any:
    """The value that `encode` was given; tensors come to the CPU, those on meta stay there."""
    return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)


def reason(error: BaseException) -> str:
    """An error in one line, without torch's stack, or how it would run the code that it has not run."""
    text = str(error).strip()
    told = re.search(r"(?:WeightsUnpickler error: |^(?=Trying to load))(.*?)( Please use|$)", text, re.MULTILINE)
    return f"{type(error).__name__}: {told[1] if told else next(iter(text.splitlines()), '')}"
