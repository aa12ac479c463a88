"""What a finished run advises is what the program takes."""

from __future__ import annotations

import shlex
from types import SimpleNamespace
from typing import Any

from megatron_ext.config.compose import compose
from megatron_ext.config.schema import Mode
from megatron_ext.config.stages import stage_config
from megatron_ext.train.endings import _generation

STAGE = "curriculum.stages.stage_4k.parallel"


def advised(words: list[str], stage: str) -> tuple[str, list[str]]:
    """The program and the words of the command for generation after a run or stage."""
    config = compose([*words, *([f"stage={stage}"] if stage else [])])
    state: Any = SimpleNamespace(
        config=stage_config(config, stage), stage=SimpleNamespace(name=stage)
    )
    program, _, rest = _generation(state, shlex.join(words)).partition("pretrain.py ")
    given = [*shlex.split(rest), "run.mode=generate"]
    return program, given + ([f"stage={stage}"] if stage else [])


def test_a_stage_with_context_and_pipeline_generates_on_the_ranks_that_are_left() -> None:
    layout = [f"{STAGE}.context=2", f"{STAGE}.pipeline=2", f"{STAGE}.tensor=2"]
    layout += [f"{STAGE}.stage_layers=[2,4]"]
    program, words = advised(["experiment=nano_curriculum", *layout], "stage_4k")
    assert program == "torchrun --standalone --nproc-per-node 2 "
    config = compose(words, world_size=2)  # refused without what was added
    own = stage_config(config, "stage_4k")
    assert config.run.mode is Mode.generate
    assert (own.parallel.tensor, own.parallel.pipeline, own.parallel.context) == (2, 1, 1)


def test_a_run_without_stages_generates_on_one_rank() -> None:
    program, words = advised(["data=sample", "parallel.pipeline=2", "parallel.context=2"], "")
    assert program == "python "
    compose(words, world_size=1)
