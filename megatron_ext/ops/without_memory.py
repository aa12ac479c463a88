"""What the fused GPU kernels allocate, for tensors that have a shape and no memory (device meta).

A plan runs the real modules on the meta device and counts bytes. Kernels written in Triton or CUDA
cannot run there; each has a stand-in here that makes the same results, keeps the same tensors for
the backward pass, and takes the same space meanwhile. Kept tensors follow fla-core 0.6 and torch
2.11; the space that a kernel takes meanwhile (`scratch`) is an estimate.

Shapes: B batch, T tokens, H heads, K and V widths of key and value, C tokens of a chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

KDA_CHUNK = 64  # C
KDA_BLOCK = 16  # of the triangular inverse


class KeptByKda(Enum):
    """Whose choice it is what KDA keeps where its backward pass computes nothing again."""

    fla = "fla"
    ours = "ours"  # no values but the new ones


class _StandIn(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        made: Sequence[Tensor],
        kept: Sequence[Tensor | None],
        scratch: int,
        *inputs: Tensor | None,
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(*kept)
        ctx.scratch = scratch
        ctx.inputs = [None if x is None else (x.shape, x.dtype) for x in inputs]
        return tuple(x.view_as(x) for x in made)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        scratch = _bytes(ctx.scratch)
        found = [
            None if x is None else torch.empty(x[0], dtype=x[1], device="meta") for x in ctx.inputs
        ]
        del scratch
        return None, None, None, *found


def _bytes(count: int) -> Tensor:
    return torch.empty(count, dtype=torch.uint8, device="meta")


def _run(
    made: Sequence[Tensor],
    inputs: Sequence[Tensor | None],
    *,
    kept: Sequence[Tensor | None],
    scratch: int = 0,
) -> tuple[Tensor, ...]:
    """The results `made` as a function of `inputs`.

    Args:
        kept: tensors that stay until the backward pass.
        scratch: bytes that are taken during the backward pass.
    """
    return _StandIn.apply(made, kept, scratch, *inputs)  # type: ignore[no-any-return, no-untyped-call]  # torch's own lacks types


def kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    z: Tensor,
    beta: Tensor,
    A_log: Tensor,  # noqa: N803  (the name of the parameter in every checkpoint)
    dt_bias: Tensor,
    initial_state: Tensor | None,
    *,
    documents: int,
    output_final_state: bool,
    keep: KeptByKda | None = None,
) -> tuple[Tensor, Tensor | None]:
    """fla's `chunk_kda` with norm, gate and sigmoid inside; arguments as it takes them.

    Of queries and keys it keeps the normed ones, with one number a row, and two products [T, C] a
    head. States of chunks and the rest are made anew in the backward pass, or kept: sums of decays
    in float32, states [chunks, H, K, V], three factors of the width of a key and the new values;
    by fla also the values and what they are before the states are taken off.

    Args:
        keep: who keeps; None: nobody.
    """
    batch, tokens, heads, key = q.shape
    value, rows, size = v.shape[-1], batch * tokens * heads, v.element_size()
    states = size * key * value // KDA_CHUNK  # of a token
    scratch = _bytes(rows * (4 * (key + KDA_BLOCK) + size * (3 * key + value) + states))
    made = [torch.empty_like(v)]
    if output_final_state:
        made.append(q.new_empty(documents, heads, key, value, dtype=torch.float32))
    normed = torch.empty_like(q), torch.empty_like(k)
    norms = [q.new_empty(q.shape[:3], dtype=torch.float32) for _ in normed]
    products = [q.new_empty(*q.shape[:3], KDA_CHUNK) for _ in range(2)]
    del scratch
    kept = (*normed, *norms, *products, z, beta, A_log, dt_bias, initial_state)
    # Sums of decays and gradients in float32, what the forward pass threw away, states twice.
    backward = rows * (4 * (4 * key + KDA_CHUNK) + size * (5 * key + 3 * value) + 2 * states)
    if keep is None:
        kept = (*kept, v)
    else:
        # Documents end in chunks that are not full: at most.
        chunks = batch * -(-tokens // KDA_CHUNK) + documents - batch
        factors = [torch.empty_like(q) for _ in range(3)]
        decay = torch.empty_like(q, dtype=torch.float32)
        new, before = torch.empty_like(v), q.new_empty(chunks, heads, key, value)
        kept = (*kept, decay, *factors, new, before)
        if keep is KeptByKda.fla:
            kept = (*kept, v, torch.empty_like(v))
        backward -= rows * (4 * key + size * (3 * key + 2 * value) + states)
    out, *final = _run(
        made, (q, k, v, z, beta, A_log, dt_bias, initial_state), kept=kept, scratch=backward
    )
    return out, final[0] if final else None


def kda_inputs(
    q: Tensor,
    k: Tensor,
    z: Tensor,
    beta: Tensor,
    A_log: Tensor | None,  # noqa: N803  (the name of the parameter in every checkpoint)
    dt_bias: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Our kernel before a KDA without a norm and gate: keeps its inputs."""
    shape = (q.shape[0] * q.shape[1], *q.shape[2:])
    made = [x.new_empty(shape) for x in (q, k)]
    made += [q.new_empty(size, dtype=torch.float32) for size in (shape, shape[:2])]
    inputs = (q, k, z, beta, A_log, dt_bias)
    query, key, g, strength = _run(made, inputs, kept=inputs)
    return query, key, g, strength


def cudnn_kda(
    inputs: list[Tensor], offsets: Tensor, state: Tensor | None, *, output_final_state: bool
) -> tuple[Tensor, Tensor | None]:
    """cuDNN's operator of q, k, v, g, beta [B * T, H, ...] in `ops.kda.cudnn`: keeps its inputs.

    Its workspace, taken in the backward pass, is from the frontend's source (1.32): six vectors a
    token and head, and of each chunk two states, one transition and one product.
    """
    q, _, v, _, _ = inputs
    (tokens, heads, key), documents = q.shape, len(offsets) - 1
    made = [torch.empty_like(v)]
    if output_final_state:
        made.append(q.new_empty(documents, heads, key, key, dtype=torch.float32))
    chunks = heads * (tokens // KDA_CHUNK + documents)
    scratch = 12 * q.numel() + chunks * (2 * (KDA_CHUNK**2 + 3 * key * key) + 4 * key)
    given = (*inputs, state)
    out, *final = _run(made, given, kept=(*given, offsets), scratch=scratch)
    return out, final[0] if final else None


class _Loop(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, fp8: bool) -> Tensor:
        ctx.fp8 = fp8
        # FP8 has rows and weights, each of them twice, and of the rows one stays.
        scratch = _bytes(x.numel() + 2 * weight.numel()) if fp8 else None
        ctx.save_for_backward(torch.empty_like(x, dtype=torch.uint8) if fp8 else x, weight)
        out = torch.mm(x, _of_experts(weight[0].T))
        del scratch
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad, d_x, d_weight = grads[0].contiguous(), None, None
        gradients = _bytes(2 * grad.numel()) if ctx.fp8 else None
        if ctx.needs_input_grad[0]:
            weights = _bytes(2 * weight.numel()) if ctx.fp8 else None
            d_x = torch.mm(grad, _of_experts(weight[0]))
            del weights
        if ctx.needs_input_grad[1]:
            experts, width, latent = weight.shape
            each, rest = divmod(x.shape[0], experts)
            one = weight.flatten()[:1]
            d_weight = torch.mm(
                _of_experts(one.expand(experts * width, each)), one.expand(each, latent)
            ).view_as(weight)
            if rest:
                target = _of_experts(d_weight[0])
                torch.mm(one.expand(width, rest), one.expand(rest, latent), out=target)
        del gradients
        return d_x, d_weight, None


def loop_linear(x: Tensor, weight: Tensor, *, fp8: bool = False) -> Tensor:
    """x [M, K], weight [E, N, K] to [M, N] as `grouped_mlp.loop.LoopLinear` makes it, in a few
    operators for all experts: a plan of 896 in 92 layers takes minutes otherwise.

    A product's flops do not depend on how its rows are spread.

    Args:
        fp8: as `grouped_mlp.fp8.Fp8Linear` makes it, without its rows of zeros.
    """
    out: Tensor = _Loop.apply(x, weight, fp8)  # type: ignore[no-untyped-call]  # torch's
    return out


def _of_experts(x: Tensor) -> Tensor:
    x.of_experts = True  # type: ignore[attr-defined]  # a mark for `is_of_experts`
    return x


def is_of_experts(*tensors: object) -> bool:
    """Whether one of these marks a matrix product as one of experts."""
    return any(getattr(x, "of_experts", False) for x in tensors)


def short_conv(x: Tensor, weight: Tensor) -> Tensor:
    """fla's causal convolution with SiLU: keeps its input, computes the sum before SiLU again."""
    return _run([torch.empty_like(x)], (x, weight), kept=(x, weight))[0]


def situ_glu(gate: Tensor, up: Tensor | None, scale: Tensor | None) -> Tensor:
    """Our SiTU-GLU kernel: keeps its inputs. Without `up` the gate holds both branches."""
    width = gate.shape[-1] // (2 if up is None else 1)
    inputs = (gate, up, scale)
    return _run([gate.new_empty(*gate.shape[:-1], width)], inputs, kept=inputs)[0]


def head_gate(o: Tensor, gate: Tensor, weight: Tensor | None) -> Tensor:
    """Our gated norm of [B, T, H, V], to [T, B, H * V]: keeps its inputs."""
    inputs = (o, gate, weight)
    return _run([torch.empty_like(gate, dtype=o.dtype)], inputs, kept=inputs)[0]


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Fused attention of [B, H, T, K] to [B, H, T, V]: keeps inputs, result and a number a row.

    Its backward pass sums the queries' gradient in float32.
    """
    out = q.new_empty(*q.shape[:3], v.shape[-1])
    sums = q.new_empty(q.shape[:3], dtype=torch.float32)
    scratch = 4 * (q.numel() + sums.numel())
    return _run([out], (q, k, v), kept=(q, k, v, out, sums), scratch=scratch)[0]


def route(logits: Tensor, top_k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Our routing of logits [T, E]: keeps each token's k experts and their scores."""
    experts = logits.new_empty(len(logits), top_k, dtype=torch.int16)
    kept = (experts, torch.empty_like(experts, dtype=logits.dtype))
    weights = _run([torch.empty_like(logits)], (logits,), kept=kept)[0]
    map = torch.empty_like(logits, dtype=torch.bool)
    return weights, map, torch.empty_like(logits), logits.new_empty(len(logits))


def depth_mix(sources: Sequence[Tensor], *vectors: Tensor | None, numbers: int) -> Tensor:
    """A mix over depth that keeps the sources and so many float32 numbers a token and source."""
    first, inputs = sources[0], (*sources, *vectors)
    shape = (len(sources), *first.shape[:-1])
    more = [first.new_empty(shape, dtype=torch.float32) for _ in range(numbers)]
    return _run([torch.empty_like(first)], inputs, kept=(*inputs, *more))[0]


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """Our norm, or torch's fused one: keeps its input and one number a row."""
    row = x.new_empty(x.shape[:-1], dtype=torch.float32)
    return _run([torch.empty_like(x)], (x, weight), kept=(x, weight, row))[0]


def rms_norm_residual(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The same, with its input as a second result."""
    row = x.new_empty(x.shape[:-1], dtype=torch.float32)
    out, same = _run([torch.empty_like(x), x], (x, weight), kept=(x, weight, row))
    return out, same
