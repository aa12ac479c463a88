"""Import and export of a random checkpoint: python bench/hugging_face.py [--layers N] [--json FILE]

A folder in the Hugging Face layout with layers like those of Kimi K3 at a quarter of its widths
(`--layers 22` is 20 GB in bfloat16) is imported and exported again, each by the command in a
process of its own. `of a copy` compares with the disk's own speed: reading the same bytes and
writing them elsewhere in as many threads, with nothing done in between. Before each reading the
system is told to forget the files, and all that is written is on the disk in the end. `peak GiB` is
the memory of the process at its largest, libraries included.

It needs three times the checkpoint's size in `--folder`.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from math import prod
from pathlib import Path

import torch
from common import GIB, Row, finish
from torch import Tensor

from megatron_ext.checkpoint.hf.blobs import Planned, flush, safetensors_blobs, write_safetensors
from megatron_ext.checkpoint.hf.exporting import STRIDE, strides
from megatron_ext.checkpoint.hf.folder import SINGLE
from megatron_ext.checkpoint.hf.keymap import Piece, pieces
from megatron_ext.config.compose import compose
from megatron_ext.config.hf_write import write_architecture
from megatron_ext.config.schema import RunConfig
from megatron_ext.data.manifest import write_json

# The command, then the largest memory of its process; getrusage may tell that of its parent.
PROBE = """
import sys
from megatron_ext.checkpoint.hf.__main__ import main
code = main(sys.argv[1:])
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
sys.exit(code)
"""
QUARTER = [
    *("model.hidden_size=1792", "model.feed_forward_size=8448", "model.vocab_size=40960"),
    *("model.kda.num_heads=24", "model.mla.num_heads=24", "model.mla.q_lora_rank=384"),
    *("model.experts.latent_size=896", "model.experts.feed_forward_size=768"),
    *("model.experts.shared_feed_forward_size=1536", "model.experts.top_k=4"),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--layers", type=int, default=2, help="the first has no experts")
    parser.add_argument("--experts", type=int, default=224, help="of a layer")
    parser.add_argument("--workers", type=int, default=min(8, os.cpu_count() or 1))
    parser.add_argument(
        "--folder", type=Path, help="where to write; default: that of temporary files"
    )
    parser.add_argument("--json", type=Path, help="write the numbers there")
    given = parser.parse_args()
    words = [f"model.num_layers={given.layers}", f"model.experts.num_experts={given.experts}"]
    config = compose(["run.mode=plan", "model=k3", "residual=block", *QUARTER, *words])
    with tempfile.TemporaryDirectory(dir=given.folder) as name:
        folder = Path(name)
        size = make(config, folder / "in")
        rows: list[Row] = [{"what": "copy", **copy(folder / "in", folder / "copy", given.workers)}]
        for what, source, output in (("import", "in", "ours"), ("export", "ours", "out")):
            rows.append(
                {"what": what, **convert(what, folder / source, folder / output, given.workers)}
            )
        failures = [] if same(folder / "in", folder / "out") else ["other weights came back"]
    for row in rows:
        row["MB/s"] = size / 1e6 / row["seconds"]
        row["of a copy"] = rows[0]["seconds"] / row["seconds"]
    title = f"{size / 1e9:.1f} GB in bfloat16, {given.workers} workers"
    finish({title: rows}, failures=failures, json_file=given.json)


def make(config: RunConfig, folder: Path) -> int:
    """Write the folder; its size in bytes. All weights are of one buffer of normal numbers."""
    folder.mkdir()
    vocab_size = int(str(config.model.vocab_size))
    found = pieces(config.model, config.residual, vocab_size=vocab_size)
    planned = [
        Planned(p.name, torch.float32 if p.float32 else torch.bfloat16, p.shape) for p in found
    ]
    noise = torch.randn(STRIDE // 8, generator=torch.Generator().manual_seed(0)) * 0.02
    shades = {dtype: noise.to(dtype) for dtype in (torch.float32, torch.bfloat16)}

    def parts(piece: Piece, plan: Planned) -> Iterator[Tensor]:
        live = prod(piece.shape) - piece.padding
        if piece.key is None:
            yield torch.full(piece.shape, piece.fill, dtype=plan.dtype)
            return
        for start, stop in strides((live,), plan.dtype):
            count, shade = stop - start, shades[plan.dtype]
            yield shade[:count] if count <= len(shade) else shade.repeat(4)[:count]
        yield torch.zeros(piece.padding, dtype=plan.dtype)

    with (folder / SINGLE).open("wb") as stream:
        both = zip(found, planned, strict=True)
        write_safetensors(stream, planned, (parts(*pair) for pair in both))
        flush(stream)
    architecture = write_architecture(
        config.model, config.residual, vocab_size=vocab_size, dtype="bfloat16"
    )
    write_json(folder / "config.json", architecture)
    return (folder / SINGLE).stat().st_size


def forget(folder: Path) -> None:
    """The next reading comes from the disk."""
    for file in folder.iterdir():
        with file.open("rb") as stream:
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def copy(source: Path, target: Path, workers: int) -> Row:
    """Read and write everything, and remove the copy."""
    forget(source)
    target.mkdir()
    spans = [
        (file, start)
        for file in source.iterdir()
        for start in range(0, file.stat().st_size, STRIDE)
    ]

    def move(span: tuple[Path, int]) -> None:
        file, start = span
        with file.open("rb", buffering=0) as stream:
            stream.seek(start)
            data = stream.read(STRIDE)
        with (target / f"{file.name}.{start}").open("wb") as stream:
            stream.write(data)
            flush(stream)

    begin, work = time.perf_counter(), time.process_time()
    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(move, spans))
    seconds, work = time.perf_counter() - begin, time.process_time() - work
    for file in target.iterdir():
        file.unlink()
    return {"seconds": seconds, "CPU seconds": work}


def convert(what: str, source: Path, output: Path, workers: int) -> Row:
    """Run the command; its time, and the most memory that it had."""
    forget(source)
    words = [what, str(source), str(output), "--workers", str(workers)]
    begin, before = time.perf_counter(), os.times()
    done = subprocess.run([sys.executable, "-c", PROBE, *words], stdout=subprocess.PIPE, text=True)
    seconds, after = time.perf_counter() - begin, os.times()
    if done.returncode:
        sys.exit(f"{what}: failed")
    work = sum(after[2:4]) - sum(before[2:4])
    memory = 1024 * int(done.stdout.split()[-1]) / GIB
    return {"seconds": seconds, "CPU seconds": work, "peak GiB": memory}


def same(source: Path, output: Path) -> bool:
    """Whether both folders hold the same tensors."""
    there, back = (
        {
            name: blob
            for file in folder.glob("*.safetensors")
            for name, blob in safetensors_blobs(file).items()
        }
        for folder in (source, output)
    )
    return there.keys() == back.keys() and all(
        torch.equal(there[name].read(), back[name].read()) for name in there
    )


if __name__ == "__main__":
    main()
