"""Weights alone, for a run that starts from them or only reads them: from whatever they lie in."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron.core.process_groups_config import ProcessGroupCollection
from torch import nn

from megatron_ext.checkpoint.hf.loading import is_folder, load_folder
from megatron_ext.checkpoint.load import load
from megatron_ext.checkpoint.paths import find, read_extra
from megatron_ext.config.compose import from_keys
from megatron_ext.config.hf_read import read_architecture
from megatron_ext.config.schema import RunConfig
from megatron_ext.model.same import check_same, remember


def load_weights(
    config: RunConfig,
    chunks: Sequence[nn.Module],
    mesh: ProcessGroupCollection,
    *,
    tokenizer: str | None,
) -> tuple[Path, dict[str, Any]]:
    """Fill model chunks from `checkpoint.load` if given, else from the run's latest checkpoint.

    Collective over all ranks, at any layout.

    Args:
        config: `checkpoint.load` is a `step_*` folder of ours, or a Hugging Face folder.
        chunks: model chunks of this rank, DDP-wrapped or bare; call it before the optimizer's main
            weights are made, or copy them anew.
        mesh: process groups.
        tokenizer: fingerprint of the tokenizer in use; None: there is no text.

    Returns:
        What was read, and the `extra` values kept with it (`step` and `tokens` at least).

    Raises:
        CheckpointError: there is none, or it is damaged.
        ConfigError: it is of another model.
    """
    path = find(Path(str(config.run.dir)), chosen=config.checkpoint.load)
    if not is_folder(path):
        check_same(read_extra(path), config, tokenizer=tokenizer)
        return path, load(path, chunks, None, mesh)
    theirs = from_keys(read_architecture(path / "config.json"))
    check_same({"model": remember(theirs)}, config, tokenizer=tokenizer)
    load_folder(path, chunks, mesh)
    return path, {"step": 0, "tokens": 0}
