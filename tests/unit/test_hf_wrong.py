"""What is wrong with a folder or a checkpoint is named, and nothing is half-written."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import torch
from torch import Tensor

from megatron_ext.checkpoint import checksums
from megatron_ext.checkpoint.hf import exporting, importing, work
from megatron_ext.checkpoint.hf.distributed import StoredTensors
from megatron_ext.checkpoint.hf.exporting import Export, export
from megatron_ext.checkpoint.hf.importing import import_folder
from megatron_ext.errors import CheckpointError, ConfigError
from tests.support import hf_configs
from tests.support.reference_config import parse_config
from tests.support.reference_files import random_tensors, write_folder, write_random_folder

F32 = torch.float32
K3, LINEAR = hf_configs.kimi_k3(), hf_configs.kimi_linear()


def assert_nothing_left(folder: Path, name: str) -> None:
    assert [p.name for p in folder.iterdir() if name in p.name] == []


Change = Callable[[Path, dict[str, Tensor]], None]


def _set(name: str, value: Tensor | None) -> Change:
    def change(folder: Path, tensors: dict[str, Tensor]) -> None:
        if value is None:
            del tensors[name]
        else:
            tensors[name] = value

    return change


NAN = torch.full((28,), torch.nan)
BIAS = "model.layers.1.block_sparse_moe.gate.e_score_correction_bias"
WRONG: dict[str, tuple[Change, str]] = {
    "missing": (_set("model.norm.weight", None), "model.norm.weight: missing"),
    "extra": (_set("model.layers.0.x.weight", NAN), "model.layers.0.x.weight: no tensor of this"),
    "shape": (
        _set("model.norm.weight", NAN[:27]),
        r"norm.weight: has shape \[27\], must be \[28\]",
    ),
    "finite": (_set("model.norm.weight", NAN), "model.norm.weight: 28 of 28 numbers"),
    "dtype": (_set("model.norm.weight", NAN.int()), "model.norm.weight: is torch.int32, must be"),
    "bias": (_set(BIAS, torch.zeros(7).bfloat16()), f"{BIAS}: is torch.bfloat16, must be float32"),
    "padding": (
        _set("model.layers.0.self_attn.A_log", torch.ones(8)),
        "layers.0.self_attn.A_log: what follows its 5 numbers is padding",
    ),
    "twice": (
        _set("model.norm.weight_packed", torch.zeros(28, dtype=torch.uint8)),
        "model.norm.weight: stored twice",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_tensors_are_named_and_nothing_is_written(tmp_path: Path, name: str) -> None:
    change, message = WRONG[name]
    tensors = random_tensors(parse_config(K3))
    change(tmp_path, tensors)
    write_folder(tmp_path / "in", K3, tensors)
    with pytest.raises(CheckpointError, match=message):
        import_folder(tmp_path / "in", tmp_path / "out", dtype=None, workers=2)
    assert_nothing_left(tmp_path, "out")


def _truncate(folder: Path) -> None:
    file = folder / "model-00002-of-00002.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


def _edit_index(edit: Callable[[dict[str, str]], None]) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        file = folder / "model.safetensors.index.json"
        content = json.loads(file.read_text())
        edit(content["weight_map"])
        file.write_text(json.dumps(content))

    return change


OTHER_SHARD = {"model.norm.weight": "model-00001-of-00002.safetensors"}
BROKEN: dict[str, tuple[Callable[[Path], None], str]] = {
    "truncated": (_truncate, "00002-of-00002.safetensors: has .* bytes, not the"),
    "no_header": (
        lambda f: (f / "model-00001-of-00002.safetensors").write_bytes(b"12"),
        "00001-of-00002.safetensors: not a readable safetensors file",
    ),
    "no_shard": (
        lambda f: (f / "model-00001-of-00002.safetensors").unlink(),
        "00001-of-00002.safetensors: not a readable safetensors file",
    ),
    "wrong_shard": (_edit_index(lambda m: m.update(OTHER_SHARD)), "norm.weight: is in model-00002"),
    "not_indexed": (
        _edit_index(lambda m: m.pop("model.norm.weight")),
        "norm.weight: is in model-00002-of-00002.safetensors, by the index in no file",
    ),
    "not_there": (
        _edit_index(lambda m: m.update(ghost="model-00001-of-00002.safetensors")),
        "ghost: is not in model-00001-of-00002.safetensors, as the index tells",
    ),
    "outside": (_edit_index(lambda m: m.update(a="../a.safetensors")), "is not the name of a file"),
    "no_index": (lambda f: (f / "model.safetensors.index.json").unlink(), "cannot be read"),
    "no_config": (lambda f: (f / "config.json").unlink(), "has no config.json"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_folders_are_refused_before_anything_is_written(tmp_path: Path, name: str) -> None:
    change, message = BROKEN[name]
    write_random_folder(tmp_path / "in", LINEAR)
    change(tmp_path / "in")
    with pytest.raises(CheckpointError, match=message):
        import_folder(tmp_path / "in", tmp_path / "out", dtype=None, workers=1)
    assert_nothing_left(tmp_path, "out")


def test_a_damaged_checkpoint_of_ours_is_refused(tmp_path: Path) -> None:
    write_random_folder(tmp_path / "in", LINEAR)
    import_folder(tmp_path / "in", tmp_path / "ours", dtype=None, workers=1)
    (file,) = (tmp_path / "ours").glob("*.distcp")
    whole = file.read_bytes()
    file.write_bytes(b"\0" * len(whole))
    with pytest.raises(CheckpointError, match=r"distcp: expected .* with CRC-32 .*, found"):
        export(Export(tmp_path / "ours", F32), tmp_path / "out", workers=1)
    # As before there were checksums.
    (tmp_path / "ours" / "checksums.json").unlink()
    extra = (tmp_path / "ours" / "extra.json").read_text()
    (tmp_path / "ours" / "extra.json").write_text(extra.replace('"format": 2', '"format": 1'))
    file.write_bytes(whole[:-1])
    with pytest.raises(CheckpointError, match=r"has .* bytes, not the"):
        export(Export(tmp_path / "ours", F32), tmp_path / "out", workers=1)
    file.write_bytes(b"\0" * len(whole))
    with pytest.raises(CheckpointError, match=r"word_embeddings\.weight is damaged"):
        export(Export(tmp_path / "ours", F32), tmp_path / "out", workers=1)
    assert_nothing_left(tmp_path, "out")
    (tmp_path / "ours" / "metadata.json").unlink()
    with pytest.raises(CheckpointError, match="not a complete checkpoint"):
        export(Export(tmp_path / "ours", F32), tmp_path / "out", workers=1)


def _trained_with(folder: Path, **rule: str | None) -> None:
    """As if the run that wrote the checkpoint had had this rule; None: it did not say."""
    extra = json.loads((folder / "extra.json").read_text())
    changed = {f"balance.{key}": value for key, value in rule.items()}
    extra["model"] = {k: v for k, v in (extra["model"] | changed).items() if v is not None}
    (folder / "extra.json").write_text(json.dumps(extra))
    checksums.write(folder, {})


def test_a_model_that_the_export_would_route_otherwise_is_refused(tmp_path: Path) -> None:
    write_random_folder(tmp_path / "in", LINEAR)
    import_folder(tmp_path / "in", tmp_path / "ours", dtype=None, workers=1)
    for rule, what in (("microbatch_mean", r"logit \+ bias"), ("reject", "rejecting tokens")):
        _trained_with(tmp_path / "ours", rule=rule)
        with pytest.raises(ConfigError, match=rf"balance\.rule={rule}: .*{what}.*no field"):
            export(Export(tmp_path / "ours", F32), tmp_path / "out", workers=1)
    assert_nothing_left(tmp_path, "out")
    for rule, line in (
        ("sign", ""),
        ("threshold", "balance.rule=threshold: experts are chosen as in evaluation"),
        (None, "balance.rule: not in the checkpoint"),
    ):
        _trained_with(tmp_path / "ours", rule=rule)
        lines = export(Export(tmp_path / "ours", F32), tmp_path / str(rule), workers=1)
        assert [x[: len(line)] for x in lines if "balance.rule" in x] == ([line] if line else [])


def test_an_interrupted_conversion_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importing, "FILE_BYTES", 20_000)
    write_random_folder(tmp_path / "in", K3)
    made: list[str] = []
    write = work._write

    def interrupted(job: work.Job, *rest: Any) -> None:
        if len(made) == 2:
            raise KeyboardInterrupt
        write(job, *rest)
        made.append(job.name)

    monkeypatch.setattr(work, "_write", interrupted)
    with pytest.raises(KeyboardInterrupt):
        import_folder(tmp_path / "in", tmp_path / "out", dtype=None, workers=1)
    assert not (tmp_path / "out").exists()
    with pytest.raises(CheckpointError, match="left of another conversion"):
        import_folder(tmp_path / "in", tmp_path / "out", dtype=torch.bfloat16, workers=1)
    monkeypatch.setattr(
        work, "_write", lambda job, *rest: (made.append(job.name), write(job, *rest))
    )
    import_folder(tmp_path / "in", tmp_path / "out", dtype=None, workers=2)
    assert len(made) == len(set(made)) > 4  # none twice
    monkeypatch.undo()
    import_folder(tmp_path / "in", tmp_path / "whole", dtype=None, workers=1)
    for key, stored in StoredTensors(tmp_path / "whole").tensors.items():
        rows = (key, (), 0, stored.shape[0])
        assert torch.equal(
            StoredTensors(tmp_path / "out").read(*rows),
            StoredTensors(tmp_path / "whole").read(*rows),
        )
    assert_nothing_left(tmp_path, "partial")
    with pytest.raises(CheckpointError, match="exists already"):
        import_folder(tmp_path / "in", tmp_path / "out", dtype=None, workers=2)


def test_a_model_that_the_layout_cannot_say_is_not_exported(tmp_path: Path) -> None:
    write_random_folder(tmp_path / "in", LINEAR)
    import_folder(tmp_path / "in", tmp_path / "ours", dtype=None, workers=1)
    extra = json.loads((tmp_path / "ours" / "extra.json").read_text())
    extra["model"]["model.kda.gate"] = "bounded_plain"
    (tmp_path / "ours" / "extra.json").write_text(json.dumps(extra))
    checksums.write(tmp_path / "ours", {})
    with pytest.raises(ConfigError, match=r"kda\.gate=bounded_plain"):
        export(Export(tmp_path / "ours", F32), tmp_path / "out", workers=1)


def test_a_full_disk_keeps_what_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_random_folder(tmp_path / "in", K3)
    import_folder(tmp_path / "in", tmp_path / "ours", dtype=None, workers=1)

    def full(stream: BinaryIO, *rest: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(exporting, "write_safetensors", full)
    with pytest.raises(CheckpointError, match=r"No space left.*the same command then goes"):
        export(Export(tmp_path / "ours", F32), tmp_path / "out", workers=2)
    assert not (tmp_path / "out").exists()
    monkeypatch.undo()
    export(Export(tmp_path / "ours", F32), tmp_path / "out", workers=2)
    assert_nothing_left(tmp_path, "partial")
