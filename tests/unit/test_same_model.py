"""A checkpoint of a model that computes something else is refused, also where all shapes agree."""

from __future__ import annotations

import json
from typing import Any

import pytest

from megatron_ext.config.keys import table
from megatron_ext.config.schema import Gate, KdaBackend, KdaOptions, ModelOptions
from megatron_ext.errors import ConfigError
from megatron_ext.model.same import FREE, check_same, remember


def saved(model: ModelOptions) -> dict[str, Any]:
    return {"model": json.loads(json.dumps(remember(model))), "tokenizer": "bytes"}


def test_the_same_model_is_accepted_whatever_its_kernels() -> None:
    check_same(saved(ModelOptions()), ModelOptions(), tokenizer="bytes")
    slow = ModelOptions(kda=KdaOptions(backend=KdaBackend.reference))
    check_same(saved(ModelOptions()), slow, tokenizer="bytes")
    check_same({}, ModelOptions(), tokenizer="bytes")  # a checkpoint of somebody's own script


def test_each_option_that_changes_the_function_is_named() -> None:
    other = ModelOptions(norm_eps=1e-6, kda=KdaOptions(gate=Gate.softplus))
    with pytest.raises(ConfigError) as caught:
        check_same(saved(ModelOptions()), other, tokenizer="bytes")
    first, second = caught.value.problems
    assert first.startswith("model.norm_eps: was 1e-05, is 1e-06")
    assert second.startswith("model.kda.gate: was bounded, is softplus")


def test_another_tokenizer_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"data\.tokenizer: now words, in the checkpoint bytes"):
        check_same(saved(ModelOptions()), ModelOptions(), tokenizer="words")


def test_what_is_free_exists() -> None:
    assert set(table()) >= FREE
