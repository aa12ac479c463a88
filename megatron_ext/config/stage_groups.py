"""Group options inside a stage of a curriculum: `data: {group: blend, sequence_length: 65536}`.

Hydra composes groups once for the whole run. A stage names an option of a group by the key `group`
of a section; the option's file is set over what the run has, and the stage's other keys over that.
No torch here.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf

from megatron_ext.config.keys import suggest, table
from megatron_ext.config.overrides import check_file, groups
from megatron_ext.config.schema import RunConfig
from megatron_ext.config.stage_words import GROUP
from megatron_ext.config.stages import SECTIONS


def expand_groups(config: RunConfig, config_dir: Path) -> list[str]:
    """Put the files of the chosen options in their places, in `config`; what is wrong, as lines.

    Args:
        config: composed and not yet checked, so that anything may stand in a stage.
        config_dir: the folder with the groups.
    """
    problems: list[str] = []
    for stage, content in config.curriculum.stages.items():
        for section in SECTIONS if isinstance(content, dict) else ():
            own = content.get(section)
            if isinstance(own, str):
                own = {GROUP: own}
            if not isinstance(own, dict) or GROUP not in own:
                continue
            rest = {key: value for key, value in own.items() if key != GROUP}
            where = f"curriculum.stages.{stage}.{section}"
            found, wrong = _option(section, own[GROUP], where=where, config_dir=config_dir)
            problems += wrong
            content[section] = _merged(found, rest)
    return problems


def _option(
    section: str, choice: Any, *, where: str, config_dir: Path
) -> tuple[dict[str, Any], list[str]]:
    """The keys of an option's file, and what is wrong with it."""
    options = groups(config_dir).get(section, [])
    if choice not in options:
        allowed = ", ".join(options) or f"none, since {section} has no options"
        near = suggest(str(choice), options, count=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        return {}, [f"{where}={choice}: no such option (allowed {allowed}{hint})"]
    file = config_dir / section / f"{choice}.yaml"
    problems = check_file(file, section, table(), OmegaConf.structured(RunConfig))
    content = {} if problems else yaml.safe_load(file.read_text(encoding="utf-8")) or {}
    if "defaults" in content:
        problems.append(
            f"{where}={choice}: {section}/{file.name} has a defaults list, which a stage does not "
            "follow (name its keys in the stage)"
        )
    return content, problems


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    merged = OmegaConf.merge(OmegaConf.create(dict(below)), OmegaConf.create(dict(above)))
    assert isinstance(merged, DictConfig)
    container = OmegaConf.to_container(merged)
    assert isinstance(container, dict)
    return {str(key): value for key, value in container.items()}
