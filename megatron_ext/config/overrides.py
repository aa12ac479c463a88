"""The pass over overrides and YAML files that runs before Hydra composes, and finds every mistake.

Hydra stops at the first unknown key and suggests nothing; here all of them are collected, with
misspelt group options and values of a wrong type, and what is left is certain to compose.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from megatron_ext.config.hf_read import read_architecture
from megatron_ext.config.keys import Key, sections, suggest, table
from megatron_ext.config.schema import RunConfig
from megatron_ext.config.section_words import section_words
from megatron_ext.config.stage_words import names_stage, stage_word, stages_of, unknown_stage
from megatron_ext.errors import ConfigError

_SEVERAL = (
    "gives several values, must be one (for a sweep: -m; for text with commas: key='\"a,b\"')"
)


@dataclass
class Checked:
    """What the pass found. ``overrides`` are the good ones, in the spelling that Hydra takes."""

    overrides: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    given: set[str] = field(default_factory=set)  # keys that a good override sets
    broken: set[str] = field(default_factory=set)  # keys whose value is not what was meant
    broken_group: bool = False
    architecture: dict[str, Any] = field(default_factory=dict)  # from `model=.../config.json`


def groups(config_dir: Path) -> dict[str, list[str]]:
    """Hydra groups and their options: one folder a group, one file an option."""
    found = {
        folder.name: sorted(file.stem for file in folder.glob("*.yaml"))
        for folder in sorted(config_dir.iterdir())
        if folder.is_dir()
    }
    return {group: options for group, options in found.items() if options}


def check_overrides(given: Sequence[str], config_dir: Path, cwd: Path | None = None) -> Checked:
    """Check ``key=value`` words and every file that they and the defaults select.

    Args:
        given: the words.
        config_dir: the folder with ``config.yaml``.
        cwd: where the relative path of a ``config.json`` starts; default: the working directory.
    """
    result, keys, options = Checked(), table(), groups(config_dir)
    selected = _defaults(config_dir / "config.yaml")
    staged: list[Override] = []
    parser, scratch = OverridesParser.create(), OmegaConf.structured(RunConfig)
    for text in given:
        try:
            override = parser.parse_override(text)
        except HydraException:
            result.problems.append(
                f"{text}: cannot be read, must be key=value or group=option (quote values with "
                "spaces, commas or brackets for Hydra: 'key=\"a, b\"')"
            )
            continue
        inside = section_words(override, keys)
        if inside == []:
            result.problems.append(f"{text}: sets nothing (give keys, or leave it out)")
        elif inside is not None:
            for word in inside:
                _check_key(word, keys, options, scratch, result)
        elif names_stage(override):
            staged.append(override)
        elif _names_architecture(override):
            _check_architecture(override, (cwd or Path.cwd()), selected, result)
        elif override.key_or_group in options and override.type is not OverrideType.DEL:
            _check_group(override, options, selected, result)
        else:
            _check_key(override, keys, options, scratch, result)
    result.overrides = _architecture_words(result) + result.overrides
    stages: list[str] = []
    for group, choices in _with_experiment(selected, config_dir).items():
        for choice in choices:
            file = config_dir / group / f"{choice}.yaml"
            if file.exists():
                result.problems += check_file(file, group, keys, scratch)
                stages += stages_of(file)
    for override in staged:
        several = f"{override.input_line}: {_SEVERAL}" if override.is_sweep_override() else ""
        problem = several or unknown_stage(override, stages)
        if problem:
            result.problems.append(problem)
        else:
            result.overrides.append(stage_word(override))
    return result


def check_file(file: Path, group: str, keys: Mapping[str, Key], scratch: DictConfig) -> list[str]:
    """Problems of one YAML file of a group: unknown keys and wrong types, each with the file."""
    name = f"{file.parent.name}/{file.name}"
    text = file.read_text(encoding="utf-8")
    try:
        content = yaml.safe_load(text) or {}
    except yaml.YAMLError as error:
        return [f"{name}: is not YAML: {' '.join(str(error).split())}"]
    package = re.search(r"^#\s*@package\s+(\S+)", text, re.MULTILINE)
    where = package.group(1) if package else group
    prefix = "" if where == "_global_" else where.replace("_group_", group) + "."
    problems = []
    for key, value in flatten(content, prefix, keys):
        if key.startswith(f"{prefix}defaults"):
            continue
        text = unknown(key, keys) if key not in keys else wrong_value(keys[key], value, scratch)
        if text:
            problems.append(f"{name}: {text}")
    return problems


def unknown(key: str, keys: Mapping[str, Key], extra: Sequence[str] = ()) -> str:
    """The line for a key that does not exist."""
    if key in sections():
        inside = [name for name in keys if name.startswith(key + ".")]
        own = [name.removeprefix(f"{key}.") for name in inside]
        several = ",".join(f"{name}:..." for name in own[:2] if "." not in name)
        return (
            f"{key}: holds other keys, must be one of them (such as {', '.join(inside[:3])}), or "
            f"several as {key}={{{several}}}"
        )
    near = suggest(key, [*keys, *extra])
    if near:
        return f"{key}: no such key (did you mean {' or '.join(near)}?)"
    section = key.split(".", 1)[0]
    inside = [name for name in keys if name.startswith(section + ".")]
    if inside:
        return f"{key}: no such key (allowed: {', '.join(inside)})"
    first = ", ".join(name for name in sections() if "." not in name)
    return f"{key}: no such key (keys begin with {first})"


def wrong_value(key: Key, value: Any, scratch: DictConfig) -> str:
    """The line for a value of a wrong type, or nothing. Interpolations are left to OmegaConf.

    ``scratch`` is a configuration to try values in; making one takes a tenth of a second.
    """
    if isinstance(value, str) and "${" in value:
        return ""
    problem = isinstance(value, bool) and key.kind in (int, float)
    try:
        OmegaConf.update(scratch, key.name, value, force_add=False)
    except (OmegaConfBaseException, ValueError, TypeError):
        problem = True
    if not problem:
        return ""
    shown = "null" if value is None else str(value)
    near = suggest(shown, key.allowed, count=1)
    if key.kind is int and isinstance(value, float):
        near = [str(round(value))]
    hint = f" (nearest {near[0]})" if near else ""
    return f"{key.name}={shown}: must be {key.expects}{hint}"


def _check_group(
    override: Override,
    options: Mapping[str, list[str]],
    selected: dict[str, list[str]],
    result: Checked,
) -> None:
    group = override.key_or_group
    if override.is_sweep_override():
        result.problems.append(f"{override.input_line}: {_SEVERAL}")
        result.broken_group = True
        return
    value: Any = override.value()
    chosen = value if isinstance(value, list) else [value]
    if value is None and group in ("experiment", "local"):
        selected[group] = []
        result.overrides.append(f"~{group}")
        return
    wrong = [choice for choice in chosen if choice not in options[group]]
    if wrong:
        shown = "null" if wrong[0] is None else str(wrong[0])
        near = suggest(shown, options[group], count=1)
        hint = f"; did you mean {group}={near[0]}?" if near else ""
        result.problems.append(
            f"{group}={shown}: no such option (allowed {', '.join(options[group])}{hint})"
        )
        result.broken_group = True
        return
    selected[group] = chosen
    # `experiment` stands in the defaults list, so `+experiment=x`, the other habit, means the same.
    result.overrides.append((override.input_line or "").lstrip("+"))


def _names_architecture(override: Override) -> bool:
    value = None if override.is_sweep_override() else override.value()
    return override.key_or_group == "model" and isinstance(value, str) and value.endswith(".json")


def _check_architecture(
    override: Override, cwd: Path, selected: dict[str, list[str]], result: Checked
) -> None:
    """``model=PATH/config.json``: the architecture of that file in the place of a preset."""
    selected["model"] = []
    try:
        result.architecture = read_architecture(cwd / Path(str(override.value())).expanduser())
    except ConfigError as error:
        result.problems += error.problems
        result.broken_group = True


def _architecture_words(result: Checked) -> list[str]:
    """The file's options as words for Hydra, before the user's own, which win."""
    if not result.architecture:
        return []
    chosen = {word.split("=", 1)[0].lstrip("+") for word in result.overrides}
    skipped = chosen | ({"residual.kind"} if "residual" in chosen else set())
    # JSON's spelling of numbers, text, lists and null is Hydra's too.
    words = [f"{k}={json.dumps(v)}" for k, v in result.architecture.items() if k not in skipped]
    return ["~model", *words]


def _check_key(
    override: Override,
    keys: Mapping[str, Key],
    options: Mapping[str, list[str]],
    scratch: DictConfig,
    result: Checked,
) -> None:
    key = override.key_or_group
    if override.type is OverrideType.DEL:
        result.problems.append(f"~{key}: keys cannot be removed (allowed: key=value, key=null)")
    elif key.startswith(("hydra.", "hydra/")):
        result.problems.append(
            f"{key}: Hydra only composes here, its own settings have no effect (leave it out)"
        )
    elif key not in keys:
        result.problems.append(unknown(key, keys, list(options)))
        result.broken.update(suggest(key, keys, count=1))
    elif override.is_sweep_override():
        result.problems.append(f"{override.input_line}: {_SEVERAL}")
        result.broken.add(key)
    else:
        value: Any = override.value()
        whole = keys[key].kind is int and isinstance(value, float) and value.is_integer()
        line = f"{key}={int(value)}" if whole else (override.input_line or "").lstrip("+")
        problem = wrong_value(keys[key], int(value) if whole else value, scratch)
        if problem:
            result.problems.append(problem)
            result.broken.add(key)
        else:
            result.overrides.append(line)
            result.given.add(key)


def flatten(content: Any, prefix: str, keys: Mapping[str, Key]) -> list[tuple[str, Any]]:
    """Leaves of a YAML mapping; a value whose key is a leaf of the schema is not entered."""
    leaves: list[tuple[str, Any]] = []
    for name, value in content.items() if isinstance(content, dict) else ():
        key = f"{prefix}{name}"
        if isinstance(value, dict) and key not in keys:
            leaves += flatten(value, key + ".", keys)
        else:
            leaves.append((key, value))
    return leaves


def _defaults(file: Path) -> dict[str, list[str]]:
    """Options that a file's defaults list chooses, by group."""
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8")) or {}
    except (OSError, yaml.YAMLError):
        return {}
    chosen: dict[str, list[str]] = {}
    for entry in content.get("defaults", []):
        for group, choice in entry.items() if isinstance(entry, dict) else ():
            name = group.replace("override ", "").replace("optional ", "").strip().lstrip("/")
            chosen[name] = [] if choice is None else [str(choice)]
    return chosen


def _with_experiment(selected: dict[str, list[str]], config_dir: Path) -> dict[str, list[str]]:
    """Options in force: what an experiment overrides counts unless the command line says else."""
    final = dict(selected)
    base = _defaults(config_dir / "config.yaml")
    for experiment in selected.get("experiment", []):
        for group, choices in _defaults(config_dir / "experiment" / f"{experiment}.yaml").items():
            if final.get(group) == base.get(group):
                final[group] = choices
    return final
