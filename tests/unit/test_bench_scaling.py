"""What `bench/scaling.py` makes of a trace, and when it says that something is wrong."""

from __future__ import annotations

import argparse
import importlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
OPTIONS = {"set": "weak", "only": "", "ranks": None}
OPTIONS |= {"plan": False, "share_gpu": False, "large": False}


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    return importlib.import_module


def event(name: str, begin: float, end: float, category: str, **arguments: str) -> dict[str, Any]:
    """Times in milliseconds; traces have microseconds."""
    times = {"ts": 1e3 * begin, "dur": 1e3 * (end - begin)}
    return {"ph": "X", "name": name, "cat": category, **times, "args": arguments}


def test_messages_are_exposed_where_nothing_is_computed(load: Any, tmp_path: Path) -> None:
    group = "EXPERT_MODEL_PARALLEL_GROUP"
    named = {"Collective name": "all_to_allv", "Process Group Description": group}
    events = [
        event("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", 0, 10, "kernel", **named),
        event("void cutlass::gemm", 4, 6, "kernel"),
        event("Memcpy DtoD", 5, 7, "gpu_memcpy"),  # overlaps the product: 3 ms together
        event("ncclDevKernel_AllReduce_Sum_f32_RING_LL(...)", 8, 12, "kernel"),
        event("void elementwise", 11, 20, "kernel"),
        event("aten::mm", 0, 20, "cpu_op"),  # the host computes nothing
        {"ph": "M", "name": "process_name"},
    ]
    file = tmp_path / "trace.json"
    file.write_text(json.dumps({"traceEvents": events}))
    found = load("support.overlap").read_trace(file)
    experts = "all_to_allv (expert model)"
    assert found.kernels == 5
    assert found.total == pytest.approx({experts: 0.010, "AllReduce": 0.004})
    assert found.exposed == pytest.approx({experts: 0.007, "AllReduce": 0.003})
    assert found.all_exposed == pytest.approx(0.008)  # 0-4, 7-11: together once


def test_on_a_cpu_torchs_operators_hide_messages(load: Any, tmp_path: Path) -> None:
    events = [
        event("gloo:all_reduce", 0, 10, "cpu_op"),
        event("aten::mm", 2, 3, "cpu_op"),
        event("autograd::engine", 0, 10, "cpu_op"),  # waits too
    ]
    file = tmp_path / "trace.json"
    file.write_text(json.dumps({"traceEvents": events}))
    found = load("support.overlap").read_trace(file)
    assert (found.kernels, found.all_exposed) == (0, pytest.approx(0.009))


@pytest.mark.parametrize(
    ("words", "gpus", "said"),
    [
        ({"ranks": 4}, 2, "this host has 2 GPU.s. .allowed: up to 2; more with --share-gpu"),
        ({"set": "k3_30b", "ranks": 8}, 0, "for 4 ranks"),
        ({"set": "k3_30b", "ranks": 2}, 8, "for 8 ranks"),
        ({"set": "resume", "ranks": 3}, 0, "an even number"),
        ({"only": "tp4"}, 2, "allowed: a part of: one; one balanced; dp2; ep2"),
    ],
)
def test_ranks_that_do_not_fit_are_refused(
    load: Any, words: dict[str, Any], gpus: int, said: str
) -> None:
    options = argparse.Namespace(**(OPTIONS | words))
    with pytest.raises(SystemExit, match=said):
        load("scaling").checked(options, [], gpus)


@pytest.mark.parametrize("chosen", ["weak", "k3_30b", "context", "resume", "custom"])
def test_every_layout_of_a_set_is_valid_on_eight_gpus(load: Any, chosen: str) -> None:
    options = argparse.Namespace(**(OPTIONS | {"set": chosen}))
    found = load("scaling").checked(options, [], 8)
    assert max(layout.ranks for layout in found) == 8


def test_a_layout_comes_with_the_one_that_it_is_measured_by(load: Any) -> None:
    options = argparse.Namespace(**(OPTIONS | {"only": "ep8 balanced"}))
    names = [layout.name for layout in load("scaling").checked(options, [], 8)]
    assert names == ["one balanced", "ep8 balanced"]


def test_even_routing_is_the_same_in_every_layout(load: Any) -> None:
    hook = load("support.scaling_rank").EvenRoute(micro_batch_size=2)
    length, experts, k = 24, 8, 2  # the parts of four ranks do not end with a round of experts

    def maps(ranks: int) -> torch.Tensor:
        """Of ranks that share two sequences out; tokens by place, then by sequence."""
        parts = []
        for rank in range(ranks):
            router = SimpleNamespace(
                sharing=SimpleNamespace(rank=lambda rank=rank: rank),
                balancer=SimpleNamespace(top_k=k),
            )
            parts.append(hook(router, torch.zeros(2 * length // ranks, experts), None))
        return torch.cat(parts)

    whole = maps(1)
    assert torch.equal(whole, maps(4))
    assert torch.equal(whole[::2], whole[1::2])  # both sequences
    assert whole.sum(1).tolist() == [k] * 2 * length
    assert whole.sum(0).tolist() == [2 * length * k // experts] * experts


def test_more_ranks_than_gpus_are_allowed_when_asked_for(load: Any) -> None:
    options = argparse.Namespace(**(OPTIONS | {"ranks": 4, "share_gpu": True}))
    assert load("scaling").checked(options, [], 1)


def test_speed_counts_against_one_rank_and_a_wrong_loss_is_an_error(load: Any) -> None:
    scaling, layout = load("scaling"), load("support.layouts").Layout
    one, two = layout("one", 1, ()), layout("dp2", 2, (), baseline="one")
    common = {"planned_gib": [10.0, 20.0], "step_seconds": 1.0, "busiest_expert": 1.5}
    found = {
        "one": {"ranks": 1, "tokens_per_second": 100.0, "tflops_a_rank": 4.0}
        | {"stage_and_peak_gib": [(0, 9.0)], "losses": [2.0], "reference_loss": 2.0},
        "dp2": {"ranks": 2, "tokens_per_second": 180.0, "tflops_a_rank": 3.6}
        | {"stage_and_peak_gib": [(0, 11.0), (1, 21.0)], "losses": [2.1], "reference_loss": 2.0},
    }
    found = {name: common | values for name, values in found.items()}
    row = scaling.report([one, two], found)["speed"][1]
    assert (row["tokens/s of ideal"], row["TFLOP/s of one"]) == ("90.0 %", "90.0 %")
    assert (row["peak GiB"], row["planned GiB"]) == (11.0, 10.0)  # of the stage that is off most
    (line,) = scaling.wrong([one, two], found, "bf16")
    assert line == "dp2: first loss off by 5.0e-02, allowed 1e-03"
