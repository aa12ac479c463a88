"""The output gate in plain torch, keeping only its inputs, as they are, for the backward pass.

Written with autograd operators, each of the float32 intermediates would be stored: four times the
memory of 16-bit inputs, in every layer. Internal precision is float32, or the inputs' if wider.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def head_gate_dense(o: Tensor, gate: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """See `ops.gating.head_gate`."""
    o = o.transpose(0, 1)
    per_head = gate.view(o.shape)
    gated: Tensor = (
        _SigmoidGate.apply(o, per_head)  # type: ignore[no-untyped-call]  # torch's
        if weight is None
        else _GatedRmsNorm.apply(o, per_head, weight, eps)  # type: ignore[no-untyped-call]  # torch's
    )
    return gated.reshape(gate.shape).contiguous()


def _wide(*tensors: Tensor) -> list[Tensor]:
    dtype = torch.promote_types(tensors[0].dtype, torch.float32)
    return [x.to(dtype) for x in tensors]


class _SigmoidGate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, o: Tensor, gate: Tensor) -> Tensor:
        ctx.save_for_backward(o, gate)
        wide, s = _wide(o, gate)
        return (wide * torch.sigmoid(s)).to(o.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        o, gate = ctx.saved_tensors
        wide, s, dy = _wide(o, gate, grads[0])
        s = torch.sigmoid(s)
        through = dy * s
        return through.to(o.dtype), (through * wide * (1 - s)).to(gate.dtype)


class _GatedRmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, o: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(o, gate, weight)
        ctx.eps = eps
        wide, s, w = _wide(o, gate, weight)
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        return (wide * scale * w * torch.sigmoid(s)).to(o.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        o, gate, weight = ctx.saved_tensors
        wide, s, w, dy = _wide(o, gate, weight, grads[0])
        s = torch.sigmoid(s)
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + ctx.eps)
        normed = wide * scale
        through = dy * s
        grad_normed = through * w
        # The norm removes the part of its input's gradient that would only rescale the input.
        grad_o = scale * (grad_normed - normed * (grad_normed * normed).mean(-1, keepdim=True))
        grad_gate = grad_normed * normed * (1 - s)
        grad_weight = (through * normed).flatten(0, -2).sum(0)
        return grad_o.to(o.dtype), grad_gate.to(gate.dtype), grad_weight.to(weight.dtype), None
