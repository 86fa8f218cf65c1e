"""Errors: the exceptions of pipeshard, whose messages say what is wrong, where, and what to do."""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Any


class PipeshardError(Exception):
    """Base class of pipeshard's own exceptions."""


class ConfigurationError(PipeshardError, ValueError):
    """An invalid argument, or an invalid combination of arguments."""


class TraceError(PipeshardError, RuntimeError):
    """The model's forward cannot be traced, or a later forward deviated from the trace."""


class PartitionError(PipeshardError, ValueError):
    """The model cannot be cut into the requested stages, or does not fit in the given memory."""


class BatchError(PipeshardError, ValueError):
    """A batch is missing, cannot be used, or differs between ranks."""


class UsageError(PipeshardError, RuntimeError):
    """A call that a split model does not support, or does not support at this time."""


class CheckpointError(PipeshardError, RuntimeError):
    """A checkpoint that cannot be read, written or matched with the model."""


class RankError(PipeshardError, RuntimeError):
    """Another rank failed, so this rank cannot continue. `fault`, if set, describes which rank failed, where and
    why."""

    def __init__(self, message: str, fault: Any = None) -> None:
        super().__init__(message)
        self.fault = fault


class NonFiniteError(PipeshardError, ArithmeticError):
    """A loss, activation, gradient or parameter that is not finite, detected because `check_finite=True`."""


class MessageError(PipeshardError, TypeError):
    """A value that cannot be sent to the other ranks."""


class MessageSizeError(MessageError):
    """A message whose size differs from the size that the receiving rank expects."""


class VerificationError(PipeshardError, ArithmeticError):
    """The split model does not match the unsplit reference: its loss, a gradient, or something else differs."""


class DeadlockError(PipeshardError, RuntimeError):
    """A program that deadlocks."""


NO_LOSS = "found no loss to train on: add labels to the batch, or pass a criterion"


def of_all(error: Exception) -> Exception:
    """Mark an error that all ranks raise together, so that no rank reports it to the other ranks. Returns the error."""
    error.__dict__["pipeshard_of_all"] = True
    return error


def is_of_all(error: BaseException) -> bool:
    return "pipeshard_of_all" in error.__dict__


def summary(error: BaseException) -> str:
    """The class name and the message of an error."""
    return f"{type(error).__name__}: {error}"


@contextmanager
def explained(explain: Callable[[Exception], Exception], but: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """Context manager that replaces an exception of third-party code with the result of `explain`. Exceptions of the
    classes in `but` are not replaced."""
    try:
        yield
    except but:
        raise
    except Exception as error:
        raise explain(error) from error


def listed(problems: Sequence[str], shown: int = 8) -> str:
    """Join the first `shown` problems on one line, followed by the number of the remaining problems."""
    more = f"; and {len(problems) - shown} more" if len(problems) > shown else ""
    return "; ".join(problems[:shown]) + more


def counted(count: int, noun: str) -> str:
    """A number with its noun in the singular or plural, such as "1 rank", "2 batches" or "3 entries"."""
    if count == 1:
        return f"1 {noun}"
    if noun.endswith("y"):
        return f"{count} {noun[:-1]}ies"
    return f"{count} {noun}{'es' if noun.endswith(('s', 'ch')) else 's'}"


def hint(name: str, known: Collection[str]) -> str:
    """A suggestion for an unknown name: the closest known names, or all known names."""
    close = get_close_matches(name, known, n=3)
    return f"did you mean {' or '.join(close)}?" if close else f"the known names are {', '.join(known) or 'none'}"


def unknown(who: str, name: str, model: str, known: Collection[str], what: str = "units") -> str:
    """The error message for an unknown name: the argument `who` contains a `name` that the `model` does not have."""
    return f"{who} names {name}, which is not one of the {what} of {model}: {hint(name, known)}"
