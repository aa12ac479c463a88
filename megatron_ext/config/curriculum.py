"""Options of a curriculum: stages with their own length, layout and schedule. No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from megatron_ext.config.option import option


class OnUnfreeze(Enum):
    restore = "restore"  # the moments of before
    reset = "reset"  # as of a new parameter


@dataclass
class CurriculumOptions:
    stage: str | None = option(None, "Only this stage, after one before it (stage=NAME); null: all")
    stages: dict[str, Any] = option({}, "Stages in order, each a mapping of the keys that it sets")
    on_unfreeze: OnUnfreeze = option(
        OnUnfreeze.restore, "Adam's moments of parameters that are trained again after a pause"
    )
