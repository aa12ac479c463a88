"""The packed form of the release: 4-bit numbers under powers of two, to bfloat16 exactly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_ext.checkpoint.hf.distributed import StoredTensors
from megatron_ext.checkpoint.hf.importing import import_folder
from megatron_ext.checkpoint.hf.mxfp4 import unpack
from megatron_ext.errors import CheckpointError
from tests.support import hf_configs
from tests.support.reference_config import parse_config
from tests.support.reference_files import random_tensors, write_folder

QUANTIZATION = {
    "quant_method": "compressed-tensors",
    "format": "mxfp4-pack-quantized",
    "config_groups": {
        "group_0": {
            "weights": {"num_bits": 4, "type": "float", "group_size": 32, "symmetric": True}
        }
    },
}
# Widths of experts that 32 divides.
FIELDS = hf_configs.kimi_k3(routed_expert_hidden_size=96, moe_intermediate_size=64)


def value(code: int) -> float:
    """E2M1, from its definition: sign, two bits of exponent with bias 1, one bit of mantissa."""
    sign, exponent, mantissa = code >> 3, (code >> 1) & 3, code & 1
    size = mantissa / 2 if exponent == 0 else 2.0 ** (exponent - 1) * (1 + mantissa / 2)
    return -size if sign else size


def test_all_numbers_at_all_scales_by_definition() -> None:
    codes = torch.arange(16).repeat(256, 2)  # every number under every scale, [256, 32]
    packed = (codes[:, 0::2] | codes[:, 1::2] << 4).to(torch.uint8)
    scale = torch.arange(256, dtype=torch.uint8)[:, None]
    got = unpack(packed, scale)
    assert got.dtype is torch.bfloat16
    for row in range(255):
        for column in range(32):
            want = value(column % 16) * 2.0 ** (row - 127)
            # 6 * 2^127 and 4 * 2^127 are beyond bfloat16 (and float32), and become infinite.
            want = want if abs(want) < 2.0**128 else want * float("inf")
            assert got[row, column].item() == want
    assert got[255].isnan().all()


def test_the_lower_half_of_a_byte_comes_first_and_groups_have_their_own_scale() -> None:
    packed = torch.zeros(1, 32, dtype=torch.uint8)
    packed[0, 0], packed[0, 16] = 0x21, 0xF4  # 0.5 and 1; 2 and -6
    got = unpack(packed, torch.tensor([[128, 126]], dtype=torch.uint8))
    assert got[0, :2].tolist() == [1.0, 2.0]
    assert got[0, 32:34].tolist() == [1.0, -3.0]


@pytest.mark.parametrize(
    ("packed", "scale", "message"),
    [((2, 16), (2, 2), "needs a scale"), ((2, 24), (2, 1), "needs a scale"), ((2, 16), (1, 1), "")],
)
def test_shapes_that_do_not_belong_together_are_refused(
    packed: tuple[int, ...], scale: tuple[int, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        unpack(torch.zeros(packed, dtype=torch.uint8), torch.zeros(scale, dtype=torch.uint8))


def packed_folder(folder: Path, quantization: dict[str, Any] | None) -> dict[str, Tensor]:
    """Random, with routed experts packed; returns what they stand for."""
    tensors = random_tensors(parse_config(FIELDS))
    generator = torch.Generator().manual_seed(3)
    meant = {}
    for name in [name for name in tensors if ".experts." in name]:
        rows, width = tensors.pop(name).shape
        shapes = {"packed": (rows, width // 2), "scale": (rows, width // 32)}
        for part, shape in shapes.items():
            low, high = (0, 256) if part == "packed" else (110, 130)
            made = torch.randint(low, high, shape, generator=generator).to(torch.uint8)
            tensors[f"{name}_{part}"] = made
        meant[name] = unpack(tensors[f"{name}_packed"], tensors[f"{name}_scale"])
    fields = FIELDS if quantization is None else FIELDS | {"quantization_config": quantization}
    write_folder(folder, fields, tensors)
    return meant


def test_packed_experts_become_bfloat16(tmp_path: Path) -> None:
    meant = packed_folder(tmp_path / "in", QUANTIZATION)
    lines = import_folder(tmp_path / "in", tmp_path / "out", dtype=torch.bfloat16, workers=2)
    assert f"{4 * 7 * 3} matrices unpacked from MXFP4" in lines
    stored = StoredTensors(tmp_path / "out")
    for layer in range(1, 5):
        for expert in range(7):
            at, ours = f"model.layers.{layer}.block_sparse_moe.experts.{expert}.", "mlp.experts."
            ours = f"decoder.layers.{layer}.mlp.experts."
            for name, key, index, rows in (
                ("w1", "fc1", (expert, 0), 64),
                ("w3", "fc1", (expert, 1), 64),
                ("w2", "fc2", (expert,), 96),
            ):
                got = stored.read(ours + key, index, 0, rows)
                assert torch.equal(got, meant[f"{at}{name}.weight"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (None, "quantization_config: missing"),
        ({"format": "nvfp4-pack-quantized"}, "format='nvfp4-pack-quantized': must be mxfp4"),
        (
            {"config_groups": {"a": {"weights": {"group_size": 16}}}},
            r"config_groups.a.weights.group_size=16: must be 32",
        ),
    ],
)
def test_other_packed_forms_are_refused(
    tmp_path: Path, change: dict[str, Any] | None, message: str
) -> None:
    packed_folder(tmp_path / "in", None if change is None else QUANTIZATION | change)
    with pytest.raises(CheckpointError, match=message):
        import_folder(tmp_path / "in", tmp_path / "out", dtype=None, workers=1)
