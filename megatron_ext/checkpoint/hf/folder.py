"""A folder in the Hugging Face layout: what should be in it, what is, and its numbers on demand."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_ext.checkpoint.hf import mxfp4
from megatron_ext.checkpoint.hf.blobs import Blob, safetensors_blobs
from megatron_ext.checkpoint.hf.keymap import Piece, pieces
from megatron_ext.config.compose import from_keys
from megatron_ext.config.hf_read import read_architecture
from megatron_ext.errors import CheckpointError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
PREFIX = "language_model."
SHOWN = 12
NUMBERS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Source:
    """Where a piece is: a tensor, or its packed form and the scales."""

    blob: Blob
    scale: Blob | None = None


class Folder:
    """A checked folder. Headers and indices are read at once, numbers when asked for.

    Attributes:
        config: the architecture, with defaults elsewhere.
        pieces: every tensor of it.
        others: names of tensors that are not of the language model.
        packed: how many matrices are stored as MXFP4.

    Raises:
        ConfigError: `config.json` is of a model that is not ours.
        CheckpointError: a tensor or shard is missing, left over, cut short, or not as it should be;
            all such are named, up to a dozen.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if not (path / "config.json").is_file():
            raise CheckpointError(f"{path}: has no config.json; give a folder in that layout")
        self.config = from_keys(read_architecture(path / "config.json"))
        vocab_size = self.config.model.vocab_size
        assert vocab_size is not None  # a required field
        self.pieces = pieces(self.config.model, self.config.residual, vocab_size=vocab_size)
        self._problems: list[str] = []
        blobs = self._language_model(self._blobs())
        self._sources = {piece.name: self._source(piece, blobs) for piece in self.pieces}
        self._problems += [f"{name}: no tensor of this architecture" for name in sorted(blobs)]
        self._check_quantization()
        self._raise()
        self._check_padding()
        ours = [(piece.key, piece) for piece in self.pieces if piece.key is not None]
        self._places = {(key, piece.index): piece for key, piece in ours}
        self._leads = {key: len(piece.index) for key, piece in ours}

    @property
    def packed(self) -> int:
        return sum(s is not None and s.scale is not None for s in self._sources.values())

    def dtype(self) -> torch.dtype:
        """What most of the model is stored in; packed matrices count as bfloat16."""
        found = self._sources["model.embed_tokens.weight"]
        return torch.bfloat16 if found is None else found.blob.dtype

    def read(self, piece: Piece, start: int, stop: int) -> Tensor:
        """Rows `start` to `stop` of `ours[piece.index]`, in the dtype they are stored in.

        Raises:
            CheckpointError: the file ends early, or a number is not finite.
        """
        source = self._sources[piece.name]
        assert source is not None  # the constructor would have raised
        width = prod(piece.inner[1:])
        if source.scale is None:
            rows = source.blob.read(start * width, stop * width)
        else:
            groups = width // mxfp4.GROUP
            packed = source.blob.read(start * width // 2, stop * width // 2)
            scale = source.scale.read(start * groups, stop * groups)
            rows = mxfp4.unpack(packed.view(-1, width // 2), scale.view(-1, groups))
        check_finite(rows, f"{self.path}: {piece.name}")
        return rows.view(stop - start, *piece.inner[1:])

    def read_box(
        self, key: str, low: Sequence[int], high: Sequence[int], dtype: torch.dtype
    ) -> Tensor:
        """The box from `low` to `high` of our tensor `key`, in `dtype`."""
        lead = self._leads[key]
        out = torch.empty([b - a for a, b in zip(low, high, strict=True)], dtype=dtype)
        rest = tuple(slice(a, b) for a, b in zip(low[lead + 1 :], high[lead + 1 :], strict=True))
        for index in product(*(range(a, b) for a, b in zip(low[:lead], high[:lead], strict=True))):
            rows = self.read(self._places[key, index], low[lead], high[lead])
            out[tuple(i - a for i, a in zip(index, low, strict=False))] = rows[(slice(None), *rest)]
        return out

    def _blobs(self) -> dict[str, Blob]:
        """All tensors of all shards, where the index says that they are."""
        if not (self.path / INDEX).is_file() and (self.path / SINGLE).is_file():
            return safetensors_blobs(self.path / SINGLE)
        try:
            weight_map: dict[str, str] = json.loads((self.path / INDEX).read_text())["weight_map"]
            files = sorted(set(weight_map.values()))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{self.path / INDEX}: cannot be read ({error})") from error
        found: dict[str, Blob] = {}
        for file in files:
            if Path(file).name != file:
                raise CheckpointError(f"{self.path / INDEX}: {file!r} is not the name of a file")
            blobs = safetensors_blobs(self.path / file)
            for name in blobs:
                if weight_map.get(name) != file:
                    wrong = weight_map.get(name, "in no file")
                    self._problems.append(f"{name}: is in {file}, by the index {wrong}")
            found |= blobs
        self._problems += [
            f"{name}: is not in {file}, as the index tells"
            for name, file in weight_map.items()
            if name not in found
        ]
        return found

    def _language_model(self, blobs: dict[str, Blob]) -> dict[str, Blob]:
        """Without the prefix of the multimodal release, and without its other parts."""
        self.others: list[str] = []
        if not any(name.startswith(PREFIX) for name in blobs):
            return blobs
        self.others = sorted(name for name in blobs if not name.startswith(PREFIX))
        return {n.removeprefix(PREFIX): b for n, b in blobs.items() if n.startswith(PREFIX)}

    def _source(self, piece: Piece, blobs: dict[str, Blob]) -> Source | None:
        """Takes the tensors of a piece out of `blobs`, and checks them."""
        blob = blobs.pop(piece.name, None)
        packed, scale = (blobs.pop(f"{piece.name}_{part}", None) for part in ("packed", "scale"))
        if blob is None and packed is not None and scale is not None:
            rows, width = piece.shape
            self._expect(f"{piece.name}_packed", packed, (rows, width // 2), (torch.uint8,))
            shape = (rows, width // mxfp4.GROUP)
            self._expect(f"{piece.name}_scale", scale, shape, (torch.uint8,))
            return Source(packed, scale)
        if blob is None or packed is not None or scale is not None:
            text = "missing" if blob is None else "stored twice, packed too"
            self._problems.append(f"{piece.name}: {text}")
            return None
        # Rounded, a bias of the router would send other tokens to other experts.
        exact = piece.name.endswith("e_score_correction_bias")
        self._expect(piece.name, blob, piece.shape, (torch.float32,) if exact else NUMBERS, piece)
        return Source(blob)

    def _expect(
        self,
        name: str,
        blob: Blob,
        shape: tuple[int, ...],
        dtypes: tuple[torch.dtype, ...],
        piece: Piece | None = None,
    ) -> None:
        allowed = [_without_ones(shape)]
        if piece is not None and piece.padding:
            allowed.append(_without_ones(piece.inner))  # some converters write it without padding
        if _without_ones(blob.shape) not in allowed:
            self._problems.append(f"{name}: has shape {list(blob.shape)}, must be {list(shape)}")
        elif blob.dtype not in dtypes:
            words = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            self._problems.append(f"{name}: is {blob.dtype}, must be {words}")

    def _check_quantization(self) -> None:
        if not self.packed:
            return
        whole = json.loads((self.path / "config.json").read_text())
        inner: dict[str, Any] = whole.get("text_config", whole)
        quantization = inner.get("quantization_config") or whole.get("quantization_config")
        if not isinstance(quantization, dict):
            self._problems.append("quantization_config: missing, and there are packed tensors")
        else:
            found = mxfp4.problems(quantization)
            self._problems += [f"quantization_config.{problem}" for problem in found]

    def _check_padding(self) -> None:
        for piece in self.pieces:
            source = self._sources[piece.name]
            if not piece.padding or source is None:
                continue
            live = prod(piece.inner)
            if source.blob.read(live, prod(source.blob.shape)).any():
                self._problems.append(
                    f"{piece.name}: what follows its {live} numbers is padding and must be 0, "
                    "but is not"
                )
        self._raise()

    def _raise(self) -> None:
        if self._problems:
            lines = "\n".join(f"  {line}" for line in self._problems[:SHOWN])
            more = len(self._problems) - SHOWN
            lines += f"\n  ... and {more} more" if more > 0 else ""
            raise CheckpointError(f"{self.path}: is not what its config.json describes:\n{lines}")


def check_finite(x: Tensor, name: str) -> None:
    """Raise a `CheckpointError` if a number is infinite or none."""
    if not torch.isfinite(x).all():
        count = int((~torch.isfinite(x)).sum())
        raise CheckpointError(f"{name}: {count} of {x.numel()} numbers read are not finite")


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    """[C, 1, W] and [C, W], or [1, 1, H, 1] and [H], are the same numbers."""
    return tuple(size for size in shape if size != 1)
