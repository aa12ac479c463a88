"""From one of our checkpoints to a folder in the Hugging Face layout."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from megatron_ext.checkpoint import paths, verify
from megatron_ext.checkpoint.hf import work
from megatron_ext.checkpoint.hf.blobs import Planned, write_safetensors
from megatron_ext.checkpoint.hf.distributed import StoredTensors
from megatron_ext.checkpoint.hf.folder import INDEX, PREFIX, SHOWN, check_finite
from megatron_ext.checkpoint.hf.keymap import Piece, our_shapes, pieces
from megatron_ext.config.hf_write import write_architecture
from megatron_ext.config.layout import expert_layers
from megatron_ext.config.schema import BalanceRule
from megatron_ext.errors import CheckpointError
from megatron_ext.model.same import recall

MAIN_WEIGHT = "optimizer.state.fp32_param."
BALANCER = ".router.balancer."
# Read and written at once.
STRIDE = 64 << 20


@dataclass(frozen=True)
class Export:
    """What to make of what.

    Attributes:
        checkpoint: a `step_*` folder of ours, saved at any layout.
        dtype: of the weights; what is float32 in every precision stays so.
        shard_bytes: largest size of a file, unless one tensor alone is larger.
        prefix: put `language_model.` before the names, as the multimodal release has it.
    """

    checkpoint: Path
    dtype: torch.dtype
    shard_bytes: int = 5 << 30
    prefix: bool = False


def export(what: Export, output: Path, *, workers: int) -> list[str]:
    """Write the folder; what was done, as lines.

    Raises:
        CheckpointError: the checkpoint is incomplete, damaged, or not of the model that it says it
            is, a number is not finite, or the output cannot be written. No output then.
        ConfigError: the layout cannot express the model.
    """
    extra = paths.read_extra(what.checkpoint)
    if "model" not in extra or "vocab_size" not in extra:
        raise CheckpointError(f"{what.checkpoint}: does not say of which model it is")
    damaged = verify.local_problems(what.checkpoint, workers=workers)
    if damaged:
        raise CheckpointError(verify.explain(what.checkpoint, damaged))
    config, vocab_size = recall(extra), int(extra["vocab_size"])
    name = str(what.dtype).removeprefix("torch.")
    rule = config.balance.rule
    architecture = write_architecture(
        config.model, config.residual, vocab_size=vocab_size, dtype=name, rule=rule
    )
    found = pieces(config.model, config.residual, vocab_size=vocab_size)
    stored = StoredTensors(what.checkpoint)
    left_out = _account(stored, found)
    keys = _keys_to_read(stored, found, what.dtype)
    shards = _shards(found, what)
    names = [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
    plan = {"export": str(what.checkpoint.absolute()), "step": extra["step"], "dtype": name}
    plan |= {"shard_bytes": what.shard_bytes, "prefix": what.prefix, "tensors": len(found)}
    with work.output_folder(output, plan) as folder:
        jobs = [
            work.Job(name, sum(p.nbytes for _, p in shard), _writer(stored, keys, shard))
            for name, shard in zip(names, shards, strict=True)
        ]
        work.run(jobs, folder, workers=workers, label="export")
        total = sum(job.nbytes for job in jobs)
        weight_map = {p.name: n for n, shard in zip(names, shards, strict=True) for _, p in shard}
        _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
        # Last: a folder without it is no model.
        _write_json(folder / "config.json", architecture)
    padded = sum(piece.padding > 0 for piece in found)
    unused = [piece.name for piece in found if piece.key is None]
    lines = [f"{len(found)} tensors in {len(shards)} files from {len(our_shapes(found))} of ours"]
    lines += [f"{padded} A_log padded with zeros"] if padded else []
    lines += [f"filled in, since no model uses them: {', '.join(unused)}"] if unused else []
    lines += [f"left out: {', '.join(left_out)}"] if left_out else []
    if not expert_layers(config.model):
        return lines
    if "balance.rule" not in extra["model"]:
        lines.append(
            "balance.rule: not in the checkpoint; it should not be microbatch_mean, reject"
        )
    if rule is BalanceRule.threshold:
        lines.append("balance.rule=threshold: experts are chosen as in evaluation, not in training")
    return lines


def _account(stored: StoredTensors, found: list[Piece]) -> list[str]:
    """Compare names and shapes of all tensors; what of ours has no place in the layout."""
    wanted, problems, left_out = our_shapes(found), [], []
    for key, shape in wanted.items():
        if key not in stored.tensors:
            problems.append(f"{key}: missing in the checkpoint")
        elif stored.tensors[key].shape != shape:
            there = list(stored.tensors[key].shape)
            problems.append(f"{key}: has shape {there}, must be {list(shape)}")
    for key in stored.tensors.keys() - wanted.keys():
        if BALANCER in key and not key.startswith("optimizer."):
            left_out.append(key)  # what a balancing rule remembers between steps, beside the bias
        elif not key.startswith("optimizer."):
            problems.append(f"{key}: has no place in the layout")
    if problems:
        lines = "\n".join(f"  {line}" for line in sorted(problems)[:SHOWN])
        more = "\n  ... and more" if len(problems) > SHOWN else ""
        raise CheckpointError(f"{stored.folder}: is not of this architecture:\n{lines}{more}")
    return sorted(left_out)


def _keys_to_read(stored: StoredTensors, found: list[Piece], dtype: torch.dtype) -> dict[str, str]:
    """Where each of our tensors is read: float32 comes from the main weights, where there are."""
    keys = {}
    for key in our_shapes(found):
        main = MAIN_WEIGHT + key
        keys[key] = main if dtype == torch.float32 and main in stored.tensors else key
    return keys


def _shards(found: list[Piece], what: Export) -> list[list[tuple[Piece, Planned]]]:
    shards: list[list[tuple[Piece, Planned]]] = []
    size = 0
    for piece in found:
        dtype = torch.float32 if piece.float32 else what.dtype
        name = PREFIX + piece.name if what.prefix else piece.name
        planned = Planned(name, dtype, piece.shape)
        if not shards or size + planned.nbytes > what.shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append((piece, planned))
        size += planned.nbytes
    return shards


def _writer(
    stored: StoredTensors, keys: dict[str, str], shard: list[tuple[Piece, Planned]]
) -> Callable[[BinaryIO, Callable[[int], None]], None]:
    def write(stream: BinaryIO, advance: Callable[[int], None]) -> None:
        parts = (_parts(stored, keys, piece, planned, advance) for piece, planned in shard)
        write_safetensors(stream, [planned for _, planned in shard], parts)

    return write


def _parts(
    stored: StoredTensors,
    keys: dict[str, str],
    piece: Piece,
    planned: Planned,
    advance: Callable[[int], None],
) -> Iterator[Tensor]:
    """A tensor of theirs, some rows at a time."""
    if piece.key is None:
        yield torch.full(piece.shape, piece.fill, dtype=planned.dtype)
        advance(planned.nbytes)
        return
    for start, stop in strides(piece.inner, planned.dtype):
        rows = stored.read(keys[piece.key], piece.index, start, stop)
        check_finite(rows, f"{stored.folder}: {piece.key}")
        rows = rows.to(planned.dtype)
        yield rows
        advance(rows.nbytes)
    if piece.padding:
        yield torch.zeros(piece.padding, dtype=planned.dtype)


def strides(shape: tuple[int, ...], dtype: torch.dtype) -> Iterable[tuple[int, int]]:
    """Ranges of rows of at most `STRIDE` bytes, or of one row."""
    row = prod(shape[1:]) * dtype.itemsize
    step = max(1, STRIDE // max(row, 1))
    return ((i, min(i + step, shape[0])) for i in range(0, shape[0], step))


def _write_json(file: Path, content: object) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
