"""A whole model so small that float64 runs of it take milliseconds."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_ext.config.compose import compose
from megatron_ext.config.schema import RunConfig
from megatron_ext.model.build import build_chunks
from megatron_ext.model.init import initialize
from megatron_ext.parallel.mcore_config import transformer_config
from tests.support.one_rank import draw

# Two heads of 8 in both kinds of attention, and narrow layers.
SMALL = [
    "model.first_dense_layers=null",  # in bfloat16 experts would be chosen otherwise
    "data=sample",
    "run.device=cpu",
    "model.hidden_size=24",
    "model.feed_forward_size=32",
    "model.vocab_size=128",
    "model.full_attention_interval=2",
    *(f"model.{kind}.num_heads=2" for kind in ("kda", "mla")),
    *(f"model.kda.{key}=8" for key in ("head_dim", "value_dim", "decay_rank")),
    "model.mla.q_lora_rank=12",
    "model.mla.kv_lora_rank=10",
    "model.mla.qk_nope_head_dim=6",
    "model.mla.qk_rope_head_dim=4",
    "model.mla.v_head_dim=8",
]


def build(
    groups: Any, *overrides: str, dtype: torch.dtype = torch.float64, random: bool = True
) -> tuple[Any, RunConfig]:
    """A small model whose queries and norms are away from their initial values."""
    config = compose([*SMALL, *overrides])
    tc = transformer_config(config)
    tc.params_dtype = dtype
    (model,) = build_chunks(config, tc, groups, vocab_size=128)
    draw(model) if random else initialize([model], seed=1)
    return model, config


def tokens() -> Tensor:
    return torch.randint(128, (2, 10), generator=torch.Generator().manual_seed(0))


def loss(model: Any) -> Tensor:
    """Mean cross-entropy of float64 logits."""
    logits = model(input_ids=tokens(), position_ids=None, attention_mask=None)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens()[:, 1:].flatten())
