"""Copies for the writer of checkpoints equal the device's tensors, whatever training does next."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from megatron_ext.checkpoint.save import Checkpointer
from megatron_ext.checkpoint.staging import Staging
from megatron_ext.checkpoint.state import device_bytes
from megatron_ext.config.compose import compose
from megatron_ext.parallel import runtime
from megatron_ext.train.loop import save
from megatron_ext.train.state import build_state
from megatron_ext.train.step import train_step

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


@pytest.mark.parametrize("reserved", [0, 9 << 20, 1 << 30])
def test_copies_are_whole_do_not_follow_the_device_and_are_read_in_a_fork(reserved: int) -> None:
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
    staging = Staging()
    staging.reserve(reserved)  # 9 MiB are too few
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


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_what_a_save_copies_is_known_before_the_first_update(
    tmp_path: Path, precision: str
) -> None:
    words = ["data=sample", f"run.precision={precision}", "model.kda.backend=dense"]
    words += [f"run.dir={tmp_path}"]
    config = compose(words)
    place = runtime.start(config.run)
    try:
        state = build_state(config, place)
        expected = device_bytes(state.chunks, state.optimizer, state.mesh)
        checkpointer = Checkpointer(
            tmp_path / "c", mesh=state.mesh, asynchronous=False, keep=0, keep_every=0
        )
        checkpointer.reserve(state.chunks, state.optimizer)
        train_step(state)
        save(state, checkpointer)
    finally:
        runtime.stop()
    written = sum(file.stat().st_size for file in tmp_path.rglob("*.distcp"))
    entries = 4 * len(list(state.chunks[0].parameters()))
    assert expected <= written <= expected + 4096 * entries  # a header each


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
