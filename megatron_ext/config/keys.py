"""The dotted keys of the configuration, read off the schema: what exists, its type, its meaning.

The override pass, the help text and the reference page all use this one table.
"""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Iterable
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from enum import Enum
from typing import Any

from megatron_ext.config.schema import RunConfig


@dataclass(frozen=True)
class Key:
    """One leaf of the configuration. ``kind`` is its type without ``None``."""

    name: str
    kind: Any
    optional: bool
    default: Any
    help: str
    unit: str

    @property
    def expects(self) -> str:
        """What a value may be, in words that fit after "must be"."""
        text = _words(self.kind)
        return f"{text}, or null" if self.optional else text

    @property
    def allowed(self) -> list[str]:
        """Names of an enumeration's members; empty for other types."""
        if isinstance(self.kind, type) and issubclass(self.kind, Enum):
            return [member.name for member in self.kind]
        return []


def table() -> dict[str, Key]:
    """Every leaf key, in the order of the schema."""
    return {key.name: key for key in _leaves(RunConfig, "")}


def sections() -> list[str]:
    """Keys that hold other keys: ``run``, ``model``, ``model.kda``, ..."""
    names = {name.rsplit(".", depth)[0] for name in table() for depth in (1, 2) if "." in name}
    return sorted(names)


def suggest(given: str, known: Iterable[str], *, count: int = 3) -> list[str]:
    """The likeliest of ``known`` for a mistyped name: the same last part, then look-alikes."""
    names = list(known)
    leaf = given.rsplit(".", 1)[-1]
    same = [name for name in names if name.rsplit(".", 1)[-1] == leaf]
    if same and "." not in given:
        return same[:count]
    near = _closest(given, names)
    leaves: dict[str, list[str]] = {}
    for name in names:
        leaves.setdefault(name.rsplit(".", 1)[-1], []).append(name)
    near_leaf = [name for part in _closest(leaf, list(leaves)) for name in leaves[part]]
    return list(dict.fromkeys([*same, *near, *(near_leaf if not near else [])]))[:count]


def _closest(given: str, names: list[str]) -> list[str]:
    """Names much like ``given``, the likest first, none much less like than that one."""
    found = difflib.get_close_matches(given, names, n=5, cutoff=0.7)
    score = [difflib.SequenceMatcher(None, name, given).ratio() for name in found]
    return [name for name, ratio in zip(found, score, strict=True) if ratio > score[0] - 0.05]


def _leaves(node: type[Any], prefix: str) -> Iterable[Key]:
    hints = typing.get_type_hints(node)
    for item in fields(node):
        kind, optional = _strip_none(hints[item.name])
        name = prefix + item.name
        if is_dataclass(kind):
            yield from _leaves(typing.cast(type[Any], kind), name + ".")
        else:
            yield Key(
                name=name,
                kind=kind,
                optional=optional,
                default=_default(item),
                help=item.metadata["help"],
                unit=item.metadata["unit"],
            )


def _strip_none(hint: Any) -> tuple[Any, bool]:
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        rest = [part for part in typing.get_args(hint) if part is not type(None)]
        return rest[0], True
    return hint, False


def _default(item: Field[Any]) -> Any:
    if item.default is not MISSING:
        return item.default
    return item.default_factory() if item.default_factory is not MISSING else None


def _words(kind: Any) -> str:
    if typing.get_origin(kind) is list:
        (inner,) = typing.get_args(kind)
        if is_dataclass(inner):
            names = ", ".join(item.name for item in fields(inner))
            return "a list like [{name:...,path:...}] with the keys " + names
        if inner is str:
            return "a list like [one,two]"
        return "a list like [2,2,1,1]"
    if isinstance(kind, type) and issubclass(kind, Enum):
        return "one of " + ", ".join(member.name for member in kind)
    if typing.get_origin(kind) is dict:
        return "stages by name, such as {stage_8k:{train:{steps:100}},stage_64k:{...}}"
    return {int: "a whole number", float: "a number", bool: "true or false", str: "text"}[kind]
