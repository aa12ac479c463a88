"""What softmax does to a chunk's logits as two Triton kernels: one reads them, one overwrites them.

torch reads and writes them in float32 five times in the forward and six times in the backward pass.
Formulas are those of `chunked`; internal precision is float32. A program has a row, or a piece of
one in the backward pass, and no sum depends on the others: the same bits on every run.

Shapes: C tokens of a chunk, V rows of the vocabulary on this rank.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from megatron_ext.ops.launch import launch_settings


@triton.jit
def _cross_entropy_forward(
    logits, local, largest, total, chosen, width,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits += row * width
    lane = tl.arange(0, BLOCK)
    # Each lane has a maximum of its own, so that the loop needs no exchange between threads. Not
    # -inf, of which a lane without numbers could not take the difference.
    high = tl.full([BLOCK], -3.0e38, tl.float32)
    sums = tl.zeros([BLOCK], tl.float32)
    for start in range(0, width, BLOCK):
        column = start + lane
        x = tl.load(logits + column, mask=column < width, other=-float("inf")).to(tl.float32)
        higher = tl.maximum(high, x)
        sums = sums * tl.exp(high - higher) + tl.exp(x - higher)
        high = higher
    most = tl.max(high)
    label = tl.load(local + row)
    own = tl.load(logits + label, mask=label >= 0, other=0.0)
    tl.store(largest + row, most)
    tl.store(total + row, tl.sum(sums * tl.exp(high - most)))
    tl.store(chosen + row, own)


@triton.jit
def _cross_entropy_backward(
    logits, local, log_sum, upstream, width,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits += row * width
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    x = tl.load(logits + column, mask=inside, other=0.0).to(tl.float32)
    share = tl.exp(x - tl.load(log_sum + row))
    share -= (column == tl.load(local + row)).to(tl.float32)
    tl.store(logits + column, share * tl.load(upstream + row), mask=inside)


def sums_triton(
    logits: Tensor, local: Tensor, largest: Tensor, total: Tensor, chosen: Tensor
) -> None:
    """See `chunked.Passes.sums`."""
    tokens, width = logits.shape
    if logits.numel():
        _cross_entropy_forward[(tokens,)](
            logits, local, largest, total, chosen, width,
            **launch_settings("cross_entropy_forward", width),
        )  # fmt: skip


def gradients_triton(logits: Tensor, local: Tensor, log_sum: Tensor, upstream: Tensor) -> Tensor:
    """See `chunked.Passes.gradients`."""
    tokens, width = logits.shape
    settings = launch_settings("cross_entropy_backward", width)
    if logits.numel():
        _cross_entropy_backward[(tokens, triton.cdiv(width, settings["BLOCK"]))](
            logits, local, log_sum, upstream, width, **settings
        )
    return logits
