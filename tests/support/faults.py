"""One seeded fault for each parallel mode: a lost reduction or a double count, as real bugs are.
The layout test must turn red with each of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from megatron_ext.layers.latent_moe import LatentMoE
from megatron_ext.train.state import TrainState


def _nothing() -> None:
    return None


def _no_effect(state: TrainState) -> None:
    return None


@dataclass(frozen=True)
class Fault:
    """`before` is called before the model is built, `after` after. Nothing undoes them: the process
    ends with its case."""

    before: Callable[[], None] = _nothing
    after: Callable[[TrainState], None] = _no_effect


def _lost_head_norm_sum() -> None:
    """Tensor: the norm over a head's width is used on local heads, and its gradient not summed."""
    from megatron_ext.layers import norms

    norms.tensor_parallel = SimpleNamespace(
        copy_to_tensor_model_parallel_region=lambda x, group=None: x
    )


def _lost_sequence_sum(state: TrainState) -> None:
    """Sequence: a norm that sees its shard of the sequence only is not summed over the shards."""
    for chunk in state.chunks:
        for name, param in chunk.named_parameters():
            if name.endswith("input_layernorm.weight"):
                param.sequence_parallel = False


def _lost_token_count(state: TrainState) -> None:
    """Pipeline: the first stage divides by another number of tokens than the last one."""
    real = state.tc.finalize_model_grads_func

    def finalize(model: Any, num_tokens: Any = None, **rest: Any) -> None:
        real(model, num_tokens, **rest)
        if torch.distributed.get_rank() == 0:
            for chunk in state.chunks:
                chunk.scale_gradients(0.5)

    state.tc.finalize_model_grads_func = finalize


def _no_overlap(state: TrainState) -> None:
    """Virtual pipeline: two stages without overlapped sends give wrong numbers without a word."""
    state.tc.overlap_p2p_comm, state.tc.batch_p2p_comm = False, True


def _lost_data_sum(state: TrainState) -> None:
    """Data: gradients stay local."""
    for chunk in state.chunks:
        for buffer in chunk.buffers:
            buffer.ddp_config.num_distributed_optimizer_instances = 1
        for group in chunk.bucket_groups:
            group.finish_grad_sync = lambda *args, **kwargs: None
            group.start_grad_sync = lambda *args, **kwargs: None


def _lost_state() -> None:
    """Context: linear attention starts from zero on every rank."""
    from megatron_ext.ops.kda import context, segments

    real = context.first_state
    context.first_state = segments.first_state = lambda *a, **k: torch.zeros_like(real(*a, **k))


def _wrong_halo() -> None:
    """Context: the convolution continues from the end of the rank's own part."""
    from megatron_ext.parallel import context

    real = context._from
    context._from = lambda x, group, rank: real(x, group, group.rank())


def _halves_swapped() -> None:
    """Context, head-tail order: the two halves of a rank come back in the other order."""
    from megatron_ext.ops.latent_attention.head_tail import HeadTail

    real = HeadTail.to_home
    HeadTail.to_home = lambda self, x: torch.cat(real(self, x).chunk(2, 1)[::-1], 1)


def _lost_latent_sum() -> None:
    """Context: latents keep the gradient of their own rank's queries only."""
    from megatron_ext.ops.latent_attention import context

    def own_share(out: torch.Tensor, x: torch.Tensor, group: Any) -> None:
        out.copy_(x.chunk(group.size())[group.rank()])

    context.dist = SimpleNamespace(
        all_gather_into_tensor=context.dist.all_gather_into_tensor,
        reduce_scatter_tensor=own_share,
    )


def _lost_query_sum(state: TrainState) -> None:
    """Sequence: a query of attention residuals sees its shard of the sequence only."""
    for chunk in state.chunks:
        for name, param in chunk.named_parameters():
            if name.endswith(".query"):
                param.sequence_parallel = False


def _change_kept_sources(change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """What a rank keeps of a micro-batch between its chunks becomes something else."""
    from megatron_ext.parallel.pipeline import SourceCache

    real = SourceCache.put

    def put(self: Any, micro_batch: int, sources: tuple[torch.Tensor, ...]) -> None:
        real(self, micro_batch, tuple(change(source) for source in sources))

    SourceCache.put = put


def _lost_kept_gradient() -> None:
    """Interleaved, cached sources: the later chunk's gradient does not come back to the earlier."""
    _change_kept_sources(lambda kept: kept.detach().requires_grad_(kept.requires_grad))


def _kept_gradient_twice() -> None:
    """Interleaved, cached sources: a block sum that was kept and sent counts twice."""

    def change(kept: torch.Tensor) -> torch.Tensor:
        if kept.requires_grad:
            kept.register_hook(lambda grad: 2 * grad)
        return kept

    _change_kept_sources(change)


def _lost_expert_sum(state: TrainState) -> None:
    """Expert data: gradients of experts stay local."""
    for chunk in state.chunks:
        for group in chunk.expert_parallel_bucket_groups:
            group.finish_grad_sync = lambda *args, **kwargs: None
            group.start_grad_sync = lambda *args, **kwargs: None


def _shared_twice(state: TrainState) -> None:
    """Expert: the shared expert is added once for every expert parallel rank."""
    for chunk in state.chunks:
        for module in chunk.modules():
            if isinstance(module, LatentMoE) and module.shared is not None:
                module.shared.register_forward_hook(lambda m, i, out: (2 * out[0], out[1]))


def _counted_twice() -> None:
    """Tensor without sequence: every rank sees all tokens, and their statistics are summed."""
    from megatron_ext.train import balance

    def all_ranks(mesh: Any, *, sequence_parallel: bool) -> Any:
        return mesh.tp_dp_cp

    balance.distinct_tokens = all_ranks


def _lost_width_sum() -> None:
    """Expert tensor: each rank's part of an expert's width is not added to the others'."""
    from megatron.core.transformer.moe import token_dispatcher

    real = token_dispatcher.reduce_scatter_to_sequence_parallel_region

    def own_share(x: Any, *, group: Any, input_split_sizes: Any = None) -> Any:
        real(x, group=group, input_split_sizes=input_split_sizes)
        return x.split(input_split_sizes)[group.rank()]

    token_dispatcher.reduce_scatter_to_sequence_parallel_region = own_share


def _lost_health_sum() -> None:
    """Tensor: the health of attention is that of the heads of one rank."""
    from megatron_ext.train import health

    health.dist = SimpleNamespace(all_reduce=lambda *_, **__: None, ReduceOp=health.dist.ReduceOp)


def _depth_counted_twice() -> None:
    """Tensor without sequence: every rank's mixes see all tokens, and their sums are summed."""
    from megatron_ext.train import depth_health

    def all_ranks(mesh: Any, *, sequence_parallel: bool) -> Any:
        return mesh.tp_dp_cp

    depth_health.balance = SimpleNamespace(distinct_tokens=all_ranks)


def _lost_depth_sum() -> None:
    """Sequence: the weights over depth are those of one shard of the sequence."""
    from megatron_ext.train import depth_health

    depth_health.dist = SimpleNamespace(all_reduce=lambda *_, **__: None)


def _lost_share_sum() -> None:
    """Tensor: scalars of shared heads get the gradient of local heads only."""
    from megatron_ext.layers import shared_heads

    shared_heads.tensor_parallel = SimpleNamespace(
        copy_to_tensor_model_parallel_region=lambda x, group=None: x,
        checkpoint=shared_heads.tensor_parallel.checkpoint,
    )


def _segment_counted_twice() -> None:
    """Segments: weights get their gradient when a segment runs again, and once more at the end."""
    from megatron_ext.ops import segments

    real = segments.segment_gradients

    def gradients(step: Any, inputs: Any, weights: Any, *args: Any, **rest: Any) -> Any:
        found = real(step, inputs, weights, *args, **rest)
        for place in range(len(inputs), len(inputs) + len(weights)):
            if found[place] is not None:
                found[place] *= 2
        return found

    segments.segment_gradients = gradients


def _lost_shared_gradient() -> None:
    """Pipeline, recomputed: what later layers read of earlier ones brings no gradient back."""
    from megatron_ext.layers.shared_heads import HeadShare

    real = HeadShare.forward

    def forward(self: Any, own: torch.Tensor) -> Any:
        self.heads = tuple(heads.detach() for heads in self.heads)
        return real(self, own)

    HeadShare.forward = forward


FAULTS = {
    "lost_share_sum": Fault(before=_lost_share_sum),
    "segment_counted_twice": Fault(before=_segment_counted_twice),
    "lost_shared_gradient": Fault(before=_lost_shared_gradient),
    "depth_counted_twice": Fault(before=_depth_counted_twice),
    "lost_depth_sum": Fault(before=_lost_depth_sum),
    "lost_health_sum": Fault(before=_lost_health_sum),
    "lost_expert_sum": Fault(after=_lost_expert_sum),
    "shared_twice": Fault(after=_shared_twice),
    "counted_twice": Fault(before=_counted_twice),
    "lost_width_sum": Fault(before=_lost_width_sum),
    "lost_head_norm_sum": Fault(before=_lost_head_norm_sum),
    "lost_sequence_sum": Fault(after=_lost_sequence_sum),
    "lost_token_count": Fault(after=_lost_token_count),
    "no_overlap": Fault(after=_no_overlap),
    "lost_data_sum": Fault(after=_lost_data_sum),
    "lost_state": Fault(before=_lost_state),
    "wrong_halo": Fault(before=_wrong_halo),
    "halves_swapped": Fault(before=_halves_swapped),
    "lost_latent_sum": Fault(before=_lost_latent_sum),
    "lost_query_sum": Fault(after=_lost_query_sum),
    "lost_kept_gradient": Fault(before=_lost_kept_gradient),
    "kept_gradient_twice": Fault(before=_kept_gradient_twice),
}
