"""Rules of the learning rate's schedule, checked before a run and again when it resumes. No torch.

A resume with another batch size or number of steps moves the schedule's end, so what held at the
start need not hold then.
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron_ext.config.problem import Problem
from megatron_ext.config.schema import OptimOptions, Schedule


def schedule_problems(optim: OptimOptions, *, total: int, name: str) -> Iterator[Problem]:
    """What does not fit into the schedule.

    Args:
        optim: its `schedule_tokens` wins over `total`.
        total: tokens at the end of the run.
        name: what `total` is made of, in words.
    """
    if optim.schedule_tokens:
        total, name = optim.schedule_tokens, "optim.schedule_tokens"
    keys = ("optim.warmup_tokens", "optim.schedule_tokens", "train.steps", "train.batch_tokens")
    if optim.warmup_tokens >= total:
        yield Problem(
            f"optim.warmup_tokens={optim.warmup_tokens}: must be less than {name} = {total} "
            f"(nearest {total - 1}; a common choice is {total // 20})",
            keys,
        )
    if optim.schedule is not Schedule.wsd:
        return
    if optim.decay_tokens == 0:
        yield Problem(
            "optim.decay_tokens=0: must be above 0 for optim.schedule=wsd (a common choice is "
            f"{max(total // 10, 1)}; or optim.schedule=constant)",
            ("optim.decay_tokens", "optim.schedule", *keys),
        )
    elif optim.warmup_tokens + optim.decay_tokens > total and optim.warmup_tokens < total:
        yield Problem(
            f"optim.decay_tokens={optim.decay_tokens}: with optim.warmup_tokens="
            f"{optim.warmup_tokens} must not exceed {name} = {total} "
            f"(nearest {total - optim.warmup_tokens})",
            ("optim.decay_tokens", *keys),
        )
