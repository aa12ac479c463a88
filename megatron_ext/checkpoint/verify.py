"""Whether a checkpoint is what was written, before any of it is used. Collective over all ranks."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from megatron_ext.checkpoint import checksums, paths
from megatron_ext.errors import CheckpointError

SHOWN = 8  # lines of many in a message
FILES_AT_A_TIME = 4  # that a rank reads


@dataclass(frozen=True)
class Sound:
    """A checkpoint that can be used.

    Attributes:
        path: its folder; None where there is none at all.
        damaged: what was found in the newer ones that cannot be used, as lines.
    """

    path: Path | None
    damaged: tuple[str, ...] = ()


def gather(lines: list[str]) -> list[str]:
    """What any rank found, each line once, on all ranks."""
    gathered: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(gathered, lines[: SHOWN + 1])
    return sorted({line for lines in gathered for line in lines})


def problems(path: Path) -> list[str]:
    """Compare every file of a checkpoint with `checksums.json`; the ranks share the reading.

    A checkpoint of a version that wrote no checksums has no problems here.

    Returns:
        A line `file: expected ..., found ...` for each difference, the same on every rank.
    """
    part, parts = dist.get_rank(), dist.get_world_size()
    return gather(local_problems(path, part=part, parts=parts, workers=FILES_AT_A_TIME))


def local_problems(path: Path, *, part: int = 0, parts: int = 1, workers: int = 1) -> list[str]:
    """As `problems`, of every `parts`-th file, without other ranks; `workers` files at a time."""
    try:
        entries = checksums.read(path)
        if entries is None:
            older = _format(path) < paths.WITH_CHECKSUMS
            return [] if older else [f"{path / checksums.FILE}: found no file"]
    except (CheckpointError, OSError, ValueError) as error:
        return [str(error)]
    lines = [
        f"{path / name}: not in {checksums.FILE}" for name in paths.NEEDED if name not in entries
    ]
    # The largest first, so that the last ones even out the ranks.
    names = sorted(entries, key=lambda name: (-entries[name].size, name))[part::parts]
    with ThreadPoolExecutor(workers) as pool:
        found = pool.map(lambda name: checksums.problems(path, [name], entries), names)
        return lines + [line for more in found for line in more]


def _format(path: Path) -> int:
    try:
        return int(paths.read_extra(path)[paths.RESERVED]["format"])
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path / paths.EXTRA}: damaged ({error})") from error


def explain(path: Path, lines: list[str]) -> str:
    """Of the lines that `problems` gave, a message that says what to do."""
    if len(lines) == 1 and lines[0].startswith(f"{path}: "):
        return lines[0]  # of the folder as a whole, with its own advice
    shown = "".join(f"\n  {line}" for line in lines[:SHOWN])
    more = "\n  ... and more" if len(lines) > SHOWN else ""
    others = ", ".join(p.name for p in paths.step_folders(path.parent).values() if p != path)
    return (
        f"{path}: damaged:{shown}{more}\nPut the files back from a copy, or take another one "
        f"(beside it: {others or 'none'}): give it as checkpoint.load, or, to go on from it, write "
        f"its name into {path.parent / paths.LATEST}"
    )


def first_sound(candidates: Iterable[Path]) -> Sound:
    """The first checkpoint without problems, and what is wrong with those before it."""
    damaged: list[str] = []
    for path in candidates:
        found = problems(path)
        if not found:
            return Sound(path, tuple(damaged))
        damaged += found
    return Sound(None, tuple(damaged))


def newest_sound(folder: Path) -> Sound:
    """The checkpoint to go on from: the one that `latest` names if it is sound, else the newest
    sound one before it. Damaged ones on the way are renamed to `step_XXXXXXXX.damaged`, which
    nothing reads, counts or deletes, and `latest` is corrected.

    Args:
        folder: the folder of checkpoints.

    Raises:
        CheckpointError: there are checkpoints, and none is sound; or `latest` is wrong.
    """
    answer: list[list[Path] | str] = [[]]
    if dist.get_rank() == 0:
        try:
            answer[0] = paths.candidates(folder)
        except (CheckpointError, OSError) as error:
            answer[0] = str(error)
    dist.broadcast_object_list(answer, src=0)
    if isinstance(answer[0], str):
        raise CheckpointError(answer[0])
    candidates = answer[0]
    sound = first_sound(candidates)
    if not sound.damaged:
        return sound
    if sound.path is None:
        shown = "".join(f"\n  {line}" for line in sound.damaged[:SHOWN])
        raise CheckpointError(
            f"{folder}: no checkpoint there is sound:{shown}\nPut the files back from a copy, give "
            "a checkpoint of another run with checkpoint.load=PATH in a new run.dir, or start anew "
            "with run.fresh=true, which moves this run aside"
        )
    bad = candidates[: candidates.index(sound.path)]
    failure: list[str | None] = [None]
    if dist.get_rank() == 0:
        try:
            paths.set_aside(bad, instead=sound.path)
        except OSError as error:
            failure[0] = f"{folder}: damaged checkpoints cannot be renamed ({error})"
    dist.broadcast_object_list(failure, src=0)
    if failure[0] is not None:
        raise CheckpointError(f"{failure[0]}. Check rights of the folder, then relaunch")
    return sound
