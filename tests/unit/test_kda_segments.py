"""A KDA layer by segments: the same function, which keeps its input, its heads and states."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams

from megatron_ext.config.schema import Gate, KdaBackend, KdaOptions, OutputGate
from megatron_ext.layers.kda import KimiDeltaAttention
from megatron_ext.ops.kda.health import AttentionHealth
from tests.support.memory import PeakMemory
from tests.support.one_rank import draw, one_rank, outputs_and_gradients, small_config

OPTIONS = KdaOptions(
    num_heads=3,
    head_dim=8,
    value_dim=8,
    decay_rank=5,
    output_gate_rank=6,
    backend=KdaBackend.dense,
)


@pytest.fixture(scope="module")
def groups():
    with one_rank() as collection:
        yield collection


def layer(groups, segment_tokens, options=OPTIONS):
    made = KimiDeltaAttention(
        small_config(), options=options, segment_tokens=segment_tokens, pg_collection=groups
    )
    draw(made)
    return made


def documents(*bounds):
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32)
    return PackedSeqParams(qkv_format="thd", cu_seqlens_q=cu_seqlens, cu_seqlens_kv=cu_seqlens)


@pytest.mark.parametrize("size", [1, 2, 16, 64])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"output_gate": OutputGate.low_rank},
        {"gate": Gate.bounded_plain},
        {"backend": KdaBackend.reference},
    ],
    ids=lambda changes: "-".join(changes) or "default",
)
def test_segments_equal_the_whole_with_every_gradient(groups, changes, size):
    options = dataclasses.replace(OPTIONS, **changes)
    x, upstream = torch.randn(2, 70, 2, 24, dtype=torch.float64)
    compare(groups, x, upstream, size, options=options)


@pytest.mark.parametrize("size", [1, 3, 16, 20])
def test_documents_may_begin_and_end_anywhere_in_segments(groups, size):
    x, upstream = torch.randn(2, 80, 1, 24, dtype=torch.float64)
    bounds = documents(0, 5, 6, 20, 40, 75, 80)
    compare(groups, x, upstream, size, packed_seq_params=bounds)


def compare(groups, x, upstream, size, *, options=OPTIONS, **forward):
    truth, ours = (
        outputs_and_gradients(layer(groups, segment, options), x, upstream, **forward)
        for segment in (None, size)
    )
    for got, want in zip(ours, truth, strict=True):
        # float64, except that float32 parameters have float32 gradients, added over segments.
        tolerance = 1e-5 if got.dtype is torch.float32 else 1e-9
        assert (got - want).norm() <= tolerance * want.norm()
        assert want.norm() > 0


@pytest.mark.parametrize("valid", [None, 37])
@pytest.mark.parametrize("packed", [False, True])
def test_statistics_of_segments_are_those_of_the_whole(groups, packed, valid):
    x = torch.randn(80, 1, 24, dtype=torch.float64)
    forward = {"packed_seq_params": documents(0, 20, 44, 80)} if packed else {}
    found = []
    for segment in (None, 16):
        made = layer(groups, segment)
        made.health = AttentionHealth("cpu", valid_tokens=valid)
        out, _ = made(x.requires_grad_(), **forward)
        out.sum().backward()  # runs all segments again, which must not count
        found.append(made.health)
    assert found[0].sums.sum() > 0
    torch.testing.assert_close(found[1].sums, found[0].sums, rtol=1e-10, atol=0)
    torch.testing.assert_close(found[1].maxima, found[0].maxima, rtol=1e-6, atol=0)  # float32


def test_evaluation_runs_by_segments_too(groups):
    x = torch.randn(40, 2, 24, dtype=torch.float64)
    with torch.no_grad():
        whole, _ = layer(groups, None)(x)
        cut, _ = layer(groups, 16)(x)
    torch.testing.assert_close(cut, whole, rtol=1e-10, atol=1e-12)


def test_what_a_token_keeps_is_the_input_of_the_layer_and_its_heads(groups):
    def a_token(segment, bytes_of):
        made, found = layer(groups, segment), []
        for tokens in (256, 768):
            x = torch.randn(tokens, 1, 24, dtype=torch.float64, requires_grad=True)
            found.append(bytes_of(made, x))
        return (found[1] - found[0]) / 512

    def kept(made, x):
        own = {p.untyped_storage().data_ptr() for p in made.parameters()}
        storages = {}

        def pack(tensor):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                storages[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            out, _ = made(x)
        del out
        return sum(storages.values())

    def peak(made, x):
        with PeakMemory() as memory:
            made(x)[0].sum().backward()
        return memory.peak

    hidden, heads, state = 24, 3 * 8, 3 * 8 * 8
    # In float64: hidden states, input of the decay, heads; a state and the convolution's last three
    # inputs for every 64 tokens.
    wanted = 8 * (hidden + 5 + heads + (state + 3 * 3 * heads) / 64)
    assert a_token(64, kept) == pytest.approx(wanted, rel=0.01)
    assert a_token(None, kept) > 10 * wanted
    # Meanwhile: the output, gradients of all that, and of the output.
    assert a_token(64, peak) < 8 * 3 * (2 * hidden + 5 + heads)
    assert a_token(None, peak) > 3 * a_token(64, peak)
