"""One micro-batch through the real modules of a pipeline stage, on the meta device.

Memory, matrix products and messages are counted while megatron-core's and our modules run forward
and backward under the layout's process groups. Nothing is modelled but what cannot run without a
GPU: fused kernels (`ops.without_memory`) and how many rows an expert gets (`MeanLoad`).
"""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from megatron_ext.config.layout import row_length, sequence_parallel
from megatron_ext.config.residual import chunk_sources, mixes
from megatron_ext.config.schema import (
    AttentionResidualBackend,
    Device,
    ExpertBackend,
    KdaBackend,
    KernelBackend,
    RunConfig,
)
from megatron_ext.data.batches import padded_length
from megatron_ext.layers.latent_moe import AnyNumberAlltoAll, LatentMoE
from megatron_ext.layers.output_head import losses_of
from megatron_ext.model.build import build_chunks
from megatron_ext.model.freeze import mark
from megatron_ext.ops import without_memory
from megatron_ext.parallel.fake import fake_world, on_meta
from megatron_ext.parallel.mcore_config import transformer_config
from megatron_ext.parallel.mesh import fewest_ranks
from megatron_ext.plan.tracker import GRANULE, Tracker, Work

# Names of megatron-core's process groups, the ones that are asked first.
KINDS = {
    "tp": "tensor",
    "cp": "context",
    "ep": "expert",
    "expt_tp": "expert tensor",
    "tp_ep": "expert",
    "tp_cp": "context",
    "pp": "pipeline",
}


@dataclass(frozen=True)
class Chunk:
    """One micro-batch through one model chunk of a rank, in bytes.

    Attributes:
        kept: what stays from the end of the forward pass to the backward pass.
        forward, backward: most that is live during each, beside what other chunks and
            micro-batches keep.
        message_in, message_out: activations received from and sent to the neighbouring stages.
        work_forward, work_backward: what is computed and communicated; with recomputation the
            second holds a part of the first again.
    """

    kept: int
    forward: int
    backward: int
    message_in: int
    message_out: int
    work_forward: Work
    work_backward: Work


@dataclass(frozen=True)
class Stage:
    """One rank of a pipeline stage.

    Attributes:
        dense, experts: trained parameters as (elements, bytes an element) that are alike on the
            data parallel ranks, and on the expert data parallel ranks.
        buffers: bytes of state beside parameters.
        statistics: bytes that balancing sums over ranks once a step.
        chunks: of the rank, in the order of virtual stages.
        frozen: bytes of parameters that are not trained.
    """

    dense: list[tuple[int, int]]
    experts: list[tuple[int, int]]
    buffers: int
    statistics: int
    chunks: list[Chunk]
    frozen: int = 0

    @property
    def parameters(self) -> int:
        """Number of trained elements on the rank."""
        return sum(count for count, _ in (*self.dense, *self.experts))


def rehearse(config: RunConfig, vocab_size: int, *, stage: int, imbalance: float) -> Stage:
    """Run one micro-batch through all chunks of the first rank of a stage.

    Args:
        config: the layout; `run.device=cpu` counts what plain torch does on a CPU, else fused GPU
            kernels are assumed.
        vocab_size: padded size.
        stage: pipeline rank.
        imbalance: rows of this rank's experts, over the mean.

    Raises:
        RuntimeError: a process group is running in this process.
    """
    config = _for_device(config)
    parallel = config.parallel
    world_size = fewest_ranks(parallel)
    # The last context parallel rank has the longest past, the last tensor parallel one is like any.
    rank = stage * (world_size // parallel.pipeline) + parallel.tensor * (parallel.context - 1)
    with fake_world(parallel, rank=rank, world_size=world_size) as groups, on_meta():
        model_parallel_cuda_manual_seed(config.run.seed)
        tc = transformer_config(config)
        chunks = build_chunks(config, tc, groups, vocab_size=vocab_size)
        mark(config, chunks)
        for moe in _modules(chunks, LatentMoE):
            moe.dispatcher = MeanLoad(moe, tc, groups, imbalance=imbalance)
        names = {
            getattr(groups, name).group_name: kind
            for name, kind in reversed(KINDS.items())
            if getattr(groups, name, None) is not None
        }
        on_cpu = config.run.device is Device.cpu
        tracker = Tracker(names, granule=1 if on_cpu else GRANULE)
        for chunk in chunks:
            tracker.ignore(*chunk.parameters(), *chunk.buffers())
        with _Fused(on_cpu=on_cpu), tracker:
            found = _Rehearsal(config, chunks, tracker, stage=stage).run()
    everything = [p for chunk in chunks for p in chunk.parameters()]
    parameters = [p for p in everything if p.requires_grad]
    routers = [module.balancer for module in _modules(chunks, nn.Module) if _is_router(module)]
    return Stage(
        dense=_sizes(p for p in parameters if getattr(p, "allreduce", True)),
        experts=_sizes(p for p in parameters if not getattr(p, "allreduce", True)),
        frozen=sum(p.nbytes for p in everything if not p.requires_grad),
        buffers=sum(b.nbytes for chunk in chunks for b in chunk.buffers()),
        statistics=sum(x.nbytes for router in routers for x in router.statistics()),
        chunks=found,
    )


def _is_router(module: nn.Module) -> bool:
    return hasattr(module, "balancer")


def _modules(chunks: list[Any], kind: type) -> Iterator[Any]:
    for chunk in chunks:
        yield from (module for module in chunk.modules() if isinstance(module, kind))


def _sizes(parameters: Iterator[nn.Parameter]) -> list[tuple[int, int]]:
    sums: dict[int, int] = {}
    for parameter in parameters:
        size = parameter.element_size()
        sums[size] = sums.get(size, 0) + parameter.numel()
    return [(count, size) for size, count in sums.items()]


def _for_device(config: RunConfig) -> RunConfig:
    """On the meta device `auto` stands for fused kernels; on a CPU plain torch would run."""
    if config.run.device is not Device.cpu:
        return config
    model = config.model
    kda = KdaBackend.dense if model.kda.backend is KdaBackend.auto else model.kda.backend
    return replace(
        config,
        model=replace(
            model,
            kda=replace(model.kda, backend=kda),
            experts=replace(model.experts, backend=ExpertBackend.loop),
            kernels=replace(model.kernels, backend=KernelBackend.dense),
        ),
        residual=replace(config.residual, backend=AttentionResidualBackend.dense),
    )


class _Fused(TorchFunctionMode):
    """torch's own functions that are one kernel where they run, and many operators elsewhere."""

    def __init__(self, *, on_cpu: bool) -> None:
        super().__init__()
        self.on_cpu = on_cpu

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.rms_norm and not self.on_cpu:
            return without_memory.rms_norm(args[0], kwargs["weight"])
        if func is F.scaled_dot_product_attention:
            return self._attention(*args)
        return func(*args, **kwargs)

    def _attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        value_width = v.shape[-1]
        if self.on_cpu:  # as `core_attention` does there
            width = max(q.shape[-1], value_width)
            q, k, v = (F.pad(x, (0, width - x.shape[-1])) for x in (q, k, v))
        return without_memory.attention(q, k, v)[..., :value_width]


class MeanLoad(AnyNumberAlltoAll):
    """The dispatcher with a load that is known beforehand, since no router chooses here.

    Every token goes to exactly top-k experts. This rank's experts get the mean number of rows times
    `imbalance`, evenly.

    Args:
        moe: the layer whose dispatcher it replaces.
    """

    def __init__(self, moe: LatentMoE, config: Any, groups: Any, *, imbalance: float) -> None:
        local = moe.experts.num_local_experts
        first = groups.ep.rank() * local
        super().__init__(
            local, list(range(first, first + local)), config=config, pg_collection=groups
        )
        self.kernels = moe.dispatcher.kernels
        self.imbalance = imbalance if self.ep_size > 1 else 1.0  # all rows come to one rank

    def preprocess(self, routing_map: Tensor) -> Tensor:
        """Rows by expert, as numbers on the host."""
        sent = routing_map.shape[0] * self.config.moe_router_topk
        sources = self.tp_size * self.ep_size
        counts = _even(
            math.ceil(sent * self.tp_size * self.imbalance), sources * self.num_local_experts
        ).reshape(sources, self.num_local_experts)
        self.num_out_tokens = sent
        if sources > 1:
            by_rank = counts.sum(1).reshape(self.tp_size, self.ep_size)
            self.input_splits = _even(sent, self.ep_size).tolist()
            self.output_splits = by_rank[self.tp_rank].tolist()
            self.output_splits_tp = torch.from_numpy(by_rank.sum(1))
        return torch.from_numpy(counts.sum(0))

    def _maybe_dtoh_and_synchronize(
        self, point: str, tokens_per_expert: Tensor | None = None
    ) -> Any:
        return tokens_per_expert

    def _sorting(self, rows: Tensor) -> tuple[Tensor, Tensor] | None:
        if self.tp_size * self.ep_size == 1:
            return None
        order = torch.empty(rows.shape[0], dtype=torch.int64, device=rows.device)
        return order, torch.empty_like(order)


def _even(total: int, parts: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    ends = np.arange(1, parts + 1) * total // parts
    return np.diff(ends, prepend=0)


class _Rehearsal:
    """Forward through all chunks of the rank in order, then backward in the other."""

    def __init__(
        self, config: RunConfig, chunks: list[Any], tracker: Tracker, *, stage: int
    ) -> None:
        self.config, self.chunks, self.tracker, self.stage = config, chunks, tracker, stage
        parallel = config.parallel
        shards = parallel.tensor if sequence_parallel(parallel) else 1
        row = padded_length(row_length(config), ranks=parallel.context, multiple=shards)
        # Isolated documents lie in one row. What attention keeps depends on its tokens alone.
        self.batch = 1 if config.data.isolate_documents else config.train.micro_batch_size
        self.length = row // parallel.context
        self.shard = self.length // shards
        self.plans = chunk_sources(config) if mixes(config.residual) else None

    def run(self) -> list[Chunk]:
        for chunk in self.chunks:
            for parameter in chunk.parameters():
                # Gradients go to megatron-core's buffers as soon as they are made.
                if parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(_forget)
        gc.collect()
        gc.freeze()  # collecting what passes leave behind then takes no time
        try:
            forwards = [self._forward(number) for number in range(len(self.chunks))]
            last = reversed(range(len(forwards)))
            backwards = [self._backward(number, forwards) for number in last]
        finally:
            gc.unfreeze()
        return [
            Chunk(
                kept=forward["kept"],
                forward=forward["peak"],
                backward=backward["peak"],
                message_in=forward["in"],
                message_out=forward["out"],
                work_forward=forward["work"],
                work_backward=backward["work"],
            )
            for forward, backward in zip(forwards, reversed(backwards), strict=True)
        ]

    def _forward(self, number: int) -> dict[str, Any]:
        tracker, chunk, config = self.tracker, self.chunks[number], self.config
        gc.collect()
        before = tracker.begin()
        tracker.take_work()
        ids = torch.empty(self.batch, self.length, dtype=torch.int64)
        message = None
        if not chunk.pre_process:
            slots = 1
            if self.plans is not None:
                slots = self.plans[number * config.parallel.pipeline + self.stage].slots_in
            shape = (slots * self.shard, self.batch, config.model.hidden_size)
            message = torch.empty(shape, dtype=chunk.config.pipeline_dtype, requires_grad=True)
            chunk.set_input_tensor(message)
        out = chunk(
            input_ids=ids,
            position_ids=None,
            attention_mask=None,
            labels=ids,
            output_processor=losses_of,
            output_processor_context=config.train.loss_chunk_tokens,
        )
        last = chunk.post_process
        size = 0 if last else out.nbytes
        loss = out.float().sum() if last else out
        chunk.set_input_tensor(None)
        del ids, out
        gc.collect()
        return {
            # megatron-core lets go of the data of a message once it is sent.
            "kept": tracker.live - before - size,
            "peak": tracker.peak - before,
            "work": tracker.take_work(),
            "loss": loss,
            "in": 0 if message is None else message.nbytes,
            "out": size,
            "message": message,
        }

    def _backward(self, number: int, forwards: list[dict[str, Any]]) -> dict[str, Any]:
        tracker, forward = self.tracker, forwards[number]
        loss = forward.pop("loss")
        before = tracker.begin()
        tracker.take_work()
        others = before - forward["kept"] - forward["out"]
        gradient = torch.empty_like(loss)
        # torch's public names run the engine without the function modes around them, which the
        # layers that are computed again need.
        run = torch.autograd.graph._engine_run_backward
        if loss.requires_grad:  # else all of the chunk is frozen, and so is what lies below it
            run(
                (loss,), (gradient,), False, False, (), allow_unreachable=True, accumulate_grad=True
            )
        del loss, gradient
        forward["message"] = None
        return {"peak": tracker.peak - others - forward["out"], "work": tracker.take_work()}


def _forget(parameter: Tensor) -> None:
    parameter.grad = None
