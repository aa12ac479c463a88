"""Stages of a curriculum: words for one of them, and all mistakes of all of them at once."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import pytest

from megatron_ext.config.compose import compose, to_yaml
from megatron_ext.config.layout import probe_lengths
from megatron_ext.config.schema import Packing, Recompute
from megatron_ext.config.stages import stage_config, stage_names
from megatron_ext.errors import ConfigError
from megatron_ext.plan.main import plan
from megatron_ext.train.curriculum import Stage, choose_stage

NANO = "experiment=nano_curriculum"
STAGES = ["stage_64", "stage_256", "stage_1k", "stage_4k"]


def test_a_word_sets_a_key_of_one_stage() -> None:
    config = compose([NANO, "curriculum.stages.stage_256.parallel.context=4", "optim.beta2=0.9"])
    own = {name: stage_config(config, name) for name in stage_names(config)}
    assert list(own) == STAGES
    assert [c.parallel.context for c in own.values()] == [1, 4, 1, 1]
    assert [c.data.sequence_length for c in own.values()] == [64, 256, 1024, 4096]
    assert own["stage_1k"].data.packing is Packing.spiral
    assert own["stage_4k"].train.recompute is Recompute.full
    assert {c.optim.beta2 for c in own.values()} == {0.9}
    assert "stage_4k:" in to_yaml(own["stage_4k"])


def test_a_stage_may_be_chosen_added_dropped_and_measured_in_tokens() -> None:
    assert stage_names(compose([NANO, "stage=64"])) == ["stage_64"]
    assert stage_names(compose([NANO, "stage=stage_1k"])) == ["stage_1k"]
    words = ["~curriculum.stages.stage_4k", "+curriculum.stages.stage_8k.tokens=1e5"]
    config = compose([NANO, *words, "+curriculum.stages.stage_8k.data.sequence_length=512"])
    assert stage_names(config) == [*STAGES[:3], "stage_8k"]
    assert stage_config(config, "stage_8k", first_step=7).train.steps == 7 + 13  # rounded up


def test_a_stage_may_choose_an_option_of_a_group() -> None:
    stage = "curriculum.stages.stage_256"
    config = compose(
        [
            NANO,
            f"{stage}.data=blend",
            f"{stage}.parallel=tp2",
            f"{stage}.checkpoint={{group:end_only,keep:7}}",
            "curriculum.stages.stage_1k.data=sample",  # which repeats the tokenizer of the run
        ]
    )
    own = stage_config(config, "stage_256")
    assert [source.name for source in own.data.sources] == ["web", "code", "books"]
    # Beside what the stage sets itself, which is set over the option's keys.
    assert (own.data.sequence_length, own.data.packing) == (256, Packing.best_fit)
    assert own.parallel.tensor == 2
    assert (own.checkpoint.interval, own.checkpoint.keep) == (0, 7)
    assert stage_config(config, "stage_64").parallel.tensor == 1
    assert "'group'" not in str(config.curriculum.stages)  # resolved, for `config.yaml`
    with pytest.raises(ConfigError) as raised:
        compose([NANO, f"{stage}.data=blendd", f"{stage}.train=long", f"{stage}.data.demo=true"])
    text = str(raised.value)
    for part in (
        f"{stage}.data=blendd: no such option (allowed blend, demo, sample; did you mean blend?)",
        f"{stage}.train=long: no such option (allowed none, since train has no options)",
        f"{stage}.data.demo: must be the same in all stages",
    ):
        assert part in text, (part, text)


def test_lengths_of_probes_follow_the_stage() -> None:
    config = compose([NANO, "evaluate.lengths=[100,256]", "evaluate.length_factors=[1,4]"])
    assert probe_lengths(stage_config(config, "stage_64")) == [64, 100, 256]
    assert probe_lengths(stage_config(config, "stage_1k")) == [100, 256, 1024, 4096]
    with pytest.raises(ConfigError, match=r"evaluate.length_factors: 0: must be at least 1"):
        compose([NANO, "evaluate.length_factors=[0]"])


def test_all_mistakes_of_all_stages_are_reported_at_once() -> None:
    wrong = [
        "curriculum.stages.stage_25.parallel.context=2",
        "curriculum.stages.stage_64.train.steps=two",
        "curriculum.stages.stage_64.tokens=5",
        "curriculum.stages.stage_64.model.num_layers=2",
        "curriculum.stages.stage_256.paralel.context=2",
        "curriculum.stages.stage_1k.data.sequence_length=1000",
        "optim.lrr=3",
        "stage=4kk",
    ]
    with pytest.raises(ConfigError) as raised:
        compose([NANO, *wrong])
    text = str(raised.value)
    for part in (
        "curriculum.stages.stage_25.parallel.context: no such stage (allowed stage_64, stage_256, "
        "stage_1k, stage_4k; did you mean stage_256?; +curriculum",
        "curriculum.stages.stage_64.train.steps=two: must be a whole number",
        "curriculum.stages.stage_64.tokens=5: train.steps is given too, must be one of them",
        "curriculum.stages.stage_64.model.num_layers: must be the same in all stages (allowed",
        "curriculum.stages.stage_256.paralel.context: no such key (did you mean parallel.context",
        "stage_1k: train.batch_tokens=8192: must be a multiple of data.sequence_length=1000",
        "optim.lrr: no such key",
        "stage=4kk: no such stage (allowed 64, 256, 1k, 4k; did you mean stage=4k?)",
    ):
        assert part in text, (part, text)
    assert len(raised.value.problems) == len(wrong)


def test_what_is_wrong_in_every_stage_is_said_once_and_idle_words_are_refused() -> None:
    with pytest.raises(ConfigError) as raised:
        compose([NANO, "parallel.tensor=3", "train.steps=5"])
    tensor, idle = raised.value.problems
    assert tensor.startswith("parallel.tensor=3: must divide")
    assert idle.startswith("train.steps: has no effect, since every stage sets its own")


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["stage=64k"], "there are no stages"),
        ([NANO, "run.mode=evaluate"], "run.mode=evaluate: needs stage=NAME"),
        ([NANO, "stage=64,256"], "gives several values"),
        (
            [NANO, "curriculum.stages.stage_64.data.sources=[{name:a,path:b},{name:a,path:c}]"],
            "stage_64: data.sources: the name 'a' is given 2 times",
        ),
        ([NANO, "curriculum.stages.stage_64=7"], "stage_64=7: must hold keys"),
    ],
)
def test_words_that_mean_nothing_are_refused(words: list[str], text: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(text)):
        compose(words)


def test_ranks_count_for_the_stages_that_run() -> None:
    words = [NANO, "curriculum.stages.stage_4k.parallel.context=4"]
    compose([*words, "stage=64"], world_size=2)
    with pytest.raises(ConfigError, match=r"stage_4k: ranks=2: must be a multiple of"):
        compose(words, world_size=2)


def test_the_checkpoint_says_which_stage_comes(tmp_path: Path) -> None:
    config = compose([NANO, f"run.dir={tmp_path}"])

    def after(name: str, first: int, step: int) -> Stage:
        stage = {"name": name, "first_step": first, "first_tokens": first * 10}
        return choose_stage(config, {"stage": stage, "step": step, "tokens": step * 10})

    assert choose_stage(config, {}) == Stage("stage_64", 0, 0)
    assert after("stage_64", 0, 3) == Stage("stage_64", 0, 0)
    assert after("stage_64", 0, 4) == Stage("stage_256", 4, 40)
    assert after("stage_4k", 8, 10) == Stage("stage_4k", 8, 80)
    ended = {"stage": Stage("stage_64").extra(), "step": 4, "tokens": 40}
    assert choose_stage(config, ended, evaluated=False) == Stage("stage_64", 0, 0)
    # A run without stages goes on with the first one.
    assert choose_stage(config, {"step": 5, "tokens": 50}) == Stage("stage_64", 5, 50)
    with pytest.raises(ConfigError, match="has no stage_9, which the checkpoint"):
        after("stage_9", 0, 1)


def test_a_stage_of_tokens_ends_with_them_whatever_the_batch_became() -> None:
    """Half of it done in small batches, the rest in twice as large ones."""
    words = ["~curriculum.stages.stage_4k", "+curriculum.stages.last.tokens=81920"]
    words += ["train.batch_tokens=2048", "optim.warmup_tokens=0", "optim.decay_tokens=1024"]
    config = compose([NANO, *words])
    stage = Stage("last", first_step=8, first_tokens=8000)
    assert stage.config(config, step=8, tokens=8000).train.steps == 8 + 40
    assert stage.config(config, step=48, tokens=8000 + 40960).train.steps == 48 + 20
    extra = {"stage": stage.extra(), "step": 48, "tokens": 8000 + 40960}
    assert choose_stage(config, extra) == stage
    assert stage.config(config, step=99, tokens=8000 + 99999).train.steps == 99, "not less"


def test_k3_walks_from_8k_to_1m_with_as_many_tokens_a_step() -> None:
    config = compose(["experiment=k3_curriculum", "run.mode=plan"], world_size=1)
    own = [stage_config(config, name) for name in stage_names(config)]
    assert [c.data.sequence_length for c in own] == [2**13, 2**16, 2**18, 2**20]
    assert {c.train.batch_tokens for c in own} == {2**26}
    budget = sum(c.train.steps * c.train.batch_tokens for c in own)
    assert budget == pytest.approx(15.5e12, rel=1e-4)
    # A rate goes on where the stage before has left it.
    for before, after in pairwise(own):
        assert before.optim.lr * before.optim.min_lr_ratio == pytest.approx(
            after.optim.lr, rel=0.02
        )


def test_a_plan_shows_every_stage(capsys: pytest.CaptureFixture[str]) -> None:
    words = [NANO, "run.mode=plan", "plan.world_size=2"]
    assert plan(compose([*words, "curriculum.stages.stage_4k.parallel.context=2"])) == 0
    text = capsys.readouterr().out
    assert text.count("Plan of nano on 2 ranks") == 4
    table = [line.split() for line in text.splitlines()[-4:]]
    assert [(row[0], row[1], row[3]) for row in table] == [
        ("stage_64", "64", "128"),
        ("stage_256", "256", "32"),
        ("stage_1k", "1,024", "8"),
        ("stage_4k", "4,096", "2"),
    ]
    assert table[3][-2:] == ["context", "2"]
