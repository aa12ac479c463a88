"""Cross-entropy from hidden states and the weight of the head, without the whole of the logits.

``linear_cross_entropy`` works through chunks of tokens and shards of the vocabulary;
``cross_entropy_reference`` is the formula.
"""

from __future__ import annotations

from megatron_ext.ops.cross_entropy.chunked import linear_cross_entropy
from megatron_ext.ops.cross_entropy.reference import IGNORED, cross_entropy_reference

__all__ = ["IGNORED", "chunk_for", "cross_entropy_reference", "linear_cross_entropy"]

LOGIT_BYTES = 1 << 28


def chunk_for(vocab_shard: int, *, logit_bytes: int = LOGIT_BYTES) -> int:
    """Tokens whose float32 logits over a shard of the vocabulary take ``logit_bytes``; at least 1.

    256 MiB are small beside the layers of any model, and its chunk is long enough for matrix
    products: 3276 tokens for a shard of 20480.
    """
    return max(1, logit_bytes // (4 * vocab_shard))
