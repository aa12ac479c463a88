"""From a folder in the Hugging Face layout to one of our checkpoints, which any layout reads."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import torch

from megatron_ext.checkpoint import checksums, paths
from megatron_ext.checkpoint.checksums import ChecksumStream, Entry
from megatron_ext.checkpoint.hf import work
from megatron_ext.checkpoint.hf.distributed import Chunk, Stored, append, write_index
from megatron_ext.checkpoint.hf.folder import INDEX, SINGLE, Folder
from megatron_ext.checkpoint.hf.keymap import our_shapes
from megatron_ext.model.same import remember

# Of a chunk, which is held in memory, and of a file.
CHUNK_BYTES = 128 << 20
FILE_BYTES = 2 << 30


@dataclass(frozen=True)
class Box:
    """A part of one of our tensors that is stored as one chunk."""

    key: str
    dtype: torch.dtype
    low: tuple[int, ...]
    high: tuple[int, ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(b - a for a, b in zip(self.low, self.high, strict=True))

    @property
    def nbytes(self) -> int:
        return prod(self.sizes) * self.dtype.itemsize


def import_folder(
    source: Path, output: Path, *, dtype: torch.dtype | None, workers: int
) -> list[str]:
    """Write the checkpoint; what was done, as lines. It holds weights and the balancer's biases.

    Args:
        source: the folder.
        output: the checkpoint, a folder that does not exist.
        dtype: of the weights; None: as stored. What is float32 in every precision becomes so.
        workers: files written at a time; each takes some hundred MB of memory.

    Raises:
        CheckpointError: the folder is not what its `config.json` describes, a number is not finite,
            or the output cannot be written. No output then.
        ConfigError: `config.json` is of a model that is not ours.
    """
    folder = Folder(source)
    weights = dtype or folder.dtype()
    shapes = our_shapes(folder.pieces)
    dtypes = {
        piece.key: torch.float32 if piece.float32 else weights
        for piece in folder.pieces
        if piece.key is not None
    }
    boxes = [box for key, shape in shapes.items() for box in _boxes(key, shape, dtypes[key])]
    files = _files(boxes)
    index = source / INDEX if (source / INDEX).is_file() else source / SINGLE
    plan = {"import": str(source.absolute()), "changed": index.stat().st_mtime_ns}
    plan |= {"dtype": str(weights), "files": len(files)}
    with work.output_folder(output, plan) as target:
        jobs = [
            work.Job(f"__0_{i}.distcp", sum(box.nbytes for box in file), _writer(folder, file))
            for i, file in enumerate(files)
        ]
        notes = work.run(jobs, target, workers=workers, label="import")
        written = {job.name: Entry(*note["written"]) for job, note in zip(jobs, notes, strict=True)}
        chunks: dict[str, list[Chunk]] = {key: [] for key in shapes}
        for job, file, note in zip(jobs, files, notes, strict=True):
            for box, (start, length) in zip(file, note["places"], strict=True):
                chunks[box.key].append(Chunk(box.low, box.sizes, job.name, start, length))
        tensors = {k: Stored(shapes[k], dtypes[k], tuple(parts)) for k, parts in chunks.items()}
        (target / paths.EXTRA).write_text(json.dumps(_extra(folder), indent=1, sort_keys=True))
        write_index(target, tensors)
        checksums.write(target, written, leave_out=[work.PLAN])
    unused = [piece.name for piece in folder.pieces if piece.key is None]
    lines = [f"{len(folder.pieces)} tensors to {len(shapes)} of ours in {len(files)} files"]
    lines += [f"{folder.packed} matrices unpacked from MXFP4"] if folder.packed else []
    lines += [f"left out, since no model uses them: {', '.join(unused)}"] if unused else []
    if folder.others:
        parts = sorted({name.split(".")[0] for name in folder.others})
        lines.append(
            f"left out, not of the language model: {len(folder.others)} tensors of "
            f"{', '.join(parts)}"
        )
    return lines


def _boxes(key: str, shape: tuple[int, ...], dtype: torch.dtype) -> list[Box]:
    """Along the first axis: as many rows, experts or parts as fit into a chunk, at least one."""
    row = prod(shape[1:]) * dtype.itemsize
    step = max(1, CHUNK_BYTES // row)
    return [
        Box(key, dtype, (i, *(0 for _ in shape[1:])), (min(i + step, shape[0]), *shape[1:]))
        for i in range(0, shape[0], step)
    ]


def _files(boxes: list[Box]) -> list[list[Box]]:
    files: list[list[Box]] = []
    size = 0
    for box in boxes:
        if not files or size + box.nbytes > FILE_BYTES:
            files.append([])
            size = 0
        files[-1].append(box)
        size += box.nbytes
    return files


def _writer(
    folder: Folder, boxes: list[Box]
) -> Callable[[BinaryIO, Callable[[int], None]], dict[str, Any]]:
    def write(file: BinaryIO, advance: Callable[[int], None]) -> dict[str, Any]:
        stream, places = ChecksumStream(file), []
        for box in boxes:
            part = folder.read_box(box.key, box.low, box.high, box.dtype)
            places.append(append(stream, part))
            advance(box.nbytes)
        return {"places": places, "written": [stream.entry.size, stream.entry.crc32]}

    return write


def _extra(folder: Folder) -> dict[str, Any]:
    """As a training run writes it, at step 0 and without an optimizer."""
    sizes = ("world_size", "virtual_pipeline", "tensor", "pipeline", "context", "data", "expert")
    ours = {
        "format": paths.FORMAT,
        "step": 0,
        "optimizer_step": 0,
        "layout": dict.fromkeys((*sizes, "expert_tensor"), 1),
        "megatron_core": version("megatron-core"),
    }
    return {
        "step": 0,
        "tokens": 0,
        "run_id": "",
        "model": remember(folder.config),
        "vocab_size": folder.config.model.vocab_size,
        "imported_from": str(folder.path.absolute()),
        paths.RESERVED: ours,
    }
