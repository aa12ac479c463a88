"""Whether a resumed run still reads what its checkpoint was trained on.

The data position is a number of tokens; over another stream the same number means other documents,
some of them read twice and some never, and nothing would fail.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_ext.data.stream import TokenStream
from megatron_ext.errors import DataError


def remember(stream: TokenStream) -> dict[str, Any]:
    """What a checkpoint keeps of the training stream, as plain JSON."""
    return {"fingerprint": stream.fingerprint, "facts": dict(stream.facts)}


def check_unchanged(saved: Mapping[str, Any], stream: TokenStream, *, allow: bool) -> list[str]:
    """Compare a checkpoint's data with the data of now.

    Args:
        saved: what `remember` returned when the checkpoint was written.
        stream: the training stream of now.
        allow: `data.allow_change`.

    Returns:
        What changed, a line each; empty when nothing did.

    Raises:
        DataError: something changed, and it is not allowed to.
    """
    found = changes(saved["facts"], stream.facts)
    if found and not allow:
        lines = "\n".join(f"  {line}" for line in found)
        raise DataError(
            f"the data is not what this checkpoint was trained on:\n{lines}\n"
            "Give the run its former data (and run.seed), start anew with run.fresh=true, or go on "
            "knowingly with data.allow_change=true: the position in tokens is kept, so some "
            "documents may be read twice and some never"
        )
    return found


def changes(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """One line a fact that differs: ``name: before, now``."""
    names = dict.fromkeys([*before, *now])
    return [
        f"{name}: was {before.get(name, 'absent')}, is {now.get(name, 'absent')}"
        for name in names
        if before.get(name) != now.get(name)
    ]
