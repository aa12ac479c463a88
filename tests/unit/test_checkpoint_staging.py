"""What a save copies for its writer."""

from __future__ import annotations

import errno
import io
import mmap
import os
import threading
from types import SimpleNamespace

import pytest
import torch

from megatron_ext.checkpoint.staging import Staging


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
    staging = Staging(locked=False)
    staging.copies([torch.ones(900), torch.ones(3)])  # of a save before
    copies = staging.copies(tensors)
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


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of the memory that is taken, in the order of asking."""
    sizes: list[int] = []
    plain = mmap.mmap

    def take(number: int, size: int) -> mmap.mmap:
        sizes.append(size)
        return plain(number, size)

    monkeypatch.setattr(mmap, "mmap", take)
    return sizes


def test_memory_is_taken_once_and_no_more_than_there_is_to_copy(taken: list[int]) -> None:
    tensors = [torch.zeros(1001), torch.zeros(0), torch.zeros(60), torch.zeros(200), torch.ones(3)]
    staging = Staging(locked=False)
    staging.copies(tensors[1:2])
    assert taken == []
    staging.copies(tensors)
    assert taken == [4032 + 256 + 832 + 64]
    staging.copies(tensors)
    assert len(taken) == 1
    *_, copy = staging.copies([*tensors, torch.ones(20)])
    assert taken[1:] == [128]
    assert torch.equal(copy, torch.ones(20))


def test_reserved_memory_is_used_and_what_is_missing_is_taken(taken: list[int]) -> None:
    staging = Staging(locked=False)
    staging.reserve(0)
    staging.reserve(1024)
    tensors = [torch.full((128,), float(number)) for number in range(3)]
    copies = staging.copies(tensors[:2])
    assert taken == [1024]
    assert all(map(torch.equal, copies, tensors))
    copies = staging.copies(tensors)
    assert taken == [1024, 512]
    assert all(map(torch.equal, copies, tensors))
    staging.reserve(1 << 20)  # there is some
    assert len(taken) == 2


def test_what_cannot_be_reserved_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, sizes = mmap.mmap, iter([None, 64])

    def take(number: int, size: int) -> mmap.mmap:
        if next(sizes) is None:
            raise OSError(errno.ENOMEM, "no memory")
        return plain(number, size)

    monkeypatch.setattr(mmap, "mmap", take)
    staging = Staging(locked=False)
    staging.reserve(1 << 30)
    (copy,) = staging.copies([torch.ones(3)])
    assert torch.equal(copy, torch.ones(3))


def test_memory_is_page_locked_by_the_ranks_own_gpu_in_any_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    current = threading.local()  # as CUDA's: a new thread begins on the first
    locked: list[tuple[int, bool]] = []

    class Device:
        def __init__(self, number: int) -> None:
            self._number = number

        def __enter__(self) -> None:
            current.number = self._number

        def __exit__(self, *_: object) -> None: ...

    def register(address: int, size: int, flags: int) -> int:
        locked.append((getattr(current, "number", 0), threading.current_thread() is main))
        return 0

    main, current.number = threading.current_thread(), 3
    cudart = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=lambda address: 0)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    monkeypatch.setattr(torch.cuda, "check_error", lambda code: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: getattr(current, "number", 0))
    monkeypatch.setattr(torch.cuda, "device", Device)
    staging = Staging(locked=True)
    staging.reserve(64)
    staging._places([64, 64])
    assert locked == [(3, False), (3, True)]


def test_a_fork_reads_the_same_memory_not_a_copy() -> None:
    (copy,) = Staging(locked=False).copies([torch.arange(5, dtype=torch.uint8)])
    if not (child := os.fork()):
        right = copy.tolist() == [0, 1, 2, 3, 4]
        copy.numpy()[0] = 9
        os._exit(0 if right else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert copy.tolist() == [9, 1, 2, 3, 4]


def test_tensors_in_main_memory_are_not_copied() -> None:
    tensor = torch.arange(6).view(2, 3)
    ((path, name, (objects, tensors)),) = Staging().to_host(
        [("p", "n", ([("o", b"1")], [("t", tensor)]))]
    )
    assert (path, name, objects) == ("p", "n", [("o", b"1")])
    assert tensors[0][0] == "t"
    assert tensors[0][1] is tensor
