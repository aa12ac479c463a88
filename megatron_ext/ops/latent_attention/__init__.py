"""Softmax attention whose keys and values are made from a compressed latent, over ranks that hold
consecutive parts of a sequence.

``context_latent_attention`` is the blockwise form; ``latent_attention_reference`` the formula.
"""

from __future__ import annotations

from megatron_ext.ops.latent_attention.context import (
    LatentWidths,
    block_for,
    context_latent_attention,
)
from megatron_ext.ops.latent_attention.reference import latent_attention_reference

__all__ = [
    "LatentWidths",
    "block_for",
    "context_latent_attention",
    "latent_attention_reference",
]
