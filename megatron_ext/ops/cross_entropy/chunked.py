"""Cross-entropy over chunks of tokens and shards of the vocabulary: plain torch, any device.

With l = h W^T of a token, M its maximum and Z = sum exp(l - M) over the whole vocabulary:

    loss = log Z - (l[label] - M)          d l = (exp(l - M - log Z) - onehot(label)) * d loss

Only one chunk's logits exist at a time, in the forward and again in the backward pass, which makes
them anew: one more matrix product, but the memory is flat in the number of tokens. What is kept for
the backward pass is one number a token. Over a vocabulary that is split between ranks, maxima and
sums of all tokens together take one all-reduce each.

Shapes: T tokens, D hidden width, V rows of the vocabulary on this rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    chunk_tokens: int,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """``cross_entropy_reference`` with the logits of ``chunk_tokens`` tokens at a time.

    Args:
        hidden: [T, D], the same on all ranks of ``group``.
        weight: rows of the head on this rank [V, D], of the dtype of ``hidden``; rank r of the
            group holds rows [r V, (r + 1) V).
        labels: int64 [T] over the whole vocabulary; negative: not counted.
        chunk_tokens: tokens of a chunk. It changes memory and speed only.
        group: over which the vocabulary is split; None: it is whole.

    Returns:
        Loss of each token in nats [T], float32, or float64 for float64 input; 0 where not counted.
        In the backward pass ``hidden`` gets the gradient through this rank's rows only: sum it over
        the group, as every split linear map needs.

    Raises:
        ValueError: ``chunk_tokens`` below 1.
    """
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens: given {chunk_tokens}, allowed 1 or more")
    loss: Tensor = _LinearCrossEntropy.apply(  # type: ignore[no-untyped-call]
        hidden, weight, labels, chunk_tokens, group
    )
    return loss


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        chunk_tokens: int,
        group: dist.ProcessGroup | None,
    ) -> Tensor:
        rows = weight.shape[0]
        ranks = 1 if group is None else group.size()
        first = 0 if group is None else group.rank() * rows
        local = labels - first
        mine = (local >= 0) & (local < rows) & (labels >= 0)
        local = local.clamp(0, rows - 1)
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        largest, total, chosen = torch.zeros(
            3, hidden.shape[0], dtype=dtype, device=hidden.device
        ).unbind(0)
        for part in _chunks(hidden.shape[0], chunk_tokens):
            logits = (hidden[part] @ weight.t()).to(dtype)
            torch.amax(logits, -1, out=largest[part])
            torch.gather(logits, 1, local[part, None], out=chosen[part, None])
            logits.sub_(largest[part, None]).exp_()
            torch.sum(logits, -1, out=total[part])
        chosen = torch.where(mine, chosen, 0)
        if ranks > 1:
            here = largest.clone()
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
            sums = torch.stack((total * (here - largest).exp(), chosen))
            dist.all_reduce(sums, group=group)
            total, chosen = sums.unbind(0)
        log_total = total.log()
        counted = labels >= 0
        ctx.save_for_backward(hidden, weight, local, mine, counted, largest + log_total)
        ctx.chunk_tokens = chunk_tokens
        return torch.where(counted, log_total - (chosen - largest), 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, local, mine, counted, log_sum = ctx.saved_tensors
        for_hidden, for_weight = ctx.needs_input_grad[:2]
        upstream = torch.where(counted, grads[0], 0)[:, None]
        d_hidden = torch.empty_like(hidden) if for_hidden else None
        # Over many chunks a 16-bit sum would lose what each of them adds.
        d_weight = torch.zeros_like(weight, dtype=log_sum.dtype) if for_weight else None
        for part in _chunks(hidden.shape[0], ctx.chunk_tokens):
            logits = (hidden[part] @ weight.t()).to(log_sum.dtype)
            logits.sub_(log_sum[part, None]).exp_()
            index = local[part, None]
            # Every row has one label, so a plain scatter is enough, and deterministic on GPUs.
            logits.scatter_(1, index, logits.gather(1, index) - mine[part, None].to(logits.dtype))
            d_logits = logits.mul_(upstream[part]).to(hidden.dtype)
            if d_hidden is not None:
                torch.matmul(d_logits, weight, out=d_hidden[part])
            if d_weight is not None:
                d_weight += d_logits.t() @ hidden[part]
        if d_weight is not None:
            d_weight = d_weight.to(weight.dtype)
        return d_hidden, d_weight, None, None, None


def _chunks(tokens: int, size: int) -> Iterator[slice]:
    for start in range(0, tokens, size):
        yield slice(start, min(tokens, start + size))
