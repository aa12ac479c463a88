"""The layers of our models, written plainly from public parts: what ours are compared with.

Weights come from our own modules, so both compute the same function, and a test says so.

Shapes: b batch, s tokens, h hidden, H heads, K their width; N = b s tokens in a row, k experts a
token, E experts, L latent width, F width inside an expert.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_ext.config.schema import Gate, KdaOptions, MlaOptions, ModelOptions, OutputGate
from support.public_kernels import PublicKernels

Weights = Mapping[str, Tensor]


def leaf(tensor: Tensor) -> nn.Parameter:
    """A weight of its own with the same numbers, and whether it is decayed."""
    made = nn.Parameter(tensor.detach().clone())
    made.no_weight_decay = getattr(tensor, "no_weight_decay", False)
    return made


def under(weights: Weights, prefix: str) -> dict[str, Tensor]:
    """The weights of a submodule, by their names in it."""
    return {name.removeprefix(prefix): w for name, w in weights.items() if name.startswith(prefix)}


class Plain(nn.Module):
    """A module that takes over weights, split or flattened where one product wants it."""

    def __init__(self, weights: Weights, kernels: PublicKernels) -> None:
        super().__init__()
        self.kernels = kernels
        self.rms = kernels.compiled(_rms)
        for name, weight in weights.items():
            self.register_parameter(name.replace(".", "_"), leaf(weight))


class Kda(Plain):
    """Linear attention; projections and convolutions of q, k and v apart, as in fla's own layer."""

    def __init__(
        self, weights: Weights, options: KdaOptions, kernels: PublicKernels, *, eps: float
    ) -> None:
        if options.gate is not Gate.bounded or options.output_gate is not OutputGate.full_rank:
            raise ValueError("the plain layer has the bounded gate and a full-rank output gate")
        split = {k: v for k, v in weights.items() if k not in ("qkv.weight", "conv_weight")}
        for index, name in enumerate("qkv"):
            split[name] = weights["qkv.weight"][index]
            filters = weights["conv_weight"][index]
            filters.no_weight_decay = True
            split[f"conv_{name}"] = filters
        super().__init__(split, kernels)
        self.options, self.eps = options, eps

    def forward(self, x: Tensor) -> Tensor:
        """[b, s, h] to [b, s, h]."""
        o, heads = self.options, (self.options.num_heads, self.options.head_dim)
        q, k, v = (
            self.kernels.conv(F.linear(x, weight), filters).unflatten(-1, heads)
            for weight, filters in (
                (self.q, self.conv_q),
                (self.k, self.conv_k),
                (self.v, self.conv_v),
            )
        )
        z = F.linear(F.linear(x, self.decay_down_weight), self.decay_up_weight)
        beta = F.linear(x, self.beta_weight)
        z = z.unflatten(-1, heads)
        out = self.kernels.kda(q, k, v, z, beta, self.A_log, self.dt_bias, o.lower_bound)
        gate = F.linear(x, self.gate_up_weight).unflatten(-1, heads)
        out = self.kernels.norm_gate(out, gate, self.norm_weight, self.eps)
        return F.linear(out.flatten(-2), self.out_weight)


class Mla(Plain):
    """Full attention through torch's scaled_dot_product_attention."""

    def __init__(self, weights: Weights, options: MlaOptions, kernels: PublicKernels) -> None:
        if not options.q_lora_rank or not options.output_gate:
            raise ValueError("the plain layer has a query compression and an output gate")
        super().__init__(weights, kernels)
        self.options = options
        self.gated = kernels.compiled(_gated)

    def forward(self, x: Tensor) -> Tensor:
        """[b, s, h] to [b, s, h]."""
        o = self.options
        low = F.linear(x, self.q_down_weight)
        low = self.rms(low, self.q_latent_norm_weight, o.norm_eps)
        q = F.linear(low, self.q_up_weight).unflatten(-1, (o.num_heads, -1))
        latent, shared = F.linear(x, self.kv_down_weight).split(
            [o.kv_lora_rank, o.qk_rope_head_dim], dim=-1
        )
        latent = self.rms(latent, self.kv_latent_norm_weight, o.norm_eps)
        both = F.linear(latent, self.kv_up_weight).unflatten(-1, (o.num_heads, -1))
        key, value = both.split([o.qk_nope_head_dim, o.v_head_dim], dim=-1)
        key = torch.cat([key, shared.unsqueeze(-2).expand(-1, -1, o.num_heads, -1)], dim=-1)
        out = F.scaled_dot_product_attention(
            *(t.transpose(1, 2) for t in (q, key, value)),
            is_causal=True,
            scale=q.shape[-1] ** -0.5,
        )
        gated = self.gated(out.transpose(1, 2).flatten(-2), F.linear(x, self.gate_weight))
        return F.linear(gated, self.out_weight)


class FeedForward(Plain):
    """SiTU-GLU between two products."""

    def __init__(self, weights: Weights, model: ModelOptions, kernels: PublicKernels) -> None:
        flat = {name: weight.flatten(0, -2) for name, weight in weights.items()}
        super().__init__(flat, kernels)
        self.bounds = (model.situ_beta, model.situ_linear_beta)
        self.act = kernels.compiled(_situ)

    def forward(self, x: Tensor) -> Tensor:
        """[b, s, h] to [b, s, h]."""
        return F.linear(self.act(F.linear(x, self.fc1_weight), *self.bounds), self.fc2_weight)


class Mixture(Plain):
    """Latent mixture of experts on one rank, with quantile balancing of every micro-batch.

    Args:
        local: experts that are here; of router output e, expert e // (E / local) takes the rows.

    Attributes:
        forced: int64 [N, k]; experts of each token, instead of the router's own.
        quantiles, batches: what the next bias is made of.
    """

    def __init__(
        self,
        weights: Weights,
        model: ModelOptions,
        kernels: PublicKernels,
        *,
        local: int,
        eps: float,
    ) -> None:
        shared = under(weights, "shared.")
        own = {k: v for k, v in weights.items() if not k.startswith("shared.")}
        own["experts.fc1"] = own["experts.fc1"].flatten(1, 2)
        super().__init__(own, kernels)
        self.options, self.eps, self.local = model.experts, eps, local
        self.bounds = (model.situ_beta, model.situ_linear_beta)
        self.shared = FeedForward(shared, model, kernels)
        self.forced: Tensor | None = None
        count, device = self.options.num_experts, self.router_weight.device
        self.register_buffer("places", torch.arange(local, device=device, dtype=torch.int32))
        self.register_buffer("bias", torch.zeros(count, device=device))
        self.register_buffer("quantiles", torch.zeros(count, device=device))
        self.register_buffer("batches", torch.zeros((), device=device))
        self.route, self.act = kernels.compiled(_route), kernels.compiled(_scaled_situ)

    def forward(self, x: Tensor) -> Tensor:
        """[b, s, h] to [b, s, h]."""
        options, flat = self.options, x.flatten(0, -2)
        logits = F.linear(flat, self.router_weight)  # in the model's dtype: the fastest plain form
        weights, chosen, quantile = self.route(logits, self.bias, options.top_k, self.forced)
        if self.training:
            self.quantiles += quantile
            self.batches += 1
        fold = options.num_experts // self.local
        local = (chosen.flatten() // fold if fold > 1 else chosen.flatten()).to(torch.int32)
        of_rows, order = local.sort(stable=True)
        token = order // options.top_k
        # Without waiting for the GPU, as bincount does.
        ends = torch.searchsorted(of_rows, self.places, right=True, out_int32=True)
        rows = F.linear(flat, self.down_weight).index_select(0, token)
        scale = weights.flatten().index_select(0, order)
        rows = self.act(self.kernels.grouped(rows, self.experts_fc1, ends), scale, *self.bounds)
        rows = self.kernels.grouped(rows, self.experts_fc2, ends)
        out = rows.new_zeros(len(flat), rows.shape[-1]).index_add(0, token, rows)
        out = self.rms(out, self.norm_weight, self.eps)
        return F.linear(out, self.up_weight).view_as(x) + self.shared(x)

    @torch.no_grad()
    def update(self) -> None:
        """The bias of the next step: the mean of the micro-batches' quantiles, centred. After
        one micro-batch at least."""
        self.bias.copy_(self.quantiles / self.batches)
        self.bias -= self.bias.mean()
        self.quantiles.zero_()
        self.batches.zero_()


class Layer(nn.Module):
    """Attention and feed-forward between the sources of block attention residuals, or plainly.

    Args:
        weights: of one of our layers, by the names in it.
        opens: whether attention starts a new sum; only between several sources.
        local: experts that are here, if there is a mixture.
    """

    def __init__(
        self,
        weights: Weights,
        model: ModelOptions,
        kernels: PublicKernels,
        *,
        opens: bool = False,
        local: int | None = None,
    ) -> None:
        super().__init__()
        attention, mlp = under(weights, "self_attention."), under(weights, "mlp.")
        eps = model.norm_eps
        self.attention: nn.Module
        if "A_log" in attention:
            self.attention = Kda(attention, model.kda, kernels, eps=eps)
        else:
            self.attention = Mla(attention, model.mla, kernels)
        self.mlp: nn.Module
        if "router.weight" in mlp:
            local = local or model.experts.num_experts
            self.mlp = Mixture(mlp, model, kernels, local=local, eps=eps)
        else:
            self.mlp = FeedForward(mlp, model, kernels)
        self.norms = nn.ModuleList(
            Norm(under(weights, f"{name}."), kernels, eps=eps)
            for name in ("input_layernorm", "pre_mlp_layernorm")
        )
        self.opens = opens

    def forward(self, *sources: Tensor) -> tuple[Tensor, ...]:
        """The sources after this layer; one of them, the stream, with a plain residual."""
        first, second = self.norms
        out = self.attention(first(*sources))
        kept, out = (sources, out) if self.opens else (sources[:-1], sources[-1] + out)
        sources = (*kept, out)
        return (*kept, out + self.mlp(second(*sources)))


class Norm(Plain):
    """RMS norm of the one source, or of the mix of several."""

    def __init__(self, weights: Weights, kernels: PublicKernels, *, eps: float) -> None:
        super().__init__(weights, kernels)
        self.eps, self.mixes = eps, "query" in weights

    def forward(self, *sources: Tensor) -> Tensor:
        """[b, s, h] each to [b, s, h]."""
        if self.mixes:
            return self.kernels.mix(sources, self.query, self.key_weight, self.weight, self.eps)
        return self.rms(sources[-1], self.weight, self.eps)


def _rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, eps)


def _gated(x: Tensor, gate: Tensor) -> Tensor:
    return (x.float() * torch.sigmoid(gate.float())).to(x.dtype)


def _situ(both: Tensor, beta: float | None, linear_beta: float | None) -> Tensor:
    """[..., 2F] to [..., F]."""
    gate, up = both.float().chunk(2, dim=-1)
    out = torch.sigmoid(gate) * (beta * torch.tanh(gate / beta) if beta else gate)
    return (out * (linear_beta * torch.tanh(up / linear_beta) if linear_beta else up)).to(both)


def _scaled_situ(
    both: Tensor, scale: Tensor, beta: float | None, linear_beta: float | None
) -> Tensor:
    gate, up = both.float().chunk(2, dim=-1)
    out = torch.sigmoid(gate) * (beta * torch.tanh(gate / beta) if beta else gate)
    out = out * (linear_beta * torch.tanh(up / linear_beta) if linear_beta else up)
    return (out * scale.unsqueeze(-1)).to(both)


def _route(
    logits: Tensor, bias: Tensor, k: int, forced: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Weights [N, k] float32, experts [N, k], and the bias [E] that would have given every expert
    as many tokens: the quantile of the margins."""
    scores = torch.sigmoid(logits.float())
    best = (scores.detach() + bias).topk(k + 1)
    chosen = best.indices[:, :k] if forced is None else forced
    taken = scores.gather(1, chosen)
    margins = (best.values[:, k:] - scores.detach()).t().contiguous()
    place = max(1, round(len(logits) * k / logits.shape[1]))
    quantile = margins.topk(place, largest=False).values[:, -1]
    return taken / (taken.sum(-1, keepdim=True) + 1e-20), chosen, quantile
