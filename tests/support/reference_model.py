"""The whole published model a second time: plain torch, float64, one token after another.

It shares no code with the package and was written from the published formulas alone, so that both
can only agree by being right. Nothing here is fast: rows and documents are taken one by one, the
recurrence token by token, the experts one by one.

Shapes: T tokens of one document or row, D hidden, H heads, K and V widths of a head, E experts,
k experts of a token. Linear weights are [out, in].
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from tests.support.reference_files import read_folder

# Both low-rank norms of MLA keep the default of the released norm class whatever rms_norm_eps is.
LOW_RANK_EPS = 1e-6


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight * x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


def situ_glu(gate: Tensor, up: Tensor, beta: float, linear_beta: float) -> Tensor:
    """`[b tanh(gate/b) sigmoid(gate)] * [c tanh(up/c)]` with b = `beta`, c = `linear_beta`."""
    return (beta * (gate / beta).tanh() * gate.sigmoid()) * (
        linear_beta * (up / linear_beta).tanh()
    )


def silu_glu(gate: Tensor, up: Tensor) -> Tensor:
    return gate * gate.sigmoid() * up


def short_convolution(x: Tensor, weight: Tensor) -> Tensor:
    """Depthwise, causal over a document x [T, C], then SiLU; the last tap is the token itself."""
    tokens, width = x.shape[0], weight.shape[1]
    padded = torch.cat([x.new_zeros(width - 1, x.shape[1]), x])
    y = sum(padded[tap : tap + tokens] * weight[:, tap] for tap in range(width))
    return y * torch.sigmoid(y)


def log_decay(z: Tensor, a_log: Tensor, dt_bias: Tensor, lower: float | None) -> Tensor:
    """`lower * sigmoid(exp(A_log) (z + dt_bias))`; without a bound `-exp(A_log) softplus(...)`.

    z [T, H, K], A_log [H], dt_bias [H, K].
    """
    rate, argument = a_log.exp()[:, None], z + dt_bias
    if lower is None:
        return -rate * torch.logaddexp(argument, torch.zeros_like(argument))
    return lower * torch.sigmoid(rate * argument)


def delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """`S <- Diag(e^g) S; S <- S + beta k (v - k^T S)^T; o = S^T q` over a document, S_0 = 0.

    q, k, g [T, H, K], v [T, H, V], beta [T, H] -> [T, H, V].
    """
    state = q.new_zeros(*q.shape[1:], v.shape[-1])  # H, K, V
    outputs = []
    for q_t, k_t, v_t, g_t, beta_t in zip(q, k, v, g, beta, strict=True):
        state = g_t.exp()[:, :, None] * state
        error = v_t - torch.einsum("hk,hkv->hv", k_t, state)
        state = state + beta_t[:, None, None] * k_t[:, :, None] * error[:, None, :]
        outputs.append(torch.einsum("hk,hkv->hv", q_t, state))
    return torch.stack(outputs)


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Softmax attention of one document, scaled by the root of the whole key width."""
    scores = torch.einsum("thk,shk->hts", q, k) / math.sqrt(q.shape[-1])
    future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return torch.einsum("hts,shv->thv", scores.masked_fill(future, -torch.inf).softmax(-1), v)


def mix_sources(sources: list[Tensor], norm: Tensor, query: Tensor, eps: float) -> Tensor:
    """Softmax over depth of `query . RMSNorm(source)`; the values are the raw sources [T, D]."""
    stacked = torch.stack(sources)  # n, T, D
    logits = rms_norm(stacked, norm, eps) @ query
    return (logits.softmax(0)[:, :, None] * stacked).sum(0)


@dataclass(frozen=True)
class Route:
    """Experts of each token of a row [T, k] (ascending) and how near it was to another choice [T].

    `margins` is the lowest chosen biased score of a *free* choice minus the best one left out.
    """

    experts: Tensor
    margins: Tensor


def route(biased: Tensor, top_k: int) -> Route:
    ordered = biased.sort(dim=-1, descending=True)
    if top_k < biased.shape[-1]:
        margins = ordered.values[:, top_k - 1] - ordered.values[:, top_k]
    else:
        margins = torch.full_like(biased[:, 0], torch.inf)
    return Route(ordered.indices[:, :top_k].sort(dim=-1).values, margins)


def combine_weights(scores: Tensor, experts: Tensor, renormalize: bool, scale: float) -> Tensor:
    """Unbiased scores of the chosen [T, k]; with one expert a token they are never renormalised."""
    weights = scores.gather(1, experts)
    if renormalize and experts.shape[1] > 1:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * scale


@dataclass
class Scores:
    """What one forward says, a list entry for each row; routes by 0-indexed layer."""

    log_probabilities: list[Tensor] = field(default_factory=list)  # [T]; NaN: first of a document
    logits: list[Tensor] = field(default_factory=list)  # [T, vocabulary]
    routes: list[dict[int, Route]] = field(default_factory=list)


class ReferenceModel:
    """The model of a folder in the released layout; `tensors` are leaves with gradients.

    Args:
        folder: with `config.json`, `model.safetensors.index.json` and the shards.
        dtype: of everything that is computed.
    """

    def __init__(self, folder: Path, dtype: torch.dtype = torch.float64) -> None:
        self.config, stored = read_folder(folder)
        self.tensors = {
            name: tensor.to(dtype).requires_grad_(not name.endswith("e_score_correction_bias"))
            for name, tensor in stored.items()
        }

    def __call__(
        self,
        rows: list[list[int]],
        documents: list[list[int]] | None = None,
        routing: list[dict[int, Tensor]] | None = None,
    ) -> Scores:
        """Scores of `rows` of token ids.

        Args:
            documents: lengths of the documents of each row, adding up to it; left out: one each.
            routing: expert ids [T, k] to use instead of a free choice, by row and layer.
        """
        scores = Scores()
        for i, row in enumerate(rows):
            lengths = [len(row)] if documents is None else documents[i]
            if sum(lengths) != len(row) or min(lengths) < 1:
                raise ValueError(f"documents of row {i} add up to {sum(lengths)}, not {len(row)}")
            routes: dict[int, Route] = {}
            given = None if routing is None else routing[i]
            logits = self._row(torch.tensor(row), lengths, routes, given)
            likely = logits.log_softmax(-1)
            token = likely[:-1].gather(1, torch.tensor(row[1:], dtype=torch.int64)[:, None])
            whole = torch.cat([logits.new_full((1,), torch.nan), token[:, 0]])
            firsts = torch.tensor([0, *lengths[:-1]]).cumsum(0)
            scores.log_probabilities.append(whole.index_fill(0, firsts, torch.nan))
            scores.logits.append(logits)
            scores.routes.append(routes)
        return scores

    def _row(
        self,
        row: Tensor,
        lengths: list[int],
        routes: dict[int, Route],
        given: dict[int, Tensor] | None,
    ) -> Tensor:
        """Logits [T, vocabulary]. `bank`: finished blocks; `partial`: the running one."""
        c, eps = self.config, self.config.rms_norm_eps
        bank: list[Tensor] = []
        partial: Tensor | None = self.tensors["model.embed_tokens.weight"][row]
        for layer in range(c.num_hidden_layers):
            at = f"model.layers.{layer}."
            assert partial is not None
            h = self._mix(at + "self_attention_res", bank, partial)
            if c.attn_res_block_size and layer % c.attn_res_block_size == 0:
                bank.append(partial)
                partial = None
            h = rms_norm(h, self.tensors[at + "input_layernorm.weight"], eps)
            mixer = self._kda if c.is_kda(layer) else self._mla
            y = torch.cat([mixer(at + "self_attn.", part) for part in h.split(lengths)])
            partial = y if partial is None else partial + y
            h = self._mix(at + "mlp_res", bank, partial)
            h = rms_norm(h, self.tensors[at + "post_attention_layernorm.weight"], eps)
            if c.is_moe(layer):
                y = self._moe(at + "block_sparse_moe.", h, layer, routes, given)
            else:
                y = self._glu(h, *(at + f"mlp.{name}_proj" for name in ("gate", "up", "down")))
            partial = partial + y
        assert partial is not None
        x = self._mix("model.output_attn_res", bank, partial)
        return self._linear(rms_norm(x, self.tensors["model.norm.weight"], eps), "lm_head")

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return x @ self.tensors[name + ".weight"].T

    def _mix(self, name: str, bank: list[Tensor], partial: Tensor) -> Tensor:
        if not bank:  # no attention residuals, or the first attention: only the embedding so far
            return partial
        norm, query = self.tensors[name + "_norm.weight"], self.tensors[name + "_proj.weight"]
        return mix_sources([*bank, partial], norm, query[0], self.config.rms_norm_eps)

    def _glu(self, x: Tensor, gate: str, up: str, down: str) -> Tensor:
        c, g, u = self.config, self._linear(x, gate), self._linear(x, up)
        if c.hidden_act == "silu":
            return self._linear(silu_glu(g, u), down)
        assert c.activation_situ_beta is not None
        assert c.activation_situ_linear_beta is not None
        y = situ_glu(g, u, c.activation_situ_beta, c.activation_situ_linear_beta)
        return self._linear(y, down)

    def _kda(self, at: str, x: Tensor) -> Tensor:
        c = self.config.linear

        def heads(y: Tensor) -> Tensor:
            return y.reshape(*y.shape[:-1], c.num_heads, c.head_dim)

        def convolved(name: str) -> Tensor:
            weight = self.tensors[at + name + "_conv1d.weight"][:, 0]
            return heads(short_convolution(self._linear(x, at + name + "_proj"), weight))

        q, k, v = convolved("q"), convolved("k"), convolved("v")
        q = q / (q.square().sum(-1, keepdim=True) + 1e-6).sqrt() / math.sqrt(c.head_dim)
        k = k / (k.square().sum(-1, keepdim=True) + 1e-6).sqrt()
        z = heads(self._linear(self._linear(x, at + "f_a_proj"), at + "f_b_proj"))
        a_log = self.tensors[at + "A_log"].flatten()[: c.num_heads]
        g = log_decay(z, a_log, heads(self.tensors[at + "dt_bias"]), c.gate_lower_bound)
        o = delta_rule(q, k, v, g, self._linear(x, at + "b_proj").sigmoid())
        o = rms_norm(o, self.tensors[at + "o_norm.weight"], self.config.rms_norm_eps)
        if c.use_full_rank_gate:
            gate = self._linear(x, at + "g_proj")
        else:
            gate = self._linear(self._linear(x, at + "g_a_proj"), at + "g_b_proj")
        return self._linear(o.flatten(1) * gate.sigmoid(), at + "o_proj")

    def _mla(self, at: str, x: Tensor) -> Tensor:
        c, h = self.config, self.config.num_attention_heads
        nope, shared, value = c.qk_nope_head_dim, c.qk_rope_head_dim, c.v_head_dim
        if c.q_lora_rank is None:
            q = self._linear(x, at + "q_proj")
        else:
            q_low, norm = (
                self._linear(x, at + "q_a_proj"),
                self.tensors[at + "q_a_layernorm.weight"],
            )
            q = self._linear(rms_norm(q_low, norm, LOW_RANK_EPS), at + "q_b_proj")
        latent, k_shared = self._linear(x, at + "kv_a_proj_with_mqa").split(
            [c.kv_lora_rank, shared], dim=-1
        )
        latent = rms_norm(latent, self.tensors[at + "kv_a_layernorm.weight"], LOW_RANK_EPS)
        expanded = self._linear(latent, at + "kv_b_proj").reshape(len(x), h, nope + value)
        k_own, v = expanded.split([nope, value], dim=-1)
        k = torch.cat([k_own, k_shared[:, None].expand(-1, h, -1)], dim=-1)
        o = causal_attention(q.reshape(len(x), h, nope + shared), k, v).flatten(1)
        if c.mla_use_output_gate:
            o = o * self._linear(x, at + "g_proj").sigmoid()
        return self._linear(o, at + "o_proj")

    def _moe(
        self,
        at: str,
        x: Tensor,
        layer: int,
        routes: dict[int, Route],
        given: dict[int, Tensor] | None,
    ) -> Tensor:
        c = self.config
        assert c.num_experts is not None
        assert c.num_experts_per_token is not None
        scores = self._linear(x, at + "gate").sigmoid()
        free = route(
            scores + self.tensors[at + "gate.e_score_correction_bias"], c.num_experts_per_token
        )
        experts = free.experts if given is None else given[layer]
        routes[layer] = Route(experts, free.margins.detach())
        weights = combine_weights(scores, experts, c.moe_renormalize, c.routed_scaling_factor)
        latent = c.routed_expert_hidden_size is not None
        rows = self._linear(x, at + "routed_expert_down_proj") if latent else x
        y = torch.zeros_like(rows)
        for e in range(c.num_experts):
            token, slot = (experts == e).nonzero(as_tuple=True)
            out = self._glu(
                rows[token], *(at + f"experts.{e}.{name}" for name in ("w1", "w3", "w2"))
            )
            y = y.index_add(0, token, weights[token, slot, None] * out)
        if c.latent_moe_use_norm:
            y = rms_norm(y, self.tensors[at + "routed_expert_norm.weight"], c.rms_norm_eps)
        if latent:
            y = self._linear(y, at + "routed_expert_up_proj")
        if c.num_shared_experts:
            names = (at + f"shared_experts.{name}_proj" for name in ("gate", "up", "down"))
            y = y + self._glu(x, *names)
        return y
