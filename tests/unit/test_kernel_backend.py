"""Which implementation runs: availability, the comparison before first use, and `require`."""

from __future__ import annotations

import subprocess
import sys
import warnings

import pytest
import torch

from megatron_ext.config.schema import KernelBackend
from megatron_ext.errors import ConfigError
from megatron_ext.ops.backend import (
    choose_backend,
    rejection,
    resolver,
    triton_misfit,
    worst_error,
)
from megatron_ext.ops.launch import launch_settings, read_table, rows_of
from megatron_ext.ops.situ import situ_glu

GPU = torch.device("cuda")


def choose(backend, *, misfit=None, check=None, require=False, device=GPU):
    return choose_backend(
        backend,
        operator="some operator",
        device=device,
        misfit=misfit,
        check=lambda: check,
        require=require,
    )


def test_auto_takes_the_kernel_only_after_its_check():
    assert choose(KernelBackend.auto) is KernelBackend.triton
    assert choose(KernelBackend.auto, check="wrong") is KernelBackend.dense
    assert choose(KernelBackend.auto, misfit="no GPU") is KernelBackend.dense
    # By name it runs without being checked.
    assert choose(KernelBackend.triton, check="wrong") is KernelBackend.triton
    assert choose(KernelBackend.dense) is KernelBackend.dense


def test_an_operator_is_checked_once_for_a_device_a_dtype_and_its_sizes(monkeypatch):
    monkeypatch.setattr("megatron_ext.ops.backend.triton_misfit", lambda device, dtype: None)
    asked = []

    def rejected(device, dtype, *sizes):
        asked.append((device, dtype, *sizes))
        return "too wide" if sizes[0] > 64 else None

    resolve = resolver("some operator", rejected)
    given = (KernelBackend.auto, GPU, torch.bfloat16)
    for _ in range(2):
        assert resolve(*given, 64) is KernelBackend.triton
        assert resolve(*given, 65) is KernelBackend.dense
    assert asked == [(GPU, torch.bfloat16, 64), (GPU, torch.bfloat16, 65)]
    with pytest.raises(ConfigError, match="some operator must run, and cannot: too wide"):
        resolve(*given, 65, require=True)
    assert resolve(KernelBackend.triton, *given[1:], 65) is KernelBackend.triton, "by name"


def test_require_makes_a_fallback_an_error():
    with pytest.raises(ConfigError, match="some operator must run, and cannot: too wrong"):
        choose(KernelBackend.auto, check="too wrong", require=True)
    with pytest.raises(ConfigError, match="no GPU"):
        choose(KernelBackend.triton, misfit="no GPU", require=True, device=torch.device("cpu"))
    # On a CPU, dense is what auto means.
    cpu = torch.device("cpu")
    chosen = choose(KernelBackend.auto, misfit="no GPU", require=True, device=cpu)
    assert chosen is KernelBackend.dense


def test_the_reason_says_what_is_missing():
    reason = triton_misfit(torch.device("cpu"), torch.float32)
    assert reason is not None
    assert "CUDA" in reason


def square(x, factor):
    wide = torch.promote_types(x.dtype, torch.float32)
    return (x.to(wide).square() * factor.to(wide)).to(x.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_equal_kernel_passes_without_a_word(dtype):
    inputs = [torch.linspace(-2, 2, 999).to(dtype), torch.ones(1, dtype=dtype)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert rejection("square", fast=square, slow=square, inputs=inputs) is None


def wrong_value(x, factor):
    return square(x, factor) * 1.02


def wrong_gradient(x, factor):
    return square(x, factor.detach()) + 0 * factor


def not_a_number(x, factor):
    return square(x, factor) * float("nan")


def failing(x, factor):
    raise RuntimeError("out of shared memory")


@pytest.mark.parametrize("fast", [wrong_value, wrong_gradient, not_a_number, failing])
def test_a_kernel_that_differs_or_fails_is_rejected_loudly(fast):
    inputs = [torch.randn(40, 30), torch.ones(1)]
    with pytest.warns(RuntimeWarning, match="the Triton kernel is rejected"):
        assert rejection("square", fast=fast, slow=square, inputs=inputs)


def test_the_comparison_touches_neither_generator_nor_gradient_mode():
    inputs = [torch.randn(4), torch.ones(1)]
    before = torch.get_rng_state()
    with torch.inference_mode():
        assert worst_error(square, square, inputs) < 1e-6
    assert torch.equal(torch.get_rng_state(), before)


def test_every_kernel_has_settings_for_every_width():
    for name, entries in read_table().items():
        limits = [entry["up_to"] for entry in entries]
        assert limits[-1] is None, name
        assert limits[:-1] == sorted(limits[:-1]), name
        assert launch_settings(name, 1) == {k: v for k, v in entries[0].items() if k != "up_to"}
        assert "up_to" not in launch_settings(name, 10**9)


def test_rows_are_views_where_memory_allows():
    x = torch.randn(3, 4, 10)
    assert rows_of(x).data_ptr() == x.data_ptr()
    half = rows_of(x.chunk(2, -1)[1])
    assert half.stride() == (10, 1)
    assert torch.equal(half, x[..., 5:].reshape(12, 5))
    assert rows_of(x.transpose(-1, -2)).stride(-1) == 1
    assert rows_of(x[0, 0]).shape == (1, 10)


def test_operators_import_no_triton_on_a_cpu():
    code = (
        "import sys, torch, megatron_ext.ops.situ as s;"
        "s.situ_glu(torch.ones(2, 4), beta=4.0, linear_beta=25.0);"
        "sys.exit(any(m.split('.')[0] == 'triton' for m in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_required_kernel_is_refused_where_it_cannot_run():
    with pytest.raises(ConfigError, match="situ_glu"):
        situ_glu(
            torch.ones(2, 4),
            beta=4.0,
            linear_beta=25.0,
            backend=KernelBackend.triton,
            require=True,
        )
