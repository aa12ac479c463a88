"""Health of attention residuals: which sources each sublayer reads, and how large they are.

A `DepthHealth` is handed to a mix, which adds what it sees; its sums over ranks that see other
tokens are sums over tokens, so the result is the same in every layout.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_ext.ops.attn_res.dense import depth_weights


class DepthHealth:
    """Statistics of one mix on one rank, under way.

    Args:
        sources: of the mix; N.
        valid_tokens: of the first axis of what is added, so many count, and what follows is
            padding; None: all of them.

    Attributes:
        sums: float64 [2 + 2 N]: tokens, entropy, weight of each source, and its root mean square.
    """

    def __init__(
        self, sources: int, device: torch.device | str, *, valid_tokens: int | None = None
    ) -> None:
        self._valid_tokens = valid_tokens
        self.sums = torch.zeros(2 + 2 * sources, dtype=torch.float64, device=device)

    @torch.no_grad()
    def add(
        self, sources: Sequence[Tensor], query: Tensor, key_weight: Tensor, *, eps: float
    ) -> None:
        """Add a micro-batch; arguments as of `depth_mix`, sources [tokens, ..., D]."""
        sources = [source[: self._valid_tokens] for source in sources]
        if not sources[0].numel():  # this rank's part is all padding
            return
        weights = depth_weights(sources, query, key_weight, eps=eps).flatten(1)  # [N, tokens]
        count = len(sources)
        self.sums[0] += weights.shape[1]
        self.sums[1] += torch.special.entr(weights).sum(dtype=torch.float64)
        self.sums[2 : 2 + count] += weights.sum(1, dtype=torch.float64)
        for place, source in enumerate(sources, start=2 + count):
            wide = source.to(weights.dtype)
            self.sums[place] += wide.square().mean(-1).sqrt().sum(dtype=torch.float64)


@dataclass(frozen=True)
class MixHealth:
    """One mix in one step, over all tokens of the global batch.

    Attributes:
        sublayer: 2 l for the attention of layer l, 2 l + 1 for its feed-forward; twice the number
            of layers for the mix after the last one.
        tokens: that were counted.
        entropy: mean entropy of a token's weights over its maximum, the logarithm of the number of
            sources: 1 is even, 0 is one source alone.
        weights: mean weight of each source, the embedding first, the running sum last.
        norms: mean root mean square of each source.
    """

    sublayer: int
    tokens: int
    entropy: float
    weights: tuple[float, ...]
    norms: tuple[float, ...]


def mix_health(sublayer: int, sums: Tensor) -> MixHealth:
    """The record of a mix from its sums over all ranks [2 + 2 N], on the host; N is 2 or more.

    Raises:
        ValueError: no token was counted.
    """
    tokens, entropy, *rest = sums.tolist()
    if not tokens:
        raise ValueError(f"sublayer {sublayer}: its mix was handed out and counted no token")
    means = tuple(value / tokens for value in rest)
    count = len(means) // 2
    even = math.log(count)
    return MixHealth(sublayer, int(tokens), entropy / tokens / even, means[:count], means[count:])
