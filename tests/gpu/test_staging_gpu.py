"""Copies for the writer of checkpoints equal the device's tensors, whatever training does next."""

from __future__ import annotations

import io

import pytest
import torch

from megatron_ext.checkpoint.staging import host_copies

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


def test_copies_are_whole_and_do_not_follow_the_device() -> None:
    torch.manual_seed(0)
    tensors = [
        torch.randn(3_000_001, device="cuda", dtype=torch.bfloat16),
        torch.randn(11, 70_001, device="cuda").t(),
        torch.tensor(5, device="cuda"),
        torch.randn(4),
        torch.zeros(0, 3, device="cuda"),
        torch.randn(1 << 20, device="cuda")[17:90],
    ]
    expected = [tensor.cpu().clone() for tensor in tensors]
    copies = host_copies(tensors, slot_bytes=1 << 16)
    for tensor in tensors:
        tensor.zero_()
    for number, (copy, right) in enumerate(zip(copies, expected, strict=True)):
        assert copy.device.type == "cpu"
        assert copy.shape == right.shape
        if number != 3:  # in main memory already: handed back itself
            assert torch.equal(copy, right)
        file = io.BytesIO()
        torch.save(copy, file)
        assert len(file.getvalue()) < copy.nbytes + 4096  # and not what lies beside it
