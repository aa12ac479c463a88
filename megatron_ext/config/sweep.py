"""``-m key=1,2``: one word list a job. No torch."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException


def expand(overrides: Sequence[str], *, root: str = "multirun") -> list[list[str]]:
    """All combinations of the values that the words give, in the order of the words.

    Each job gets a folder of its own, ``multirun/<its values>``, which is the same when the sweep
    is started again: finished jobs are reported, interrupted ones go on.

    Args:
        overrides: Hydra words; ``a=1,2``, ``a=choice(1,2)`` and ``a=range(1,4)`` give several.
        root: parent of the jobs' folders, relative to the working directory.
    """
    parser = OverridesParser.create()
    choices: list[list[str]] = []
    for word in overrides:
        try:
            override = parser.parse_override(word)
            swept = override.is_sweep_override()
        except HydraException:
            swept = False  # `compose` explains it
        if swept:
            prefix = override.get_key_element()
            choices.append([f"{prefix}={value}" for value in override.sweep_string_iterator()])
        else:
            choices.append([word])
    jobs = [list(job) for job in itertools.product(*choices)]
    for job in jobs:
        given = [word for word, options in zip(job, choices, strict=True) if len(options) > 1]
        name = re.sub(r"[^\w.,=+-]", "-", "_".join(given)) or "job"
        if not any(word.startswith("run.dir=") for word in job):
            job.append(f"run.dir='{root}/{name}'")
    return jobs
