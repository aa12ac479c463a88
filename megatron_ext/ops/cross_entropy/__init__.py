"""Cross-entropy from hidden states and the weight of the head, without the whole of the logits.

``linear_cross_entropy`` works through chunks of tokens and shards of the vocabulary;
``cross_entropy_reference`` is the formula.
"""

from __future__ import annotations

from functools import cache, partial

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ext.config.schema import KernelBackend, KernelOptions
from megatron_ext.ops.backend import planned, rejection, resolver
from megatron_ext.ops.cross_entropy.chunked import (
    DENSE,
    Passes,
    add_product,
    linear_cross_entropy_chunked,
)
from megatron_ext.ops.cross_entropy.reference import IGNORED, cross_entropy_reference

__all__ = [
    "IGNORED",
    "chunk_for",
    "cross_entropy_reference",
    "linear_cross_entropy",
    "resolve_backend",
]

LOGIT_BYTES = 1 << 28
CHECKED_TOKENS, CHECKED_WIDTH = 37, 16


def chunk_for(vocab_shard: int, *, logit_bytes: int = LOGIT_BYTES) -> int:
    """Tokens whose float32 logits over a shard of the vocabulary take ``logit_bytes``; at least 1.

    256 MiB are small beside the layers of any model, and its chunk is long enough for matrix
    products: 3276 tokens for a shard of 20480. Our kernels have no logits in float32, so that a
    bf16 model needs half of it.
    """
    return max(1, logit_bytes // (4 * vocab_shard))


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    chunk_tokens: int,
    group: dist.ProcessGroup | None = None,
    kernels: KernelOptions | None = None,
) -> Tensor:
    """``cross_entropy_reference`` with the logits of ``chunk_tokens`` tokens at a time.

    Args:
        hidden: [T, D], the same on all ranks of ``group``.
        weight: rows of the head on this rank [V, D], of the dtype of ``hidden``; rank r of the
            group holds rows [r V, (r + 1) V).
        labels: int64 [T] over the whole vocabulary; negative: not counted.
        chunk_tokens: tokens of a chunk. It changes memory and speed only.
        group: over which the vocabulary is split; None: it is whole.
        kernels: backend of what is not a matrix product; None takes the defaults. ``reference``
            runs as ``dense``: the formula needs all logits at once.

    Returns:
        Loss of each token in nats [T], float32, or float64 for float64 input; 0 where not counted.
        In the backward pass ``hidden`` gets the gradient through this rank's rows only: sum it over
        the group, as every split linear map needs.

    Raises:
        ValueError: ``chunk_tokens`` below 1.
        ConfigError: ``kernels.require``, and the backend asked for cannot run here.
    """
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens: given {chunk_tokens}, allowed 1 or more")
    passes = _passes(hidden, vocab_shard=len(weight), options=kernels or KernelOptions())
    return linear_cross_entropy_chunked(hidden, weight, labels, chunk_tokens, group, passes)


def _passes(hidden: Tensor, *, vocab_shard: int, options: KernelOptions) -> Passes:
    if planned(hidden, options.backend):  # our kernels write over the logits
        return Passes(lambda *_: None, lambda logits, *_: logits, _add_planned)
    chosen = resolve_backend(
        options.backend, hidden.device, hidden.dtype, vocab_shard, require=options.require
    )
    return _triton() if chosen is KernelBackend.triton else DENSE


def _add_planned(total: Tensor, a: Tensor, b: Tensor) -> None:
    """What `add_product` does on a GPU, to memory and to torch's count of operations."""
    if a.dtype == total.dtype:
        total += a @ b
    else:
        torch.mm(a, b, out=total.view(a.dtype)[:, : total.shape[1]])


def _triton() -> Passes:
    from megatron_ext.ops.cross_entropy.triton import gradients_triton, sums_triton

    return Passes(sums_triton, gradients_triton, add_product)


@cache
def _rejection(device: torch.device, dtype: torch.dtype, vocab_shard: int) -> str | None:
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, vocab_shard, (CHECKED_TOKENS,), generator=generator)
    labels[3] = IGNORED
    labels = labels.to(device)
    inputs = [
        torch.randn(count, CHECKED_WIDTH, generator=generator) / CHECKED_WIDTH**0.25
        for count in (CHECKED_TOKENS, vocab_shard)
    ]
    return rejection(
        "cross_entropy",
        fast=lambda hidden, weight: linear_cross_entropy_chunked(
            hidden, weight, labels, CHECKED_TOKENS, None, _triton()
        ),
        slow=partial(cross_entropy_reference, labels=labels),
        inputs=[x.to(device, dtype) for x in inputs],
    )


resolve_backend = resolver("cross_entropy", _rejection)
