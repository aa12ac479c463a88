"""The entry point: compose, validate, then train, plan, evaluate, generate or score.

python pretrain.py [group=option] [key=value]
torchrun --standalone --nproc-per-node N pretrain.py [...]
python pretrain.py --help
"""

from __future__ import annotations

import gc
import importlib
import subprocess
import sys
from collections.abc import Sequence

from megatron_ext.config.compose import compose, hydra_command
from megatron_ext.config.reference import help_text
from megatron_ext.config.schema import Mode, RunConfig
from megatron_ext.config.sweep import expand
from megatron_ext.errors import ConfigError, MegatronExtError, TrainingHalted
from megatron_ext.observe.refusal import report
from megatron_ext.parallel.environment import read_environment

COMMANDS = {
    Mode.train: ("megatron_ext.train.main", "train"),
    Mode.plan: ("megatron_ext.plan.main", "plan"),
    Mode.evaluate: ("megatron_ext.train.evaluate", "evaluate"),
    Mode.generate: ("megatron_ext.inference.main", "generate"),
    Mode.score: ("megatron_ext.train.score", "score"),
}


def main(words: Sequence[str]) -> int:
    """Run one command line; returns the exit code of `megatron_ext.errors`."""
    place = read_environment()
    if {"-h", "--help"} & set(words):
        print(help_text())
        return 0
    try:
        if any(word.startswith(("--cfg", "-c", "--info", "-i")) for word in words):
            return hydra_command(words)
        if {"-m", "--multirun"} & set(words):
            return sweep([word for word in words if word not in ("-m", "--multirun")])
        return place.process_code(run(compose(words, world_size=place.world_size)))
    except MegatronExtError as error:
        code = report(error, place)
        # All ranks halt together; other errors may be of this one alone.
        return place.process_code(code) if isinstance(error, TrainingHalted) else code


def run(config: RunConfig) -> int:
    """Hand over to the part that the mode names. Only then is torch imported."""
    # Libraries are told to be quiet before megatron-core is imported, since they speak then.
    importlib.import_module("megatron_ext.parallel.runtime").quiet()
    module, function = COMMANDS[config.run.mode]
    code: int = getattr(importlib.import_module(module), function)(config)
    return code


def sweep(words: Sequence[str]) -> int:
    """One process a job, one after the other; the first exit code that is not 0, else 0."""
    jobs = expand(words)
    try:
        for job in jobs:
            compose(job)
    except ConfigError as error:
        error.run_dir = None  # the whole sweep is refused, not that run
        raise
    codes = [
        subprocess.run([sys.executable, __file__, *job], check=False).returncode for job in jobs
    ]
    return next((code for code in codes if code), 0)


if __name__ == "__main__":
    code = main(sys.argv[1:])
    gc.freeze()  # else the interpreter looks through all that was imported as it ends: seconds
    sys.exit(code)
