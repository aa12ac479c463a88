"""SiTU-GLU, the bounded gated activation of Kimi K3."""

from __future__ import annotations

from torch import Tensor

from megatron_ext.ops.situ.dense import SituGlu
from megatron_ext.ops.situ.reference import situ_glu_reference

__all__ = ["situ_glu", "situ_glu_reference"]


def situ_glu(gate: Tensor, up: Tensor, *, beta: float, linear_beta: float) -> Tensor:
    """``beta tanh(gate/beta) sigmoid(gate) * linear_beta tanh(up/linear_beta)``.

    Bounded by ``beta * linear_beta`` whatever the input. First derivatives only.

    Args:
        gate: [..., D], any floating dtype.
        up: [..., D], same shape and dtype.
        beta: bound of the gate branch, > 0 (K3: 4).
        linear_beta: bound of the linear branch, > 0 (K3: 25).

    Returns:
        [..., D] in the dtype of ``gate``; computed in float32, or float64 for float64 input.

    Raises:
        ValueError: shapes or dtypes differ, or a bound is not positive.
    """
    if gate.shape != up.shape or gate.dtype != up.dtype:
        raise ValueError(
            f"situ_glu: given gate {tuple(gate.shape)} {gate.dtype} and up {tuple(up.shape)} "
            f"{up.dtype}, allowed equal shapes and dtypes"
        )
    if beta <= 0 or linear_beta <= 0:
        raise ValueError(f"situ_glu: given bounds {beta} and {linear_beta}, allowed > 0")
    out: Tensor = SituGlu.apply(gate, up, beta, linear_beta)  # type: ignore[no-untyped-call]
    return out
