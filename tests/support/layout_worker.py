"""Trains a few steps in one layout after the other and writes down everything, whole.

    python -m tests.support.layout_worker FOLDER RANKS CASE[:FAULT] ...

Ranks are forked for each case anew: groups of earlier cases would keep threads, which slow down
later ones threefold, no seeded fault outlives its case, and the slow imports are done once.

Each case is a fresh start of `STEPS` steps, then (unless a fault is seeded) the checkpoint that the
one-rank case saved after `STEPS - 1` steps is loaded and the last step is done once more. Rank 0
writes FOLDER/<case>.pt: losses, gradient norms, and by logical name whole tensors of initial
weights, gradients of step 1, updates, and the resumed run's update.
"""

from __future__ import annotations

import gc
import json
import os
import re
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from megatron_ext.checkpoint.load import load
from megatron_ext.checkpoint.save import Checkpointer
from megatron_ext.checkpoint.state import unwrap
from megatron_ext.config.compose import compose
from megatron_ext.config.schema import RunConfig
from megatron_ext.data.batches import MicroBatch
from megatron_ext.model.init import named_shards
from megatron_ext.parallel import runtime
from megatron_ext.parallel.environment import variables_of_shared_gpu
from megatron_ext.plan.hops import sent_by
from megatron_ext.train import share
from megatron_ext.train import state as build
from megatron_ext.train.depth_health import DepthWatch
from megatron_ext.train.evaluate import held_out_loss
from megatron_ext.train.feed import feeds_of, micro_batch_count, next_batches
from megatron_ext.train.health import HealthWatch
from megatron_ext.train.state import TrainState, build_state, gather_parameters
from megatron_ext.train.step import (
    run_schedule,
    train_step,
)
from tests.support.faults import FAULTS
from tests.support.layout_cases import (
    CASES,
    COMMON,
    FLOAT64,
    FREE,
    MODELS,
    SPLIT,
    STEPS,
    model_of,
    truth_of,
)
from tests.support.routing import PAD, Replay


def main() -> None:
    folder, ranks, cases = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    if torch.cuda.is_initialized():
        sys.exit("an import has opened the GPU already: forked ranks could not use it")
    extra = json.loads((folder / "overrides.json").read_text())
    # Ranks then neither look through what the imports left nor copy its pages.
    gc.collect()
    gc.freeze()
    for case in cases:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        words = (CASES | FLOAT64)[case.partition(":")[0]]
        config = compose([*COMMON, *words, *extra], world_size=ranks)
        started = {fork_rank(folder, case, config, rank, ranks, port) for rank in range(ranks)}
        while started:
            pid, status = os.wait()
            started.discard(pid)
            if status:
                for other in started:
                    os.kill(other, signal.SIGKILL)
                sys.exit(f"{case}: a rank failed")


def fork_rank(folder: Path, case: str, config: RunConfig, rank: int, ranks: int, port: int) -> int:
    """Start one rank of a case; returns its process. An error ends that as it ends any program."""
    if pid := os.fork():
        return pid
    if ranks > 1:
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks}
        place |= {"LOCAL_WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        os.environ |= {name: str(value) for name, value in place.items()}
        if 0 < torch.cuda.device_count() < ranks:
            os.environ |= variables_of_shared_gpu(rank)
    run_rank(folder, case, config)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # an interpreter with so many imports takes 1.7 s to end


def run_rank(folder: Path, case: str, config: RunConfig) -> None:
    """One case, from the start of torch.distributed to its end."""
    place = runtime.start(config.run)
    name, _, fault = case.partition(":")
    if fault:
        FAULTS[fault].before()
    if "appended" in name:
        append_padding()
    if name in FLOAT64:
        compute_in_float64()
    state = build_state(config, place)
    if fault:
        FAULTS[fault].after(state)
    record = (
        one_pass(state) if name in FLOAT64 else run_case(state, folder, name=name, resume=not fault)
    )
    if place.rank == 0:
        torch.save(record, folder / f"{case.replace(':', '_')}.pt")
    runtime.stop()


def run_case(state: TrainState, folder: Path, *, name: str, resume: bool) -> dict[str, Any]:
    """Everything about one case, on every rank (whole tensors on rank 0 only)."""
    record: dict[str, Any] = {"loss": [], "grad_norm": [], "loads": []}
    start = whole(state, main_weight)
    record["initial"] = start
    truth = truth_of(name)
    replay = Replay(state, folder / f"{truth}.routing", record=name == truth, free=name in FREE)
    evaluated, batch = state.config.evaluate.tokens, state.config.train.batch_tokens
    with replay("evaluation_0", evaluated):
        evaluation = losses_in(held_out_loss(state))
    prepare = state.optimizer.prepare_grads

    def prepare_and_keep_gradient() -> Any:
        if "gradient" not in record and not state.config.parallel.distributed_optimizer:
            record["gradient"] = whole(state, lambda param: param.main_grad)
        return prepare()

    state.optimizer.prepare_grads = prepare_and_keep_gradient
    for number in range(STEPS):
        if name in ("one", *MODELS, SPLIT) and number == STEPS - 1:
            save_here(state, folder / name)
        if number == 0:
            watch = HealthWatch(state)
            depth_watch = DepthWatch(state)
            watch.begin()
            depth_watch.begin()
        with replay(f"step_{number}", batch), messages(state) as sizes:
            values = train_step(state)
        if number == 0:
            record["sent"] = sent_and_planned(state, sizes)
            record["health"] = {health.layer: health for health in watch.end()}
            record["depth"] = depth_watch.end()
        replay.biases(f"step_{number}")
        record["loss"].append(values["loss"])
        record["grad_norm"].append(values["grad_norm"])
        record["loads"].append(state.loads)
        if name == "one_evaluated":
            held_out_loss(state)
    record["update"] = difference(whole(state, main_weight), start)
    with replay("evaluation_1", evaluated):
        evaluation += losses_in(held_out_loss(state))
    record["evaluation"] = evaluation
    counts = (replay.rerouted, replay.first_rerouted)
    record["rerouted"] = added(*counts, device=state.runtime.device)
    record["margin"] = replay.margin
    checkpoint = folder / model_of(name) / "checkpoints" / f"step_{STEPS - 1:08d}"
    if resume and checkpoint.exists() and ("gated" not in name):
        state.restore(load(checkpoint, state.chunks, state.optimizer, state.mesh))
        begin = whole(state, main_weight)
        with replay("resumed", batch):
            values = train_step(state)
        record["resumed_loads"] = state.loads
        record["resumed_loss"] = values["loss"]
        record["resumed_update"] = difference(whole(state, main_weight), begin)
    replay.close()
    return record


def compute_in_float64() -> None:
    """Everything in float64, gradients and their sums over ranks included."""
    real_config, real_ddp, real_chunks = (
        build.transformer_config,
        build.ddp_config,
        build.build_chunks,
    )

    def config_of(config: RunConfig) -> Any:
        tc = real_config(config)
        tc.params_dtype = tc.pipeline_dtype = tc.autocast_dtype = torch.float64
        config.residual.fp32 = False  # wider already
        return tc

    def chunks_of(*args: Any, **kwargs: Any) -> Any:
        chunks = real_chunks(*args, **kwargs)
        for chunk in chunks:
            for param in chunk.parameters():  # those of float32 in any model
                param.data = param.data.double()
        return chunks

    build.transformer_config, build.build_chunks = config_of, chunks_of
    # Then gradients have the type of their parameters.
    build.ddp_config = lambda config: replace(real_ddp(config), grad_reduce_in_fp32=False)


def one_pass(state: TrainState) -> dict[str, Any]:
    """Loss and gradients of the first batch."""
    for chunk in state.chunks:
        chunk.zero_grad_buffer()
    feeds = feeds_of(state, next_batches(state))
    losses = run_schedule(state, feeds, micro_batch_count(state), forward_only=False)
    gradient = whole(state, lambda param: param.main_grad, dtype=torch.float64)
    return {"loss": losses.mean, "gradient": gradient}


@contextmanager
def messages(state: TrainState) -> Iterator[list[int]]:
    """Bytes of everything that this rank sends to other pipeline stages meanwhile."""
    real, sizes, within = distributed_c10d.isend, [], []
    # With two stages megatron-core takes the group of all ranks for one of the directions.
    groups = (state.mesh.pp, dist.group.WORLD)

    def isend(tensor: Tensor, *args: Any, group: Any = None, **rest: Any) -> Any:
        if not within and group in groups:
            sizes.append(tensor.numel() * tensor.element_size())
        within.append(group)  # torch calls the function by its name again, within itself
        try:
            return real(tensor, *args, group=group, **rest)
        finally:
            within.pop()

    # Batches of messages check that they are given the function of the inner module.
    dist.isend = distributed_c10d.isend = isend
    try:
        yield sizes
    finally:
        dist.isend = distributed_c10d.isend = real


def sent_and_planned(state: TrainState, sizes: list[int]) -> list[tuple[list[int], list[int]]]:
    """Sizes of messages of every rank, each as measured and as `plan` counts them."""
    stage, count = int(state.mesh.pp.rank()), micro_batch_count(state)
    planned = sent_by(state.config, stage=stage, micro_batches=count)
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, (sorted(sizes), planned))
    return gathered


def losses_in(values: dict[str, float]) -> list[float]:
    """The held-out loss, and by bucket of positions where there are several."""
    return [values[key] for key in sorted(values) if re.match(r"eval/loss($|/position)", key)]


def save_here(state: TrainState, folder: Path) -> None:
    saver = Checkpointer(
        folder / "checkpoints", mesh=state.mesh, asynchronous=False, keep=0, keep_every=0
    )
    saver.save(state.step, state.chunks, state.optimizer, state.extra())
    saver.close()


def added(*counts: int, device: torch.device) -> list[int]:
    """Sums over all ranks."""
    sums = torch.tensor(counts, device=device)
    dist.all_reduce(sums)
    return sums.tolist()


def append_padding() -> None:
    """Rows get padding up to a multiple of 20 that nothing asks for."""
    real = share.part_of_rank
    PAD["multiple"] = 20

    def part(batch: MicroBatch, *, rank: int, ranks: int, multiple: int = 1) -> MicroBatch:
        return real(batch, rank=rank, ranks=ranks, multiple=20)

    share.part_of_rank = part


def main_weight(param: Tensor) -> Tensor:
    return param.detach()


def whole(
    state: TrainState, value: Callable[[Any], Tensor], *, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """Tensors by logical name, put together from all ranks on rank 0 (elsewhere empty).

    A tensor of which two ranks hold different bits of the same piece is filled with NaN: replicas
    must be identical, and NaN equals nothing.
    """
    gather_parameters(state.chunks)
    pieces = []
    for chunk in state.chunks:
        for param, shard in named_shards(unwrap(chunk)):
            data = (
                value(param)
                .detach()
                .to(device="cpu", dtype=dtype, copy=True)
                .reshape(shard.local_shape)
            )
            pieces.append((shard.key, shard.global_shape, shard.global_offset, data))
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.gather_object(pieces, gathered if dist.get_rank() == 0 else None)
    tensors: dict[str, Tensor] = {}
    seen: dict[Any, Tensor] = {}
    differ: set[str] = set()
    for key, shape, offset, data in (p for part in gathered if part for p in part):
        if (key, offset) in seen:
            if not torch.equal(seen[key, offset], data):
                differ.add(key)
            continue
        seen[key, offset] = data
        target = tensors.setdefault(key, torch.full(shape, float("nan"), dtype=dtype))
        place = tuple(slice(o, o + n) for o, n in zip(offset, data.shape, strict=True))
        target[place] = data
    for key in differ:
        tensors[key].fill_(float("nan"))
    return tensors


def difference(after: dict[str, Tensor], before: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key: after[key] - before[key] for key in after}


if __name__ == "__main__":
    main()
