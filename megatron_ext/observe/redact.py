"""Keeps secrets out of what is uploaded or written: known by the name of their key."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

REDACTED = "<redacted>"

# Whole words of a key: `api_key` and `hub.token` are secrets, `batch_tokens`, `tokenizer` and
# `keep` are not.
_SECRET_KEY = re.compile(
    r"(^|[_.\-])(key|apikey|token|secret|secrets|password|passwd|passphrase|credential|credentials)"
    r"($|[_.\-])",
    re.IGNORECASE,
)
_URL_LOGIN = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.\-]*://)[^/@\s]+@")


def is_secret_key(key: str) -> bool:
    """Whether the name of a key says that its value is a secret."""
    return _SECRET_KEY.search(key) is not None


def redact(value: Any) -> Any:
    """A copy of a nested configuration with secrets replaced by `<redacted>`.

    Text under a secret's key goes, and so does a login inside a URL (`https://user:word@host`).
    Numbers, booleans and None stay: they are no secrets.
    """
    if isinstance(value, Mapping):
        return {
            key: _hide(item) if is_secret_key(str(key)) else redact(item)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [redact(item) for item in value]
    if isinstance(value, str):
        return _URL_LOGIN.sub(rf"\g<scheme>{REDACTED}@", value)
    return value


def redact_argument(argument: str) -> str:
    """A word of a command line, with the value of `some.token=value` replaced."""
    key, equals, value = argument.partition("=")
    if equals and value and is_secret_key(key):
        return f"{key}={REDACTED}"
    return str(redact(argument))


def _hide(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _hide(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_hide(item) for item in value]
    return REDACTED if isinstance(value, str | bytes) and value else value
