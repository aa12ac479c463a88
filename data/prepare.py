#!/usr/bin/env python
"""Make a prepared folder that data.sources can name. See docs/data.md.

    python data/prepare.py INPUT... --output DIR --name NAME [--tokenizer byte|PATH] [--workers N]

INPUT: files or folders with text (one document a file), .jsonl(.gz, .zst) or .parquet. The same
command goes on after an interruption.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from megatron_ext.data.prepare import OnError, PrepareOptions, Progress, prepare
from megatron_ext.errors import DataError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code (30 for a DataError)."""
    given = _parser().parse_args(arguments)
    output = Path(given.output)
    options = PrepareOptions(
        tokenizer=given.tokenizer,
        field=given.field,
        patterns=tuple(given.pattern),
        unit_bytes=max(1, int(given.shard_mib * 2**20)),
        on_error=OnError(given.on_error),
        workers=given.workers,
    )
    try:
        with _bar() as progress:
            manifest = prepare(
                [Path(path) for path in given.inputs],
                output=output,
                name=given.name or output.name,
                options=options,
                progress=progress,
                overwrite=given.overwrite,
            )
    except DataError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from the finished shards", file=sys.stderr)
        return 130
    print(
        f"{output}: source {manifest.source}, {manifest.documents:,} documents, "
        f"{manifest.tokens:,} tokens in {len(manifest.shards)} shards, {manifest.skipped} skipped, "
        f"tokenizer {manifest.tokenizer['name']} ({manifest.tokenizer['fingerprint']})"
    )
    print(f"use: data.sources='[{{name: {manifest.source}, path: {output}}}]'")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="data/prepare.py", description="Turn text into a prepared folder."
    )
    parser.add_argument("inputs", nargs="+", metavar="INPUT", help="files or folders")
    parser.add_argument("--output", required=True, metavar="DIR", help="folder to make")
    parser.add_argument("--name", help="of the source in metrics; default: the folder's")
    parser.add_argument("--tokenizer", default="byte", help="byte, tokenizer.json, tiktoken file")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--field", default="text", help="key of jsonl, column of parquet")
    parser.add_argument(
        "--pattern", action="append", default=[], help="files of a folder, e.g. '*.md'; repeatable"
    )
    parser.add_argument("--shard-mib", type=float, default=64, help="MiB of input a shard")
    parser.add_argument(
        "--on-error",
        choices=[choice.value for choice in OnError],
        default="stop",
        help="at a document that cannot be read",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace what is in the folder")
    return parser


@contextmanager
def _bar() -> Iterator[Callable[[int], Progress]]:
    """A progress bar on a terminal; elsewhere (logs, pipes) nothing but the result."""
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.progress import Progress as Bar

    console = Console(stderr=True)
    columns = (
        TextColumn("preparing"),
        BarColumn(),
        TextColumn("{task.percentage:3.0f}% {task.fields[counts]}"),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Bar(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=None, counts="")
        documents = tokens = 0

        def begin(total: int) -> Progress:
            bar.update(task, total=total)
            return step

        def step(size: int, unit_documents: int, unit_tokens: int) -> None:
            nonlocal documents, tokens
            documents += unit_documents
            tokens += unit_tokens
            counts = f"{documents:,} documents, {tokens:,} tokens"
            bar.update(task, advance=size, counts=counts)

        yield begin


if __name__ == "__main__":
    sys.exit(main())
