"""On a GPU: the fused update equals the formula; neither it nor the norm waits for the device."""

from __future__ import annotations

import pytest
import torch

from megatron_ext.optim import mcore_adam
from tests.support.cuda import no_waits

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
SHAPES = [(257, 33), (1000,), (), (3, 4, 5)]


def parameters(device: str) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(5)
    return [
        torch.nn.Parameter(torch.randn(shape, generator=generator).to(device)) for shape in SHAPES
    ]


def set_gradients(params: list[torch.nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator).to(param.device)


def test_fused_update_equals_the_formula_without_a_wait() -> None:
    fused, formula = parameters("cuda"), parameters("cpu")
    options = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    ours, twin = mcore_adam.Adam(fused, **options), mcore_adam.Adam(formula, **options)
    for step in range(10):
        set_gradients(fused, step)
        set_gradients(formula, step)
        with no_waits():
            ours.step()
        twin.step()
    for a, b in zip(fused, formula, strict=True):
        # The fused kernel rounds in another order: a few float32 ulp a step.
        torch.testing.assert_close(a.cpu(), b, rtol=1e-5, atol=1e-6)


def test_norm_and_clipping_do_not_wait_and_do_not_depend_on_the_cut() -> None:
    flag = torch.zeros(1, dtype=torch.int, device="cuda")
    long = torch.randn(1_000_003, generator=torch.Generator().manual_seed(2)).cuda()
    parts = list(long.clone().split(7919))
    with no_waits():
        whole, _ = mcore_adam.multi_tensor_l2_norm(0, flag, [[long]], False)
        split, _ = mcore_adam.multi_tensor_l2_norm(0, flag, [parts], False)
        mcore_adam.multi_tensor_scale(0, flag, [parts, parts], 0.5)
    exact = long.double().norm().item()
    # The invariant on layouts asks 1e-6 of the norm.
    assert whole.item() == pytest.approx(exact, rel=1e-6)
    assert split.item() == pytest.approx(exact, rel=1e-6)
    assert torch.equal(torch.cat(parts), long * 0.5)


def test_resume_is_bit_exact() -> None:
    straight, resumed = parameters("cuda"), parameters("cuda")
    adam = mcore_adam.Adam(straight, lr=1e-2)
    first = mcore_adam.Adam(resumed, lr=1e-2)
    for step in range(3):
        for params, optimizer in ((straight, adam), (resumed, first)):
            set_gradients(params, step)
            optimizer.step()
    second = mcore_adam.Adam(resumed, lr=1e-2)
    second.load_state_dict(first.state_dict())
    for params, optimizer in ((straight, adam), (resumed, second)):
        set_gradients(params, 3)
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(straight, resumed, strict=True))
