"""What is wrong in a configuration."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """One line of the report, and the keys that it blames or rests on."""

    text: str
    keys: tuple[str, ...]
