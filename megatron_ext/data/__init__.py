"""Data: prepared shards, document order by consumed tokens, blends, batches, tokenizers.

Numpy only: neither torch nor megatron-core is imported here, so workers and login nodes start fast.
"""

from __future__ import annotations

from megatron_ext.data.batches import MicroBatch, evaluation_batches, micro_batches
from megatron_ext.data.stream import Slice, TokenStream, open_corpus
from megatron_ext.data.tokenizers import Tokenizer, load_tokenizer

__all__ = [
    "MicroBatch",
    "Slice",
    "TokenStream",
    "Tokenizer",
    "evaluation_batches",
    "load_tokenizer",
    "micro_batches",
    "open_corpus",
]
