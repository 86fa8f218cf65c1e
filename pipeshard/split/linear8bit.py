"""Linear8bit: the linear layer of LLM.int8 (Dettmers et al. 2022, arXiv:2208.07339). Imports bitsandbytes."""

import copy
from typing import Any

import bitsandbytes
import torch
from bitsandbytes import functional
from torch import Tensor

from pipeshard.split.packed import Packed, Rows, quantize_rows


class Linear8bit(Packed, bitsandbytes.nn.Linear8bitLt):
    """bitsandbytes' 8-bit linear layer, with one scale per output. While the weight has no values, the scales are None,
    and a forward uses scales of 1."""

    layer_class, weight_class = bitsandbytes.nn.Linear8bitLt, bitsandbytes.nn.Int8Params
    mark = "is_loaded_in_8bit"
    state: Any

    def blank(self, *sizes: Any) -> Any:
        how = {"has_fp16_weights": False, "threshold": self.state.threshold}
        return bitsandbytes.nn.Linear8bitLt(*sizes, **how, device="meta")

    def begin(self) -> None:
        self.weight.data = torch.empty(self.out_features, self.in_features, dtype=torch.int8, device="meta")
        self.state.SCB = None

    @torch.no_grad()
    def pack(self, value: Rows) -> None:
        # bitsandbytes' own function has the same result, bit for bit, but copies its whole input in higher precision.
        self.state.SCB = quantize_rows(
            self.parts(value),
            self.weight.data,
            lambda part: functional.int8_vectorwise_quant(part.to(torch.float16))[:2],
        )

    def restore(self, value: Tensor, scales: dict[str, Tensor]) -> None:
        rows, way = scales["SCB"], scales.get("weight_format")
        if rows.shape != value.shape[:1] or rows.dtype != torch.float32 or (way is not None and way.any()):
            raise ValueError("its scales must be fp32, one per row, and its weight_format must be 0 (row)")
        self.weight.data, self.state.SCB = value, rows

    def product(self, x: Tensor) -> Tensor:
        state = copy.copy(self.state)  # bitsandbytes writes to the state
        state.CB, state.is_training = self.weight.data, self.training
        if state.SCB is None:
            state.SCB = torch.ones(len(self.weight), device=self.weight.device)
        bias = None if self.bias is None else self.bias.to(x.dtype)
        y = bitsandbytes.matmul(x, self.weight, bias=bias, state=state)
        if y.grad_fn is not None and x.numel():
            _forget_input(y.grad_fn)
        return y


def _forget_input(node: Any) -> None:
    """Remove the input from a product's autograd node. bitsandbytes keeps the input for the gradient of the weight, but
    the weight is frozen. `offload="activations"` could not move this input to the host, since the node stores it as an
    attribute."""
    if hasattr(node, "tensors"):  # MatMul8bitLt
        node.tensors, node.tensor_states = (None, None, None), (None, None)
    else:  # MatMul8bitFp, on CPUs
        node.A = None
