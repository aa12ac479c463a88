"""Frozen parameters cost no gradient and no optimizer memory, and the others have the gradients
of the whole model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from torch import Tensor

from megatron_ext.config.compose import compose
from megatron_ext.config.trainable import Trainable
from megatron_ext.errors import ConfigError
from megatron_ext.model.freeze import parameter_names
from megatron_ext.parallel import cpu_support, runtime
from megatron_ext.train.state import TrainState, build_state
from megatron_ext.train.step import train_step

RULE = Trainable(("position", "*.mlp.*", "head"), 2)
FROZEN = ["train.trainable=[position,'*.mlp.*',head]", "train.frozen_layers=2"]


@pytest.fixture(autouse=True)
def stopped() -> Iterator[None]:
    yield
    runtime.stop()
    cpu_support.uninstall()


def state_of(folder: Path, *words: str) -> TrainState:
    config = compose(
        [
            "model=nano",
            "data=sample",
            f"run.dir={folder}/run",
            "data.sequence_length=32",
            "train.batch_tokens=64",
            "train.micro_batch_size=1",
            "model.num_layers=4",
            "model.full_attention_interval=4",
            "optim.schedule=constant",
            "optim.clip_grad=0",
            *words,
        ]
    )
    return build_state(config, runtime.start(config.run))


def gradients(state: TrainState) -> dict[str, Tensor]:
    train_step(state)
    named = list(parameter_names(state.chunks[0].module))
    return {name: p.main_grad.clone() for name, p in named if hasattr(p, "main_grad")}


@pytest.mark.parametrize("residual", ["standard", "block", "shared"])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_what_is_trained_has_the_gradients_of_the_whole_model(
    tmp_path: Path, residual: str, recompute: str
) -> None:
    words = [f"residual={residual}", f"train.recompute={recompute}"]
    words += ["residual.block_size=2"] if residual != "standard" else []
    whole = gradients(state_of(tmp_path, *words))
    runtime.stop()
    part = gradients(state_of(tmp_path, *words, *FROZEN))
    assert part.keys() == {name for name in whole if RULE.trains(name)}
    assert 5 < len(part) < len(whole) - 30
    for name, gradient in part.items():
        assert whole[name].abs().max() > 0, name
        far = float((gradient - whole[name]).norm() / whole[name].norm())
        assert far < 1e-5, (name, far)  # sums of float32; seen 3e-6


@pytest.mark.parametrize("sharded", ["true", "false"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_frozen_parameters_cost_no_gradient_and_no_optimizer_memory(
    tmp_path: Path, sharded: str, precision: str
) -> None:
    words = [f"parallel.distributed_optimizer={sharded}", f"run.precision={precision}"]
    state = state_of(tmp_path, *FROZEN, *words)
    train_step(state)
    (chunk,) = state.chunks
    frozen = [p for n, p in parameter_names(chunk.module) if not RULE.trains(n)]
    trained = sum(p.numel() for n, p in parameter_names(chunk.module) if RULE.trains(n))
    assert sum(p.numel() for p in frozen) > trained
    assert not any(p.requires_grad or hasattr(p, "main_grad") for p in frozen)
    assert all(p.grad is None for p in frozen)
    buffers = [*chunk.buffers, *chunk.expert_parallel_buffers]
    padded = 1.05 * trained + 1024  # the sharded optimizer's buffers
    assert trained <= sum(buffer.grad_data.numel() for buffer in buffers) <= padded
    moments = [
        tensor.numel()
        for part in state.optimizer.chained_optimizers
        for entry in part.optimizer.state.values()
        for name, tensor in entry.items()
        if name == "exp_avg"
    ]
    assert sum(moments) == trained


def test_patterns_without_a_parameter_end_before_training(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"norm\.wait: matches no parameter"):
        state_of(tmp_path, "train.trainable=[head,'*.norm.wait']")
