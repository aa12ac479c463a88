"""Copies for the writer of checkpoints equal the device's tensors, whatever training does next."""

from __future__ import annotations

import os

import pytest
import torch

from megatron_ext.checkpoint.staging import Staging

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


def test_copies_are_whole_do_not_follow_the_device_and_are_read_in_a_fork() -> None:
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
    staging = Staging(piece_bytes=1 << 20)  # some tensors are larger
    ((_, _, (_, found)),) = staging.to_host([("p", "n", ([], [(None, x) for x in tensors]))])
    for tensor in tensors:
        if tensor.is_cuda:
            tensor.zero_()
    copies = [copy for _, copy in found]
    assert all(copy.device.type == "cpu" for copy in copies)
    assert all(map(torch.equal, copies, expected))
    whole = [_bytes(tensor) for tensor in expected]
    # The child compares bytes: it has none of the threads that torch's own operators wait for.
    if not (child := os.fork()):
        os._exit(0 if [_bytes(copy) for copy in copies] == whole else 1)
    assert os.waitpid(child, 0)[1] == 0


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
