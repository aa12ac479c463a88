"""Whether a resumed run still reads what its checkpoint was trained on.

The data position is a number of tokens; over another stream the same number means other documents,
some of them read twice and some never, and nothing would fail.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_ext.data.stream import TokenStream
from megatron_ext.errors import DataError

_BLEND = ("weight of source ", "order of data.sources")
_CONTENT = "content of source "


def remember(stream: TokenStream, position: int = 0) -> dict[str, Any]:
    """What a checkpoint keeps of the training stream, as plain JSON.

    Args:
        stream: that was read.
        position: tokens of it that lie behind.
    """
    return {
        "fingerprint": stream.fingerprint,
        "facts": dict(stream.facts),
        "left": dict(stream.left),
        "begin": stream.begin,
        "begun": stream.begun,
        "position": position,
        "places": stream.places(position),
    }


def go_on_with(saved: Mapping[str, Any], stream: TokenStream, *, other_blend: bool) -> None:
    """Let a fresh stream go on where a checkpoint's has stopped.

    Args:
        saved: what `remember` returned when the checkpoint was written.
        stream: of now.
        other_blend: it is another blend, which takes over at the checkpoint's position; else it
            has begun where the checkpoint's had.

    Raises:
        DataError: the checkpoint does not say where its sources stand.
    """
    known = dict(saved.get("left", {}))
    if other_blend:
        known |= {name: fact for name, fact in saved["facts"].items() if name.startswith(_CONTENT)}
    stream.left = {name: fact for name, fact in known.items() if name not in stream.facts}
    if other_blend:
        if "position" not in saved:
            raise DataError(
                "the checkpoint is of a version that did not note where each source stands, so no "
                "other blend can go on from it: give the stage the data.sources of the one before"
            )
        stream.take_over(saved["position"], saved["places"])
    elif saved.get("begin"):
        stream.take_over(saved["begin"], saved["begun"])


def check_next_blend(saved: Mapping[str, Any], stream: TokenStream) -> bool:
    """Whether the next stage blends otherwise: sources and weights may change, their content not.

    Raises:
        DataError: something else changed.
    """
    now = stream.facts
    # A source that comes back goes on where it was left: in the same documents.
    before = {**saved.get("left", {}), **saved["facts"]}
    kept = {
        name
        for name in {*before, *now}
        if not name.startswith(_BLEND)
        and not (name.startswith(_CONTENT) and not (name in before and name in now))
    }
    pick = [{name: facts[name] for name in facts if name in kept} for facts in (before, now)]
    found = changes(*pick)
    if found:
        raise DataError(
            "the data of the next stage:\n"
            + "\n".join(f"  {line}" for line in found)
            + "\nA stage may weigh, add and leave out sources; what is in one, the share held out "
            "and the seed stay"
        )
    return bool(changes(saved["facts"], now))


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
