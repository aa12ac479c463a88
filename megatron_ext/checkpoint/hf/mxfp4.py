"""MXFP4 as released: two 4-bit numbers a byte, one power of two for every 32 of them.

The packed form of a matrix `NAME.weight` [out, in] is `NAME.weight_packed` uint8 [out, in/2] (the
lower half of a byte comes first) and `NAME.weight_scale` uint8 [out, in/32], the exponent of two
plus 127 (E8M0). A number has a sign, two bits of exponent and one of mantissa (E2M1): 0, 0.5, 1,
1.5, 2, 3, 4 or 6. Source: OCP Microscaling Formats 1.0; names: compressed-tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

GROUP = 32
FORMAT = "mxfp4-pack-quantized"
NOT_A_NUMBER = 255
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def unpack(packed: Tensor, scale: Tensor) -> Tensor:
    """The bfloat16 matrix, exactly: its 2 significant bits and any exponent of E8M0 fit.

    Args:
        packed: uint8 [out, in/2].
        scale: uint8 [out, in/32].

    Returns:
        [out, in]; NaN where a scale is (255).

    Raises:
        ValueError: shapes or dtypes do not belong together.
    """
    rows, half = packed.shape
    if packed.dtype != torch.uint8 or scale.dtype != torch.uint8:
        raise ValueError(f"must be bytes, got {packed.dtype} and {scale.dtype}")
    if scale.shape != (rows, 2 * half // GROUP) or 2 * half % GROUP:
        raise ValueError(
            f"packed {list(packed.shape)} needs a scale for every {GROUP} numbers, got "
            f"{list(scale.shape)}"
        )
    values = torch.tensor([*_MAGNITUDES, *(-x for x in _MAGNITUDES)], dtype=torch.bfloat16)
    # A table of both numbers of a byte: one look-up instead of two and a shuffle.
    byte = torch.arange(256)
    table = torch.stack([values[byte & 15], values[byte >> 4]], dim=-1)
    numbers = table[packed.int()].view(rows, -1, GROUP)
    # The smallest, 2^-127, is subnormal in bfloat16 too, and exact.
    powers = torch.ldexp(torch.ones(scale.shape), scale.int() - 127).to(torch.bfloat16)
    powers[scale == NOT_A_NUMBER] = torch.nan
    return (numbers * powers.unsqueeze(-1)).view(rows, 2 * half)


def problems(quantization: Mapping[str, Any]) -> list[str]:
    """What in a `quantization_config` is not the released form."""
    found = []
    if quantization.get("quant_method") != "compressed-tensors":
        found.append(
            f"quant_method={quantization.get('quant_method')!r}: must be compressed-tensors"
        )
    if quantization.get("format") != FORMAT:
        found.append(f"format={quantization.get('format')!r}: must be {FORMAT}")
    wanted = {"num_bits": 4, "type": "float", "group_size": GROUP, "symmetric": True}
    for name, group in (quantization.get("config_groups") or {}).items():
        weights = group.get("weights") or {}
        found += [
            f"config_groups.{name}.weights.{key}={weights[key]!r}: must be {value!r}"
            for key, value in wanted.items()
            if key in weights and weights[key] != value
        ]
    return found
