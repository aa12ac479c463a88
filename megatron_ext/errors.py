"""The errors a user can act on. Each class carries the exit code that launchers act on.

Exit codes: 0 done, 10 stopped on request and resumable, 20 configuration, 30 data or checkpoint,
40 health halt, 50 hang; any other is a crash. A launcher starts a run again after 10, 50 and a
crash, never after 20, 30 or 40: the same would happen again.
"""

from __future__ import annotations

from collections.abc import Sequence

STOPPED, HANG = 10, 50
# Endings after which the same command, started again at once, would end in the same way or against
# somebody's will. What comes next is for a person or a scheduler to say.
FINAL = (STOPPED, 20, 30, 40)
# The reason in `exit.json`, with code 10, when another stage of the curriculum is to be started.
NEXT_STAGE = "next_stage"


class MegatronExtError(Exception):
    """Base of every error whose message tells the user what to do."""

    exit_code: int = 1
    #: Run folder in which `exit.json` is to be left; None when the run has left one, or has none.
    run_dir: str | None = None
    #: The ranks of a host have all met it in the same way: the first of them tells it.
    shared: bool = False


class ConfigError(MegatronExtError):
    """One or several things are wrong in the configuration. All of them are listed together.

    Args:
        problems: one line for each problem: ``key: what was given, what is allowed, what works``.
    """

    exit_code = 20

    def __init__(self, problems: str | Sequence[str]) -> None:
        self.problems: tuple[str, ...] = (
            (problems,) if isinstance(problems, str) else tuple(problems)
        )
        count = len(self.problems)
        head = "1 problem" if count == 1 else f"{count} problems"
        lines = "\n".join(f"  {i}. {text}" for i, text in enumerate(self.problems, 1))
        super().__init__(f"{head} in the configuration:\n{lines}")


class OutOfMemory(MegatronExtError):
    """The configuration does not fit the machine. Says what was needed, and the cheapest keys."""

    exit_code = 20


class DataError(MegatronExtError):
    """A corpus, shard, manifest or tokenizer cannot be used. Names the file, place and remedy."""

    exit_code = 30


class CheckpointError(MegatronExtError):
    """A checkpoint cannot be written or read as asked. Names the folder, the reason, the remedy."""

    exit_code = 30


class TrainingHalted(MegatronExtError):
    """Training stopped itself since going on would do harm (a non-finite loss, for example)."""

    exit_code = 40
