"""Cross-entropy over chunks of tokens and shards of the vocabulary, on any device.

With l = h W^T of a token, M its maximum and Z = sum exp(l - M) over the whole vocabulary:

    loss = log Z - (l[label] - M)          d l = (exp(l - M - log Z) - onehot(label)) * d loss

Only one chunk's logits exist at a time, in the forward and again in the backward pass, which makes
them anew: one more matrix product, but the memory is flat in the number of tokens. What is kept for
the backward pass is one number a token. Over a vocabulary that is split between ranks, maxima and
sums of all tokens together take one all-reduce each.

Shapes: T tokens, D hidden width, V rows of the vocabulary on this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable


class Passes(NamedTuple):
    """What is done to the logits [C, V] of a chunk of C tokens.

    Attributes:
        sums: of (logits, local, largest, total, chosen), fills the last three, [C] in float32 or
            wider: M, Z over this rank's rows and the label's logit. Labels of other ranks are -1
            in local, int64 [C], and their logit is left to itself. May write over the logits.
        gradients: of (logits, local, log_sum, upstream), the gradient of the logits in their dtype,
            with M + log Z and d loss in float32 or wider [C]. May write over the logits.
        add: of (total, a, b), ``total += a @ b``; total may be wider than a and b.
    """

    sums: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]
    gradients: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
    add: Callable[[Tensor, Tensor, Tensor], None]


def sums_dense(
    logits: Tensor, local: Tensor, largest: Tensor, total: Tensor, chosen: Tensor
) -> None:
    """`Passes.sums` in plain torch, by way of the logits in the dtype of the results."""
    logits = logits.to(largest.dtype)
    torch.amax(logits, -1, out=largest)
    torch.gather(logits, 1, local.clamp(min=0)[:, None], out=chosen[:, None])
    logits.sub_(largest[:, None]).exp_()
    torch.sum(logits, -1, out=total)


def gradients_dense(logits: Tensor, local: Tensor, log_sum: Tensor, upstream: Tensor) -> Tensor:
    """`Passes.gradients` in plain torch, by way of the logits in the dtype of `log_sum`."""
    shares = logits.to(log_sum.dtype)
    shares.sub_(log_sum[:, None]).exp_()
    index = local.clamp(min=0)[:, None]
    # Every row has one label, so a plain scatter is enough, and deterministic on GPUs.
    shares.scatter_(1, index, shares.gather(1, index) - (local >= 0).to(shares.dtype)[:, None])
    return shares.mul_(upstream[:, None]).to(logits.dtype)


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """`Passes.add`, in one pass where the product of 16-bit numbers can be had in float32."""
    if a.is_cuda and a.dtype != total.dtype:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total += a @ b


DENSE = Passes(sums_dense, gradients_dense, add_product)


def linear_cross_entropy_chunked(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    chunk_tokens: int,
    group: dist.ProcessGroup | None,
    passes: Passes,
) -> Tensor:
    """See `ops.cross_entropy.linear_cross_entropy`."""
    loss: Tensor = _LinearCrossEntropy.apply(  # type: ignore[no-untyped-call]
        hidden, weight, labels, chunk_tokens, group, passes
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
        passes: Passes,
    ) -> Tensor:
        rows = weight.shape[0]
        ranks = 1 if group is None else group.size()
        first = 0 if group is None else group.rank() * rows
        local = labels - first
        local = torch.where((local >= 0) & (local < rows) & (labels >= 0), local, -1)
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        largest, total, chosen = torch.zeros(
            3, hidden.shape[0], dtype=dtype, device=hidden.device
        ).unbind(0)
        for part in _chunks(hidden.shape[0], chunk_tokens):
            logits = hidden[part] @ weight.t()
            passes.sums(logits, local[part], largest[part], total[part], chosen[part])
        chosen = torch.where(local >= 0, chosen, 0)
        if ranks > 1:
            here = largest.clone()
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
            sums = torch.stack((total * (here - largest).exp(), chosen))
            dist.all_reduce(sums, group=group)
            total, chosen = sums.unbind(0)
        log_total = total.log()
        counted = labels >= 0
        ctx.save_for_backward(hidden, weight, local, counted, largest + log_total)
        ctx.chunk_tokens, ctx.passes = chunk_tokens, passes
        return torch.where(counted, log_total - (chosen - largest), 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, local, counted, log_sum = ctx.saved_tensors
        for_hidden, for_weight = ctx.needs_input_grad[:2]
        upstream = torch.where(counted, grads[0], 0).to(log_sum.dtype)
        d_hidden = torch.empty_like(hidden) if for_hidden else None
        # Over many chunks a 16-bit sum would lose what each of them adds.
        d_weight = torch.zeros_like(weight, dtype=log_sum.dtype) if for_weight else None
        for part in _chunks(hidden.shape[0], ctx.chunk_tokens):
            logits = hidden[part] @ weight.t()
            d_logits = ctx.passes.gradients(logits, local[part], log_sum[part], upstream[part])
            if d_hidden is not None:
                torch.matmul(d_logits, weight, out=d_hidden[part])
            if d_weight is not None:
                ctx.passes.add(d_weight, d_logits.t(), hidden[part])
        if d_weight is not None:
            d_weight = d_weight.to(weight.dtype)
        return d_hidden, d_weight, None, None, None, None


def _chunks(tokens: int, size: int) -> Iterator[slice]:
    for start in range(0, tokens, size):
        yield slice(start, min(tokens, start + size))
