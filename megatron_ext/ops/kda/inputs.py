"""What a KDA kernel without a fused norm and gate is given: which implementation makes it.

Shapes: B batch, T tokens, H heads, K width of a key head.
"""

# ruff: noqa: N803  (A_log is the name of the parameter in every checkpoint)
from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from megatron_ext.config.schema import Gate, KernelBackend
from megatron_ext.ops import without_memory
from megatron_ext.ops.backend import choose_backend, planned, rejection, triton_misfit
from megatron_ext.ops.kda.gate import log_decay, normalise

Prepared = tuple[Tensor, Tensor, Tensor, Tensor]


def kda_inputs(
    q: Tensor,
    k: Tensor,
    z: Tensor,
    beta_logits: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor,
    *,
    lower_bound: float,
) -> Prepared:
    """Normalised q and k, not scaled, the bounded log-decay and the write strength.

    On a GPU by our Triton kernel where it agrees with plain torch, which runs elsewhere. First
    derivatives only.

    Args:
        q, k, z: [B, T, H, K].
        beta_logits: [B, T, H].
        A_log: [H], or None for gate ``bounded_plain``.
        dt_bias: [H, K].
        lower_bound: smallest log-decay a token, in nats.

    Returns:
        q and k [B * T, H, K] in their own dtypes; log-decay [B * T, H, K] and write strength
        [B * T, H] in float32, or float64 for float64 input. All contiguous.
    """
    inputs = (q, k, z, beta_logits, A_log, dt_bias)
    if planned(q, KernelBackend.auto):
        return without_memory.kda_inputs(*inputs)
    if resolve_backend(q.device, q.dtype, width=q.shape[-1]) is KernelBackend.triton:
        from megatron_ext.ops.kda.triton import kda_inputs_triton

        return kda_inputs_triton(*inputs, lower_bound)
    return kda_inputs_dense(*inputs, lower_bound)


def kda_inputs_dense(
    q: Tensor,
    k: Tensor,
    z: Tensor,
    beta_logits: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor,
    lower_bound: float,
) -> Prepared:
    """The formulas of `gate`, in plain torch."""
    gate = Gate.bounded_plain if A_log is None else Gate.bounded
    g = log_decay(z, A_log, dt_bias, gate=gate, lower_bound=lower_bound)
    made = (
        normalise(q).to(q.dtype),
        normalise(k).to(k.dtype),
        g,
        torch.sigmoid(beta_logits.to(g.dtype)),
    )
    query, key, g, beta = (x.flatten(0, 1).contiguous() for x in made)
    return query, key, g, beta


@cache
def resolve_backend(device: torch.device, dtype: torch.dtype, *, width: int) -> KernelBackend:
    """``triton`` on a GPU where it passes its check, else ``dense``. See `ops.backend`."""
    return choose_backend(
        KernelBackend.auto,
        operator="kda_inputs",
        device=device,
        misfit=triton_misfit(device, dtype),
        check=lambda: _rejection(device, dtype, width),
        require=False,
    )


@cache
def _rejection(device: torch.device, dtype: torch.dtype, width: int) -> str | None:
    from megatron_ext.ops.kda.triton import kda_inputs_triton

    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int, like: torch.dtype = dtype) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, like)

    inputs = [draw(2, 300, 3, width) for _ in range(3)]
    inputs += [draw(2, 300, 3), *(draw(3, *more, like=torch.float32) for more in ((), (width,)))]

    def by(run: Callable[..., Prepared]) -> Callable[..., Tensor]:
        return lambda *x: together(run(*x, -5.0))

    return rejection(
        "kda_inputs", fast=by(kda_inputs_triton), slow=by(kda_inputs_dense), inputs=inputs
    )


def together(made: Prepared) -> Tensor:
    """All four in one tensor [4, B * T, H, K], for comparisons, of numbers of about one size."""
    q, k, g, beta = made
    root = q.shape[-1] ** 0.5
    return torch.stack([q * root, k * root, g, beta[..., None].expand_as(g)]).to(g.dtype)
