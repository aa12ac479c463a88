"""What one layer's experts were given in one step: the plain record that dashboards read."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass
class LayerLoad:
    """One expert layer in one optimizer step, over the valid tokens of the global batch.

    Every field is the same on all ranks and in every layout (given the same scores).

    Attributes:
        layer: 0-based number of the layer.
        top_k: experts a token.
        tokens: valid tokens.
        counts: int64 [E], tokens that each expert was given.
        bias: float32 [E], in use during the step.
        new_bias: float32 [E], from the next step on.
        predicted: float64 [E], tokens that each expert would have been given in this batch with
            the new bias and the cut-offs held; None where the rule makes no such promise.
        out_of_range: margins that fell outside the histogram (of tokens * E).
        bin_width: widest bin at the quantiles that were read; 0 without a histogram.
        dropped: slots (of tokens * top_k) that no expert took.
    """

    layer: int
    top_k: int
    tokens: int
    counts: Tensor
    bias: Tensor
    new_bias: Tensor
    predicted: Tensor | None = None
    out_of_range: int = 0
    bin_width: float = 0.0
    dropped: int = 0
