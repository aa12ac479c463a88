"""What a launcher does after its ranks have ended: it reads `exit.json`, not exit codes.

torchrun returns 1 whatever its ranks returned, and 0 under our launchers for endings that must not
be restarted; `exit.json` in the run folder has the code of the run. Without one it has crashed.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from megatron_ext.errors import FINAL, HANG, NEXT_STAGE, STOPPED

EXIT = "exit.json"
# What a launcher remembers between the restarts of one launch; with several, each for itself.
MEMORY = ".restarts{host}.json"
CRASH = 1


@dataclass(frozen=True)
class Verdict:
    """Whether to start the run again, the code that it ended with, and a line that says why.

    `stage`: to start another stage of a curriculum, which needs no new time slice.
    """

    again: bool
    code: int
    why: str
    stage: bool = False


def read_exit(folder: Path) -> dict[str, Any] | None:
    """`{"code", "reason", "step"}`, None after a crash."""
    return _read(folder / EXIT)


def saved_step(folder: Path) -> int:
    """The step of the checkpoint that a restart goes on from; 0 without one."""
    try:
        name = (folder / "checkpoints" / "latest").read_text().strip()
    except OSError:
        return 0
    match = re.fullmatch(r"step_(\d+)", name)
    return int(match[1]) if match else 0


def judge(
    folder: Path, *, launch: str, asked: bool, resume: bool, limit: int, host: str = ""
) -> Verdict:
    """What to do now that the ranks have ended. Remembers its progress in the run folder.

    Args:
        folder: the run folder.
        launch: name of this launch; another one starts counting anew.
        asked: the launcher itself was told to stop.
        resume: a run that stopped on request is to go on later by itself (a time limit), rather
            than stay stopped (a person).
        limit: restarts without a new checkpoint before giving up.
        host: name of this one, where the launchers of several hosts judge the same ending.
    """
    end = read_exit(folder)
    code = CRASH if end is None else int(end.get("code", CRASH))
    reason = "crashed: it left no exit.json" if end is None else str(end.get("reason", ""))
    first = reason.splitlines()[0] if reason else ""
    if code == 0:
        return Verdict(False, 0, first or "done")
    progress = partial(_progress, folder, launch=launch, limit=limit, host=host, code=code)
    if code == STOPPED and first == NEXT_STAGE and not (asked and not resume):
        return replace(progress(why="next stage"), stage=True)
    stays = code == STOPPED and (not resume or first == "stop file")
    if stays or (code in FINAL and code != STOPPED):
        return Verdict(False, code, first)
    if asked and not resume:
        return Verdict(False, code, f"told to stop, and then: {first}")
    why = {STOPPED: f"stopped on request ({first})", HANG: "hung"}.get(code, first)
    return progress(why=why)


def _progress(folder: Path, *, launch: str, limit: int, host: str, code: int, why: str) -> Verdict:
    """Again, unless the last restarts have all led to nothing."""
    step = saved_step(folder)
    path = folder / MEMORY.format(host=f".{host}" if host else "")
    memory = _read(path) or {}
    if memory.get("launch") != launch:
        memory = {"launch": launch, "step": -1, "stalled": -1, "restarts": 0}
    stalled = 0 if step > memory["step"] else memory["stalled"] + 1
    memory |= {"step": max(step, memory["step"]), "stalled": stalled}
    if stalled >= limit:
        text = f"{why}; {limit} restarts brought no checkpoint after step {step}: giving up"
        return Verdict(False, code, text)
    memory["restarts"] += 1
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_text(json.dumps(memory))
    temporary.replace(path)
    text = f"{why}; restart {memory['restarts']} goes on after step {step}"
    return Verdict(True, code, text)


def _read(path: Path) -> dict[str, Any] | None:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


AGAIN_HERE, AGAIN_LATER = 100, 101


def main(words: Sequence[str]) -> int:
    """For a job's script: print the verdict; return the exit code, or one of the two above.

    A run that stopped on request goes on when SLURM gives it another time slice; after a crash or
    a hang it goes on at once in what is left of this one, unless that is about to end.
    """
    parser = argparse.ArgumentParser(prog="launch.ending", description=__doc__)
    parser.add_argument("folder", type=Path, help="the run folder")
    parser.add_argument("--launch", required=True, help="name of the launch")
    parser.add_argument("--limit", type=int, required=True, help="launch.stalled_restarts")
    parser.add_argument("--asked", type=int, default=0, help="1: the time slice is about to end")
    given = parser.parse_args(words)
    verdict = judge(
        given.folder, launch=given.launch, asked=bool(given.asked), resume=True, limit=given.limit
    )
    print(f"launch: {verdict.why}", flush=True)
    if not verdict.again:
        return verdict.code
    stopped = verdict.code == STOPPED and not verdict.stage
    return AGAIN_LATER if given.asked or stopped else AGAIN_HERE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
