"""How a field of the configuration is written down."""

from __future__ import annotations

from dataclasses import field
from typing import Any


def option(default: Any, help: str, *, unit: str = "") -> Any:
    """A documented field. Lists, mappings and nested groups get a fresh copy for every instance."""
    metadata = {"help": help, "unit": unit}
    if isinstance(default, list | dict):
        return field(default_factory=default.copy, metadata=metadata)
    if isinstance(default, type):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)
