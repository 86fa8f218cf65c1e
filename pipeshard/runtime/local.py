"""Local: what this rank has of a tensor that is sliced over ranks, and all there is of any other."""

from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, which shares its memory; any other tensor itself."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def local_grad(parameter: nn.Parameter) -> Tensor | None:
    return None if parameter.grad is None else local(parameter.grad)


def set_local_grad(parameter: nn.Parameter, gradient: Tensor | None) -> None:
    parameter.grad = gradient if gradient is None else like(gradient, parameter)


def align_grad(parameter: nn.Parameter) -> None:
    """Slice a gradient as its parameter is, where backward has left it whole, or as parts of a sum."""
    gradient = parameter.grad
    if isinstance(parameter, DTensor) and isinstance(gradient, DTensor) and gradient.placements != parameter.placements:
        parameter.grad = gradient.redistribute(placements=parameter.placements)


def like(part: Tensor, tensor: Tensor) -> Tensor:
    """`part`, sliced as `tensor` is."""
    if not isinstance(tensor, DTensor) or isinstance(part, DTensor):
        return part
    return DTensor.from_local(
        part, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


def whole(tensor: Tensor) -> Tensor:
    """All of a sliced tensor, gathered from the ranks that have its slices; all of them call it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def is_packed(tensor: Tensor) -> bool:
    """Whether this rank's slice is made of one part of each of several blocks, so that it is not in one place."""
    placements = tensor.placements if isinstance(tensor, DTensor) and tensor.device_mesh.ndim == 1 else ()
    return any(isinstance(placement, _StridedShard) for placement in placements)


def slice_like(value: Tensor, tensor: Tensor) -> Tensor:
    """This rank's part of `value`, a whole tensor, sliced as `tensor` is."""
    if not isinstance(tensor, DTensor):
        return value
    placed: Any = distribute_tensor(value, tensor.device_mesh, tensor.placements, src_data_rank=None)
    return local(placed)
