"""The router's matrix product, in a precision of its own and with a float32 result."""

from __future__ import annotations

from torch import Tensor

from megatron_ext.config.schema import RouterMatmul
from megatron_ext.ops.router.dense import RouterMatmulFunction
from megatron_ext.ops.router.reference import router_logits_reference

__all__ = ["router_logits", "router_logits_reference"]


def router_logits(x: Tensor, weight: Tensor, *, precision: RouterMatmul) -> Tensor:
    """``x weight^T`` with products and sums in the chosen precision, forward and backward.

    Args:
        x: [T, h], any floating dtype.
        weight: [E, h], any floating dtype.
        precision: ``fp32``: true float32, also where the run allows TensorFloat-32. ``tf32``:
            operands cut to 10 bits of mantissa on GPUs that can. ``bf16``: operands cut to 7 bits.
            ``auto``: ``bf16`` where x and weight are bfloat16, so that only the gradient of the
            logits is cut; else ``fp32``. Sums are float32 in all of them.

    Returns:
        [T, E] float32, or float64 for float64 input, which is never cut.

    Raises:
        ValueError: shapes do not fit.
    """
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1]:
        raise ValueError(
            f"router_logits: given x {tuple(x.shape)} and weight {tuple(weight.shape)}, allowed "
            "[T, h] and [E, h]"
        )
    out: Tensor = RouterMatmulFunction.apply(x, weight, precision)  # type: ignore[no-untyped-call]
    return out
