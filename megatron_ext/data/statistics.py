"""What a global batch is made of: documents, how many were cut, how long they are."""

from __future__ import annotations

import numpy as np

from megatron_ext.config.schema import Packing
from megatron_ext.data.packing import pack
from megatron_ext.data.stream import TokenStream


def bucket_starts(length: int, *, first: int) -> list[int]:
    """Where buckets of positions or lengths begin: 0, then `first` and its doubles below `length`.

    Only [0] where there would be one bucket, or with `first` 0.
    """
    starts = [0]
    while first and first < length:
        starts.append(first)
        first *= 2
    return starts


def batch_statistics(
    stream: TokenStream,
    *,
    start: int,
    batch_tokens: int,
    sequence_length: int,
    packing: Packing,
    buckets: list[int],
) -> dict[str, float]:
    """Metrics of the global batch at ``start`` consumed tokens; reads no token.

    Args:
        buckets: where classes of document lengths begin (`bucket_starts`).

    Returns:
        ``data/documents``, ``data/cut_documents`` and, with several buckets,
        ``data/length/<start>``.
    """
    pieces = stream.pieces(start, batch_tokens)
    lengths = pieces.length
    if packing is Packing.concat:
        ends = lengths.cumsum()
        cut = ((ends - lengths) // sequence_length != (ends - 1) // sequence_length).sum()
    else:
        rows = pack(lengths, sequence_length=sequence_length, packing=packing)
        held = np.array([piece for row in rows for piece in {item.piece for item in row}])
        cut = (np.bincount(held, minlength=lengths.size) > 1).sum()
    numbers = {"data/documents": float(lengths.size), "data/cut_documents": float(cut)}
    if len(buckets) > 1:
        place = np.searchsorted(buckets, pieces.whole, side="right") - 1
        shares = np.bincount(place, weights=lengths, minlength=len(buckets)) / batch_tokens
        numbers |= {
            f"data/length/{begin}": float(share)
            for begin, share in zip(buckets, shares, strict=True)
        }
    return numbers
