"""A checkpoint of a model that computes something else is refused, also where all shapes agree."""

from __future__ import annotations

import json

import pytest

from megatron_ext.config.keys import table
from megatron_ext.config.schema import Gate, KdaBackend, KdaOptions, ModelOptions
from megatron_ext.errors import ConfigError
from megatron_ext.model.same import FREE, check_same, remember


def saved(model: ModelOptions) -> dict[str, str]:
    return json.loads(json.dumps(remember(model)))


def test_the_same_model_is_accepted_whatever_its_kernels() -> None:
    check_same(saved(ModelOptions()), ModelOptions())
    check_same(saved(ModelOptions()), ModelOptions(kda=KdaOptions(backend=KdaBackend.reference)))
    check_same(None, ModelOptions())  # a checkpoint of somebody's own script


def test_each_option_that_changes_the_function_is_named() -> None:
    other = ModelOptions(norm_eps=1e-6, kda=KdaOptions(gate=Gate.softplus))
    with pytest.raises(ConfigError) as caught:
        check_same(saved(ModelOptions()), other)
    first, second = caught.value.problems
    assert first.startswith("model.norm_eps: was 1e-05, is 1e-06")
    assert second.startswith("model.kda.gate: was bounded, is softplus")


def test_what_is_free_exists() -> None:
    assert set(table()) >= FREE
