"""Layers between several sources: exactly the published procedure, and no memory by depth."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_ext.config.schema import RunConfig
from megatron_ext.layers.attn_res import MixNorm
from megatron_ext.ops.attn_res import depth_mix_reference
from megatron_ext.optim.groups import parameter_groups
from tests.support.one_rank import one_rank
from tests.support.small_model import build, loss, tokens


@pytest.fixture(scope="module")
def groups() -> Iterator[Any]:
    with one_rank() as collection:
        yield collection


def published(model: Any, config: RunConfig) -> Tensor:
    """What goes into the final norm, from the model's own sublayers, as the report has it."""
    eps, block = config.model.norm_eps, config.residual.block_size

    def mix(norm: Any) -> Tensor:
        return depth_mix_reference([*bank, partial], norm.query, norm.key_weight, eps=eps)

    def norm(layer_norm: Any, x: Tensor) -> Tensor:
        return F.rms_norm(x, layer_norm.weight.shape, layer_norm.weight, eps)

    bank: list[Tensor] = []
    partial = model.embedding(input_ids=tokens(), position_ids=None)
    *layers, end = model.decoder.layers
    for number, layer in enumerate(layers):
        h = mix(layer.input_layernorm) if bank else partial
        if number % block == 0:
            bank, partial = [*bank, partial], torch.zeros_like(partial)
        partial = partial + layer.self_attention(norm(layer.input_layernorm, h))[0]
        h = mix(layer.pre_mlp_layernorm)
        partial = partial + layer.mlp(norm(layer.pre_mlp_layernorm, h))[0]
    return mix(end)


def full_published(model: Any, config: RunConfig) -> Tensor:
    """The same with every sublayer's output a source of its own."""
    eps = config.model.norm_eps

    def read(layer_norm: Any, *, first: bool = False) -> Tensor:
        h = sources[0]
        if not first:
            h = depth_mix_reference(sources, layer_norm.query, layer_norm.key_weight, eps=eps)
        return F.rms_norm(h, layer_norm.weight.shape, layer_norm.weight, eps)

    sources = [model.embedding(input_ids=tokens(), position_ids=None)]
    *layers, end = model.decoder.layers
    for number, layer in enumerate(layers):
        sources.append(layer.self_attention(read(layer.input_layernorm, first=number == 0))[0])
        sources.append(layer.mlp(read(layer.pre_mlp_layernorm))[0])
    return depth_mix_reference(sources, end.query, end.key_weight, eps=eps)


@pytest.mark.parametrize(
    ("layers", "block"), [(1, 2), (2, 2), (3, 2), (4, 2), (5, 2), (3, 1), (3, 12)]
)
def test_layers_follow_the_published_procedure(groups: Any, layers: int, block: int) -> None:
    model, config = build(
        groups, "residual=block", f"residual.block_size={block}", f"model.num_layers={layers}"
    )
    compare(model, published(model, config))


def test_every_sublayer_is_a_source_of_full(groups: Any) -> None:
    model, config = build(groups, "residual=full", "model.num_layers=3")
    compare(model, full_published(model, config))


def compare(model: Any, exact: Tensor) -> None:
    """Output and all gradients of the decoder against those of `exact`, before the final norm."""
    norm = model.decoder.final_layernorm
    out = model.decoder(
        hidden_states=model.embedding(input_ids=tokens(), position_ids=None), attention_mask=None
    )
    exact = F.rms_norm(exact, norm.weight.shape, norm.weight, norm.eps)
    torch.testing.assert_close(out, exact, rtol=1e-10, atol=1e-12)
    parameters = dict(model.named_parameters())
    del parameters["output_layer.weight"]
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).to(out)
    found = torch.autograd.grad(out, list(parameters.values()), upstream)
    wanted = torch.autograd.grad(exact, list(parameters.values()), upstream)
    for name, ours, theirs in zip(parameters, found, wanted, strict=True):
        # float32 parameters (A_log, convolution) round their gradients.
        exactness = 1e-10 if ours.dtype == torch.float64 else 1e-6
        assert (ours - theirs).norm() <= exactness * (theirs.norm() + 1e-6), name


@pytest.mark.parametrize("kind", ["block", "full"])
def test_zero_queries_start_as_the_plain_residual(groups: Any, kind: str) -> None:
    """The mean of n sources is the plain stream divided by n, and norms remove that. What is left
    is their epsilon, which counts n^2 times as much: 1e-5 is no longer small beside a mean square
    of 0.02^2 / n^2, above all among the 11 sources of `full`."""
    for eps, tolerance in ((1e-12, 1e-10), (1e-5, 1e-3 if kind == "block" else 1e-2)):
        common = ["model.num_layers=5", f"model.norm_eps={eps}", f"model.mla.norm_eps={eps}"]
        plain, _ = build(groups, "residual=standard", *common, random=False)
        mixed, _ = build(groups, f"residual={kind}", "residual.block_size=2", *common, random=False)
        difference = abs(loss(mixed) - loss(plain)) / loss(plain)
        assert difference < tolerance


@pytest.mark.parametrize("kind", ["block", "full"])
def test_recomputation_changes_no_gradient(groups: Any, kind: str) -> None:
    size = ["model.num_layers=5", "residual.block_size=2"]
    grads, calls = {}, {}
    for recompute in ("none", "selective", "full"):
        model, _ = build(groups, f"residual={kind}", f"train.recompute={recompute}", *size)
        count = calls[recompute] = [0]
        model.decoder.layers[2].mlp.register_forward_hook(
            lambda *_, count=count: count.__setitem__(0, count[0] + 1)
        )
        loss(model).backward()
        grads[recompute] = {name: p.grad for name, p in model.named_parameters()}
    assert {name: count[0] for name, count in calls.items()} == {
        "none": 1,
        "selective": 2,
        "full": 2,
    }
    for recompute in ("selective", "full"):
        for name, exact in grads["none"].items():
            found = grads[recompute][name]
            exactness = 1e-10 if exact.dtype == torch.float64 else 1e-6
            assert (found - exact).norm() <= exactness * (exact.norm() + 1e-6), (recompute, name)


def test_saved_memory_of_a_layer_does_not_grow_with_depth(groups: Any) -> None:
    """Layers of one kind, each with one source more than the last."""
    model, _ = build(
        groups, "residual=block", "residual.block_size=1", "model.num_layers=9",
        "model.attention=mla",
    )  # fmt: skip
    seen: set[int] = set()
    bytes_by_layer: list[int] = []

    def pack(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if bytes_by_layer and storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            bytes_by_layer[-1] += storage.nbytes()
        return x

    for layer in model.decoder.layers:
        layer.register_forward_pre_hook(lambda *_: bytes_by_layer.append(0))
    # Kept alive: storages that are freed would be used again for others.
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = loss(model)
    assert out.requires_grad
    # The first layer also saves the embedding, which is the first of its sources.
    assert len(set(bytes_by_layer[1:9])) == 1


def test_vectors_of_a_mix_stay_wide_and_are_not_decayed(groups: Any) -> None:
    model, _ = build(groups, "residual=block", "model.num_layers=3", dtype=torch.bfloat16)
    decayed, spared = parameter_groups([model])
    vectors = {name: p for name, p in spared.parameters if name.endswith(("query", "key_weight"))}
    # Two a sublayer but for the first, which reads the embedding alone; two for the output.
    assert len(vectors) == 2 * (2 * 3 - 1) + 2
    assert not any(name.endswith(("query", "key_weight")) for name, _ in decayed.parameters)
    assert all(p.dtype == torch.float32 for p in vectors.values())
    assert not isinstance(model.decoder.layers[0].input_layernorm, MixNorm)
    out = model(input_ids=tokens(), position_ids=None, attention_mask=None)
    assert out.dtype == torch.bfloat16


def test_sums_can_be_kept_in_float32(groups: Any) -> None:
    options = ["residual=block", "residual.block_size=2", "model.num_layers=5"]
    exact, _ = build(groups, *options)
    errors = []
    for fp32 in ("false", "true"):
        model, _ = build(groups, *options, f"residual.fp32={fp32}", dtype=torch.bfloat16)
        kinds: list[torch.dtype] = []
        model.decoder.layers[4].register_forward_hook(
            lambda layer, args, out, kinds=kinds: kinds.extend(x.dtype for x in (out[0], *out[1]))
        )
        model(input_ids=tokens(), position_ids=None, attention_mask=None)
        assert set(kinds) == {torch.float32 if fp32 == "true" else torch.bfloat16}
        with torch.no_grad():
            for ours, theirs in zip(exact.parameters(), model.parameters(), strict=True):
                ours.copy_(theirs)
        errors.append(abs(float(loss(model)) - float(loss(exact))))
    assert errors[1] < 0.02  # the linear maps still round to 8 bits
