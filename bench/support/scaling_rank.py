"""What one process of `bench/scaling.py` does. Rank 0 writes what all have found as JSON."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from megatron_ext.checkpoint.load import load
from megatron_ext.checkpoint.save import Checkpointer
from megatron_ext.config.compose import compose
from megatron_ext.config.layout import stage_layers
from megatron_ext.data.batches import micro_batches
from megatron_ext.data.stream import open_corpus
from megatron_ext.data.tokenizers import load_tokenizer
from megatron_ext.layers.balance import Selection
from megatron_ext.layers.router import BalancedRouter
from megatron_ext.model.build import build_chunks, choose_vocab_size
from megatron_ext.model.count import flops_per_token
from megatron_ext.model.init import initialize
from megatron_ext.parallel import runtime
from megatron_ext.parallel.mcore_config import transformer_config
from megatron_ext.parallel.mesh import build_mesh
from megatron_ext.plan.main import planned_vocab_size
from megatron_ext.plan.memory import memory_of
from megatron_ext.plan.rehearsal import rehearse
from megatron_ext.train import balance
from megatron_ext.train.feed import micro_batch_count
from megatron_ext.train.loop import save
from megatron_ext.train.micro_batch import model_inputs, token_losses
from megatron_ext.train.share import Share
from megatron_ext.train.state import TrainState, build_state
from megatron_ext.train.step import train_step
from support.layouts import COMMON, Layout
from support.overlap import read_trace

GIB = 2.0**30
MOST_STEPS = 40  # while a checkpoint is written


class EvenRoute:
    """A router's hook: the token at place p of its sequence goes to experts p k, p k + 1, ...

    The same in every layout, and each expert gets as many tokens, to one of each sequence.
    """

    def __init__(self, micro_batch_size: int) -> None:
        self.sequences = micro_batch_size
        self._maps: dict[tuple[int, int], Tensor] = {}

    def __call__(self, router: BalancedRouter, scores: Tensor, selection: Selection) -> Tensor:
        """bool [T, E]; tokens are ordered by place, then by sequence."""
        first = router.sharing.rank() * (len(scores) // self.sequences)
        return self._even(scores, first, k=router.balancer.top_k)

    def _even(self, scores: Tensor, first: int, *, k: int) -> Tensor:
        key = (len(scores), first)
        if key not in self._maps:
            count, experts = scores.shape
            place = first + torch.arange(count, device=scores.device) // self.sequences
            taken = (place[:, None] * k + torch.arange(k, device=scores.device)) % experts
            even = torch.zeros(count, experts, dtype=torch.bool, device=scores.device)
            self._maps[key] = even.scatter_(1, taken, True)
        return self._maps[key]


def plan_rank(layout: Layout, extra: list[str], file: Path) -> None:
    """Write the memory that the plan predicts for a rank of each pipeline stage, in GiB."""
    config = compose([*COMMON, *layout.words, *extra], world_size=layout.ranks)
    runtime.quiet()
    vocab_size = planned_vocab_size(config)
    imbalance = 1.0 if layout.balanced else config.plan.imbalance
    predicted = []
    for number in range(config.parallel.pipeline):
        stage = rehearse(config, vocab_size, stage=number, imbalance=imbalance)
        memory = memory_of(config, stage, number=number, world_size=layout.ranks)
        predicted.append(memory.total / GIB)
    file.write_text(json.dumps({"planned_gib": predicted}))


def reference_rank(layout: Layout, words: list[str], file: Path) -> None:
    """The loss of a layout's first batch on one rank: weights alone, forward alone."""
    config = compose(words)
    place = runtime.start(config.run)
    groups = build_mesh(config.parallel, timeout_seconds=config.run.timeout_seconds)
    tokenizer = load_tokenizer(config.data.tokenizer)
    data = open_corpus(config.data, seed=config.run.seed, tokenizer=tokenizer, split="train")
    vocab_size = choose_vocab_size(config, tokenizer.vocab_size)
    (model,) = build_chunks(config, transformer_config(config), groups, vocab_size=vocab_size)
    initialize([model], seed=config.run.seed)
    model.eval()
    if layout.balanced:
        _even(model, config.train.micro_batch_size)
    total = tokens = 0.0
    with torch.no_grad():
        for batch in micro_batches(
            data,
            start=0,
            batch_tokens=config.train.batch_tokens,
            sequence_length=config.data.sequence_length,
            micro_batch_size=config.train.micro_batch_size,
            data_rank=0,
            data_size=1,
        ):
            share = Share(context=groups.cp, tensor=None)
            inputs = model_inputs(batch, model, device=place.device, share=share)
            losses = token_losses(inputs, model)
            mask = torch.from_numpy(batch.loss_mask).to(place.device).flatten()
            total += float((losses.flatten().double() * mask).sum())
            tokens += float(mask.sum())
    file.write_text(json.dumps({"loss": total / tokens}))
    runtime.stop()


def _even(model: Any, micro_batch_size: int) -> None:
    hook = EvenRoute(micro_batch_size)
    for router in balance.routers([model]):
        router.hook = hook


def layout_rank(layout: Layout, extra: list[str], folder: Path, steps: int, warm_up: int) -> None:
    """Train a layout: verify, time, profile; or save; or go on. Writes FOLDER/NAME.json."""
    words = [*COMMON, *layout.words, *extra]
    place = runtime.start(compose(words).run)
    config = compose(words, world_size=place.world_size)
    begin = time.perf_counter()
    state = build_state(config, place)
    _wait_for_all(place)
    found: dict[str, Any] = {"build_seconds": time.perf_counter() - begin}
    if layout.balanced:
        for chunk in state.chunks:
            _even(chunk, config.train.micro_batch_size)
    if layout.resumes:
        found |= _resumed(state, folder / _file(layout.resumes) / "checkpoints")
    else:
        found |= _timed(state, steps=steps, warm_up=warm_up)
        found |= _profiled(state, folder / f"trace.{place.rank}.json")
        if layout.checkpoint:
            found |= _saved(state, folder / _file(layout.name) / "checkpoints")
    if place.rank == 0:
        (folder / f"{_file(layout.name)}.json").write_text(json.dumps(found))
    runtime.stop()


def _file(name: str) -> str:
    return name.replace(" ", "_").replace(",", "")


def result(layout: Layout, folder: Path) -> dict[str, Any]:
    """What rank 0 of a layout has written."""
    return dict(json.loads((folder / f"{_file(layout.name)}.json").read_text()))


def _timed(state: TrainState, *, steps: int, warm_up: int) -> dict[str, Any]:
    """First loss, seconds of a step, and the peak memory of every rank."""
    config, place = state.config, state.runtime
    on_gpu = place.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    values = [train_step(state) for _ in range(max(1, warm_up))]
    # Of the warmed-up steps: the first one of all has the kernels' own start in it.
    _wait_for_all(place)
    begin = time.perf_counter()
    values += [train_step(state) for _ in range(steps)]
    _wait_for_all(place)
    step = (time.perf_counter() - begin) / steps
    peak = torch.cuda.max_memory_allocated() / GIB if on_gpu else None
    flops = flops_per_token(
        config.model, vocab_size=state.vocab_size, sequence_length=config.data.sequence_length
    )
    return {
        "losses": [value["loss"] for value in values],
        "grad_norms": [value["grad_norm"] for value in values],
        "first_step_seconds": values[0]["step_seconds"],
        "step_seconds": step,
        "spread": sorted(value["step_seconds"] for value in values[-steps:]),
        "tokens_per_second": config.train.batch_tokens / step,
        "tflops_a_rank": config.train.batch_tokens * flops / step / place.world_size / 1e12,
        "stage_and_peak_gib": _gathered((int(state.mesh.pp.rank()), peak), place),
        "busiest_expert": max((_violation(load.counts) for load in state.loads), default=None),
    }


def _violation(counts: Tensor) -> float:
    """Load of the busiest expert over the mean."""
    return float(counts.max() / counts.double().mean())


def _profiled(state: TrainState, file: Path) -> dict[str, Any]:
    """One more step, under the profiler on every rank."""
    config, place = state.config, state.runtime
    activities = [ProfilerActivity.CPU]
    if place.device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    _wait_for_all(place)
    with profile(activities=activities) as record:
        begin = time.perf_counter()
        train_step(state)
        _synchronize(place)
        seconds = time.perf_counter() - begin
    record.export_chrome_trace(str(file))
    seen = read_trace(file)
    file.unlink()
    chunks = stage_layers(config.parallel, config.model.num_layers)[int(state.mesh.pp.rank())]
    passes = micro_batch_count(state) * max(1, sum(len(layers) for layers in chunks))
    mine = {
        "seconds": seconds,
        "total": seen.total,
        "exposed": seen.exposed,
        "all_exposed": seen.all_exposed,
        "kernels_a_layer": seen.kernels / passes,
    }
    return {"profile": _gathered(mine, place)}


def _saved(state: TrainState, folder: Path) -> dict[str, Any]:
    """Two saves in the background of training, then the loss of one more step."""
    place = state.runtime
    checkpointer = Checkpointer(folder, mesh=state.mesh, asynchronous=True, keep=1, keep_every=0)
    saves = []
    for _ in range(2):
        checkpointer.save_seconds = None
        _wait_for_all(place)
        begin = time.perf_counter()
        save(state, checkpointer)
        stall = time.perf_counter() - begin
        meanwhile: list[dict[str, float]] = []
        while checkpointer.save_seconds is None and len(meanwhile) < MOST_STEPS:
            meanwhile.append(train_step(state))
            checkpointer.poll()
        checkpointer.close()
        saves.append(
            {
                "stall_seconds": stall,
                "save_seconds": checkpointer.save_seconds,
                "steps_meanwhile": len(meanwhile),
                "step_seconds": sum(v["step_seconds"] for v in meanwhile) / len(meanwhile),
                "next_loss": meanwhile[0]["loss"],
            }
        )
    return {"saves": saves}


def _resumed(state: TrainState, folder: Path) -> dict[str, Any]:
    """The loss of the first step after loading the newest checkpoint."""
    _wait_for_all(state.runtime)
    begin = time.perf_counter()
    newest = max(folder.glob("step_*"))
    state.restore(load(newest, state.chunks, state.optimizer, state.mesh))
    _wait_for_all(state.runtime)
    return {
        "load_seconds": time.perf_counter() - begin,
        "next_loss": train_step(state)["loss"],
    }


def _synchronize(place: runtime.Runtime) -> None:
    if place.device.type == "cuda":
        torch.cuda.synchronize()


def _wait_for_all(place: runtime.Runtime) -> None:
    """Until every rank, and its GPU, is here."""
    _synchronize(place)
    dist.barrier()
    _synchronize(place)


def _gathered(value: Any, place: runtime.Runtime) -> list[Any]:
    values: list[Any] = [None] * place.world_size
    dist.all_gather_object(values, value)
    return values
