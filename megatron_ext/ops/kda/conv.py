"""Short causal convolution, one filter a channel, followed by SiLU: what feeds q, k and v of KDA.

    y[t, c] = silu(sum_i weight[c, i] * x[t - (W - 1) + i, c])

Tokens before the start of a document are zero, or the ``W - 1`` inputs kept in a state.
Shapes: B batch, T tokens, C channels, W taps, N documents.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_ext.ops.kda.documents import document_lengths
from megatron_ext.ops.kda.gate import compute_dtype


def short_conv_reference(
    x: Tensor,
    weight: Tensor,
    *,
    cu_seqlens: Tensor | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """The formula, token by token. Arguments and result as ``short_conv_dense``."""
    dtype = compute_dtype(x)
    batch, tokens, channels = x.shape
    taps = weight.shape[1]
    lengths = document_lengths(cu_seqlens, batch=batch, tokens=tokens)
    pieces = list(x) if lengths is None else list(torch.split(x[0], lengths))
    outputs: list[Tensor] = []
    finals: list[Tensor] = []
    for index, piece in enumerate(pieces):
        if initial_state is None:
            window = x.new_zeros(channels, taps - 1, dtype=dtype)
        else:
            window = initial_state[index].to(dtype)
        for token in piece:
            window = torch.cat((window, token.to(dtype)[:, None]), 1)
            outputs.append(F.silu((window * weight.to(dtype)).sum(1)))
            window = window[:, 1:]
        finals.append(window)
    out = torch.stack(outputs).view(batch, tokens, channels) if outputs else x
    return out.to(x.dtype), torch.stack(finals) if output_final_state else None


def short_conv_dense(
    x: Tensor,
    weight: Tensor,
    *,
    cu_seqlens: Tensor | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """The convolution as one multiply-add a tap over all tokens; any device.

    Args:
        x: inputs [B, T, C].
        weight: filters [C, W]; the last tap meets the token itself.
        cu_seqlens: document offsets [N + 1], int32 or int64; then B must be 1.
        initial_state: the W - 1 inputs before each document [N or B, C, W - 1], oldest first; zero
            when None.
        output_final_state: also return the last W - 1 inputs of each document.

    Returns:
        y [B, T, C] in the dtype of ``x``; final state [N or B, C, W - 1] in the dtype of the
        computation (float32, or float64 for float64 input), or None.

    Raises:
        ValueError: ``cu_seqlens`` does not fit.
    """
    dtype = compute_dtype(x)
    batch, tokens, channels = x.shape
    before = weight.shape[1] - 1
    lengths = document_lengths(cu_seqlens, batch=batch, tokens=tokens)
    data = x.to(dtype)
    # Every document gets W - 1 rows in front of it, so no tap needs a mask.
    if lengths is None:
        if initial_state is None:
            rows = F.pad(data, (0, 0, before, 0))
        else:
            rows = torch.cat((initial_state.to(dtype).transpose(1, 2), data), 1)
        y = _depthwise_silu(rows, weight.to(dtype)).to(x.dtype)
        final = rows[:, tokens:].transpose(1, 2) if output_final_state else None
        return y, final
    length = torch.tensor(lengths, dtype=torch.int64)
    document = torch.repeat_interleave(length)
    position = torch.arange(tokens) + (document + 1) * before
    ends = length.cumsum(0) + torch.arange(1, len(lengths) + 1) * before
    last = (ends[:, None] + torch.arange(-before, 0)).to(x.device)
    first = last - length.to(x.device)[:, None]
    position = position.to(x.device)
    rows = data.new_zeros(tokens + before * len(lengths), channels).index_copy(0, position, data[0])
    if initial_state is not None:
        state = initial_state.to(dtype).transpose(1, 2).reshape(-1, channels)
        rows = rows.index_copy(0, first.flatten(), state)
    if tokens == 0:
        y = x
    else:
        y = _depthwise_silu(rows[None], weight.to(dtype)).to(x.dtype)
        y = y.index_select(1, position - before)
    if not output_final_state:
        return y, None
    final = rows.index_select(0, last.flatten()).view(len(lengths), before, channels)
    return y, final.transpose(1, 2)


class DepthwiseSilu(torch.autograd.Function):
    """[B, W - 1 + T, C], [C, W] -> [B, T, C]; keeps the input only, recomputes the rest."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weight)
        return F.silu(_taps(rows, weight), inplace=True)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight = ctx.saved_tensors
        taps = weight.shape[1]
        tokens = rows.shape[1] - taps + 1
        y = _taps(rows, weight)
        gate = torch.sigmoid(y)
        # silu'(y) = s (1 + y (1 - s))
        grad = y.mul_(1 - gate).add_(1).mul_(gate).mul_(grads[0])
        d_rows = torch.zeros_like(rows)
        d_weight = torch.empty_like(weight)
        for i in range(taps):
            d_rows[:, i : i + tokens].addcmul_(grad, weight[:, i])
            # not an einsum: that is a batched product with a batch a channel, 10 times slower here
            d_weight[:, i] = (grad * rows[:, i : i + tokens]).sum((0, 1))
        return d_rows, d_weight


def _depthwise_silu(rows: Tensor, weight: Tensor) -> Tensor:
    y: Tensor = DepthwiseSilu.apply(rows, weight)  # type: ignore[no-untyped-call]
    return y


def _taps(rows: Tensor, weight: Tensor) -> Tensor:
    taps = weight.shape[1]
    tokens = rows.shape[1] - taps + 1
    y = rows[:, taps - 1 :] * weight[:, taps - 1]
    for i in range(taps - 1):
        y.addcmul_(rows[:, i : i + tokens], weight[:, i])
    return y
