"""Reads the file that wandb writes offline: a LevelDB log of protobuf records."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

_BLOCK = 32 * 1024
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4


def payloads(data: bytes) -> list[bytes]:
    """Records of a LevelDB log: 32 KiB blocks; chunks: checksum (4), length (2), type (1), data."""
    found, part, place = [], b"", 7  # wandb puts a 7-byte header of its own before the first chunk
    while place + 7 <= len(data):
        room = _BLOCK - place % _BLOCK
        if room < 7:  # the rest of a block that no chunk header fits in is padding
            place += room
            continue
        _, length, kind = struct.unpack("<IHB", data[place : place + 7])
        if kind not in (_FULL, _FIRST, _MIDDLE, _LAST):
            break
        part += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (_FULL, _LAST):
            found.append(part)
            part = b""
    return found


def read(folder: Path) -> dict[str, Any]:
    """`run_id`, `project`, `config`, `history` (rows with `_step`), `exit_code` of a launch."""
    from wandb.proto.wandb_internal_pb2 import Record

    result: dict[str, Any] = {"history": [], "config": {}, "run_id": None, "exit_code": None}
    (path,) = folder.glob("run-*.wandb")
    for payload in payloads(path.read_bytes()):
        record = Record()
        record.ParseFromString(payload)
        kind = record.WhichOneof("record_type")
        if kind == "run":
            result["run_id"], result["project"] = record.run.run_id, record.run.project
            for item in record.run.config.update:
                result["config"][item.key] = json.loads(item.value_json)
        elif kind == "history":
            row = {
                item.key or "/".join(item.nested_key): json.loads(item.value_json)
                for item in record.history.item
            }
            result["history"].append({**row, "_step": record.history.step.num})
        elif kind == "exit":
            result["exit_code"] = record.exit.exit_code
    return result
