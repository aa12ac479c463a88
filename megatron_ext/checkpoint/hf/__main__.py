"""python -m megatron_ext.checkpoint.hf export CHECKPOINT OUTPUT, or import INPUT OUTPUT."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from megatron_ext.checkpoint.hf.exporting import Export, export
from megatron_ext.checkpoint.hf.importing import import_folder
from megatron_ext.checkpoint.paths import latest
from megatron_ext.errors import CheckpointError, MegatronExtError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def parser() -> argparse.ArgumentParser:
    """The command line."""
    whole = argparse.ArgumentParser(
        prog="python -m megatron_ext.checkpoint.hf",
        description="Checkpoints to and from the Hugging Face layout of Kimi K3 and Kimi Linear.",
    )
    commands = whole.add_subparsers(dest="command", required=True)
    out = commands.add_parser("export", help="one of our checkpoints to a Hugging Face folder")
    out.add_argument("source", type=Path, help="a step_* folder, or a run folder (its latest)")
    out.add_argument("--shard-gib", type=float, default=5.0, help="largest file, in GiB")
    out.add_argument(
        "--prefix", action="store_true", help="names begin with language_model., as released"
    )
    into = commands.add_parser("import", help="a Hugging Face folder to a checkpoint of ours")
    into.add_argument("source", type=Path, help="a folder with config.json and safetensors")
    for command, default in ((out, "bfloat16"), (into, None)):
        command.add_argument("output", type=Path, help="a folder that does not exist yet")
        command.add_argument(
            "--dtype",
            choices=DTYPES,
            default=default,
            help=f"of the weights (default: {default or 'as stored'})",
        )
        command.add_argument(
            "--workers", type=int, default=min(8, os.cpu_count() or 1), help="files at a time"
        )
    return whole


def main(words: Sequence[str]) -> int:
    """Run one command; the exit code is that of `megatron_ext.errors`."""
    given = parser().parse_args(words)
    dtype = DTYPES[given.dtype] if given.dtype else None
    torch.set_num_threads(1)  # files are written side by side instead
    start = time.perf_counter()
    try:
        if given.command == "export":
            assert dtype is not None
            what = Export(
                _checkpoint(given.source), dtype, int(given.shard_gib * 2**30), given.prefix
            )
            lines = export(what, given.output, workers=given.workers)
        else:
            lines = import_folder(given.source, given.output, dtype=dtype, workers=given.workers)
    except MegatronExtError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    seconds = time.perf_counter() - start
    size = sum(file.stat().st_size for file in given.output.iterdir())
    lines.append(f"{size / 1e9:.2f} GB in {seconds:.1f} s, {size / 1e6 / seconds:.0f} MB/s")
    print("\n".join([f"{given.command}ed to {given.output}", *(f"  {line}" for line in lines)]))
    return 0


def _checkpoint(path: Path) -> Path:
    if not (path / "checkpoints").is_dir():
        return path
    found = latest(path / "checkpoints")
    if found is None:
        raise CheckpointError(f"{path / 'checkpoints'}: no checkpoint there")
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
