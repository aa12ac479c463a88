"""One micro-batch on its device: what the model reads, the losses it gives, and their sums.

Shapes: b sequences of a micro-batch, s tokens a sequence of this rank's part, n groups of tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_ext.data.batches import MicroBatch
from megatron_ext.layers.output_head import losses_of
from megatron_ext.parallel.context import ContextDocuments, pack_documents
from megatron_ext.parallel.runtime import to_device
from megatron_ext.train.losses import one_hot, sum_losses
from megatron_ext.train.share import Share


@dataclass(frozen=True)
class ModelInputs:
    """What a model chunk is given of a micro-batch.

    Attributes:
        tokens, labels: integer [b, s], or [1, b * s] where documents are isolated.
        padding: bool, as tokens, True for padding; None where there is none.
        packing: bounds of isolated documents; else None.
    """

    tokens: Tensor
    labels: Tensor
    padding: Tensor | None
    packing: ContextDocuments | None


@dataclass(frozen=True)
class TrainInputs:
    """A micro-batch of training or evaluation.

    Attributes:
        model: what the model reads.
        mask: float32 [b, s], 1 where a token counts.
        members: bool [b * s, n], the groups whose losses are summed.
    """

    model: ModelInputs
    mask: Tensor
    members: Tensor


def model_inputs(
    batch: MicroBatch, model: Any, *, device: torch.device, share: Share
) -> ModelInputs:
    """This rank's part of a micro-batch, copied to its device.

    Args:
        batch: the part.
        model: the chunk that will read it.
    """
    tokens, labels = (_copy(array, device) for array in (batch.tokens, batch.labels))
    packing = None
    if batch.cu_seqlens is not None:
        tokens, labels = tokens.reshape(1, -1), labels.reshape(1, -1)
        packing = pack_documents(torch.from_numpy(batch.cu_seqlens), group=share.context)
    return ModelInputs(tokens, labels, share.padding_mask(batch, model, device=device), packing)


def train_inputs(
    batch: MicroBatch,
    model: Any,
    *,
    device: torch.device,
    sources: int,
    buckets: list[int],
    share: Share,
) -> TrainInputs:
    """`model_inputs` with what the losses are summed by.

    Args:
        sources: number of data sources.
        buckets: tokens at which the buckets of positions begin.
    """
    mask, source, position = (
        _copy(array, device) for array in (batch.loss_mask, batch.source, batch.position)
    )
    starts = _copy(np.array(buckets[1:], np.int32), device)
    bucket = torch.bucketize(position, starts, right=True)
    members = one_hot(source, sources, bucket, len(buckets))
    return TrainInputs(model_inputs(batch, model, device=device, share=share), mask, members)


def token_losses(
    inputs: ModelInputs, model: Any, *, loss_chunk_tokens: int | None = None
) -> Tensor:
    """A micro-batch through a model chunk.

    Returns:
        Of the last chunk the losses in nats [b, s], or [1, b * s] where documents are isolated; of
        the others their hidden states.
    """
    output: Tensor = model(
        input_ids=inputs.tokens,
        position_ids=None,
        attention_mask=None,
        labels=inputs.labels,
        packed_seq_params=inputs.packing,
        padding_mask=inputs.padding,
        output_processor=losses_of,
        output_processor_context=loss_chunk_tokens,
    )
    return output


def forward(
    feed: Iterator[TrainInputs], model: Any, *, loss_chunk_tokens: int | None = None
) -> tuple[Tensor, Any]:
    """One micro-batch through a model chunk, in the form that megatron-core's schedules call.

    Returns:
        The chunk's output (losses [b, s] in the last one) and the function that sums them.
    """
    inputs = next(feed)
    output = token_losses(inputs.model, model, loss_chunk_tokens=loss_chunk_tokens)
    return output, partial(sum_losses, mask=inputs.mask, members=inputs.members)


def _copy(array: np.ndarray, device: torch.device) -> Tensor:
    return to_device(torch.from_numpy(array), device)
