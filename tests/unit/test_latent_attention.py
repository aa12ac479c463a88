"""Latent attention over ranks equals the formula on the whole sequence: values, gradients, memory.

Ranks are threads, in float64.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ext.ops.latent_attention import (
    LatentWidths,
    context,
    context_latent_attention,
    latent_attention_reference,
)
from megatron_ext.ops.latent_attention.blocks import Kernel, attend, attend_backward
from tests.support.memory import PeakMemory
from tests.support.threads import run_ranks

HEADS, COMPRESSED = 3, 7
WIDTHS = LatentWidths(heads=HEADS, nope=6, shared=2, value=5)
SCALE = 0.7  # large enough that probabilities differ
EXACT = {"rtol": 1e-11, "atol": 1e-12}  # float64, sums in another order


@dataclass(frozen=True)
class Case:
    """`start`: of the only document that is looked at, which goes on to the end of its rank."""

    tokens: int
    batch: int = 1
    widths: LatentWidths = WIDTHS
    block: int | None = None
    kernel: Kernel | None = None


CASES = {
    "one block": Case(24),
    "blocks that do not divide": Case(24, block=5),
    "a token a block": Case(12, block=1),
    "rows": Case(24, batch=2, block=7),
    "wide values": Case(24, widths=LatentWidths(HEADS, 4, 3, 11), block=5),
    "no shared key": Case(24, widths=LatentWidths(HEADS, 6, 0, 6), block=5),
    "plain torch": Case(24, batch=2, block=5, kernel=Kernel.tiled),
}


def problem(case: Case, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    w = case.widths
    return {
        "q": normal(case.batch, case.tokens, w.heads, w.key),
        "latent": normal(case.batch, case.tokens, COMPRESSED + w.shared),
        "weight": normal(w.heads * (w.nope + w.value), COMPRESSED) * 0.5,
        "upstream": normal(case.batch, case.tokens, w.heads, w.value),
    }


def truth(case: Case, given: dict[str, Tensor]) -> dict[str, Tensor]:
    leaves = {k: given[k].clone().requires_grad_() for k in ("q", "latent", "weight")}
    o = latent_attention_reference(
        leaves["q"], leaves["latent"], leaves["weight"], nope=case.widths.nope, scale=SCALE
    )
    grads = torch.autograd.grad(o, list(leaves.values()), given["upstream"])
    return {"o": o.detach()} | dict(zip(leaves, grads, strict=True))


def over_ranks(
    case: Case, given: dict[str, Tensor], *, ranks: int, balanced: bool = False
) -> dict[str, Tensor]:
    size = case.tokens // ranks
    firsts = [(size, rank * size) for rank in range(ranks)] if balanced else None

    def part(group: dist.ProcessGroup) -> dict[str, Tensor]:
        own = slice(group.rank() * size, (group.rank() + 1) * size)
        q = given["q"][:, own].clone().requires_grad_()
        latent = given["latent"][:, own].transpose(0, 1).clone().requires_grad_()
        weight = given["weight"].clone().requires_grad_()
        o = context_latent_attention(
            q,
            latent,
            weight,
            widths=case.widths,
            scale=SCALE,
            before=own.start,
            group=group,
            firsts=firsts,
            block_tokens=case.block,
            kernel=case.kernel,
        )
        grads = torch.autograd.grad(o, (q, latent, weight), given["upstream"][:, own])
        return {"o": o.detach(), "q": grads[0], "latent": grads[1].transpose(0, 1)} | {
            "weight": grads[2]
        }

    parts = run_ranks(ranks, part)
    found = {name: torch.cat([p[name] for p in parts], 1) for name in ("o", "q", "latent")}
    return found | {"weight": torch.stack([p["weight"] for p in parts]).sum(0)}


@pytest.mark.parametrize("balanced", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_ranks_equal_the_whole_sequence(name: str, balanced: bool) -> None:
    case = CASES[name]
    given = problem(case)
    want = truth(case, given)
    for ranks in (1, 2, 4):
        for key, got in over_ranks(case, given, ranks=ranks, balanced=balanced).items():
            torch.testing.assert_close(got, want[key], **EXACT, msg=lambda m, k=key: f"{k}: {m}")


def test_head_tail_order_gives_every_rank_the_same_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pairs of a query and a key that ranks compute, counted where blocks are."""
    case, ranks = Case(64, block=3), 4
    given, own = problem(case), threading.local()

    def counted(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, **rest: Any) -> Any:
        queries, keys = q.shape[1], k.shape[1]
        own.pairs = getattr(own, "pairs", 0)
        own.pairs += queries * (queries + 1) // 2 if causal else queries * keys
        return attend(q, k, v, causal=causal, **rest)

    monkeypatch.setattr(context, "attend", counted)

    def pairs(group: dist.ProcessGroup, *, balanced: bool) -> int:
        own.pairs = 0
        x = {name: value.chunk(ranks, 1)[group.rank()] for name, value in given.items()}
        context_latent_attention(
            x["q"],
            x["latent"].transpose(0, 1),
            given["weight"],
            widths=case.widths,
            scale=SCALE,
            before=16 * group.rank(),
            group=group,
            firsts=[(16, 16 * rank) for rank in range(ranks)] if balanced else None,
            block_tokens=case.block,
        )
        return int(own.pairs)

    mean = 64 * 65 // 2 / ranks
    uneven = run_ranks(ranks, partial(pairs, balanced=False))
    assert sum(uneven) == mean * ranks
    assert max(uneven) / mean == pytest.approx(2 - 1 / ranks, rel=0.02)
    assert run_ranks(ranks, partial(pairs, balanced=True)) == [mean] * ranks


def test_a_document_that_began_on_an_earlier_rank_sees_its_own_tokens_only() -> None:
    """Documents [0, 5), [5, 17) and [17, 24) over three ranks of 8; each rank attends for the one
    that began before it (none on the first). Gradients reach all of that document's latents."""
    case, bounds = Case(24, block=3), (0, 5, 17, 24)
    given, size = problem(case), 8
    document = torch.bucketize(torch.arange(24), torch.tensor(bounds[1:]), right=True)
    first = {0: (0, 0), 1: (5, 16), 2: (5, 17)}  # begin of the document, end on that rank
    mask = torch.zeros(24, dtype=torch.bool)
    for rank, (_, end) in first.items():
        mask[rank * size : max(end, rank * size)] = True
    leaves = {k: given[k].clone().requires_grad_() for k in ("q", "latent", "weight")}
    o = latent_attention_reference(
        *leaves.values(), nope=case.widths.nope, scale=SCALE, document=document
    )
    upstream = given["upstream"] * mask[None, :, None, None]
    want = torch.autograd.grad(o, list(leaves.values()), upstream)

    def part(group: dist.ProcessGroup) -> tuple[Tensor, Tensor, Tensor]:
        place = group.rank() * size
        begin, end = first[group.rank()]
        count = max(0, end - place)
        latent = given["latent"][:, place : place + size].transpose(0, 1).clone().requires_grad_()
        weight = given["weight"].clone().requires_grad_()
        got = context_latent_attention(
            given["q"][:, place : place + count],
            latent,
            weight,
            widths=case.widths,
            scale=SCALE,
            before=place - begin if count else 0,
            group=group,
            block_tokens=case.block,
        )
        torch.testing.assert_close(got, o[:, place : place + count], **EXACT)
        return torch.autograd.grad(
            got, (latent, weight), given["upstream"][:, place : place + count]
        )

    parts = run_ranks(3, part)
    torch.testing.assert_close(torch.cat([d for d, _ in parts]).transpose(0, 1), want[1], **EXACT)
    torch.testing.assert_close(torch.stack([w for _, w in parts]).sum(0), want[2], **EXACT)


def test_a_lost_reduce_scatter_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: every rank keeps the gradients that its own queries gave."""
    case = CASES["one block"]

    def own_share(out: Tensor, x: Tensor, group: dist.ProcessGroup) -> None:
        out.copy_(x.chunk(group.size())[group.rank()])

    monkeypatch.setattr(dist, "reduce_scatter_tensor", own_share)
    given = problem(case)
    lost = over_ranks(case, given, ranks=2)["latent"] - truth(case, given)["latent"]
    assert lost.norm() > 1e-2


@pytest.mark.parametrize("kernel", [Kernel.cpu, Kernel.tiled])
@pytest.mark.parametrize("causal", [False, True])
def test_blocks_of_float32_merge_to_rounding(kernel: Kernel, causal: bool) -> None:
    case = Case(600, block=256 if causal else 100, kernel=kernel)
    given = problem(case, torch.float32)
    want = truth(case, {k: v.double() for k, v in given.items()})
    for key, got in over_ranks(case, given, ranks=1).items():
        error = float((got.double() - want[key]).norm() / want[key].norm())
        assert error < 2e-6, (key, error)


def test_the_plain_form_equals_the_kernel() -> None:
    torch.manual_seed(0)
    q, k, v, d_o = (torch.randn(2, 300, 2, 4, dtype=torch.float64) for _ in range(4))
    for causal in (False, True):
        results = []
        for kernel in (Kernel.cpu, Kernel.tiled):
            o, lse = attend(q, k, v, scale=SCALE, causal=causal, kernel=kernel)
            grads = attend_backward(
                d_o, q, k, v, o, lse + 0.3, scale=SCALE, causal=causal, kernel=kernel
            )
            results.append((o, lse, *grads))
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b, **EXACT)


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_memory_beside_inputs_and_outputs_does_not_grow_with_length(direction: str) -> None:
    """Bytes a token beyond the block of keys and values stay those of latents, queries, outputs."""

    def peak(tokens: int) -> int:
        case = Case(tokens, block=16)
        given = problem(case, torch.float32)

        def part(group: dist.ProcessGroup) -> int:
            leaves = [given[k].clone().requires_grad_() for k in ("q", "latent", "weight")]
            leaves[1] = given["latent"].transpose(0, 1).clone().requires_grad_()
            with PeakMemory() as memory:
                o = context_latent_attention(
                    *leaves, widths=case.widths, scale=SCALE, before=0, group=group, block_tokens=16
                )
                if direction == "backward":
                    o.backward(given["upstream"])
            return memory.peak

        return run_ranks(1, part)[0]

    short, long = peak(128), peak(1024)
    widths = CASES["one block"].widths
    token = 4 * (widths.heads * (widths.key + widths.value) + COMPRESSED + widths.shared)
    # Forward: gathered latents, merged output, its copy, one block's output of all queries (twice,
    # padded). Backward: as much again, in gradients. Scores of all pairs would be 3 x 1024 x 4.
    assert (long - short) / (1024 - 128) < (4 if direction == "forward" else 8) * token
