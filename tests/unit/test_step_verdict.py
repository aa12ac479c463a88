"""What a step leaves behind that is refused: nothing, though its balancing was computed already."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron_ext.checkpoint.state import unwrap
from megatron_ext.config.compose import compose
from megatron_ext.config.schema import BalanceRule
from megatron_ext.errors import TrainingHalted
from megatron_ext.parallel import cpu_support, runtime
from megatron_ext.train.balance import routers
from megatron_ext.train.state import TrainState, build_state
from megatron_ext.train.step import train_step


@pytest.fixture(autouse=True)
def stopped() -> Iterator[None]:
    yield
    runtime.stop()
    cpu_support.uninstall()


def state_of(folder: Path, rule: BalanceRule) -> TrainState:
    words = ["model=nano", "data=sample", f"balance.rule={rule.name}", "optim.schedule=constant"]
    words += ["data.sequence_length=32", "train.batch_tokens=128", "train.micro_batch_size=1"]
    config = compose([*words, f"run.dir={folder}"])
    return build_state(config, runtime.start(config.run))


def kept(state: TrainState) -> dict[str, Tensor]:
    """Weights, biases and other states of the model, and the statistics of the step under way."""
    found = {name: value.clone() for name, value in unwrap(state.chunks[0]).state_dict().items()
             if isinstance(value, Tensor)}  # fmt: skip
    for router in routers(state.chunks):
        for number, value in enumerate(router.balancer.statistics()):
            found[f"statistics {router.layer} {number}"] = value.clone()
    return found


@pytest.mark.parametrize("rule", list(BalanceRule))
def test_a_refused_step_and_one_that_ends_the_run_leave_no_trace(
    tmp_path: Path, rule: BalanceRule
) -> None:
    state = state_of(tmp_path, rule)
    train_step(state)
    before = kept(state)
    train_step(state, lambda loss, norm: False)
    assert state.loads == []
    assert_equal(kept(state), before)

    weight = unwrap(state.chunks[0]).output_layer.weight.data
    sound = weight.clone()
    weight.fill_(torch.nan)
    train_step(state, lambda loss, norm: math.isfinite(loss))
    weight.copy_(sound)
    assert_equal(kept(state), before)

    def halt(loss: float, norm: float) -> bool:
        raise TrainingHalted("asked to")

    step = state.step
    with pytest.raises(TrainingHalted):
        train_step(state, halt)
    assert_equal(kept(state), before)
    assert state.step == step
    train_step(state)
    assert len(state.loads) == len(list(routers(state.chunks)))
    changed = [name for name, value in kept(state).items() if not torch.equal(value, before[name])]
    assert any("weight" in name for name in changed)
    moves = rule not in (BalanceRule.none, BalanceRule.aux_loss, BalanceRule.reject)
    assert any(name.endswith("balancer.bias") for name in changed) == moves
    for router, load in zip(routers(state.chunks), state.loads, strict=True):
        assert torch.equal(load.new_bias, router.balancer.bias.cpu())


def assert_equal(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []
