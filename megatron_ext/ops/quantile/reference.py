"""The formulas, in plain loops over tokens and experts, in float64: what tests compare with."""

from __future__ import annotations

import torch
from torch import Tensor


def top_k(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Map bool [T, E] and cut-off [T] of scores [T, E]: the k largest; tied ones in turn."""
    map = torch.zeros(scores.shape, dtype=torch.bool)
    cutoff = []
    for position, row in enumerate(scores.tolist()):
        ordered = sorted(row, reverse=True)
        last = ordered[k - 1]
        above = [e for e, score in enumerate(row) if score > last]
        tied = [e for e, score in enumerate(row) if score == last]
        places = k - len(above)
        dealt = [tied[(position * places + i) % len(tied)] for i in range(places)]
        map[position, above + dealt] = True
        cutoff.append(ordered[min(k, len(row) - 1)])
    return map, torch.tensor(cutoff, dtype=torch.float64)


def quantile(margins: list[float], *, top_k: int, experts: int) -> float:
    """The k/E quantile of one expert's margins."""
    ordered = sorted(margins)
    place = top_k * (len(ordered) - 1) / experts
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def next_bias(scores: Tensor, bias: Tensor, k: int) -> Tensor:
    """Kimi K3, equations 13 and 14, for all scores [T, E] of a global batch: float64 [E]."""
    scores, bias = scores.double(), bias.double()
    _, cutoff = top_k(scores + bias, k)
    experts = scores.shape[1]
    values = []
    for e in range(experts):
        margins = [float(cutoff[t] - scores[t, e]) for t in range(len(scores))]
        values.append(quantile(margins, top_k=k, experts=experts))
    mean = sum(values) / experts
    return torch.tensor([value - mean for value in values], dtype=torch.float64)


def place(value: float, edges: list[float]) -> int:
    """The bin of a margin: bin i lies between edges i and i + 1; 0 is before all of them, so that
    the answer is i + 1, or one past the last."""
    return sum(edge <= value for edge in edges)
