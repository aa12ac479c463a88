"""Words that give several keys of a section at once: ``model.kda={num_heads:8,head_dim:64}``.

Hydra merges such a mapping into what is there. Here each of its keys becomes a word of its own, so
that it is checked, suggested and reported like one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

from hydra.core.override_parser.types import Override, Sweep, ValueType

from megatron_ext.config.keys import sections


def section_words(override: Override, keys: Collection[str]) -> list[Override] | None:
    """The words that a mapping for a section stands for, in its order; None where it is none.

    Args:
        override: a parsed word.
        keys: all leaf keys; a mapping that is the value of one is not entered.
    """
    # Not .value(), which forgets what was quoted: '64' is a text, 64 a number.
    content: Any = override._value
    name = override.key_or_group
    if not isinstance(content, dict) or override.value_type is not ValueType.ELEMENT:
        return None
    if name not in sections():
        return None
    return [_word(override, key, value) for key, value in _leaves(content, name, keys)]


def _leaves(
    content: Mapping[Any, Any], prefix: str, keys: Collection[str]
) -> Iterator[tuple[str, Any]]:
    for name, value in content.items():
        key = f"{prefix}.{name}"
        if isinstance(value, dict) and value and key not in keys:
            yield from _leaves(value, key, keys)
        else:
            yield key, value


def _word(override: Override, key: str, value: Any) -> Override:
    word = replace(override, key_or_group=key, _value=value)
    if isinstance(value, Sweep):  # Hydra sees it at the head of a word only, and cannot print it
        return replace(word, value_type=ValueType.CHOICE_SWEEP)
    return replace(word, input_line=f"{key}={word.get_value_element_as_str()}")
