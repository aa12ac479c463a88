"""A step that was judged bad: find out where it went wrong, and turn it into an ending or a rewind.

All of it is collective and costs a forward pass; it happens once an incident.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from megatron_ext.checkpoint import paths
from megatron_ext.checkpoint.state import unwrap
from megatron_ext.checkpoint.verify import first_sound
from megatron_ext.config.operations import HealthAction
from megatron_ext.errors import CheckpointError, TrainingHalted
from megatron_ext.resilience.referee import Decision
from megatron_ext.train import balance
from megatron_ext.train.feed import feeds_of, micro_batch_count, next_batches
from megatron_ext.train.state import TrainState
from megatron_ext.train.step import evaluating, run_schedule

# Where activations are looked at: what a layer, its two halves, and the ends of the model give.
_WATCHED = re.compile(
    r"(^|\.)(embedding|output_layer|decoder\.layers\.\d+(\.(self_attention|mlp))?)$"
)


class Unsound(Exception):
    """Raised by the judge of a step that must not be applied. The same on every rank."""

    def __init__(self, decision: Decision) -> None:
        self.decision = decision
        super().__init__(decision.verdict.why)


class Rewind(Exception):
    """Go back to a checkpoint and leave out a stretch of the data. The same on every rank.

    Attributes:
        window: tokens [first, last) of the data to leave out.
    """

    def __init__(self, text: str, window: tuple[int, int]) -> None:
        self.window = window
        super().__init__(text)


@dataclass(frozen=True)
class Finding:
    """The first value that is not finite on some rank; ordered by layer, then micro-batch."""

    layer: int
    micro_batch: int
    rank: int
    data_rank: int
    name: str


def raise_for(state: TrainState, decision: Decision) -> None:
    """Say what is known of the bad step that `state` is about to do, and raise.

    Raises:
        TrainingHalted: the policy is to halt.
        Rewind: the policy is to rewind.
    """
    train = state.config.train
    first = state.position
    last = first + train.batch_tokens
    text = f"step {state.step + 1}: {decision.verdict.why} (data tokens {first} to {last - 1})"
    if decision.verdict.nonfinite:
        text += where(state)
    if decision.verdict.action is HealthAction.rewind:
        begin = last - state.config.resilience.rewind_steps * train.batch_tokens
        raise Rewind(text, (max(0, begin), last))
    raise TrainingHalted(
        f"{text}. Nothing was saved after it. Relaunch to go on from the last checkpoint; if it "
        "comes back, resilience=rewind leaves this data out, or take a smaller optim.lr or more "
        "optim.warmup_tokens"
    )


def where(state: TrainState) -> str:
    """The layer, rank, micro-batch and documents of the first value that is not finite."""
    found: list[list[Finding]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(found, list(_bad_activations(state)))
    everywhere = sorted(
        (finding for rank in found for finding in rank), key=lambda f: (f.layer, f.micro_batch)
    )
    if everywhere:
        one = everywhere[0]
        return (
            f"; first in the output of {one.name} on rank {one.rank}, micro-batch "
            f"{one.micro_batch}{_documents(state, one)}"
        )
    names: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(names, _bad_gradients(state))
    ranks = [rank for rank, bad in enumerate(names) if bad]
    if not ranks:
        return "; a second forward pass and the gradients are finite: perhaps a hardware fault"
    bad = names[ranks[0]]
    more = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
    return (
        f"; activations are finite, the gradient of {bad[0]}{more} is not, on rank {ranks[0]}"
        + (f" and {len(ranks) - 1} others" if len(ranks) > 1 else "")
    )


def _bad_activations(state: TrainState) -> Iterator[Finding]:
    """At most one finding: the first bad output on this rank, seen in a second forward pass."""
    findings: list[Finding] = []
    with evaluating(state.chunks), _watching(state, findings):
        feeds = feeds_of(state, next_batches(state))
        run_schedule(state, feeds, micro_batch_count(state), forward_only=True)
    yield from sorted(findings, key=lambda f: (f.layer, f.micro_batch))[:1]


@contextmanager
def _watching(state: TrainState, findings: list[Finding]) -> Iterator[None]:
    passes: dict[int, int] = {}
    handles = []

    def count(chunk: nn.Module, *_: Any) -> None:
        passes[id(chunk)] = passes.get(id(chunk), -1) + 1

    def hook(chunk: nn.Module, layer: int, name: str) -> Any:
        def look(module: nn.Module, inputs: Any, output: Any) -> None:
            if any(not bool(torch.isfinite(tensor).all()) for tensor in _tensors(output)):
                findings.append(
                    Finding(
                        layer=layer,
                        micro_batch=passes[id(chunk)],
                        rank=dist.get_rank(),
                        data_rank=int(state.mesh.dp.rank()),
                        name=name,
                    )
                )

        return look

    for wrapped in state.chunks:
        chunk = unwrap(wrapped)
        handles.append(chunk.register_forward_pre_hook(count))
        for name, module, layer in _named_with_layers(chunk):
            if _WATCHED.search(name):
                handles.append(module.register_forward_hook(hook(chunk, layer, name)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _named_with_layers(chunk: nn.Module) -> Iterator[tuple[str, nn.Module, int]]:
    """Modules with names that count layers over the whole model, and a number to order them by."""
    numbers = {
        name: int(module.layer_number) - 1
        for name, module in chunk.named_modules()
        if re.search(r"decoder\.layers\.\d+$", name) and hasattr(module, "layer_number")
    }
    for name, module in chunk.named_modules():
        match = re.search(r"decoder\.layers\.\d+", name)
        if match is None:
            yield name, module, -1 if "embedding" in name else 1 << 30
            continue
        number = numbers.get(name[: match.end()], 0)
        yield name.replace(match[0], f"decoder.layers.{number}"), module, number


def _tensors(output: Any) -> Iterator[torch.Tensor]:
    if isinstance(output, torch.Tensor) and output.is_floating_point():
        yield output
    elif isinstance(output, tuple | list):
        for part in output:
            yield from _tensors(part)


def _bad_gradients(state: TrainState) -> list[str]:
    names = []
    for wrapped in state.chunks:
        for name, module, _ in _named_with_layers(unwrap(wrapped)):
            for leaf, param in module.named_parameters(recurse=False):
                gradient = getattr(param, "main_grad", None)
                if gradient is not None and not bool(torch.isfinite(gradient).all()):
                    names.append(f"{name}.{leaf}")
    return names


def _documents(state: TrainState, finding: Finding) -> str:
    """Which documents a micro-batch is made of, by number in the stream and source."""
    config = state.config
    count = config.train.micro_batch_size * config.data.sequence_length
    number = finding.micro_batch * int(state.mesh.dp.size()) + finding.data_rank
    part = state.train_data.read(state.position + number * count, count)
    sources = ", ".join(state.sources[index] for index in np.unique(part.source))
    return f": documents {part.document.min()} to {part.document.max()} of the stream ({sources})"


def go_back(state: TrainState, folder: Path, rewind: Rewind, *, done: int) -> str:
    """Restore the newest checkpoint before the window, and remember to leave the window out.

    Args:
        folder: of checkpoints.
        done: rewinds of this launch before this one.

    Returns:
        What was done, for the header.

    Raises:
        TrainingHalted: no such checkpoint, or too many rewinds.
    """
    limit = state.config.resilience.max_rewinds
    if done >= limit:
        raise TrainingHalted(
            f"{rewind}. It came back after resilience.max_rewinds={limit} rewinds; take a smaller "
            "optim.lr, or look at the data named here"
        )
    first, last = rewind.window
    choice: list[list[Path]] = [[]]
    if dist.get_rank() == 0:
        # Not inside the window either: its batches are what is suspected.
        # Nor of the stage before, whose layout may be another, nor ahead: from before a rewind.
        begin, end = state.stage.first_step, state.step
        there = [p for step, p in paths.step_folders(folder).items() if begin <= step <= end]
        places = {path: place for path in there if (place := _position(path)) is not None}
        fit = [path for path, place in places.items() if place <= first]
        # A window wider than the way from the first checkpoint is cut there.
        fit = fit or [path for path, place in list(places.items())[:1] if place < last]
        choice[0] = fit[::-1]
    dist.broadcast_object_list(choice, src=0)
    sound = first_sound(choice[0])
    path, damaged = sound.path, "".join(f"; damaged: {line}" for line in sound.damaged)
    if path is None:
        raise TrainingHalted(
            f"{rewind}. There is no checkpoint before it to go back to{damaged}; save more often "
            "(checkpoint.interval) or take resilience.nonfinite=skip"
        )
    balance.discard(state.chunks)
    state.take_over(path, verified=True)
    state.windows.append((max(first, state.position), last))
    if dist.get_rank() == 0:
        paths.point(folder, path.name)
    return f"{rewind}; went back to step {state.step} and leaves out {state.windows[-1]}{damaged}"


def _position(path: Path) -> int | None:
    """Where in the data a checkpoint stands; None when it is damaged."""
    try:
        extra = paths.read_extra(path)
        return int(extra["tokens"]) + int(extra.get("left_out", 0))
    except (CheckpointError, KeyError, TypeError, ValueError):
        return None  # told by rank 0 alone, which must not fail alone
