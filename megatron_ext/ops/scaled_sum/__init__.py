"""A tensor plus others, each times a learned scalar: what layers of a block share."""

from __future__ import annotations

from megatron_ext.ops.scaled_sum.dense import scaled_sum
from megatron_ext.ops.scaled_sum.reference import scaled_sum_reference

__all__ = ["scaled_sum", "scaled_sum_reference"]
