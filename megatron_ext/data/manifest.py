"""``manifest.json``: what a prepared folder holds, and the checks made when it is opened."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron_ext.data.checksum import check_blocks, check_size
from megatron_ext.data.indexed import REMEDY, ShardReader
from megatron_ext.data.tokenizers import Tokenizer
from megatron_ext.errors import DataError

FORMAT = 1
FILE = "manifest.json"
ALWAYS_VERIFIED = 64 << 20  # bytes; a smaller source is hashed in a tenth of a second at every open


@dataclass(frozen=True)
class Manifest:
    """The content of ``manifest.json``. No times and no absolute paths: same input, same bytes."""

    source: str
    tokenizer: dict[str, Any]  # name, fingerprint, vocab_size, eod
    documents: int
    tokens: int
    skipped: int  # documents left out: empty, or broken and --on-error=skip
    inputs: str  # digest of names and sizes of the input files and of the options
    shards: list[dict[str, Any]]  # name, documents, tokens, bin and idx: bytes and checksums
    format: int = FORMAT


def write_json(path: Path, content: object, *, indent: int | None = 1) -> None:
    """Write atomically and durably: the file is either the old one or the whole new one."""
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("w", encoding="utf-8") as file:
        json.dump(content, file, indent=indent)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write ``manifest.json``; its presence means that the folder is complete."""
    write_json(folder / FILE, asdict(manifest))


def read_manifest(folder: Path) -> Manifest:
    """Read it. DataError when there is none, or when it is of another format."""
    path = folder / FILE
    if not path.is_file():
        raise DataError(
            f"{path}: no such file, so this is no (finished) prepared folder. Make it, or go on "
            f"after an interruption: python data/prepare.py INPUT... --output {folder}"
        )
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content.get("format") != FORMAT:
            raise DataError(
                f"{path}: format {content.get('format')!r}, this version reads {FORMAT}. {REMEDY}"
            )
        return Manifest(**content)
    except (json.JSONDecodeError, TypeError, AttributeError) as error:
        place = f" at offset {error.pos}" if isinstance(error, json.JSONDecodeError) else ""
        raise DataError(f"{path}: damaged{place}: {error}. {REMEDY}") from error


def open_shards(
    folder: Path, *, tokenizer: Tokenizer, verify: bool = False
) -> tuple[Manifest, list[ShardReader]]:
    """Check a prepared folder and open its shards.

    Sizes and indices are always checked; the checksums of tokens for sources up to 64 MiB, or with
    ``verify``. megatron-core would notice damage only when it reads the damaged part.

    Raises:
        DataError: missing, truncated or damaged file, another tokenizer, no documents.
    """
    manifest = read_manifest(folder)
    made_with = manifest.tokenizer
    if made_with["fingerprint"] != tokenizer.fingerprint:
        raise DataError(
            f"{folder / FILE}: prepared with tokenizer {made_with['name']} "
            f"({made_with['fingerprint']}), the run uses {tokenizer.name} "
            f"({tokenizer.fingerprint}). Set data.tokenizer to that one, or prepare the text again"
        )
    if not manifest.documents:
        raise DataError(f"{folder / FILE}: no documents in this source. {REMEDY}")
    for shard in manifest.shards:
        name = str(shard["name"])
        if Path(name).name != name:
            raise DataError(
                f"{folder / FILE}: names the shard {name!r}, which is not in its folder. Do not "
                "use what somebody may have made to do harm; prepare the text again"
            )
    total = sum(int(shard["bin"]["bytes"]) for shard in manifest.shards)
    readers = []
    for shard in manifest.shards:
        for part in ("idx", "bin"):
            path = folder / f"{shard['name']}.{part}"
            check_size(path, shard[part], remedy=REMEDY)
            if verify or part == "idx" or total <= ALWAYS_VERIFIED:
                check_blocks(path, shard[part], remedy=REMEDY)
        reader = ShardReader(folder / shard["name"])
        if len(reader) != shard["documents"]:
            raise DataError(
                f"{reader.prefix}.idx: {len(reader)} documents, the manifest says "
                f"{shard['documents']}. {REMEDY}"
            )
        readers.append(reader)
    return manifest, readers
