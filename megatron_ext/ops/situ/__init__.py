"""SiTU-GLU, the bounded gated activation of Kimi K3."""

from __future__ import annotations

from torch import Tensor

from megatron_ext.ops.situ.dense import SituGlu
from megatron_ext.ops.situ.reference import situ_glu_reference

__all__ = ["situ_glu", "situ_glu_reference"]


def situ_glu(gate: Tensor, up: Tensor, *, beta: float | None, linear_beta: float | None) -> Tensor:
    """``beta tanh(gate/beta) sigmoid(gate) * linear_beta tanh(up/linear_beta)``.

    Bounded by ``beta * linear_beta`` whatever the input. Without a bound a branch is what it tends
    to: ``gate * sigmoid(gate)`` and ``up``; without both it is SwiGLU. First derivatives only.

    Args:
        gate: [..., D], any floating dtype.
        up: [..., D], same shape and dtype.
        beta: bound of the gate branch, > 0 (K3: 4); None: none.
        linear_beta: bound of the linear branch, > 0 (K3: 25); None: none.

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
    if any(bound is not None and bound <= 0 for bound in (beta, linear_beta)):
        raise ValueError(f"situ_glu: given bounds {beta} and {linear_beta}, allowed > 0")
    out: Tensor = SituGlu.apply(gate, up, beta, linear_beta)  # type: ignore[no-untyped-call]
    return out
