"""The learning rate as a pure function of tokens: nothing to save, nothing to restore."""

from __future__ import annotations

import math

from megatron_ext.config.schema import OptimOptions, Schedule
from megatron_ext.errors import ConfigError


def learning_rate(optim: OptimOptions, tokens: int, *, total_tokens: int) -> float:
    """Learning rate of the step that ends at `tokens`.

    Linear warm-up from 0 to `lr`, then by `schedule`: `constant` stays; `cosine` falls to
    `lr * min_lr_ratio` at the end of the schedule; `wsd` stays and falls linearly to it over the
    last `decay_tokens`. After the end, the last value stays.

    Args:
        optim: the options; the schedule is `schedule_tokens` long if given, else `total_tokens`.
        tokens: tokens consumed when this step is done, its own batch included. So the first step of
            a warm-up is not lost to a rate of 0, and the last step runs at the final rate.
        total_tokens: tokens of the whole run.

    Raises:
        ConfigError: warm-up and decay do not fit into the schedule, or a number is out of range.
    """
    length = total_tokens if optim.schedule_tokens is None else optim.schedule_tokens
    _check(optim, length)
    if tokens < optim.warmup_tokens:
        return optim.lr * max(tokens, 0) / optim.warmup_tokens
    if optim.schedule is Schedule.constant:
        return optim.lr
    start = optim.warmup_tokens
    if optim.schedule is Schedule.wsd:
        start = length - optim.decay_tokens
    if tokens >= length:
        fraction = 1.0 if length > start else 0.0
    else:
        fraction = max(tokens - start, 0) / (length - start)
    if optim.schedule is Schedule.cosine:
        fraction = 0.5 * (1.0 - math.cos(math.pi * fraction))
    return optim.lr * (1.0 - (1.0 - optim.min_lr_ratio) * fraction)


def _check(optim: OptimOptions, length: int) -> None:
    problems = []
    if not (math.isfinite(optim.lr) and optim.lr >= 0.0):
        problems.append(f"optim.lr: {optim.lr}, allowed: a finite number >= 0, for example 1e-3")
    if not 0.0 <= optim.min_lr_ratio <= 1.0:
        problems.append(f"optim.min_lr_ratio: {optim.min_lr_ratio}, allowed: 0 to 1, usual: 0.1")
    if optim.warmup_tokens < 0:
        problems.append(f"optim.warmup_tokens: {optim.warmup_tokens}, allowed: 0 or more")
    if length <= 0:
        problems.append(f"optim.schedule_tokens: the schedule has {length} tokens, allowed: > 0")
    elif optim.schedule is Schedule.cosine and optim.warmup_tokens > length:
        problems.append(
            f"optim.warmup_tokens: {optim.warmup_tokens} is longer than the schedule of {length} "
            f"tokens; allowed: up to {length}"
        )
    if optim.schedule is Schedule.wsd and length > 0:
        room = length - optim.warmup_tokens
        if not 0 <= optim.decay_tokens <= room:
            problems.append(
                f"optim.decay_tokens: {optim.decay_tokens}, allowed: 0 to {max(room, 0)}, what "
                f"optim.warmup_tokens={optim.warmup_tokens} leaves of a schedule of {length} tokens"
            )
    if problems:
        raise ConfigError(problems)
