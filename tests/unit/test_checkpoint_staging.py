"""What a save copies for its writer."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch

from megatron_ext.checkpoint.staging import host_copies, to_host


def test_copies_are_whole_and_written_alone() -> None:
    generator = torch.Generator().manual_seed(0)
    sizes = (1, 0, 700, 64, 513, 3)
    tensors = [torch.randn(size, generator=generator) for size in sizes]
    tensors += [
        torch.randn(7, 9, generator=generator).t(),
        torch.tensor(3, dtype=torch.int64),
        torch.randn(40, generator=generator).bfloat16()[7:20],
        torch.zeros(0, 3),
    ]
    wanted = [tensor.clone() for tensor in tensors]
    copies = host_copies(tensors, pinned=False, segment_bytes=1024)  # some tensors are larger
    for tensor in tensors:
        tensor.zero_()
    for copy, right in zip(copies, wanted, strict=True):
        assert copy.dtype == right.dtype
        assert copy.shape == right.shape
        assert torch.equal(copy, right)
        assert copy.is_contiguous()
        file = io.BytesIO()
        torch.save(copy, file)
        assert len(file.getvalue()) < copy.nbytes + 4096
        assert copy.untyped_storage().nbytes() == copy.nbytes


def test_no_more_memory_is_taken_than_there_is_to_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    plain = torch.empty

    def empty(size: int, **options: Any) -> torch.Tensor:
        if options.get("dtype") is torch.uint8:
            sizes.append(size)
        return plain(size, **options)

    monkeypatch.setattr(torch, "empty", empty)
    tensors = [torch.zeros(1001), torch.zeros(0), torch.zeros(60), torch.zeros(200), torch.ones(3)]
    host_copies(tensors, pinned=False, segment_bytes=1024)
    # The large one alone; 256 + 832 bytes do not fit one piece; what is left is 832 and 64.
    assert sizes == [0, 4004, 1024, 896]


def test_tensors_in_main_memory_are_not_copied() -> None:
    tensor = torch.arange(6).view(2, 3)
    ((path, name, (objects, tensors)),) = to_host([("p", "n", ([("o", b"1")], [("t", tensor)]))])
    assert (path, name, objects) == ("p", "n", [("o", b"1")])
    assert tensors[0][0] == "t"
    assert tensors[0][1] is tensor
