"""What goes through the ring from a device to main memory."""

from __future__ import annotations

import torch

from megatron_ext.checkpoint import staging


def test_slots_behind_each_other_hold_every_tensor_at_its_place() -> None:
    generator = torch.Generator().manual_seed(0)
    sizes = (1, 0, 700, 64, 513, 3)
    tensors = [torch.randn(size, generator=generator) for size in sizes if size]
    tensors += [torch.randn(7, 9, generator=generator).t(), torch.tensor(3, dtype=torch.int64)]
    places, total = staging.places_of(tensors)
    memory = torch.zeros(total, dtype=torch.uint8)
    slots = list(staging.by_slot(tensors, places, slot_bytes=256))
    assert len(slots) == -(-total // 256)
    for number, pieces in enumerate(slots):
        slot = memory[number * 256 :][:256]
        for piece in pieces:
            slot[piece.at : piece.at + len(piece.source)] = piece.source
    for tensor, place in zip(tensors, places, strict=True):
        assert place % staging.ALIGNMENT == 0
        found = memory[place : place + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        assert torch.equal(found, tensor)


def test_tensors_in_main_memory_are_not_copied() -> None:
    tensor = torch.arange(6).view(2, 3)
    ((path, name, (objects, tensors)),) = staging.to_host(
        [("p", "n", ([("o", b"1")], [("t", tensor)]))]
    )
    assert (path, name, objects) == ("p", "n", [("o", b"1")])
    assert tensors[0][0] == "t"
    assert tensors[0][1] is tensor
