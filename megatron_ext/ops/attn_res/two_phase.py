"""The two mixes of a layer in two phases: the sources that both read are read once.

The mixes before attention and before the feed-forward read the same finished sources, the *bank*,
and their queries are parameters. So the first phase, the mix before attention, also mixes the bank
by the query of the second; the second phase adds what was not there yet, the running sum, by the
rule of an online softmax (Kimi K3 report, 2.2; Attention Residuals, arXiv:2603.15031):

    L = log sum_j exp(s_j);  b = sum_j exp(s_j - L) v_j                over the bank
    h = (exp(L) b + exp(s_r) r) / (exp(L) + exp(s_r))                  r the running sum

Backward, the second phase gives the gradients of b and L, which lie below attention. The first
meets every source with the gradients of both mixes, and writes its gradient once. With F sources in
the bank and a running sum, in units of one such tensor: two mixes by themselves move 8 F + 10, two
phases 4 F + 17. Kept beside what two mixes keep is b, in the dtype of the sources, whatever F is.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from megatron_ext.config.schema import AttentionResidualBackend as Backend
from megatron_ext.ops import without_memory
from megatron_ext.ops.attn_res import resolve_backend
from megatron_ext.ops.attn_res.reference import (
    BankMix,
    first_phase_reference,
    second_phase_reference,
)

__all__ = ["BankMix", "first_phase", "pays", "second_phase"]

# With one source in the bank two phases move more than two mixes do, with two 25 for 26, and keep a
# tensor more; with more than nine sources the kernel's registers spill.
FEWEST, MOST = 3, 9


def pays(sources: Sequence[Tensor], *, bank_sources: int, backend: Backend) -> bool:
    """Whether the mixes of a layer are taken in two phases: where our kernel or the formula runs;
    `dense` and fla mix each time anew."""
    if bank_sources < FEWEST or len(sources) > MOST:
        return False
    return _resolved(sources[0], backend, count=len(sources)) in (Backend.triton, Backend.reference)


def _resolved(source: Tensor, backend: Backend, *, count: int) -> Backend:
    width = source.shape[-1]
    return resolve_backend(backend, source.device, dtype=source.dtype, width=width, count=count)


def first_phase(
    sources: Sequence[Tensor],
    query: Tensor,
    key_weight: Tensor,
    *,
    bank_query: Tensor,
    bank_key_weight: Tensor,
    bank_sources: int,
    eps: float,
    norm_weight: Tensor | None = None,
    backend: Backend = Backend.auto,
) -> tuple[Tensor, BankMix]:
    """`depth_mix` of the sources, and the mix of the bank for `second_phase`.

    Args:
        sources: as of `depth_mix`; the first `bank_sources` are the bank.
        query: as the next ones, of the mix that is read now; see `depth_mix`.
        bank_query: pseudo-query of the second mix [D].
        bank_key_weight: of the keys' norm of the second mix, [D].
        eps: inside the square roots, of both.
        backend: one for which `pays` is true.

    Returns:
        The mix [..., D], normed if `norm_weight` is given, and the mix of the bank.
    """
    ours = _resolved(sources[0], backend, count=len(sources)) is Backend.triton
    if ours and sources[0].device.type == "meta":
        vectors = query, key_weight, bank_query, bank_key_weight, norm_weight
        mixed, *bank = without_memory.first_phase(sources, *vectors)
        return mixed, BankMix(*bank)
    if ours:
        from megatron_ext.ops.attn_res.triton import first_phase_triton as run
    else:
        run = first_phase_reference
    return run(
        sources,
        query,
        key_weight,
        bank_query=bank_query,
        bank_key_weight=bank_key_weight,
        bank_sources=bank_sources,
        eps=eps,
        norm_weight=norm_weight,
    )


def second_phase(
    bank: BankMix,
    running: Tensor,
    query: Tensor,
    key_weight: Tensor,
    *,
    eps: float,
    norm_weight: Tensor | None = None,
    backend: Backend = Backend.auto,
) -> Tensor:
    """`depth_mix` of the bank and of one source more.

    Args:
        bank: of `first_phase`, by the same query and key weight.
        running: the source more [..., D].

    Returns:
        [..., D] in the dtype of `running`; as of `depth_mix`.
    """
    ours = _resolved(running, backend, count=2) is Backend.triton
    if ours and running.device.type == "meta":
        return without_memory.second_phase(*bank, running, query, key_weight, norm_weight)
    if ours:
        from megatron_ext.ops.attn_res.triton import second_phase_triton as run
    else:
        run = second_phase_reference
    return run(bank, running, query, key_weight, eps=eps, norm_weight=norm_weight)
