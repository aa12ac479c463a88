"""Both kinds of attention in one layer, mixed by a learned gate for each token."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_ext.layers.initializers import Constant, parameter
from megatron_ext.layers.linears import ShardedModule, tensor_group


@dataclass
class GatedHybridSubmodules:
    """The two branches, each the spec of a self-attention."""

    kda: ModuleSpec
    mla: ModuleSpec


class GatedHybrid(ShardedModule):
    """y = a KDA(x) + (1 - a) MLA(x), a = sigmoid(w . x) for each token; w starts at 0: a = 1/2.

    The gate's weight [1, h] is replicated and acts on the shard of the sequence.

    Args:
        submodules: the branches.
        pg_collection: process groups; None takes megatron-core's.
        layer_number, name, cp_comm_type: given by megatron-core; the first is handed on.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *,
        submodules: GatedHybridSubmodules,
        layer_number: int = 1,
        pg_collection: ProcessGroupCollection | None = None,
        name: str | None = None,
        cp_comm_type: str | None = None,
    ) -> None:
        super().__init__(config, tp_group=tensor_group(pg_collection))
        common = {"config": config, "layer_number": layer_number, "pg_collection": pg_collection}
        self.kda = build_module(submodules.kda, **common)
        self.mla = build_module(submodules.mla, **common)
        self.mix_weight = parameter(
            1,
            config.hidden_size,
            dtype=config.params_dtype,
            initializer=Constant(0.0),
            weight_decay=False,  # which would pull the mix towards halves
            sequence_parallel=config.sequence_parallel,
        )

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        *,
        packed_seq_params: PackedSeqParams | None = None,
        **unused: object,
    ) -> tuple[Tensor, None]:
        """[s/tp, b, h] to ([s/tp, b, h], None); `packed_seq_params` goes to both branches."""
        linear, _ = self.kda(hidden_states, packed_seq_params=packed_seq_params)
        full, _ = self.mla(hidden_states, packed_seq_params=packed_seq_params)
        wide = torch.promote_types(hidden_states.dtype, torch.float32)
        share = torch.sigmoid(F.linear(hidden_states.to(wide), self.mix_weight.to(wide)))
        return torch.lerp(full.to(wide), linear.to(wide), share).to(full.dtype), None
