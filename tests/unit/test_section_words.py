"""A mapping for a section is its keys, each checked as if it stood alone."""

from __future__ import annotations

import pytest

from launch.submit import plan_jobs
from megatron_ext.config.compose import compose, to_container
from megatron_ext.errors import ConfigError

BASE = ["run.device=cpu"]


@pytest.mark.parametrize(
    ("together", "apart"),
    [
        (
            "model.kda={num_heads: 2, decay_rank: 16}",
            ["model.kda.num_heads=2", "model.kda.decay_rank=16"],
        ),
        # A group's name too, and a section inside it.
        (
            "model={num_layers:4,kda:{num_heads:2}}",
            ["model.num_layers=4", "model.kda.num_heads=2"],
        ),
        ("+optim={lr:1e-4,schedule:constant}", ["optim.lr=1e-4", "optim.schedule=constant"]),
        # What is quoted stays a text, whatever it looks like.
        ("run={name:'64',seed:7}", ["run.name='64'", "run.seed=7"]),
        (r"run={name:'a, \'b\' =$1'}", [r"run.name='a, \'b\' =$1'"]),
        (
            "evaluate={lengths:[64,128],tokens:4096}",
            ["evaluate.lengths=[64,128]", "evaluate.tokens=4096"],
        ),
        (
            "data={sources:[{name:a,path:data/sample/code}],tokenizer:byte}",
            ["data.sources=[{name:a,path:data/sample/code}]", "data.tokenizer=byte"],
        ),
        ("logging={wandb:offline}", ["logging.wandb=offline"]),
    ],
)
def test_a_mapping_sets_its_keys_and_no_others(together: str, apart: list[str]) -> None:
    found = to_container(compose([*BASE, together]))
    assert found == to_container(compose([*BASE, *apart]))
    assert found != to_container(compose(BASE))


def test_the_last_word_wins_as_among_single_keys() -> None:
    words = ["train={steps:3,batch_tokens:2048}", "train.steps=5", "train={batch_tokens:4096}"]
    train = compose([*BASE, *words]).train
    assert (train.steps, train.batch_tokens) == (5, 4096)


def test_every_mistake_in_it_is_reported_like_that_of_a_key() -> None:
    words = ["train={stepz:3,batch_tokens:many}", "model={kda:{num_headz:2}}", "optim={}"]
    with pytest.raises(ConfigError) as error:
        compose([*BASE, *words])
    assert list(error.value.problems) == [
        "train.stepz: no such key (did you mean train.steps?)",
        "train.batch_tokens=many: must be a whole number",
        "model.kda.num_headz: no such key (did you mean model.kda.num_heads?)",
        "optim={}: sets nothing (give keys, or leave it out)",
    ]


def test_several_values_for_a_key_are_refused_as_for_a_key_by_itself() -> None:
    words = ["train={steps:choice(1,2)}", "model={kda:{num_heads:range(1,3)}}"]
    with pytest.raises(ConfigError) as error:
        compose([*BASE, *words])
    told = [f"{word}: gives several values, must be one" for word in words]
    assert [line.split(" (")[0] for line in error.value.problems] == told


def test_a_section_that_is_given_no_mapping_is_told_how() -> None:
    with pytest.raises(ConfigError, match=r"several as model.kda=\{num_heads:...,head_dim:...\}"):
        compose([*BASE, "model.kda=3"])


def test_a_following_job_adds_to_the_mapping_of_the_first() -> None:
    words = [*BASE, "train={steps:3,batch_tokens:2048}", "launch.snapshot=false"]
    first, second = plan_jobs(words, ["train={steps:9}"], sweep=False)
    assert [job.configs[0].train.steps for job in (first, second)] == [3, 9]
    assert second.configs[0].train.batch_tokens == 2048
