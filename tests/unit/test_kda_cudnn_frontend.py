"""Our calls of cuDNN's frontend, taken by the real package, without a GPU: names, shapes, layouts.

It registers its operator with shapes for tensors that have no memory, and its engine says which
graphs it supports; only the kernels need a Hopper GPU (`tests/gpu/test_kda_cudnn_gpu.py`).
"""

from __future__ import annotations

import importlib.util

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_ext.config.schema import Gate, KdaBackend
from megatron_ext.ops.kda import cudnn, kda

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("cudnn") is None, reason="needs the package nvidia-cudnn-frontend"
)
TOKENS, HEADS, WIDTH = 256, 2, 128


def tensor(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, requires_grad=True)


@pytest.mark.parametrize("documents", [None, (0, 10, 10, TOKENS)])
@pytest.mark.parametrize("state", [False, True])
def test_its_operator_takes_our_calls(documents, state, monkeypatch) -> None:
    monkeypatch.setattr(cudnn, "misfits", lambda device, **options: [])
    count = 1 if documents is None else len(documents) - 1
    with FakeTensorMode():
        row = (1, TOKENS, HEADS, WIDTH)
        leaves = [*(tensor(*row) for _ in range(4)), tensor(*row[:3])]
        wide = {"dtype": torch.float32}
        leaves += [tensor(HEADS, **wide), tensor(HEADS, WIDTH, **wide)]
        initial = tensor(count, HEADS, WIDTH, WIDTH, **wide) if state else None
        o, final = kda(
            *leaves,
            gate=Gate.bounded,
            lower_bound=-5.0,
            cu_seqlens=None if documents is None else torch.tensor(documents),
            initial_state=initial,
            output_final_state=True,
            backend=KdaBackend.cudnn,
        )
        assert (o.shape, o.dtype) == (row, torch.bfloat16)
        assert final is not None
        assert (final.shape, final.dtype) == ((count, HEADS, WIDTH, WIDTH), torch.float32)
        leaves += [] if initial is None else [initial]
        upstream = [torch.empty_like(o), torch.empty_like(final)]
        found = torch.autograd.grad([o, final], leaves, upstream)
        assert [(x.shape, x.dtype) for x in found] == [(x.shape, x.dtype) for x in leaves]


@pytest.mark.parametrize("state", [False, True])
def test_its_engine_for_hopper_supports_our_graphs(state, monkeypatch) -> None:
    import cudnn as frontend
    from cudnn.frost import buffers
    from cudnn.linear_attention.ops import common
    from cudnn.linear_attention.ops import kda as operator

    monkeypatch.setattr(buffers, "current_sm", lambda *device: 90)
    half, wide, whole = (getattr(frontend.data_type, n) for n in ("BFLOAT16", "FLOAT", "INT32"))
    states = wide if state else None
    sizes = (TOKENS, 4, HEADS, HEADS, HEADS, WIDTH, WIDTH, half, wide, wide)
    scale, no = WIDTH**-0.5, False
    forward, _ = operator.build_fprop_graph(
        *(*sizes, states, whole, scale, state, no, no, no, no, no, None, "log", 0, None)
    )
    backward, _ = operator.build_bprop_graph(*(*sizes, states, states, whole, None, scale, no, no))
    for graph in (forward, backward):
        common.select_plan(graph, cudnn.PLAN)
        assert graph.selected_engine.name == cudnn.PLAN
