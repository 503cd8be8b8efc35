"""RMS norm that saves for backward, on every device, what the GPU's fused kernel saves.

That is its input and one number per row.
"""

from typing import Any, cast

import torch
from torch import nn


class RmsNorm(nn.RMSNorm):
    """torch's RMS norm; on CPUs, where torch's saves fp32 results, a single autograd function."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The input over its root mean square, times the weight."""
        if x.device.type != "cpu":
            return super().forward(x)
        return cast(torch.Tensor, CpuRmsNorm.apply(x, self.weight, self.eps))


class CpuRmsNorm(torch.autograd.Function):
    """RMS norm for CPUs, with its gradient.

    y = w x r, r = 1 / sqrt(mean(x^2) + eps)
    dx = r (w dy - x r mean(w dy x r)), dw = sum(dy x r)
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        wide = x.float()
        scale = (wide.square().mean(-1, keepdim=True) + epsilon).rsqrt()
        ctx.save_for_backward(x, weight, scale)
        return (wide * scale * weight.float()).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        rows, normed = grad.float(), x.float() * scale
        weighted = rows * weight.float()
        grad_x = scale * (weighted - normed * (weighted * normed).mean(-1, keepdim=True))
        grad_weight = (rows * normed).sum(tuple(range(grad.ndim - 1)))
        return grad_x.to(x.dtype), grad_weight.to(weight.dtype), None
