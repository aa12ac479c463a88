"""Arithmetic of allowed values, and the range of every number in the schema. No torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Range:
    """An interval of finite numbers; each end may be left out (``open``) of it."""

    low: float = -math.inf
    high: float = math.inf
    low_open: bool = False
    high_open: bool = False

    def holds(self, value: float) -> bool:
        above = value > self.low if self.low_open else value >= self.low
        below = value < self.high if self.high_open else value <= self.high
        return above and below and math.isfinite(value)

    def clamp(self, value: float) -> str:
        """The closest value inside, as text; past an open end, a common value beside it."""
        if not math.isfinite(value):
            value = self.high if value > 0 and math.isfinite(self.high) else self.low
        if value <= self.low:
            beside = self.low + min(0.01, (self.high - self.low) / 2)
            return _text(beside if self.low_open else self.low)
        beside = self.high - min(0.01, (self.high - self.low) / 2)
        return _text(beside if self.high_open else self.high)

    def __str__(self) -> str:
        if math.isinf(self.high):
            return f"above {_text(self.low)}" if self.low_open else f"{_text(self.low)} or more"
        left, right = "(" if self.low_open else "[", ")" if self.high_open else "]"
        return f"in {left}{_text(self.low)}, {_text(self.high)}{right}"


def _text(value: float) -> str:
    """Whole numbers in full: `9223372036854775807` can be copied, `9.22337e+18` cannot."""
    return str(value) if isinstance(value, int) else f"{value:g}"


COUNT = Range(low=1)
AMOUNT = Range(low=0)
POSITIVE = Range(low=0, low_open=True)

RANGES: dict[str, Range] = {
    "run.seed": Range(low=0, high=2**63 - 1),
    "run.timeout_seconds": POSITIVE,
    "model.num_layers": COUNT,
    "model.first_dense_layers": AMOUNT,
    "model.hidden_size": COUNT,
    "model.feed_forward_size": COUNT,
    "model.vocab_size": COUNT,
    "model.full_attention_interval": COUNT,
    "model.norm_eps": POSITIVE,
    "model.init_std": POSITIVE,
    "model.situ_beta": POSITIVE,
    "model.situ_linear_beta": POSITIVE,
    "model.kda.num_heads": COUNT,
    "model.kda.head_dim": COUNT,
    "model.kda.value_dim": COUNT,
    "model.kda.conv_width": COUNT,
    "model.kda.lower_bound": Range(),  # depends on the gate: see validate
    "model.kda.decay_rank": COUNT,
    "model.kda.output_gate_rank": COUNT,
    "model.mla.num_heads": COUNT,
    "model.mla.q_lora_rank": AMOUNT,
    "model.mla.kv_lora_rank": COUNT,
    "model.mla.qk_nope_head_dim": COUNT,
    "model.mla.qk_rope_head_dim": AMOUNT,
    "model.mla.v_head_dim": COUNT,
    "model.mla.norm_eps": POSITIVE,
    "model.experts.num_experts": COUNT,
    "model.experts.top_k": COUNT,
    "model.experts.latent_size": COUNT,
    "model.experts.feed_forward_size": COUNT,
    "model.experts.shared_feed_forward_size": AMOUNT,
    "model.experts.scaling": POSITIVE,
    "balance.bins": Range(low=2),
    "balance.sign_step": POSITIVE,
    "balance.aux_coefficient": AMOUNT,
    "balance.capacity_factor": Range(low=1),
    "balance.overload": Range(low=1),
    "balance.rejection_probability": Range(low=0, high=1, low_open=True),
    "balance.running_decay": Range(low=0, high=1, high_open=True),
    "residual.block_size": COUNT,
    "residual.query_std": AMOUNT,
    "residual.share_std": AMOUNT,
    "parallel.tensor": COUNT,
    "parallel.pipeline": COUNT,
    "parallel.virtual_pipeline": COUNT,
    "parallel.context": COUNT,
    "parallel.expert": COUNT,
    "parallel.expert_tensor": COUNT,
    "data.sequence_length": COUNT,
    "data.spiral_segment": AMOUNT,
    "data.held_out": Range(low=0, high=1, low_open=True, high_open=True),
    "train.frozen_layers": AMOUNT,
    "train.steps": COUNT,
    "train.batch_tokens": COUNT,
    "train.micro_batch_size": COUNT,
    "train.loss_chunk_tokens": COUNT,
    "train.expert_chunk_tokens": COUNT,
    "train.kda_segment_tokens": COUNT,
    "optim.lr": POSITIVE,
    "optim.min_lr_ratio": Range(low=0, high=1),
    "optim.warmup_tokens": AMOUNT,
    "optim.decay_tokens": AMOUNT,
    "optim.schedule_tokens": COUNT,
    "optim.beta1": Range(low=0, high=1, high_open=True),
    "optim.beta2": Range(low=0, high=1, high_open=True),
    "optim.eps": POSITIVE,
    "optim.weight_decay": AMOUNT,
    "optim.clip_grad": AMOUNT,
    "evaluate.interval_tokens": AMOUNT,
    "evaluate.tokens": COUNT,
    "evaluate.position_bucket": AMOUNT,
    "evaluate.probes": COUNT,
    "checkpoint.interval": AMOUNT,
    "checkpoint.keep": AMOUNT,
    "checkpoint.keep_every": AMOUNT,
    "logging.interval": COUNT,
    "logging.expert_interval": AMOUNT,
    "logging.health_interval": AMOUNT,
    "logging.rank_interval": AMOUNT,
    "resilience.loss_deviations": POSITIVE,
    "resilience.norm_factor": Range(low=1, low_open=True),
    "resilience.window_steps": Range(low=2),
    "resilience.max_skips": COUNT,
    "resilience.max_rewinds": AMOUNT,
    "resilience.rewind_steps": COUNT,
    "resilience.replay_interval": AMOUNT,
    "resilience.straggler_excess": POSITIVE,
    "resilience.hang_seconds": AMOUNT,
    "launch.nodes": COUNT,
    "launch.ranks_per_node": COUNT,
    "launch.node_restarts": AMOUNT,
    "launch.stalled_restarts": AMOUNT,
    "launch.stop_seconds": AMOUNT,
    "launch.lead_seconds": AMOUNT,
    "launch.gpus_per_node": COUNT,
    "launch.cpus_per_node": COUNT,
    "generate.max_new_tokens": COUNT,
    "generate.temperature": AMOUNT,
    "generate.top_k": AMOUNT,
    "plan.world_size": COUNT,
    "plan.imbalance": COUNT,
    "plan.gpu_hour_price": AMOUNT,
}


def nearest(value: int, allowed: Sequence[int]) -> str:
    """The closest allowed values below and above: ``"2 or 4"``."""
    below = [a for a in allowed if a < value]
    above = [a for a in allowed if a > value]
    return " or ".join(str(a) for a in ([max(below)] if below else []) + above[:1])


def nearest_multiples(value: int, step: int) -> str:
    """The multiples of ``step`` around ``value``: ``"8192 or 16384"``."""
    low = value // step * step
    return nearest(value, [low, low + step] if low > 0 else [step])


def divisors(number: int) -> list[int]:
    """All divisors, ascending."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})
