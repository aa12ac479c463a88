"""The formula, with every score at once and the whole sequence on one rank."""

from __future__ import annotations

import torch
from torch import Tensor


def latent_attention_reference(
    q: Tensor,
    latent: Tensor,
    weight: Tensor,
    *,
    nope: int,
    scale: float,
    document: Tensor | None = None,
) -> Tensor:
    """Causal attention with [k_n | v] = W c and k = [k_n | k_r], per head.

    Args:
        q: queries [b, s, H, N + R].
        latent: c and the key part that all heads share, [b, s, C + R].
        weight: W [H (N + V), C].
        nope: N.
        scale: factor on q k^T.
        document: number of each token's document [s]; tokens see their own only. None: one.

    Returns:
        [b, s, H, V].
    """
    heads, shared_width = q.shape[2], q.shape[3] - nope
    compressed, shared = torch.split(latent, [latent.shape[-1] - shared_width, shared_width], -1)
    both = torch.unflatten(compressed @ weight.t(), -1, (heads, -1))
    key, value = both.tensor_split([nope], -1)
    key = torch.cat((key, shared.unsqueeze(2).expand(-1, -1, heads, -1)), -1)
    scores = torch.einsum("bshd,bthd->bhst", q, key) * scale
    tokens = q.shape[1]
    hidden = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
    if document is not None:
        hidden |= document[:, None] != document[None, :]
    scores = scores.masked_fill(hidden.to(q.device), -torch.inf)
    return torch.einsum("bhst,bthv->bshv", scores.softmax(-1), value)
