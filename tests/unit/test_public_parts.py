"""The rival of the benchmarks computes what our model computes, so that times can be compared."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_ext.config.compose import compose
from megatron_ext.config.schema import Device, RunOptions
from megatron_ext.parallel import cpu_support, mesh, runtime
from megatron_ext.train.state import build_state
from megatron_ext.train.step import train_step
from tests.support.one_rank import one_rank

ROOT = Path(__file__).resolve().parents[2]
# Sums in another order: seen 1e-8 in losses, 4e-7 in gradients.
EXACT = 1e-5
KEYS = ("loss", "grad_norm")


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    return importlib.import_module


@pytest.mark.parametrize(
    ("residual", "precision"), [("block", "fp32"), ("standard", "fp32"), ("block", "bf16")]
)
def test_the_public_model_trains_as_ours_does(load: Any, residual: str, precision: str) -> None:
    bench, kernels = load("public_model"), load("support.public_kernels").stand_ins()
    words = [f"residual={residual}" if w.startswith("residual=") else w for w in bench.TOY]
    if residual == "standard":
        words = [w for w in words if not w.startswith("residual.")]
    # The rules of balancing differ after the first step: none here, and a bias of zero there.
    words += ["balance=none", "run.device=cpu", "optim.lr=1e-3", f"run.precision={precision}"]
    config = compose([*bench.COMMON, *words])
    # Three steps from equal weights; what is allowed of the first in bf16, else ten roundings.
    allowed = bench.ALLOWED["bf16"] if precision == "bf16" else dict.fromkeys(KEYS, 10 * EXACT)
    place = runtime.start(RunOptions(device=Device.cpu))
    try:
        state = build_state(config, place, mesh=mesh.build_mesh(config.parallel))
        theirs = bench.PublicStep(bench.weights_of(state), config, state.train_data, kernels)
        for mixture in theirs.trainer.mixtures:
            mixture.update = mixture.bias.zero_
        for _ in range(3):
            mine, other = train_step(state), theirs()
            for key in KEYS:
                assert other[key] == pytest.approx(mine[key], rel=allowed[key]), key
        assert len(theirs.trainer.mixtures) == 5
    finally:
        runtime.stop()
        cpu_support.uninstall()


def slice_of(load: Any, kind: str, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Rows of ours and of the other, without their times."""
    bench = load("layer_slice")
    monkeypatch.setattr(bench, "measure", lambda name, run, **rest: {"version": name})
    monkeypatch.setattr(bench, "kernels", lambda run, **rest: [])
    with one_rank() as groups:
        rows, _ = bench.one_residual(
            compose([*bench.SMALL, f"residual={kind}"]),
            groups,
            public=load("support.public_kernels").stand_ins(),
            whole=False,
            tokens=32,
            rate=1e9,
            device=torch.device("cpu"),
        )
    return list(rows)


@pytest.mark.parametrize("kind", ["block", "standard"])
def test_the_public_slice_computes_what_ours_does(
    load: Any, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, theirs = slice_of(load, kind, monkeypatch)
    assert {what: theirs[what] < EXACT for what in load("layer_slice").OFF} == {
        "output off": True,
        "worst gradient off": True,
        "norm of weights' off": True,
    }


def test_a_fault_in_the_public_slice_is_seen(load: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    layers = load("support.public_layers")

    def not_renormalised(*arguments: Any) -> tuple[torch.Tensor, ...]:
        weights, *rest = route(*arguments)
        return (weights * torch.linspace(0.9, 1.1, weights.shape[1]), *rest)

    route = layers._route
    monkeypatch.setattr(layers, "_route", not_renormalised)
    _, theirs = slice_of(load, "standard", monkeypatch)
    assert theirs["output off"] > 100 * EXACT


def test_kernels_are_products_by_their_names(load: Any) -> None:
    kernel = load("support.kernel_time").Kernel
    products = (
        "nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNT",
        "void cutlass::device_kernel<at::cuda::detail::enable_3x_kernel_for_sm9x<cutlass::gemm::"
        "kernel::GemmUniversal<cutlass::gemm::GroupProblemShape<...",
        "void cublasLt::splitKreduce_kernel<32, 16, int, float>",
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64",
        "aten::mm",
    )
    others = (
        "void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<cutlass::bfloat16_t>",
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16",
        "chunk_kda_bwd_kernel_intra",
        "triton_poi_fused_mul_sigmoid_tanh_0",
        "aten::mul",
    )
    assert all(kernel(name, 1.0, 1).is_product for name in products)
    assert not any(kernel(name, 1.0, 1).is_product for name in others)


def test_every_case_is_a_configuration(load: Any) -> None:
    bench = load("public_model")
    for case in [*bench.CASES.values(), *bench.ON_CPU.values()]:
        compose([*bench.COMMON, *case])
