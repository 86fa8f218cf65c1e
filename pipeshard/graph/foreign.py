"""Foreign parameters: trainable tensors that a loss depends on, but that are not parameters of the model.

The foreign parameters of a criterion are found in the autograd graph of the loss, so they may be stored in a module, a
closure, a global, a list or a bound method. Foreign parameters that the model's own code uses are found when they
receive a gradient in a step.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from pipeshard.errors import ConfigurationError, listed
from pipeshard.graph.nodes import nodes_from
from pipeshard.graph.places import format_path
from pipeshard.graph.snapshot import Snapshot


def leaves_of(loss: Tensor, until: Iterable[Tensor] = ()) -> list[Tensor]:
    """The leaf tensors that receive a gradient of `loss`, ignoring paths through the tensors `until`."""
    ends = {tensor.grad_fn for tensor in until if tensor.grad_fn is not None}
    leaves = [getattr(node, "variable", None) for node in nodes_from([loss.grad_fn], ends) if node not in ends]
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def refuse_foreign(
    loss: Tensor, own: Collection[Tensor], is_made: Callable[[Tensor], bool], criterion: Callable[..., Any] | None
) -> None:
    """Raise ConfigurationError if `loss` trains a tensor that is neither in `own` nor created by the forward or the
    criterion (`is_made`)."""
    known = {id(tensor) for tensor in own}
    foreign = [leaf for leaf in leaves_of(loss) if id(leaf) not in known and not is_made(leaf)]
    if foreign:
        raise foreign_error(foreign, criterion)


def foreign_error(foreign: list[Tensor], criterion: Callable[..., Any] | None) -> ConfigurationError:
    """The error for a loss that trains the tensors `foreign`."""
    places = _places(criterion)
    names = sorted(places.get(id(leaf), f"a parameter of shape {tuple(leaf.shape)}") for leaf in foreign)
    return ConfigurationError(
        f"the loss trains tensors that the model does not contain ({listed(names, 3)}), but a pipeline trains only the "
        "model's parameters. To train these tensors, make the module that contains them a submodule of the model, "
        "compute the loss in the model's forward, and pass the model's parameters to the optimizer. Otherwise, freeze "
        "them with requires_grad_(False)"
    )


def kept(leaves: Iterable[Tensor], criterion: Callable[..., Any]) -> list[Tensor]:
    """The leaves that outlive a call of the criterion: parameters, and tensors at places that the criterion reaches."""
    others = [leaf for leaf in leaves if not isinstance(leaf, nn.Parameter)]
    places = _places(criterion) if others else {}
    return [leaf for leaf in leaves if isinstance(leaf, nn.Parameter) or id(leaf) in places]


def _places(criterion: Callable[..., Any] | None) -> dict[int, str]:
    """The place of each tensor that the criterion reaches, by the tensor's id."""
    return {id(tensor): format_path(path) for path, *_, tensor, _ in Snapshot({"the criterion": criterion}).tensors}


@contextmanager
def without_gradients(foreign: Mapping[str, Tensor]) -> Iterator[None]:
    """Context manager that raises ConfigurationError on exit if a tensor of `foreign` (by place) has received a
    gradient."""
    before = {place: _state_of_gradient(leaf) for place, leaf in foreign.items()}
    yield
    graded = sorted(place for place, leaf in foreign.items() if _state_of_gradient(leaf) != before[place])
    if graded:
        raise ConfigurationError(
            f"the forward uses {graded[0]}, which receives a gradient but is not one of the model's parameters, so "
            "each rank has only its own part of the gradient. Make this tensor an nn.Parameter of the model (directly, "
            "or in an nn.ParameterList) and pass it to the optimizer, or freeze it with requires_grad_(False)"
        )


def _state_of_gradient(leaf: Tensor) -> tuple[int, int] | None:
    """A value that changes when a gradient is accumulated into `leaf`."""
    return None if leaf.grad is None else (id(leaf.grad), leaf.grad._version)
