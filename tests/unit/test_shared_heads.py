"""`residual=shared`: exactly its formula within a block, nothing beyond, and what it costs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_ext.config.compose import compose
from megatron_ext.layers.shared_heads import HeadShare
from megatron_ext.model.count import count_parameters
from megatron_ext.ops.scaled_sum import scaled_sum, scaled_sum_reference
from megatron_ext.optim.groups import parameter_groups
from tests.support.one_rank import one_rank
from tests.support.small_model import SMALL, build, loss, tokens

FEATURES = 16  # two heads of 8 in both kinds of attention
TOKENS = (2, 10)


@pytest.fixture(scope="module")
def groups() -> Iterator[Any]:
    with one_rank() as collection:
        yield collection


def test_the_sum_is_its_formula_and_its_gradients_are_finite_differences() -> None:
    generator = torch.Generator().manual_seed(0)
    x, *others = torch.randn(4, 3, 2, 5, generator=generator, dtype=torch.float64)
    scale = torch.tensor([0.5, -2.0, 0.1], dtype=torch.float64)
    wanted = scaled_sum_reference(x, scale, others)
    torch.testing.assert_close(scaled_sum(x, scale, others), wanted, rtol=1e-14, atol=1e-14)
    leaves = [t.clone().requires_grad_() for t in (x, scale, *others)]
    assert torch.autograd.gradcheck(lambda x, c, *a: scaled_sum(x, c, a), leaves)


def test_16_bit_tensors_are_added_up_in_float32() -> None:
    generator = torch.Generator().manual_seed(0)
    x, *others = torch.randn(5, 64, generator=generator).bfloat16()
    scale = torch.full((4,), 0.3)
    exact = scaled_sum_reference(x.double(), scale, [a.double() for a in others])
    assert torch.equal(scaled_sum(x, scale, others), exact.float().bfloat16())


@pytest.mark.parametrize(
    ("scale", "other", "message"),
    [
        (torch.ones(2), torch.ones(3), r"scale: given \(2,\), allowed \(1,\)"),
        (torch.ones(1), torch.ones(4), r"tensor 0: given \(4,\)"),
        (torch.ones(1), torch.ones(3).double(), r"tensor 0: .*float64, allowed \(3,\) .*float32"),
    ],
)
def test_tensors_that_do_not_fit_are_an_error(scale: Tensor, other: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        scaled_sum(torch.ones(3), scale, [other])


class Through(nn.Module):
    """In the place of an output projection: hands its input on."""

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return x, None


def as_written(model: Any, scales: dict[int, Tensor], block: int) -> Tensor:
    """What goes into the final norm, by the formula, from the sublayers of a *plain* model."""
    h = model.embedding(input_ids=tokens(), position_ids=None)
    heads: list[Tensor] = []
    for number, layer in enumerate(model.decoder.layers):
        if number % block == 0:
            heads = []
        projection, layer.self_attention.out = layer.self_attention.out, Through()
        own, _ = layer.self_attention(layer.input_layernorm(h)[0])
        layer.self_attention.out = projection
        shared = sum((c * a for c, a in zip(scales.get(number, ()), heads, strict=True)), own)
        h = h + F.linear(shared, projection.weight)
        h = h + layer.mlp(layer.pre_mlp_layernorm(h)[0])[0]
        heads.append(own)
    return h


@pytest.mark.parametrize(("layers", "block"), [(4, 2), (5, 3), (3, 1), (3, 12), (1, 2)])
def test_layers_of_a_block_share_by_the_formula(groups: Any, layers: int, block: int) -> None:
    size = f"model.num_layers={layers}"
    model, _ = build(groups, "residual=shared", f"residual.block_size={block}", size)
    plain, _ = build(groups, "residual=standard", size)
    ours = dict(model.named_parameters())
    theirs = dict(plain.named_parameters())
    extra = {name for name in ours if name.endswith("share.scale")}
    assert ours.keys() - theirs.keys() == extra
    assert len(extra) == sum(layer % block > 0 for layer in range(layers))
    with torch.no_grad():
        for name, value in theirs.items():
            value.copy_(ours[name])
    leaves = {name: ours[name].detach().clone().requires_grad_() for name in sorted(extra)}
    scales = {int(name.split(".")[2]): value for name, value in leaves.items()}
    assert all(value.numel() == number % block for number, value in scales.items())
    norm = plain.decoder.final_layernorm
    wanted = norm(as_written(plain, scales, block))
    found = model.decoder(
        hidden_states=model.embedding(input_ids=tokens(), position_ids=None), attention_mask=None
    )
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)
    upstream = torch.randn(found.shape, generator=torch.Generator().manual_seed(2)).to(found)
    found.backward(upstream)
    wanted.backward(upstream)
    for name, parameter in ours.items():
        if name == "output_layer.weight":
            continue
        exact = leaves[name].grad if name in leaves else theirs[name].grad
        # float32 parameters (A_log, convolution) round their gradients.
        exactness = 1e-10 if parameter.dtype == torch.float64 else 1e-6
        assert (parameter.grad - exact).norm() <= exactness * (exact.norm() + 1e-6), name


def test_scalars_of_zero_are_the_plain_model_bit_for_bit(groups: Any) -> None:
    size = ["model.num_layers=5", "residual.block_size=3"]
    plain, _ = build(groups, "residual=standard", *size, random=False)
    shared, _ = build(groups, "residual=shared", *size, random=False)
    ours = dict(shared.named_parameters())
    assert all(torch.equal(ours[name], value) for name, value in plain.named_parameters())
    assert torch.equal(loss(shared), loss(plain))
    loss(shared).backward()  # and they learn from there
    assert all(
        (parameter.grad != 0).all() for name, parameter in ours.items() if name.endswith("scale")
    )


def test_recomputation_changes_no_bit(groups: Any) -> None:
    grads, calls = {}, {}
    for recompute in ("none", "selective", "full"):
        model, _ = build(
            groups, "residual=shared", "residual.block_size=3", "model.num_layers=5",
            f"train.recompute={recompute}",
        )  # fmt: skip
        count = calls[recompute] = [0]
        model.decoder.layers[1].mlp.register_forward_hook(
            lambda *_, count=count: count.__setitem__(0, count[0] + 1)
        )
        loss(model).backward()
        grads[recompute] = {name: p.grad for name, p in model.named_parameters()}
    assert [count[0] for count in calls.values()] == [1, 2, 2]
    for recompute in ("selective", "full"):
        for name, exact in grads["none"].items():
            assert torch.equal(grads[recompute][name], exact), (recompute, name)


def saved_bytes(model: Any) -> int:
    """Bytes that a forward pass keeps for the backward pass, each storage once."""
    seen: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        seen.setdefault(storage.data_ptr(), storage.nbytes())
        return x

    # Kept alive: storages that are freed would be used again for others.
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = loss(model)
    assert out.requires_grad
    return sum(seen.values())


@pytest.mark.parametrize(
    ("recompute", "kept"),
    [
        # The first layer's heads are what it projects, the last one's nobody reads.
        ("none", 4 - 2),
        ("selective", 4 - 2),
        # Each that a later layer reads is an input of a layer that is computed again.
        ("full", 4 - 1),
    ],
)
def test_a_block_keeps_one_tensor_more_for_a_layer_that_is_read_later(
    groups: Any, recompute: str, kept: int
) -> None:
    common = ["model.num_layers=8", "residual.block_size=4", f"train.recompute={recompute}"]
    plain, _ = build(groups, "residual=standard", *common)
    shared, _ = build(groups, "residual=shared", *common)
    scalars = sum(p.nbytes for name, p in shared.named_parameters() if name.endswith("scale"))
    if recompute == "full":
        scalars = 0  # recomputed with the layer
    heads = TOKENS[0] * TOKENS[1] * FEATURES * 8
    assert saved_bytes(shared) - saved_bytes(plain) == 2 * kept * heads + scalars


def test_scalars_stay_wide_are_not_decayed_and_are_counted(groups: Any) -> None:
    words = ["residual=shared", "residual.block_size=3", "model.num_layers=5"]
    model, config = build(groups, *words, dtype=torch.bfloat16)
    decayed, spared = parameter_groups([model])
    scalars = {name: p for name, p in spared.parameters if name.endswith("share.scale")}
    assert [p.numel() for p in scalars.values()] == [1, 2, 1]
    assert not any(name.endswith("share.scale") for name, _ in decayed.parameters)
    assert all(p.dtype == torch.float32 for p in scalars.values())
    out = model(input_ids=tokens(), position_ids=None, attention_mask=None)
    assert out.dtype == torch.bfloat16
    counts = count_parameters(config, 128)
    plain = count_parameters(compose([*SMALL, *words, "residual=standard"]), 128)
    assert counts.by_part["residual"] == 4
    assert counts.total - plain.total == 4
    assert counts.by_part["kda"] == plain.by_part["kda"]


def test_heads_that_were_not_passed_on_are_an_error(groups: Any) -> None:
    model, _ = build(groups, "residual=shared", "model.num_layers=2")
    share = model.decoder.layers[0].self_attention.share
    assert isinstance(share, HeadShare)
    with pytest.raises(RuntimeError, match="did not pass its heads on"):
        share.take()
