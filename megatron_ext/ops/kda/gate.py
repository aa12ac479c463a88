"""What surrounds the KDA recurrence: decay gate, key and query normalisation, write strength.

Shapes: B batch, T tokens, H heads, K width of a query and key head.
Source of the formulas: Kimi Linear (gate ``softplus``) and Kimi K3 section 2.1 (gate ``bounded``).
"""

# ruff: noqa: N803  (A_log is the name of the parameter in every checkpoint)
from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_ext.config.schema import Gate

NORM_EPS = 1e-6  # added to the sum of squares, inside the root, as in the released model


def compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype of every intermediate result: float64 for float64 input, else float32."""
    return torch.promote_types(x.dtype, torch.float32)


def log_decay(
    z: Tensor, A_log: Tensor | None, dt_bias: Tensor, *, gate: Gate, lower_bound: float
) -> Tensor:
    """Log-decay a token, head and channel, in nats; never positive.

    ``bounded``: ``lower_bound * sigmoid(exp(A_log) * (z + dt_bias))``, within [lower_bound, 0];
    ``bounded_plain``: the same without ``A_log``;
    ``softplus``: ``-exp(A_log) * softplus(z + dt_bias)``, without a bound.

    Args:
        z: raw gate input [B, T, H, K].
        A_log: logarithm of the slope [H]; None for ``bounded_plain`` only.
        dt_bias: offset [H, K].
        gate: form of the gate.
        lower_bound: smallest log-decay a token, in nats; not used by ``softplus``.

    Returns:
        [B, T, H, K] in float32, or float64 for float64 input.

    Raises:
        ValueError: ``A_log`` is missing, or given to a gate without one.
    """
    dtype = compute_dtype(z)
    shifted = z.to(dtype) + dt_bias.to(dtype)
    check_slope(A_log, gate)
    if A_log is None:
        return torch.sigmoid(shifted) * lower_bound
    slope = A_log.to(dtype).exp()[:, None]
    if gate is Gate.bounded:
        return torch.sigmoid(slope * shifted) * lower_bound
    return -slope * F.softplus(shifted)


def check_slope(A_log: Tensor | None, gate: Gate) -> None:
    """Raises ValueError: ``A_log`` is missing, or given to a gate without one."""
    if gate is Gate.bounded_plain and A_log is not None:
        raise ValueError("A_log: given with gate bounded_plain, which has none; pass None")
    if gate is not Gate.bounded_plain and A_log is None:
        raise ValueError(
            f"A_log: None with gate {gate.value}, which needs one value a head; "
            "pass a tensor [H], or use gate bounded_plain"
        )


def normalise(x: Tensor, *, scale: float = 1.0) -> Tensor:
    """``scale * x / sqrt(sum(x^2) + 1e-6)`` over the last dimension.

    Args:
        x: [..., K], any floating dtype.
        scale: factor of the result (``K**-0.5`` for queries).

    Returns:
        Same shape, float32 or float64.
    """
    y: Tensor = _Normalise.apply(x, scale)  # type: ignore[no-untyped-call]
    return y


class _Normalise(torch.autograd.Function):
    """Keeps the input in its own dtype and one number a row; autograd would keep four tensors."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        wide = x.to(compute_dtype(x))
        inverse: Tensor = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_()
        inverse = inverse.add_(NORM_EPS).rsqrt_()
        ctx.save_for_backward(x, inverse)
        ctx.scale = scale
        return wide * (inverse * scale)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, inverse = ctx.saved_tensors
        unit = x.to(inverse.dtype) * inverse
        along = (grads[0] * unit).sum(-1, keepdim=True)
        d_x = torch.addcmul(grads[0], unit, along, value=-1).mul_(inverse * ctx.scale)
        return d_x.to(x.dtype), None
