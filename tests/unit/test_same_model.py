"""A checkpoint of a model that computes something else is refused, also where all shapes agree."""

from __future__ import annotations

import json
from typing import Any

import pytest

from megatron_ext.config.keys import table
from megatron_ext.config.schema import (
    BalanceOptions,
    BalanceRule,
    Gate,
    KdaBackend,
    KdaOptions,
    ModelOptions,
    ResidualKind,
    ResidualOptions,
    RunConfig,
)
from megatron_ext.errors import ConfigError
from megatron_ext.model.same import FREE, check_same, remember


def saved(config: RunConfig) -> dict[str, Any]:
    return {"model": json.loads(json.dumps(remember(config))), "tokenizer": "bytes"}


def block(size: int, **changes: Any) -> RunConfig:
    return RunConfig(residual=ResidualOptions(kind=ResidualKind.block, block_size=size, **changes))


def test_the_same_model_is_accepted_whatever_its_kernels() -> None:
    check_same(saved(RunConfig()), RunConfig(), tokenizer="bytes")
    slow = RunConfig(model=ModelOptions(kda=KdaOptions(backend=KdaBackend.reference)))
    check_same(saved(RunConfig()), slow, tokenizer="bytes")
    check_same({}, RunConfig(), tokenizer="bytes")  # a checkpoint of somebody's own script


def test_each_option_that_changes_the_function_is_named() -> None:
    other = RunConfig(model=ModelOptions(norm_eps=1e-6, kda=KdaOptions(gate=Gate.softplus)))
    with pytest.raises(ConfigError) as caught:
        check_same(saved(RunConfig()), other, tokenizer="bytes")
    first, second = caught.value.problems
    assert first.startswith("model.norm_eps: was 1e-05, is 1e-06")
    assert second.startswith("model.kda.gate: was bounded, is softplus")


def test_another_residual_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"residual\.block_size: was 4, is 6: not the model that"):
        check_same(saved(block(4)), block(6), tokenizer="bytes")
    with pytest.raises(ConfigError, match=r"residual\.kind: was standard, is block"):
        check_same(saved(RunConfig()), block(4), tokenizer="bytes")
    # How the same sums are kept and sent is free.
    check_same(saved(block(4)), block(4, fp32=True, cache_sources=False), tokenizer="bytes")
    # A plain residual has no blocks.
    size = RunConfig(residual=ResidualOptions(block_size=3))
    check_same(saved(RunConfig()), size, tokenizer="bytes")
    old = saved(RunConfig())
    del old["model"]["residual.kind"]
    check_same(old, RunConfig(), tokenizer="bytes")


def experts(rule: BalanceRule, **options: Any) -> RunConfig:
    model = ModelOptions(first_dense_layers=1)
    return RunConfig(model=model, balance=BalanceOptions(rule=rule, **options))


def test_a_rule_that_chooses_other_experts_with_the_same_tensors_is_refused() -> None:
    quantile, sign = experts(BalanceRule.quantile), experts(BalanceRule.sign)
    mean, reject = experts(BalanceRule.microbatch_mean), experts(BalanceRule.reject)
    # Both take the k largest of score + bias.
    check_same(saved(quantile), sign, tokenizer="bytes")
    # Bins are no part of the function.
    check_same(saved(quantile), experts(BalanceRule.quantile, bins=64), tokenizer="bytes")
    for before, now in ((quantile, mean), (mean, sign), (reject, quantile), (mean, reject)):
        was, is_ = before.balance.rule.name, now.balance.rule.name
        with pytest.raises(
            ConfigError, match=rf"balance\.rule: was {was}, is {is_}: not the model"
        ):
            check_same(saved(before), now, tokenizer="bytes")
    with pytest.raises(ConfigError, match=r"balance\.overload: was 1\.05, is 2\.0"):
        check_same(saved(reject), experts(BalanceRule.reject, overload=2.0), tokenizer="bytes")
    for kept in (mean, reject):
        old = saved(kept)
        old["model"] = {k: v for k, v in old["model"].items() if not k.startswith("balance.")}
        check_same(old, kept, tokenizer="bytes")
    # Without experts there is no rule.
    assert "balance.rule" not in remember(RunConfig(balance=mean.balance))


def test_another_tokenizer_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"data\.tokenizer: now words, in the checkpoint bytes"):
        check_same(saved(RunConfig()), RunConfig(), tokenizer="words")


def test_what_is_free_exists() -> None:
    assert set(table()) >= FREE
