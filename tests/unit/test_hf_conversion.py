"""Conversion to and from the Hugging Face layout, without a model: every number, or an error."""

from __future__ import annotations

import json
import shutil
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_ext.checkpoint import checksums
from megatron_ext.checkpoint.hf import importing
from megatron_ext.checkpoint.hf.__main__ import main
from megatron_ext.checkpoint.hf.distributed import Stored, StoredTensors, write_index
from megatron_ext.checkpoint.hf.exporting import Export, export
from megatron_ext.checkpoint.hf.importing import import_folder
from megatron_ext.checkpoint.hf.keymap import our_shapes, pieces
from megatron_ext.config.compose import from_keys
from megatron_ext.config.hf_read import read_architecture
from megatron_ext.errors import CheckpointError
from tests.support import hf_configs
from tests.support.reference_config import parse_config
from tests.support.reference_files import (
    expected_shapes,
    read_folder,
    write_random_folder,
)

KINDS = {
    "k3": hf_configs.kimi_k3(),
    "linear": hf_configs.kimi_linear(),
    "odd": hf_configs.kimi_k3(
        attn_res_block_size=3,
        latent_moe_use_norm=False,
        num_shared_experts=0,
        q_lora_rank=None,
        linear_attn_config={"num_heads": 9, "use_full_rank_gate": False},
    ),
}
F32 = torch.float32


def tensors_of(folder: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= load_file(file)
    return found


def same_bits(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype, name
        assert a[name].shape == b[name].shape, name
        assert torch.equal(a[name].view(torch.uint8), b[name].view(torch.uint8)), name


@pytest.mark.parametrize("kind", KINDS)
def test_names_and_shapes_are_the_published_ones(tmp_path: Path, kind: str) -> None:
    """The table against a second one, written from the published names alone."""
    fields = KINDS[kind]
    (tmp_path / "config.json").write_text(json.dumps(fields))
    config = from_keys(read_architecture(tmp_path / "config.json"))
    found = pieces(config.model, config.residual, vocab_size=fields["vocab_size"])
    assert {piece.name: piece.shape for piece in found} == expected_shapes(parse_config(fields))
    # Each number of ours is in exactly one tensor of theirs.
    numbers: dict[str, int] = {}
    for piece in found:
        if piece.key is not None:
            size = torch.Size(piece.inner).numel()
            numbers[piece.key] = numbers.get(piece.key, 0) + size
    assert numbers == {k: torch.Size(s).numel() for k, s in our_shapes(found).items()}


def test_the_published_k3_has_the_published_number_of_tensors(tmp_path: Path) -> None:
    """497,220 in its index: routed experts count twice, packed and scales; 168 are not of the
    language model (27 layers of 6 and 6 others)."""
    (tmp_path / "config.json").write_text(json.dumps(hf_configs.published_k3()))
    config = from_keys(read_architecture(tmp_path / "config.json"))
    found = pieces(config.model, config.residual, vocab_size=163840)
    routed = sum(".experts." in piece.name for piece in found)
    assert routed == 92 * 896 * 3
    assert len(found) + routed + 27 * 6 + 6 == 497_220


@pytest.mark.parametrize("kind", KINDS)
def test_import_then_export_gives_the_folder_back(tmp_path: Path, kind: str) -> None:
    write_random_folder(tmp_path / "in", KINDS[kind])
    import_folder(tmp_path / "in", tmp_path / "ours", dtype=None, workers=2)
    what = Export(tmp_path / "ours", F32, shard_bytes=20_000)
    export(what, tmp_path / "out", workers=2)
    given, got = tensors_of(tmp_path / "in"), tensors_of(tmp_path / "out")
    if kind != "linear":  # what the model never uses comes back as its initial values
        for name, value in (("norm", 1.0), ("proj", 0.0)):
            unused = f"model.layers.0.self_attention_res_{name}.weight"
            given[unused] = torch.full_like(given[unused], value)
    same_bits(given, got)
    read_folder(tmp_path / "out")  # index, configuration and all: as another reader sees it
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 3
    import_folder(tmp_path / "out", tmp_path / "again", dtype=None, workers=1)
    export(Export(tmp_path / "again", F32, 20_000), tmp_path / "twice", workers=1)
    for file in (tmp_path / "out").iterdir():
        assert file.read_bytes() == (tmp_path / "twice" / file.name).read_bytes(), file.name


def test_bfloat16_rounds_weights_and_nothing_that_must_stay_exact(tmp_path: Path) -> None:
    write_random_folder(tmp_path / "in", KINDS["k3"])
    import_folder(tmp_path / "in", tmp_path / "ours", dtype=None, workers=1)
    export(Export(tmp_path / "ours", torch.bfloat16), tmp_path / "out", workers=1)
    given, got = tensors_of(tmp_path / "in"), tensors_of(tmp_path / "out")
    exact = ("A_log", "dt_bias", "conv1d.weight", "e_score_correction_bias", "res_norm.weight")
    for name, tensor in got.items():
        if "layers.0.self_attention_res" in name:
            continue
        wide = name.endswith(exact) or "res_proj" in name or "res_norm" in name
        assert torch.equal(tensor, given[name] if wide else given[name].bfloat16()), name
    import_folder(tmp_path / "out", tmp_path / "bf16", dtype=None, workers=1)
    stored = StoredTensors(tmp_path / "bf16").tensors
    assert stored["decoder.layers.0.self_attention.qkv.weight"].dtype is torch.bfloat16
    assert stored["decoder.layers.1.mlp.router.balancer.bias"].dtype is F32
    export(Export(tmp_path / "bf16", torch.bfloat16), tmp_path / "twice", workers=1)
    same_bits(got, tensors_of(tmp_path / "twice"))


def test_float32_is_read_from_main_weights_and_other_state_is_accounted_for(tmp_path: Path) -> None:
    write_random_folder(tmp_path / "in", KINDS["k3"])
    import_folder(tmp_path / "in", tmp_path / "ours", dtype=torch.bfloat16, workers=1)
    source = StoredTensors(tmp_path / "ours")
    state = {
        name: source.read(name, (), 0, stored.shape[0]) for name, stored in source.tensors.items()
    }
    key = "decoder.final_layernorm.weight"
    main = torch.linspace(0.1, 0.9, 28)
    state |= {f"optimizer.state.fp32_param.{key}": main, f"optimizer.state.exp_avg.{key}": main}
    state["decoder.layers.1.mlp.router.balancer.average"] = torch.ones(7)
    resave(tmp_path / "ours", state)
    for dtype, expected in ((F32, main), (torch.bfloat16, state[key])):
        lines = export(Export(tmp_path / "ours", dtype), tmp_path / str(dtype), workers=1)
        assert torch.equal(tensors_of(tmp_path / str(dtype))["model.norm.weight"], expected)
        assert any("left out: decoder.layers.1.mlp.router.balancer.average" in x for x in lines)
    state["decoder.layers.1.stranger"] = torch.ones(3)
    del state["output_layer.weight"]
    state[key] = torch.ones(27)
    resave(tmp_path / "ours", state)
    with pytest.raises(CheckpointError) as refused:
        export(Export(tmp_path / "ours", F32), tmp_path / "no", workers=1)
    for line in (
        "stranger: has no place",
        f"{key}: has shape [27]",
        "output_layer.weight: missing",
    ):
        assert line in str(refused.value)
    assert not (tmp_path / "no").exists()


def resave(folder: Path, state: dict[str, Tensor]) -> None:
    """By torch itself, in place of what is there."""
    for file in folder.glob("*.distcp"):
        file.unlink()
    dcp.save(state, checkpoint_id=folder, no_dist=True)
    checksums.write(folder, {})


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_part_of_a_tensor_is_read_from_any_chunks(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Chunks as layouts cut them: every axis into equal or unequal parts."""
    folder = tmp_path_factory.mktemp("chunks")
    shape = tuple(data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=4)))
    whole = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    cuts = [
        sorted({0, size, *data.draw(st.sets(st.integers(1, size), max_size=2))}) for size in shape
    ]
    boxes: list[list[tuple[int, int]]] = [[]]
    for cut in cuts:
        boxes = [[*box, pair] for box in boxes for pair in pairwise(cut)]
    chunks = []
    with (folder / "a.distcp").open("wb") as stream:
        for box in boxes:
            part = whole[tuple(slice(a, b) for a, b in box)]
            place = importing.append(stream, part)
            low, sizes = tuple(a for a, _ in box), tuple(part.shape)
            chunks.append(importing.Chunk(low, sizes, "a.distcp", *place))
    write_index(folder, {"x": Stored(shape, F32, tuple(chunks))})
    lead = data.draw(st.integers(0, len(shape) - 1))
    index = tuple(data.draw(st.integers(0, size - 1)) for size in shape[:lead])
    start = data.draw(st.integers(0, shape[lead] - 1))
    stop = data.draw(st.integers(start + 1, shape[lead]))
    got = StoredTensors(folder).read("x", index, start, stop)
    assert torch.equal(got, whole[index][start:stop])
    loaded = {"x": torch.empty(shape)}  # as torch's own reader sees it
    dcp.load(loaded, checkpoint_id=folder, no_dist=True)
    assert torch.equal(loaded["x"], whole)


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_random_folder(tmp_path / "in", KINDS["k3"])
    run = tmp_path / "run" / "checkpoints"
    run.mkdir(parents=True)
    assert main(["import", f"{tmp_path}/in", f"{run}/step_00000000"]) == 0
    text = capsys.readouterr().out
    assert "212 tensors to 117 of ours in 1 files" in text
    assert "left out, since no model uses them: model.layers.0.self_attention_res_norm" in text
    words = ["export", f"{tmp_path}/run", f"{tmp_path}/out", "--dtype=float32", "--prefix"]
    assert main(words) == 0
    assert "3 A_log padded with zeros" in capsys.readouterr().out
    assert all(name.startswith("language_model.") for name in tensors_of(tmp_path / "out"))
    tower = tmp_path / "out" / "tower.safetensors"
    save_file({"vision_tower.a": torch.ones(2), "mm_projector.b": torch.ones(2)}, tower)
    index = tmp_path / "out" / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"] |= {"vision_tower.a": tower.name, "mm_projector.b": tower.name}
    index.write_text(json.dumps(content))
    assert main(["import", f"{tmp_path}/out", f"{tmp_path}/back"]) == 0
    assert "2 tensors of mm_projector, vision_tower" in capsys.readouterr().out
    assert main(["import", f"{tmp_path}/none", f"{tmp_path}/x"]) == 30
    assert "has no config.json" in capsys.readouterr().err
    shutil.rmtree(run / "step_00000000")
    assert main(["export", f"{tmp_path}/run", f"{tmp_path}/y"]) == 30
