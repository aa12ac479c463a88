"""Options of a curriculum: stages with their own length, layout and schedule. No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron_ext.config.option import option


@dataclass
class CurriculumOptions:
    stage: str | None = option(None, "Only this stage, after one before it (stage=NAME); null: all")
    stages: dict[str, Any] = option({}, "Stages in order, each a mapping of the keys that it sets")
