"""Which parameters are trained, what is wrong with a rule, how many updates moments have seen."""

from __future__ import annotations

import pytest

from megatron_ext.checkpoint.history import History
from megatron_ext.config.compose import compose
from megatron_ext.config.schema import RunConfig
from megatron_ext.config.trainable import Trainable
from megatron_ext.errors import ConfigError
from megatron_ext.model.freeze import check_rules

LAYERS = [
    name
    for layer in range(12)
    for name in (
        f"decoder.layers.{layer}.input_layernorm.weight",
        f"decoder.layers.{layer}.self_attention.A_log",
        f"decoder.layers.{layer}.self_attention.out.weight",
    )
]
NAMES = [
    "embedding.word_embeddings.weight",
    *LAYERS,
    "decoder.final_layernorm.weight",
    "output_layer.weight",
]


def trained(*names: str, frozen_layers: int = 0) -> list[str]:
    rule = Trainable(names, frozen_layers)
    return [name for name in NAMES if rule.trains(name)]


def test_sets_and_patterns_of_names_above_the_frozen_layers() -> None:
    assert trained("all") == NAMES
    assert trained("head") == ["output_layer.weight"]
    assert trained("head", "embedding") == [NAMES[0], NAMES[-1]]
    assert trained("position", "head", frozen_layers=10) == [
        "decoder.layers.10.self_attention.A_log",
        "decoder.layers.11.self_attention.A_log",
        "output_layer.weight",
    ]
    # Layer 1 is not layers 10 and 11.
    assert len(trained("decoder.layers.1.*")) == 3
    # Below the layers lies the embedding; above them all else.
    assert trained("all", frozen_layers=12) == NAMES[-2:]


def test_all_mistakes_of_all_stages_are_told_before_anything_runs() -> None:
    with pytest.raises(ConfigError) as wrong:
        compose(
            [
                "experiment=nano_curriculum",
                "curriculum.stages.stage_64.train.trainable=[]",
                "curriculum.stages.stage_256.train.trainable=[heads,position]",
                "curriculum.stages.stage_1k.train.frozen_layers=7",
                "curriculum.stages.stage_4k.train.trainable=head",
            ]
        )
    text = "\n".join(wrong.value.problems)
    assert "stage_64: train.trainable=[]: nothing would be trained" in text
    assert "stage_256: train.trainable: heads: no such set (allowed all, embedding," in text
    assert "did you mean head?" in text
    assert "stage_1k: train.frozen_layers=7: must not exceed model.num_layers=6 (nearest 6)" in text
    assert "stage_4k.train.trainable=head: must be a list like [one,two]" in text


def test_rules_that_fit_no_model_are_told_of_all_stages() -> None:
    config = RunConfig()
    config.curriculum.stages = {
        "stage_a": {"train": {"trainable": ["decoder.layers.*.self_attn.A_log"]}},
        "stage_b": {"train": {"trainable": ["position", "embedding"], "frozen_layers": 12}},
        "stage_c": None,
    }
    with pytest.raises(ConfigError) as wrong:
        check_rules(config, NAMES)
    assert [problem.split(": ")[0] for problem in wrong.value.problems] == [
        "stage_a",
        "stage_b",
        "stage_b",
    ]
    text = "\n".join(wrong.value.problems)
    assert "self_attn.A_log: matches no parameter of this model" in text
    assert "decoder.layers.*.self_attention.A_log" in text
    assert "embedding: matches frozen parameters only, since train.frozen_layers=12" in text


def test_a_history_counts_the_updates_of_each_parameter() -> None:
    everything, head = Trainable(), Trainable(("head",))
    first = History().then(everything, reset=False)
    assert first.late("a") == 0
    saved = _saved(first, total=10)
    second = saved.then(head, reset=False)
    assert second.then(head, reset=True) is second  # the same rule goes on
    saved = _saved(second, total=14)
    for reset, late in ((False, 4), (True, 14)):
        third = saved.then(everything, reset=reset)
        assert third.late("output_layer.weight") == 0
        assert third.late("a") == late
        assert third.begins_anew("a", saved) == reset
        assert not third.begins_anew("output_layer.weight", saved)
        # Later, in the same stretch, they are its own.
        later = _saved(third, total=20)
        assert later.late("a") == late
        assert not later.then(everything, reset=reset).begins_anew("a", later)


def test_what_was_never_trained_has_no_moments() -> None:
    saved = _saved(History().then(Trainable(("head",)), reset=False), total=3)
    assert saved.keeps("output_layer.weight")
    assert not saved.keeps("a")
    now = saved.then(Trainable(), reset=False)
    assert now.begins_anew("a", saved)
    assert now.late("a") == 3


def test_checkpoints_of_before_there_was_a_choice_trained_everything() -> None:
    history = History.read({"optimizer_step": 7})
    assert history.keeps("a")
    assert history.then(Trainable(("head",)), reset=True).late("output_layer.weight") == 0


def _saved(history: History, *, total: int) -> History:
    return History.read({"history": history.written(total=total)})
