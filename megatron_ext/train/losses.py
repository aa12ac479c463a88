"""Losses summed over valid tokens, as a whole and by group.

Shapes: b sequences of a micro-batch, s tokens a sequence, n data sources, p buckets of positions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass
class Losses:
    """Sums over the valid tokens of a global batch, the same on every rank.

    Attributes:
        total: cross-entropy by source, in nats, float64 [n].
        tokens: valid tokens by source, float64 [n] (exact integers).
        position_total, position_tokens: the same by bucket of positions, float64 [p].
        buckets: where those begin, in tokens.
    """

    total: torch.Tensor
    tokens: torch.Tensor
    position_total: torch.Tensor
    position_tokens: torch.Tensor
    buckets: list[int]

    @property
    def mean(self) -> float:
        """Mean cross-entropy of the valid tokens."""
        return float(self.total.sum() / self.tokens.sum())

    def by_source(self, names: list[str], *, prefix: str = "") -> dict[str, float]:
        """`loss/<source>` for each source that has tokens here."""
        return {
            f"{prefix}loss/{name}": float(self.total[i] / self.tokens[i])
            for i, name in enumerate(names)
            if self.tokens[i] > 0
        }

    def by_position(self, *, prefix: str = "") -> dict[str, float]:
        """`loss/position/<start>` for each bucket that has tokens here; none where all are one."""
        if len(self.buckets) == 1:
            return {}
        return {
            f"{prefix}loss/position/{start}": float(
                self.position_total[i] / self.position_tokens[i]
            )
            for i, start in enumerate(self.buckets)
            if self.position_tokens[i] > 0
        }


def one_hot(source: torch.Tensor, sources: int, bucket: torch.Tensor, buckets: int) -> torch.Tensor:
    """Which source and which bucket each token belongs to, bool [tokens, sources + buckets]."""
    parts = (
        index.flatten()[:, None] == torch.arange(count, device=index.device)
        for index, count in ((source, sources), (bucket, buckets))
    )
    return torch.cat(list(parts), dim=1)


def sum_losses(
    losses: torch.Tensor, *, mask: torch.Tensor, members: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Sums over the valid tokens of a micro-batch; megatron-core divides them by all tokens.

    Args:
        losses: float32 [b, s] (or [1, b * s] when packed).
        mask: float32 [b, s], 1 where a token counts.
        members: bool [b * s, n], the groups whose sums are wanted.

    Returns:
        The loss to differentiate, the number of valid tokens (int32), and `sums` float64 [2, n]:
        losses and tokens by group.
    """
    valid = mask.flatten()
    weighted = losses.float().flatten() * valid
    # A matrix product, since index_add is not deterministic on GPUs.
    sums = torch.stack((weighted.detach(), valid)).double() @ members.double()
    return weighted.sum(), valid.sum().int(), {"sums": sums}
