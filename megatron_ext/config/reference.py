"""Text made from the schema and ``configs/``: the ``--help`` of the command, the reference page.

``python -m megatron_ext.config.reference`` writes ``docs/configuration.md``; a test says that the
page is current.
"""

from __future__ import annotations

from dataclasses import fields
from enum import Enum
from pathlib import Path
from textwrap import wrap

from megatron_ext.config.compose import CONFIGS, REPOSITORY
from megatron_ext.config.keys import Key, table
from megatron_ext.config.overrides import groups
from megatron_ext.config.ranges import RANGES
from megatron_ext.config.schema import RunConfig

PAGE = REPOSITORY / "docs" / "configuration.md"


def help_text(config_dir: Path = CONFIGS) -> str:
    """What ``pretrain.py --help`` prints: usage, groups, experiments, keys of every section."""
    options = groups(config_dir)
    lines = [
        "Train, plan, evaluate, sample or score:  python pretrain.py [group=option] [key=value]",
        "Several ranks:  torchrun --standalone --nproc-per-node N pretrain.py [...]",
        "",
        "  run.mode=plan       check, draw the layout and count parameters; needs no GPU",
        "  --cfg job           print the composed configuration and stop",
        "  --info defaults     print which files it comes from (also defaults-tree, config)",
        "  section={a:1,b:2}   several keys of a section at once; the others stay",
        "  -m key=1,2          run every combination, one after the other, under multirun/",
        "  stage=NAME          only this stage of an experiment with a curriculum",
        "",
        "Groups (files in configs/; the default is the first in configs/config.yaml):",
    ]
    lines += [
        f"  {name + '=':<12}{', '.join(values)}"
        for name, values in options.items()
        if name not in ("experiment", "local")
    ]
    lines += ["", "Experiments (experiment=NAME, or +experiment=NAME):"]
    for name in options.get("experiment", []):
        lines += _row(f"  {name:<16}", _summary(config_dir / "experiment" / f"{name}.yaml"))
    lines += ["", "Keys (docs/configuration.md says more; values are of the schema):"]
    for key in table().values():
        lines += _row(f"  {key.name + '=' + _value(key.default):<44}", _meaning(key))
    return "\n".join(lines)


def _row(start: str, text: str) -> list[str]:
    """Lines of two columns; a long text goes on below itself."""
    return wrap(text, 110, initial_indent=start, subsequent_indent=" " * len(start))


def page(config_dir: Path = CONFIGS) -> str:
    """The text of ``docs/configuration.md``."""
    lines = [
        "# Configuration",
        "",
        "Made by `python -m megatron_ext.config.reference`; edit the schema, not this page.",
        "",
        "`python pretrain.py key=value group=option` composes `configs/config.yaml`, the chosen",
        "options of each group, the experiment, `configs/local/default.yaml` if there is one, and",
        "then the command line; later ones win. All that is wrong is listed at once, before any",
        "work (exit code 20). `--cfg job` prints the result, `--info defaults` its sources.",
        "",
        "## Groups",
        "",
        "| group | options |",
        "| --- | --- |",
    ]
    for name, values in groups(config_dir).items():
        if name != "local":
            lines.append(f"| `{name}=` | {', '.join(f'`{value}`' for value in values)} |")
    lines += ["", "`experiment=NAME` and `+experiment=NAME` mean the same:", ""]
    for name in groups(config_dir).get("experiment", []):
        lines.append(f"- `{name}`: {_summary(config_dir / 'experiment' / f'{name}.yaml')}")
    lines += [
        "",
        "In an experiment with a curriculum `stage=NAME` runs one stage, and a key of one stage is",
        "set by `curriculum.stages.stage_64k.parallel.context=4`; see long_context.md.",
        "",
        "A `model` option also sets the sequence length and batch it is meant for.",
        "",
        "`'model.kda={num_heads: 8, decay_rank: 16}'` sets several keys of a section, at any",
        "depth, and leaves its others as they are.",
        "",
        "`-m optim.lr=1e-3,3e-4 run.seed=1,2` runs every combination, one after the other, each in",
        "its own folder under `multirun/`.",
    ]
    section = ""
    for key in table().values():
        head = key.name.rsplit(".", 1)[0]
        if head != section:
            section = head
            lines += ["", f"## {section}", "", _section_help(section) + ".", ""]
            lines += ["| key | default | allowed | meaning |", "| --- | --- | --- | --- |"]
        cells = (f"`{key.name}`", f"`{_value(key.default)}`", _allowed(key), _meaning(key))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _summary(file: Path) -> str:
    """The comment at the head of a YAML file, its `@package` line left out."""
    text: list[str] = []
    for line in file.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        if "@package" not in line:
            text.append(line.lstrip("# "))
    return " ".join(text)


def _value(value: object) -> str:
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}"
    return "null" if value is None else str(value)


def _meaning(key: Key) -> str:
    return f"{key.help} ({key.unit})" if key.unit else key.help


def _allowed(key: Key) -> str:
    if key.name in RANGES and "inf" not in str(RANGES[key.name]):
        text = f"{'whole number' if key.kind is int else 'number'}, {RANGES[key.name]}"
        return f"{text}, or null" if key.optional else text
    return key.expects


def _section_help(section: str) -> str:
    node, text = RunConfig(), ""
    for part in section.split("."):
        text = str(next(f for f in fields(node) if f.name == part).metadata["help"])
        node = getattr(node, part)
    return text


def main() -> None:
    PAGE.write_text(page(), encoding="utf-8")
    print(f"wrote {PAGE.relative_to(REPOSITORY)}")


if __name__ == "__main__":
    main()
