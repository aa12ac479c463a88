"""Copies between model and main parameters are those of megatron-core."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from megatron_ext.checkpoint.state import optimizer_parts
from megatron_ext.config.compose import compose
from megatron_ext.optim.copies import fuse_copies
from megatron_ext.parallel import cpu_support, runtime
from megatron_ext.train.state import build_state
from megatron_ext.train.step import train_step


@pytest.fixture(autouse=True)
def stopped() -> Iterator[None]:
    yield
    runtime.stop()
    cpu_support.uninstall()


def test_weights_and_gradients_are_what_megatron_core_copies(tmp_path: Path) -> None:
    words = ["model=nano", "data=sample", f"run.dir={tmp_path}/run", "run.precision=bf16"]
    words += ["data.sequence_length=32", "train.batch_tokens=64", "train.micro_batch_size=1"]
    config = compose([*words, "model.num_layers=4", "train.trainable=['*.mlp.*',head]"])
    state = build_state(config, runtime.start(config.run))
    train_step(state)
    parts = optimizer_parts(state.optimizer)
    assert len(parts) > 1  # experts have their own
    for part in parts:
        assert isinstance(part, DistributedOptimizer)
        assert "_copy_main_params_to_model_params" in vars(part), "not replaced"
        mains = [main for group in part.optimizer.param_groups for main in group["params"]]
        weights = [p for b in part.buffers for p in b.params]
        part._copy_model_grads_to_main_grads()
        grads = [main.grad for main in mains]
        DistributedOptimizer._copy_model_grads_to_main_grads(part)
        assert all(map(torch.equal, grads, [main.grad for main in mains]))
        assert any(grad.abs().max() > 0 for grad in grads)
        found = []
        for copy in (
            part._copy_main_params_to_model_params,
            lambda part=part: DistributedOptimizer._copy_main_params_to_model_params(part),
        ):
            torch.manual_seed(0)
            for main in mains:
                main.data.normal_()
            copy()
            found.append([weight.detach().clone() for weight in weights])
            for main in mains:
                main.data.zero_()
        assert all(map(torch.equal, *found))
        assert all(weight.abs().max() > 0 for weight in found[0])


def test_a_rank_whose_share_is_padding_copies_nothing() -> None:
    part: Any = SimpleNamespace(  # as much of an optimizer as is looked at
        ddp_config=SimpleNamespace(
            use_megatron_fsdp=False, fp8_param_gather=False, fp4_param_gather=False
        ),
        config=SimpleNamespace(use_precision_aware_optimizer_no_fp8_or_ds_fp8=False),
        shard_fp32_from_float16_groups=[[]],
        model_float16_groups=[[]],
        shard_fp32_groups=[[]],
        model_fp32_groups=[[]],
    )
    fuse_copies(part)
    part._copy_model_grads_to_main_grads()
    part._copy_main_params_to_model_params()
