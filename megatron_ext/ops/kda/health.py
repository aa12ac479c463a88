"""Health of attention layers: how fast the state forgets, and how far the gates are open.

An `AttentionHealth` is handed to a layer, which adds what it sees; sums over ranks and over layers
of these tensors are sums over tokens and heads, so the result is the same in every layout.

Shapes: B batch, T tokens, H heads of this rank, K width of a key head, V of a value head.
"""

# ruff: noqa: N803  (A_log is the name of the parameter in every checkpoint)
from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from megatron_ext.config.schema import Gate
from megatron_ext.ops.backend import triton_misfit
from megatron_ext.ops.kda.gate import check_slope, log_decay
from megatron_ext.ops.kda.tiles import TILE

# Rates (minus the log-decay, nats a token) are counted in bins of an eighth of an octave, from 1e-6
# (a half-life of 700 000 tokens) to 256: a percentile is known to 9 % of the rate.
LOWEST_OCTAVE, HIGHEST_OCTAVE, BINS_AN_OCTAVE = -20, 8, 8
BINS = (HIGHEST_OCTAVE - LOWEST_OCTAVE) * BINS_AN_OCTAVE + 2  # and one on either side
# A gate within 1 % of an end of its range has almost no gradient left.
SATURATED = 0.01
# Gates that are looked at in one go: temporary tensors of some 100 MB.
_AT_ONCE = 4 * 2**20


class Sum(IntEnum):
    """Places in `AttentionHealth.sums`; the histogram of rates follows from `HISTOGRAM` on."""

    GATES = 0  # decay gates: one a token, head and channel
    DECAY = 1  # exp(g)
    LOW = 2  # gates that nearly reach the lower bound
    HIGH = 3  # gates that nearly do not decay
    WRITES = 4
    BETA = 5
    OUTPUTS = 6
    OUTPUT_GATE = 7
    ATTENTION_OUTPUTS = 8
    ATTENTION_GATE = 9  # of full attention
    HISTOGRAM = 10


class Maximum(IntEnum):
    """Places in `AttentionHealth.maxima`, none below 0."""

    TILE_DECAY = 0  # nats over one tile of 16 tokens
    STATE_NORM = 1  # Frobenius norm of a head's state after the last token


SUMS, MAXIMA = Sum.HISTOGRAM + BINS, len(Maximum)


class AttentionHealth:
    """Statistics of one layer on one rank, under way.

    Args:
        valid_tokens: of each row that is added, so many count, and what follows is padding; None:
            all of them.

    Attributes:
        sums: float64 [SUMS]; add them over ranks that see other tokens or heads.
        maxima: float64 [MAXIMA]; take their maximum over the same ranks.
    """

    def __init__(self, device: torch.device | str, *, valid_tokens: int | None = None) -> None:
        self._valid_tokens = valid_tokens
        self.sums = torch.zeros(SUMS, dtype=torch.float64, device=device)
        self.maxima = torch.zeros(MAXIMA, dtype=torch.float64, device=device)

    @torch.no_grad()
    def add_decay(
        self,
        z: Tensor,
        A_log: Tensor | None,
        dt_bias: Tensor,
        *,
        gate: Gate,
        lower_bound: float,
        first: int = 0,
    ) -> None:
        """Add the decay gates of a micro-batch; arguments as `log_decay`: z [B, T, H, K].

        Tiles are counted from the first token given, as the kernels do without documents.
        `first`: tokens of each row that are given by another call before.
        """
        check_slope(A_log, gate)
        z = z[:, self._valid(first)]
        if not z.numel():  # this rank's part is all padding
            return
        if triton_misfit(z.device, z.dtype) is None and z.stride(-1) == 1:
            self._add_fused(z, A_log, dt_bias, softplus=gate is Gate.softplus, bound=lower_bound)
            return
        heads = max(1, _AT_ONCE // z[:, :, 0].numel())
        for first in range(0, z.shape[2], heads):
            part = slice(first, first + heads)
            g = log_decay(
                z[:, :, part],
                None if A_log is None else A_log[part],
                dt_bias[part],
                gate=gate,
                lower_bound=lower_bound,
            )
            self._add_log_decay(g, lower_bound)

    def _add_fused(
        self, z: Tensor, A_log: Tensor | None, dt_bias: Tensor, *, softplus: bool, bound: float
    ) -> None:
        """What `_add_log_decay` adds, in one kernel: plain torch needs some 30, and waits for the
        GPU at every count."""
        from megatron_ext.ops.kda.triton_health import decay_statistics

        totals, tile, counts = decay_statistics(
            z,
            torch.ones_like(dt_bias[:, 0]) if A_log is None else A_log.float().exp(),
            dt_bias,
            softplus=softplus,
            lower_bound=bound,
            saturated=SATURATED,
            tile=TILE,
            octaves=(LOWEST_OCTAVE, BINS_AN_OCTAVE),
            bins=BINS,
        )
        self.sums[Sum.GATES] += z.numel()
        self.sums[Sum.DECAY : Sum.HIGH + 1] += totals
        self._raise(Maximum.TILE_DECAY, tile)
        self.sums[Sum.HISTOGRAM :] += counts

    def _add_log_decay(self, g: Tensor, lower_bound: float) -> None:
        sums = self.sums
        sums[Sum.GATES] += g.numel()
        sums[Sum.DECAY] += g.exp().sum(dtype=torch.float64)
        sums[Sum.LOW] += (g <= lower_bound * (1 - SATURATED)).sum()
        sums[Sum.HIGH] += (g >= lower_bound * SATURATED).sum()
        # Decays only add up, so the strongest decay within a tile is that over all of it.
        tiles = torch.nn.functional.pad(g, (0, 0, 0, 0, 0, -g.shape[1] % TILE))
        total = torch.unflatten(tiles, 1, (-1, TILE)).sum(2).neg().amax()
        self._raise(Maximum.TILE_DECAY, total)
        octave = g.neg().log2()  # of a rate of 0: -inf, the first bin
        place = (octave - LOWEST_OCTAVE).mul_(BINS_AN_OCTAVE).floor_().add_(1).clamp_(0, BINS - 1)
        # NaN is no index; the loss is NaN as well then, and training stops with a better message.
        place.nan_to_num_(nan=0.0)
        counts = torch.bincount(place.flatten().long(), minlength=BINS)
        sums[Sum.HISTOGRAM :] += counts

    @torch.no_grad()
    def add_gate(self, count: Sum, total: Sum, logits: Tensor, *, first: int = 0) -> None:
        """Add sigmoid gates [B, T, ...], given before their sigmoid, to a pair of sums. `first` as
        for `add_decay`."""
        logits = logits[:, self._valid(first)]
        wide = torch.promote_types(logits.dtype, torch.float32)
        self.sums[count] += logits.numel()
        self.sums[total] += torch.sigmoid(logits.to(wide)).sum(dtype=torch.float64)

    @torch.no_grad()
    def add_state(self, state: Tensor) -> None:
        """Add the states after the last token of each row or document: [N, H, K, V]. Does nothing
        where rows are padded: these states have seen the padding."""
        if self._valid_tokens is not None or not state.numel():
            return
        self._raise(Maximum.STATE_NORM, torch.linalg.vector_norm(state, dim=(-2, -1)).amax())

    def _valid(self, first: int) -> slice:
        """Of tokens from `first` of a row on, those that are no padding."""
        valid = self._valid_tokens
        return slice(None if valid is None else max(0, valid - first))

    def _raise(self, place: Maximum, value: Tensor) -> None:
        self.maxima[place] = torch.maximum(self.maxima[place], value.double())


@dataclass(frozen=True)
class LayerHealth:
    """One attention layer in one step, over all tokens and heads of the global batch.

    Attributes:
        layer: 0-based number of the layer.
        values: by name, of what the layer has: `decay_mean`, `saturated_low`, `saturated_high`,
            `tile_decay`, `state_norm`, `beta_mean`, `output_gate_mean`; `attention_gate_mean`.
        rates: counts of decay rates, [BINS]; empty without linear attention.
    """

    layer: int
    values: Mapping[str, float]
    rates: tuple[int, ...] = ()


def layer_health(layer: int, sums: Tensor, maxima: Tensor) -> LayerHealth:
    """The record of a layer from its sums and maxima over all ranks, on the host."""
    total, most = sums.tolist(), maxima.tolist()
    values: dict[str, float] = {}

    def mean(name: str, count: Sum, of: Sum) -> None:
        if total[count]:
            values[name] = total[of] / total[count]

    mean("decay_mean", Sum.GATES, Sum.DECAY)
    mean("saturated_low", Sum.GATES, Sum.LOW)
    mean("saturated_high", Sum.GATES, Sum.HIGH)
    mean("beta_mean", Sum.WRITES, Sum.BETA)
    mean("output_gate_mean", Sum.OUTPUTS, Sum.OUTPUT_GATE)
    mean("attention_gate_mean", Sum.ATTENTION_OUTPUTS, Sum.ATTENTION_GATE)
    if not total[Sum.GATES]:
        return LayerHealth(layer, values)
    values["tile_decay"] = most[Maximum.TILE_DECAY]
    if most[Maximum.STATE_NORM]:  # sequences that are padded give none
        values["state_norm"] = most[Maximum.STATE_NORM]
    return LayerHealth(layer, values, tuple(int(count) for count in total[Sum.HISTOGRAM :]))


def decay_percentile(rates: tuple[int, ...], percent: float) -> float:
    """Decay exp(g) that so many percent of the gates do not exceed; NaN without gates.

    Args:
        rates: counts of decay rates, of one layer or added over layers, [BINS].
        percent: 0 to 100.
    """
    # Large decays are small rates.
    left = sum(rates) * (1 - percent / 100)
    if not sum(rates):
        return math.nan
    for place, count in enumerate(rates):
        if count and left <= count:
            octave = LOWEST_OCTAVE + (place - 1 + max(left, 0.0) / count) / BINS_AN_OCTAVE
            return math.exp(-(2.0**octave))
        left -= count
    return 0.0
