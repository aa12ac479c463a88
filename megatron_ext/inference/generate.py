"""Sampling from a language model, one token at a time.

The model is a function from tokens to logits, so that the same code serves a model of any layout
with or without a cache, and is tested without one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def choose(
    logits: Tensor, *, temperature: float, top_k: int, generator: torch.Generator | None
) -> int:
    """One token from the logits of one position.

    Args:
        logits: [vocabulary], any float dtype, on any device. -inf marks a token that cannot be.
        temperature: divides the logits; 0 takes the likeliest token, the lowest id among equals.
        top_k: sample among the k likeliest; 0: among all. Tokens as likely as the k-th beyond k are
            left out, lower ids first in.
        generator: of the CPU; unused at temperature 0.

    Returns:
        The token id.

    Raises:
        ValueError: a logit is NaN, or none is finite.
    """
    # Chosen on the CPU in float64: the same seed gives the same text from a GPU's logits and from a
    # CPU's, and a cumulative sum over a large vocabulary does not round the tail away.
    scores = logits.detach().to(device="cpu", dtype=torch.float64)
    if torch.isnan(scores).any() or not torch.isfinite(scores).any():
        raise ValueError("logits: NaN or nothing finite; the model's weights or inputs are broken")
    order = torch.argsort(scores, descending=True, stable=True)
    if temperature == 0:
        return int(order[0])
    if top_k:
        order = order[:top_k]
    kept = scores[order]
    cumulative = torch.softmax((kept - kept[0]) / temperature, dim=0).cumsum(dim=0)
    threshold = torch.rand((), generator=generator, dtype=torch.float64) * cumulative[-1]
    place = int(torch.searchsorted(cumulative, threshold, right=True))
    return int(order[min(place, len(order) - 1)])


def sample(
    logits_fn: Callable[[list[int]], Tensor],
    prompt_tokens: Sequence[int],
    *,
    max_new_tokens: int,
    temperature: float,
    top_k: int,
    seed: int,
    eod: int | None,
) -> list[int]:
    """Continue a prompt.

    Args:
        logits_fn: takes all tokens so far, returns the logits of the next one, [vocabulary] (cut to
            the tokenizer's size: padding must not be sampled). Called once a new token.
        prompt_tokens: at least one token.
        max_new_tokens: most tokens to add.
        temperature: at least 0; 0 is greedy.
        top_k: at least 0; 0 is all.
        seed: same seed, same text.
        eod: the token that ends a document: the text ends before it. None: never ends early.

    Returns:
        The new tokens only, without `eod`.

    Raises:
        ValueError: an argument is out of its range.
    """
    if not prompt_tokens:
        raise ValueError("prompt_tokens: empty, at least one is needed; begin with the eod token")
    if max_new_tokens < 0 or temperature < 0 or top_k < 0:
        raise ValueError(
            f"max_new_tokens={max_new_tokens}, temperature={temperature}, top_k={top_k}: "
            "none of them may be below 0"
        )
    generator = torch.Generator(device="cpu").manual_seed(seed)
    tokens = list(prompt_tokens)
    start = len(tokens)
    for _ in range(max_new_tokens):
        token = choose(logits_fn(tokens), temperature=temperature, top_k=top_k, generator=generator)
        if token == eod:
            break
        tokens.append(token)
    return tokens[start:]
