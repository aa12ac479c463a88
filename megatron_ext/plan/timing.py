"""Time of a training step, from what a rehearsal counted and the speeds of a calibration file.

Nothing overlaps in this estimate: neither messages with products, nor the reduction of gradients
with the backward pass; and the host is taken to be fast enough. It ranks layouts; it is no promise.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron_ext.config.layout import LayerKind, layer_kinds, stage_layers
from megatron_ext.config.schema import Gate, Precision, Recompute, RunConfig
from megatron_ext.model.count import mla_core_flops
from megatron_ext.plan.calibration import Calibration
from megatron_ext.plan.memory import GRADIENT, MASTER, MOMENTS, data_ranks, micro_batches
from megatron_ext.plan.rehearsal import Stage
from megatron_ext.plan.traffic import step_traffic

ONCE = ("data", "expert data", "balance")  # kinds of parallelism that speak once a step


@dataclass(frozen=True)
class StepTime:
    """Seconds of the slowest pipeline stage, by what they go to.

    Attributes:
        parts: of one step; they add up to `total`.
    """

    parts: dict[str, float]

    @property
    def total(self) -> float:
        """Seconds of a step."""
        return sum(self.parts.values())


def step_time(
    config: RunConfig,
    stages: list[Stage],
    calibration: Calibration,
    *,
    world_size: int,
    first: int = 0,
) -> StepTime:
    """The step of the slowest stage, with the time that the pipeline makes it wait.

    Args:
        stages: consecutive ones of the layout, as rehearsed.
        calibration: speeds.
        world_size: ranks of the job.
        first: number of the first of the stages.
    """
    each = [
        _stage(config, stage, calibration, number=number, world_size=world_size)
        for number, stage in enumerate(stages, first)
    ]
    slowest = max(each, key=lambda parts: sum(parts.values()))
    parallel = config.parallel
    passing = sum(
        seconds for name, seconds in slowest.items() if name not in ("reduce", "optimizer")
    )
    waits = (parallel.pipeline - 1) / parallel.virtual_pipeline
    idle = passing * waits / micro_batches(config, world_size)
    return StepTime({**slowest, "waiting for other stages": idle})


def _stage(
    config: RunConfig, stage: Stage, calibration: Calibration, *, number: int, world_size: int
) -> dict[str, float]:
    count = micro_batches(config, world_size)
    works = [work for chunk in stage.chunks for work in (chunk.work_forward, chunk.work_backward)]
    dense = sum(work.flops["dense"] for work in works) * count
    grouped = sum(work.flops["grouped"] for work in works) * count
    traffic = sum(work.traffic for work in works) * count
    if config.run.precision is Precision.fp32:
        calibration = _in_float32(calibration)
    linear, full = _attention(config, calibration, stage=number, micro_batches=count)
    messages = {"messages between ranks": 0.0, "reduce": 0.0}
    sent = step_traffic(config, stage, number=number, world_size=world_size)
    for (kind, _), size in sent.items():
        near = span(config, kind, world_size=world_size) <= calibration.gpus_per_node
        speed = calibration.in_node_gbs if near else calibration.between_nodes_gbs
        messages["reduce" if kind in ONCE else "messages between ranks"] += size / speed / 1e9
    return {
        "dense products": dense / calibration.dense_tflops / 1e12,
        "products of experts": grouped / calibration.grouped_tflops / 1e12,
        "linear attention": linear,
        "full attention": full,
        "all other kernels": traffic / calibration.other_tbs / 1e12,
        **messages,
        "optimizer": _optimizer_bytes(config, stage, world_size) / calibration.memory_tbs / 1e12,
    }


def _in_float32(calibration: Calibration) -> Calibration:
    """Matrix products of float32 are no quicker than `fp32_tflops`, whoever asks for them."""
    speeds = {
        name: min(getattr(calibration, name), calibration.fp32_tflops)
        for name in ("dense_tflops", "grouped_tflops", "attention_tflops")
    }
    return replace(calibration, **speeds)


def span(config: RunConfig, kind: str, *, world_size: int) -> int:
    """Over how many ranks in a row a group of this kind of parallelism stretches."""
    parallel = config.parallel
    stage = world_size // parallel.pipeline
    spans = {
        "tensor": parallel.tensor,
        "context": parallel.tensor * parallel.context,
        "expert tensor": parallel.expert_tensor,
        "expert": parallel.expert_tensor * parallel.expert,
        "pipeline": 2 * stage,
    }
    return spans.get(kind, stage)


def _attention(
    config: RunConfig, calibration: Calibration, *, stage: int, micro_batches: int
) -> tuple[float, float]:
    """Seconds of the cores of linear and of full attention in a step of a rank."""
    model, parallel, length = config.model, config.parallel, config.data.sequence_length
    kinds = layer_kinds(model)
    here = [kinds[n] for chunk in stage_layers(parallel, model.num_layers)[stage] for n in chunk]
    tokens = micro_batches * config.train.micro_batch_size * length / parallel.context
    again = config.train.recompute is not Recompute.none
    linear = calibration.kda_ns
    if model.kda.gate is Gate.softplus:
        linear *= calibration.kda_softplus_factor
    linear += calibration.kda_forward_ns if again else 0.0
    linear *= model.kda.num_heads / parallel.tensor * model.kda.head_dim / 128 / 1e9
    flops = mla_core_flops(model.mla, sequence_length=length) / parallel.tensor
    full = flops * (4 / 3 if again else 1) / calibration.attention_tflops / 1e12
    kda = sum(kind in (LayerKind.kda, LayerKind.gated) for kind in here)
    mla = sum(kind in (LayerKind.mla, LayerKind.gated) for kind in here)
    return kda * tokens * linear, mla * tokens * full


def _optimizer_bytes(config: RunConfig, stage: Stage, world_size: int) -> float:
    """Read and written by the update: the gradient, main weights and moments twice, the weight."""
    moved = 0.0
    ranks = data_ranks(config.parallel, world_size)
    for sizes, copies in zip((stage.dense, stage.experts), ranks, strict=True):
        share = copies if config.parallel.distributed_optimizer else 1
        moved += sum(
            count * (GRADIENT + 2 * (MASTER + MOMENTS) + size) / share for count, size in sizes
        )
    return moved
