"""Words of the command line that speak of stages: ``stage=64k``, ``curriculum.stages.NAME.KEY=``.

Which keys a stage may have is checked when everything is composed (`stages`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from hydra.core.override_parser.types import Override, OverrideType

from megatron_ext.config.keys import suggest

_SHORT, _STAGES = "stage", "curriculum.stages."
GROUP = "group"  # the key of a section that names an option of its group


def names_stage(override: Override) -> bool:
    """Whether a word chooses a stage, or is for one."""
    return override.key_or_group == _SHORT or override.key_or_group.startswith(_STAGES)


def unknown_stage(override: Override, stages: Sequence[str]) -> str:
    """The line for a key of a stage that the chosen files do not have, or nothing."""
    if override.key_or_group == _SHORT or override.type is OverrideType.ADD:
        return ""
    name = override.key_or_group.removeprefix(_STAGES).split(".", 1)[0]
    if name in stages:
        return ""
    allowed = ", ".join(stages) or "none, since no experiment with stages is chosen"
    near = suggest(name, stages, count=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    return (
        f"{override.key_or_group}: no such stage (allowed {allowed}{hint}; "
        f"+{override.input_line} adds a stage at the end)"
    )


def stage_word(override: Override) -> str:
    """The word as Hydra takes it. Stages hold any keys, so theirs are added or replaced."""
    if override.key_or_group == _SHORT:
        value: Any = override.value()
        # Quoted, since in stage=64 the number is a name.
        return "curriculum.stage=null" if value is None else f"curriculum.stage='{value}'"
    line = override.input_line or ""
    if override.type is OverrideType.DEL:
        return line
    key, (_, equals, value) = override.key_or_group, line.partition("=")
    # `curriculum.stages.NAME.data=blend`: an option of a group, beside what the stage sets itself.
    if key.count(".") == _STAGES.count(".") + 1 and isinstance(override.value(), str):
        key += f".{GROUP}"
    return f"++{key}{equals}{value}"


def stages_of(file: Path) -> list[str]:
    """Names of the stages in a YAML file of the whole configuration."""
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except yaml.YAMLError:
        return []  # reported where the file's keys are checked
    for key in ("curriculum", "stages"):
        content = content.get(key) if isinstance(content, dict) else None
    return [str(name) for name in content] if isinstance(content, dict) else []
