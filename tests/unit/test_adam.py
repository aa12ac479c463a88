"""Our Adam repeats torch's AdamW, resumes exactly, and stands in for megatron-core's fallback."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from megatron.core import optimizer as mcore_optimizer
from megatron.core.optimizer import clip_grads, distrib_optimizer

from megatron_ext.optim import mcore_adam

OPTIONS = {"lr": 3e-3, "betas": (0.9, 0.95), "eps": 1e-8}


def parameters(dtype: torch.dtype) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    shapes = [(7, 5), (33,), (), (2, 3, 4), (0, 4)]
    return [
        torch.nn.Parameter(torch.randn(shape, generator=generator, dtype=dtype)) for shape in shapes
    ]


def grouped(params: list[torch.nn.Parameter]) -> list[dict[str, object]]:
    return [
        {"params": params[:1], "weight_decay": 0.1},
        {"params": params[1:], "weight_decay": 0.0, "lr": 1e-2},
    ]


def set_gradients(params: list[torch.nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator, dtype=param.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equals_torch_adamw(dtype: torch.dtype) -> None:
    ours, theirs = parameters(dtype), parameters(dtype)
    adam = mcore_adam.Adam(grouped(ours), **OPTIONS)
    reference = torch.optim.AdamW(grouped(theirs), foreach=True, **OPTIONS)
    for step in range(20):
        set_gradients(ours, step)
        set_gradients(theirs, step)
        adam.step()
        reference.step()
    for a, b in zip(ours, theirs, strict=True):
        # The same operations in the same order; a few ulp allow for torch changing its order.
        torch.testing.assert_close(a, b, rtol=8 * torch.finfo(dtype).eps, atol=0.0)


def test_equals_the_paper_for_one_number() -> None:
    param = torch.nn.Parameter(torch.tensor([2.0], dtype=torch.float64))
    adam = mcore_adam.Adam([param], lr=0.1, betas=(0.9, 0.99), eps=1e-3, weight_decay=0.5)
    p, m, v = 2.0, 0.0, 0.0
    for step, grad in enumerate([0.3, -0.7, 0.2], 1):
        param.grad = torch.tensor([grad], dtype=torch.float64)
        adam.step()
        m, v = 0.9 * m + 0.1 * grad, 0.99 * v + 0.01 * grad**2
        p -= 0.1 * 0.5 * p
        p -= 0.1 * (m / (1 - 0.9**step)) / (math.sqrt(v / (1 - 0.99**step)) + 1e-3)
        assert param.item() == pytest.approx(p, rel=1e-14)


def test_resume_is_bit_exact_and_state_has_the_fused_shape() -> None:
    straight, resumed = parameters(torch.float32), parameters(torch.float32)
    adam = mcore_adam.Adam(grouped(straight), **OPTIONS)
    for step in range(6):
        set_gradients(straight, step)
        adam.step()
    first = mcore_adam.Adam(grouped(resumed), **OPTIONS)
    for step in range(3):
        set_gradients(resumed, step)
        first.step()
    saved = copy.deepcopy(first.state_dict())
    assert all(type(group["step"]) is int for group in saved["param_groups"])
    assert all(set(state) == {"exp_avg", "exp_avg_sq"} for state in saved["state"].values())
    second = mcore_adam.Adam(grouped(resumed), **OPTIONS)
    second.load_state_dict(saved)
    for step in range(3, 6):
        set_gradients(resumed, step)
        second.step()
    assert all(torch.equal(a, b) for a, b in zip(straight, resumed, strict=True))


def test_a_group_that_is_empty_on_this_rank_counts_steps_too() -> None:
    adam = mcore_adam.Adam([{"params": []}, {"params": parameters(torch.float32)}], **OPTIONS)
    adam.step()
    assert [group["step"] for group in adam.param_groups] == [1, 1]


def test_norm_does_not_depend_on_how_tensors_are_cut() -> None:
    long = torch.randn(300_001, generator=torch.Generator().manual_seed(3)) * 1e-3
    flag = torch.zeros(1, dtype=torch.int)
    whole, _ = mcore_adam.multi_tensor_l2_norm(0, flag, [[long]], False)
    parts, _ = mcore_adam.multi_tensor_l2_norm(0, flag, [list(long.split(977))], False)
    exact = long.double().norm().item()
    assert whole.shape == (1,)
    assert whole.dtype == torch.float32
    # float32 rounds the result once; the sum behind it is float64.
    assert whole.item() == pytest.approx(exact, rel=1e-7)
    assert parts.item() == pytest.approx(exact, rel=1e-7)


def test_norm_of_nothing_is_zero() -> None:
    norm, _ = mcore_adam.multi_tensor_l2_norm(0, torch.zeros(1, dtype=torch.int), [[]], False)
    assert norm.tolist() == [0.0]
    assert norm.dtype == torch.float32


def test_scale_works_in_place_and_casts() -> None:
    flag = torch.zeros(1, dtype=torch.int)
    values = [torch.tensor([1.0, 2.0]), torch.tensor([3.0])]
    mcore_adam.multi_tensor_scale(0, flag, [values, values], 0.5)
    assert [v.tolist() for v in values] == [[0.5, 1.0], [1.5]]
    halves = [torch.zeros(2, dtype=torch.bfloat16), torch.zeros(1, dtype=torch.bfloat16)]
    mcore_adam.multi_tensor_scale(0, flag, [values, halves], 1.0)
    assert [v.tolist() for v in halves] == [[0.5, 1.0], [1.5]]
    mcore_adam.multi_tensor_scale(0, flag, [values, halves], 2.0)
    assert [v.tolist() for v in halves] == [[1.0, 2.0], [3.0]]


@pytest.mark.parametrize(
    "wrong",
    [{"adam_w_mode": False}, {"capturable": True}, {"betas": (1.0, 0.9)}, {"eps": -1.0}],
)
def test_wrong_arguments_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        mcore_adam.Adam(parameters(torch.float32), **{**OPTIONS, **wrong})


def test_install_replaces_every_fallback_or_nothing() -> None:
    fallback = mcore_optimizer.USING_PYTORCH_OPTIMIZER
    used = mcore_adam.install()
    assert mcore_adam.install() == used, "can be repeated"
    if used:
        assert mcore_optimizer.Adam is distrib_optimizer.Adam is mcore_adam.Adam
        assert not mcore_optimizer.USING_PYTORCH_OPTIMIZER
        assert distrib_optimizer.HAVE_APEX_OR_TE
        assert clip_grads.l2_norm_impl is mcore_adam.multi_tensor_l2_norm
    else:
        assert not fallback
        assert mcore_optimizer.Adam is not mcore_adam.Adam
