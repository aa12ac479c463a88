"""How the ranks of a layout share a micro-batch out: their parts of it, padding.

Shapes: b sequences of a micro-batch, L tokens of a context rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron_ext.checkpoint.state import unwrap
from megatron_ext.data.batches import MicroBatch, padded_length, part_of_rank
from megatron_ext.parallel.runtime import to_device


@dataclass(frozen=True)
class Share:
    """The ranks that share a sequence out among them.

    Attributes:
        context: context parallel ranks.
        tensor: tensor parallel ranks, where they shard sequences between layers; else None.
    """

    context: dist.ProcessGroup
    tensor: dist.ProcessGroup | None

    @property
    def multiple(self) -> int:
        """What the tokens of a context rank must divide by."""
        return 1 if self.tensor is None else self.tensor.size()

    def padded(self, length: int) -> int:
        """Tokens of a row with the padding that sharing it out needs."""
        return padded_length(length, ranks=self.context.size(), multiple=self.multiple)

    def part(self, batch: MicroBatch) -> MicroBatch:
        """This rank's part."""
        return part_of_rank(
            batch,
            rank=self.context.rank(),
            ranks=self.context.size(),
            multiple=self.multiple,
        )

    def padding_mask(
        self, batch: MicroBatch, model: Any, *, device: torch.device
    ) -> torch.Tensor | None:
        """bool [b, L] for experts, True for padding; None where there is none.

        megatron-core shards it with the sequence on the first pipeline stage only, so on the
        others it is given sharded.
        """
        if batch.padding is None:
            return None
        mask = to_device(torch.from_numpy(batch.padding), device)
        if self.tensor is not None and not unwrap(model).pre_process:
            mask = mask.chunk(self.tensor.size(), dim=1)[self.tensor.rank()]
        return mask
