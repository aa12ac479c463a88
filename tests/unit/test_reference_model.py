"""The reference model against cases worked out by hand: the judge is judged first."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support import hf_configs
from tests.support.reference_config import parse_config
from tests.support.reference_files import expected_shapes, random_tensors, write_random_folder
from tests.support.reference_model import (
    ReferenceModel,
    causal_attention,
    combine_weights,
    delta_rule,
    log_decay,
    mix_sources,
    rms_norm,
    route,
    short_convolution,
    situ_glu,
)

ROW = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Tensors of a few numbers: handing them to threads is what would take the time."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def f64(*values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def close(value: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-12)


def test_norm_situ_and_convolution_by_hand() -> None:
    close(rms_norm(f64(3.0, 4.0), f64(1.0, 2.0), 0.5), f64(3.0, 8.0) / math.sqrt(13.0))
    gate, up = 1.5, -30.0
    phi = 4 * math.tanh(gate / 4) / (1 + math.exp(-gate))
    close(situ_glu(f64(gate), f64(up), 4.0, 25.0), f64(phi * 25 * math.tanh(up / 25)))
    x, taps = f64([1.0], [2.0], [3.0]), f64([10.0, 20.0, 30.0, 40.0])
    y = f64([40.0], [30 + 80.0], [20 + 60 + 120.0])  # the last tap meets the token itself
    close(short_convolution(x, taps), y * torch.sigmoid(y))


def test_decay_by_hand() -> None:
    z, bias, a_log = f64([[0.5, -1.0], [2.0, 0.0]]), f64([0.1, 0.2], [0.3, 0.4]), f64(0.0, 1.0)
    g = log_decay(z, a_log, bias, -5.0)
    assert g[0, 0, 1].item() == pytest.approx(-5 / (1 + math.exp(0.8)))
    assert g[0, 1, 0].item() == pytest.approx(-5 / (1 + math.exp(-math.e * 2.3)))
    unbounded = log_decay(z, a_log, bias, None)
    assert unbounded[0, 1, 0].item() == pytest.approx(-math.e * math.log1p(math.exp(2.3)))


def test_delta_rule_by_hand() -> None:
    """One head, K = 2, V = 1, two tokens, every number worked out on paper."""
    q, k = f64([[1.0, 0.0]], [[1.0, 2.0]]), f64([[1.0, 0.0]], [[0.6, 0.8]])
    v, beta = f64([[2.0]], [[3.0]]), f64([0.5], [0.25])
    g = torch.log(f64([[1.0, 1.0]], [[0.5, 0.1]]))
    # S1 = 0.5 * 2 * (1, 0) = (1, 0); o1 = 1. Decayed: (0.5, 0); error = 3 - 0.3 = 2.7;
    # S2 = (0.5, 0) + 0.25 * 2.7 * (0.6, 0.8) = (0.905, 0.54); o2 = 0.905 + 1.08.
    close(delta_rule(q, k, v, g, beta), f64([[1.0]], [[1.985]]))


def test_attention_by_hand() -> None:
    """Two heads that share nothing but time; K = 4, so the scale is one half."""
    q = f64([[0.0] * 4, [0.0] * 4], [[2.0, 0, 0, 0], [0.0, 0, 0, 0]])
    k = f64([[1.0, 0, 0, 0], [9.0, 0, 0, 0]], [[0.0, 5, 0, 0], [9.0, 0, 0, 0]])
    v = f64([[1.0], [2.0]], [[3.0], [4.0]])
    first = math.e / (math.e + 1)  # logits of head 0 at the second token: 1 and 0
    close(causal_attention(q, k, v), f64([[1.0], [2.0]], [[3 - 2 * first], [3.0]]))


def test_routing_by_hand() -> None:
    scores, bias = f64([0.9, 0.5, 0.4, 0.1]), f64(0.0, -0.3, 0.0, 0.7)
    chosen = route(scores + bias, 2)
    assert chosen.experts.tolist() == [[0, 3]]  # the bias lifts expert 3 above experts 1 and 2
    close(chosen.margins, f64(0.8 - 0.4))
    close(combine_weights(scores, chosen.experts, True, 3.0), f64([0.9, 0.1]) * 3)  # unbiased
    close(combine_weights(scores, chosen.experts, False, 1.0), f64([0.9, 0.1]))
    close(combine_weights(scores, chosen.experts[:, :1], True, 2.0), f64([1.8]))  # never made one
    assert route(scores, 4).margins.tolist() == [math.inf]


def test_mix_of_sources_by_hand() -> None:
    a, b = f64([3.0, 4.0]), f64([0.0, 2.0])
    close(mix_sources([a, b], f64(1.0, 1.0), f64(0.0, 0.0), 0.0), (a + b) / 2)
    rms = math.sqrt(12.5), math.sqrt(2.0)
    logits = 3 * 2 * 0.5 / rms[0] + 4 / rms[0], 2 / rms[1]  # weight (2, 1) times query (0.5, 1)
    share = 1 / (1 + math.exp(logits[1] - logits[0]))
    close(mix_sources([a, b], f64(2.0, 1.0), f64(0.5, 1.0), 0.0), share * a + (1 - share) * b)


def folder(tmp_path: Path, config: dict[str, Any], name: str = "model") -> Path:
    write_random_folder(tmp_path / name, config)
    return tmp_path / name


@pytest.mark.parametrize("kind", [hf_configs.kimi_k3, hf_configs.kimi_linear])
def test_packed_documents_equal_separate_rows_and_the_future_is_not_seen(
    tmp_path: Path, kind: Any
) -> None:
    model = ReferenceModel(folder(tmp_path, kind()))
    packed = model([ROW], [[4, 1, 6]])
    alone = model([ROW[:4], ROW[4:5], ROW[5:]])
    close(packed.logits[0], torch.cat(alone.logits))
    together = torch.cat(alone.log_probabilities)
    torch.testing.assert_close(packed.log_probabilities[0], together, equal_nan=True)
    assert packed.log_probabilities[0].isnan().nonzero().flatten().tolist() == [0, 4, 5]
    close(model([ROW]).logits[0][:7], model([ROW[:7]]).logits[0])
    likely = model([ROW]).logits[0][2].softmax(-1)[ROW[3]].log()
    close(model([ROW]).log_probabilities[0][3], likely)
    assert sorted(packed.routes[0]) == [1, 2, 3, 4]
    assert packed.routes[0][1].experts.shape == (len(ROW), 3)


def test_a_replayed_choice_is_used_and_a_free_one_replays_itself(tmp_path: Path) -> None:
    model = ReferenceModel(folder(tmp_path, hf_configs.kimi_k3()))
    free = model([ROW])
    given = [{layer: chosen.experts for layer, chosen in free.routes[0].items()}]
    close(model([ROW], None, given).logits[0], free.logits[0])
    other = [{layer: (experts + 1) % 7 for layer, experts in given[0].items()}]
    replayed = model([ROW], None, other)
    assert torch.equal(replayed.routes[0][2].experts, other[0][2])
    assert not torch.allclose(replayed.logits[0], free.logits[0])
    # The first layer of experts sees the same input, so its free choice is as near as before.
    close(replayed.routes[0][1].margins, free.routes[0][1].margins)


def test_latent_norm_removes_the_scale_of_the_routed_part(tmp_path: Path) -> None:
    model = ReferenceModel(folder(tmp_path, hf_configs.kimi_k3(rms_norm_eps=1e-30)))
    before = model([ROW]).logits[0].detach()
    for name, tensor in model.tensors.items():
        if name.endswith(".w2.weight"):
            tensor.data *= 3
    close(model([ROW]).logits[0], before)
    model.tensors["model.layers.1.block_sparse_moe.shared_experts.down_proj.weight"].data *= 3
    assert not torch.allclose(model([ROW]).logits[0], before)


@pytest.mark.parametrize("block", [1, 2, 3, 5, 12])
def test_attention_residuals_sum_as_the_published_procedure(tmp_path: Path, block: int) -> None:
    """Zero queries make every mix a mean of sources that together are the plain residual stream."""
    at = folder(tmp_path, hf_configs.kimi_k3(attn_res_block_size=block, rms_norm_eps=1e-30))
    model = ReferenceModel(at)
    plain = ReferenceModel(at)
    object.__setattr__(plain.config, "attn_res_block_size", None)
    for name, tensor in model.tensors.items():
        if "_res_proj" in name:
            tensor.data.zero_()
    close(model([ROW]).logits[0], plain([ROW]).logits[0])
    unused = "model.layers.0.self_attention_res_proj.weight"
    model = ReferenceModel(at)
    model.tensors[unused].data.fill_(7.0)  # only the embedding is there to be mixed
    close(model([ROW]).logits[0], ReferenceModel(at)([ROW]).logits[0])
    model([ROW]).logits[0].square().mean().backward()
    silent = {name for name, t in model.tensors.items() if t.requires_grad and t.grad is None}
    assert silent == {unused, unused.replace("proj", "norm")}


def test_one_block_start_by_hand(tmp_path: Path) -> None:
    """Blocks of one layer: the mix before layer 1 has the embedding and layer 0 as its sources."""
    fields = hf_configs.kimi_k3(num_hidden_layers=2, attn_res_block_size=1, num_experts=None)
    for name in ("num_experts_per_token", "num_shared_experts", "moe_intermediate_size"):
        del fields[name]
    del fields["routed_expert_hidden_size"], fields["latent_moe_use_norm"]
    fields["linear_attn_config"] |= {"kda_layers": [1], "full_attn_layers": [2]}
    model = ReferenceModel(folder(tmp_path, fields))
    t, eps = model.tensors, 1e-5
    e = t["model.embed_tokens.weight"][torch.tensor(ROW)]

    def mix(name: str, *sources: Tensor) -> Tensor:
        return mix_sources(
            list(sources), t[name + "_norm.weight"], t[name + "_proj.weight"][0], eps
        )

    def sublayer(layer: int, x: Tensor, attention: bool) -> Tensor:
        at = f"model.layers.{layer}."
        if attention:
            x = rms_norm(x, t[at + "input_layernorm.weight"], eps)
            return (model._kda if layer == 0 else model._mla)(at + "self_attn.", x)
        x = rms_norm(x, t[at + "post_attention_layernorm.weight"], eps)
        return model._glu(x, *(at + f"mlp.{name}_proj" for name in ("gate", "up", "down")))

    a0 = sublayer(0, e, True)
    f0 = sublayer(0, mix("model.layers.0.mlp_res", e, a0), False)
    first = a0 + f0
    a1 = sublayer(1, mix("model.layers.1.self_attention_res", e, first), True)
    f1 = sublayer(1, mix("model.layers.1.mlp_res", e, first, a1), False)
    x = mix("model.output_attn_res", e, first, a1 + f1)
    logits = rms_norm(x, t["model.norm.weight"], eps) @ t["lm_head.weight"].T
    close(model([ROW]).logits[0], logits)


def test_gradients_are_those_of_finite_differences(tmp_path: Path) -> None:
    """Along one random direction through all weights, with routing held."""
    model = ReferenceModel(folder(tmp_path, hf_configs.kimi_k3()))
    free = model([ROW], [[5, 6]])
    given = [{layer: chosen.experts for layer, chosen in free.routes[0].items()}]
    generator = torch.Generator().manual_seed(1)
    steps = {
        name: 1e-6 * torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
        for name, tensor in model.tensors.items()
        if tensor.requires_grad
    }

    def loss() -> Tensor:
        return model([ROW], [[5, 6]], given).log_probabilities[0].nanmean()

    loss().backward()
    unused = "layers.0.self_attention_res"
    slope = sum(
        (model.tensors[name].grad * step).sum()
        for name, step in steps.items()
        if unused not in name
    )
    ends = []
    for sign in (1, -2):
        for name, step in steps.items():
            model.tensors[name].data += sign * step
        ends.append(loss().item())
    assert (ends[0] - ends[1]) / 2 == pytest.approx(float(slope), rel=1e-5)


def test_full_k3_has_the_published_count_of_parameters() -> None:
    config = parse_config(hf_configs.published_k3())
    total = sum(math.prod(shape) for shape in expected_shapes(config).values())
    assert round(total / 1e9, 1) == 2779.5


def test_wrong_configurations_are_refused_all_at_once() -> None:
    linear = {"kda_layers": [0, 1, 3], "gate_lower_bound": -6.0}
    fields = hf_configs.kimi_k3(num_expert=3, rope_scaling={"a": 1}, linear_attn_config=linear)
    with pytest.raises(ValueError, match="config") as refused:
        parse_config(fields)
    for part in ("num_expert: unknown", "rope_scaling"):
        assert part in str(refused.value)
    del fields["num_expert"]
    with pytest.raises(ValueError, match="config") as refused:
        parse_config(fields | {"hidden_act": "silu"})
    for part in ("kda_layers and full_attn", "gate_lower_bound", "activation_situ_beta", "rope_sc"):
        assert part in str(refused.value)
    with pytest.raises(ValueError, match=r"hidden_size='28': must be .*int"):
        parse_config(hf_configs.kimi_k3(hidden_size="28"))


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("model.norm.weight", None, "missing"),
        ("model.norm.weight", torch.ones(27), "shape"),
        ("model.norm.weight", torch.full((28,), torch.nan), "not finite"),
        ("model.layers.0.self_attn.A_log", torch.ones(8), "padding"),
        ("model.layers.0.self_attn.o_bias", torch.ones(8), "unknown"),
    ],
)
def test_wrong_tensors_are_refused(
    tmp_path: Path, name: str, change: Tensor | None, message: str
) -> None:
    at = folder(tmp_path, hf_configs.kimi_k3())
    shard = at / "model-00002-of-00002.safetensors"
    if name.endswith(("A_log", "bias")):
        shard = at / "model-00001-of-00002.safetensors"
    tensors = load_file(shard)
    tensors.pop(name, None)
    if change is not None:
        tensors[name] = change
    save_file(tensors, shard)
    with pytest.raises(ValueError, match=f"{name}.*{message}"):
        ReferenceModel(at)


def test_random_weights_depend_on_the_seed_and_pad_nothing_live() -> None:
    config = parse_config(hf_configs.kimi_k3())
    first, again, other = (random_tensors(config, seed) for seed in (0, 0, 1))
    a_log = first["model.layers.0.self_attn.A_log"]
    assert a_log.shape == (8,)
    assert a_log[:5].all()
    assert not a_log[5:].any()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])
