"""From ``key=value`` words to a checked `RunConfig`. Hydra composes, and neither runs nor writes.

No torch is imported here, so that a plan or a typo is answered on a login node at once.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra import main as hydra_main
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from megatron_ext.config.overrides import Checked, check_overrides
from megatron_ext.config.problem import Problem
from megatron_ext.config.schema import AttentionResidualBackend, KdaBackend, Mode, RunConfig
from megatron_ext.config.stage_groups import expand_groups
from megatron_ext.config.stages import idle_keys, stage_problems
from megatron_ext.errors import ConfigError

REPOSITORY = Path(__file__).resolve().parents[2]
CONFIGS = REPOSITORY / "configs"
# Files and folders, as the user at the command line means them.
_PATHS = (("checkpoint", "load"), ("score", "tokens"), ("score", "output"), ("score", "routing"))


def compose(
    overrides: Sequence[str],
    *,
    world_size: int | Callable[[RunConfig], int] | None = None,
    config_dir: Path = CONFIGS,
    cwd: Path | None = None,
) -> RunConfig:
    """Compose ``configs/`` with ``overrides`` and check everything before any work.

    Args:
        overrides: Hydra words: ``key=value``, ``group=option``, ``experiment=x`` or
            ``+experiment=x``.
        world_size: ranks of the job, or what tells them from the configuration; None leaves out
            what depends on their number.
        config_dir: the folder with ``config.yaml``.
        cwd: where relative paths start; default: the working directory.

    Returns:
        The configuration, with ``run.name``, ``run.dir`` and the paths of sources filled in and
        absolute, so that every rank has the same ones.

    Raises:
        ConfigError: with *all* problems: unknown keys and options, wrong types, broken rules.
    """
    if not (config_dir / "config.yaml").is_file():
        raise ConfigError(f"{config_dir}: has no config.yaml (run from a checkout of the project)")
    checked = check_overrides(overrides, config_dir, cwd)
    try:
        composed = _hydra(checked.overrides, config_dir)
        missing = sorted(OmegaConf.missing_keys(composed))
        checked.problems += [f"{key}: is missing, must be given" for key in missing]
        config = None if missing else OmegaConf.to_object(composed)
    except (HydraException, OmegaConfBaseException, yaml.YAMLError) as error:
        # The pass before found the cause in most cases and says it better.
        raise ConfigError(checked.problems or " ".join(str(error).split())) from error
    if config is None:
        raise ConfigError(checked.problems)
    assert isinstance(config, RunConfig)
    checked.problems += expand_groups(config, config_dir)
    resolve_paths(config, cwd or Path.cwd())
    if callable(world_size):
        world_size = world_size(config)
    found = stage_problems(config, world_size)
    checked.problems += [problem.text for problem in found if _certain(problem, checked)]
    checked.problems += idle_keys(config, checked.given)
    if config.run.deterministic and config.model.kda.backend is KdaBackend.auto:
        # What `auto` takes on a GPU, triton or fla, is not deterministic.
        config.model.kda.backend = KdaBackend.dense
    if config.run.deterministic and config.residual.backend is AttentionResidualBackend.auto:
        config.residual.backend = AttentionResidualBackend.dense
    if checked.problems:
        wrong = ConfigError(checked.problems)
        # Where the run would have been, unless that itself is in doubt.
        certain = not checked.broken_group and not checked.broken & {"run.dir", "run.name"}
        if certain and config.run.mode is Mode.train and "run.mode" not in checked.broken:
            wrong.run_dir = config.run.dir
        raise wrong
    return config


def resolve_paths(config: RunConfig, cwd: Path) -> None:
    """Fill in the run's name and folder, and make paths absolute, in place.

    A relative source is looked for under ``cwd`` and then in the repository, where samples are.
    """
    config.run.name = config.run.name or config.model.name
    folder = os.path.expanduser(config.run.dir or f"runs/{config.run.name}")
    config.run.dir = os.path.abspath(cwd / folder)
    for source in config.data.sources:
        source.path = _source_path(source.path, cwd)
    for stage in config.curriculum.stages.values():
        # Not checked yet: anything may stand there.
        data = stage.get("data") if isinstance(stage, dict) else None
        sources = data.get("sources") if isinstance(data, dict) else None
        for given in sources if isinstance(sources, list) else ():
            if isinstance(given, dict) and isinstance(given.get("path"), str):
                given["path"] = _source_path(given["path"], cwd)
    for section, key in _PATHS:
        options = getattr(config, section)
        if getattr(options, key) is not None:
            setattr(options, key, os.path.abspath(cwd / os.path.expanduser(getattr(options, key))))


def _source_path(path: str, cwd: Path) -> str:
    here, shipped = cwd / os.path.expanduser(path), REPOSITORY / path
    return os.path.abspath(shipped if shipped.exists() and not here.exists() else here)


def from_keys(values: Mapping[str, Any]) -> RunConfig:
    """The schema's defaults with some keys set; neither presets nor rules have a say.

    Raises:
        ConfigError: a key does not exist, or its value is of a wrong type.
    """
    config = OmegaConf.structured(RunConfig)
    try:
        for key, value in values.items():
            OmegaConf.update(config, key, value, force_add=False)
    except (OmegaConfBaseException, ValueError, TypeError) as error:
        raise ConfigError(" ".join(str(error).split())) from error
    result = OmegaConf.to_object(config)
    assert isinstance(result, RunConfig)
    return result


def to_container(config: RunConfig) -> dict[str, Any]:
    """The configuration as plain dicts, lists and values, enums by name: what is saved."""
    container = OmegaConf.to_container(OmegaConf.structured(config), enum_to_str=True)
    assert isinstance(container, dict)
    return {str(key): value for key, value in container.items()}


def to_yaml(config: RunConfig) -> str:
    """The text of a run folder's ``config.yaml``."""
    return yaml.safe_dump(to_container(config), sort_keys=False, allow_unicode=True)


def _hydra(overrides: Sequence[str], config_dir: Path) -> DictConfig:
    store = ConfigStore.instance()
    store.store(name="schema", node=RunConfig)
    with initialize_config_dir(config_dir=str(config_dir.resolve()), version_base="1.3"):
        return hydra_compose("config", overrides=list(overrides))


def _certain(problem: Problem, checked: Checked) -> bool:
    """Whether a broken rule is the user's doing, and not of a value that stood in for a bad one."""
    if checked.broken_group:
        return set(problem.keys) <= checked.given
    return not set(problem.keys) & checked.broken


def hydra_command(words: Sequence[str], *, config_dir: Path = CONFIGS) -> int:
    """Hydra's own inspection, ``--cfg`` and ``--info``: prints, composes, runs nothing.

    Raises:
        ConfigError: for words that do not compose, as `compose` does.
    """
    flags = [word for word in words if word.startswith("-") or "=" not in word]
    checked = check_overrides([word for word in words if word not in flags], config_dir)
    if checked.problems:
        raise ConfigError(checked.problems)
    ConfigStore.instance().store(name="schema", node=RunConfig)
    # Hydra reads the words from sys.argv only; ours lack the + that it refuses.
    show = hydra_main(version_base="1.3", config_path=str(config_dir), config_name="config")
    program, sys.argv = sys.argv, [sys.argv[0], *flags, *checked.overrides]
    try:
        show(lambda _: None)()
    finally:
        sys.argv = program
    return 0
