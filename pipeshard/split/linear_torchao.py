"""LinearTorchao: a linear layer with the weight of torchao's Int8WeightOnlyConfig. Imports torchao."""

from typing import Any

import torch
from torch import Tensor, nn
from torchao.quantization import Int8Tensor, PerRow

from pipeshard.split.packed import Packed, Rows, quantize_rows


class LinearTorchao(Packed, nn.Linear):
    """A linear layer with an int8 weight.

    The layer gives the same results as a layer with torchao's Int8Tensor as its weight, but does not save the weight in
    the input's dtype for the backward pass. Instead, the backward pass casts the weight again.

    Attributes:
        scale: one scale per output, or None while the weight has no values. A forward then uses scales of 1.
    """

    layer_class, weight_class, mark = nn.Linear, nn.Parameter, "is_quantized"
    scale: Tensor | None = None  # a class attribute: verification would copy an instance's None to a smaller layer

    @property
    def adapter_dtype(self) -> torch.dtype:
        return self.values_dtype

    def begin(self) -> None:
        packed = torch.empty(self.out_features, self.in_features, dtype=torch.int8, device="meta")
        self.weight = nn.Parameter(packed, requires_grad=False)

    def blank(self, *sizes: Any) -> Any:
        with torch.device("meta"):
            return nn.Linear(*sizes)

    @torch.no_grad()
    def pack(self, value: Rows) -> None:
        def quantize(part: Tensor) -> tuple[Tensor, Tensor]:
            quantized = Int8Tensor.from_hp(part, PerRow())
            return quantized.qdata, quantized.scale

        # torchao's own function has the same result, bit for bit, but copies its whole input in higher precision.
        self.scale = quantize_rows(self.parts(value), self.weight.data, quantize)

    def restore(self, value: Tensor, scales: dict[str, Tensor]) -> None:
        raise ValueError("its scales have the format of bitsandbytes, but the layer is a torchao layer")

    def product(self, x: Tensor) -> Tensor:
        product: Tensor = _Product.apply(x.reshape(-1, self.in_features), self.weight)
        scale = torch.ones(self.out_features, device=x.device) if self.scale is None else self.scale.flatten()
        y = (product * scale.to(product.dtype)).reshape(*x.shape[:-1], self.out_features)
        if self.bias is not None:
            y += self.bias
        return y.to(x.dtype)


class _Product(torch.autograd.Function):
    """The product of an input and a weight with a different dtype."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return x.mm(weight.t().to(x.dtype))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (weight,) = ctx.saved_tensors
        (gradient,) = gradients
        return gradient.mm(weight.to(gradient.dtype)), None
