"""Launch settings of our Triton kernels, timed: python bench/launch_settings.py [--write]

Each kernel at the sizes of `bench/operators.py`, `bench/attention_residuals.py` and
`bench/routing.py`, with every candidate below and what `ops/launch.json` says now; the GPU time of
that kernel alone. `--write` puts the fastest into the last entry of the table, the one for wide
rows.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import attention_residuals
import kda_backward
import routing
import torch
from common import Row, both_ways, finish, free_memory, gpu_kernels, start
from operators import works

from megatron_ext.config.schema import AttentionResidualBackend, BinPlacement, KernelBackend
from megatron_ext.ops import launch

Settings = dict[str, int]
TOKENS, ROUTED, REPEATS = 8192, 65536, 5
# By a word in an operator's name, how the names of its kernels begin. Those of the norm, gate and
# beta before cudnn's linear attention, and those of our own, have no operator and are not tried.
KERNELS = {
    "SiTU": "situ",
    "RMS": "rms_norm",
    "gate": "head_gate",
    "convolution": "qkv_conv",
    "sums": "expert_rows",
    "losses": "cross_entropy",
    "mix": "depth_mix",
    "chunks": "kda_backward",
    "routing": "route",
    "margins": "statistics",
}


def product(**values: tuple[int, ...]) -> list[Settings]:
    """Every combination."""
    return [dict(zip(values, found, strict=True)) for found in itertools.product(*values.values())]


def candidates(kernel: str) -> list[Settings]:
    """What is tried for a kernel of the table."""
    blocks = [
        {"BLOCK": block, "num_warps": warps}
        for block, warps in ((512, 2), (512, 4), (1024, 4), (1024, 8), (2048, 8))
    ]
    if kernel.startswith("qkv_conv"):
        narrow = ((128, 1), (128, 2), (256, 1), (256, 2), (256, 4), (512, 2), (512, 4))
        return [
            {"ROWS": rows, "AHEAD": ahead, "BLOCK": block, "num_warps": warps}
            for rows, ahead in ((32, 4), (64, 4), (64, 8), (128, 8))
            for block, warps in narrow
        ]
    if kernel.startswith("head_gate"):
        return product(ELEMENTS=(512, 1024, 2048, 4096), num_warps=(2, 4, 8))
    if kernel.startswith("cross_entropy"):
        return product(BLOCK=(1024, 2048, 4096, 8192), num_warps=(4, 8, 16))
    if kernel == "rms_norm_forward":
        return product(ELEMENTS=(2048,), num_warps=(4, 8, 16))
    if kernel == "rms_norm_backward":
        some = product(ELEMENTS=(2048,), PROGRAMS=(132, 264, 528), num_warps=(8, 16))
        return [*some, *({**each, "maxnreg": 1024 // each["num_warps"]} for each in some)]
    if kernel.startswith("route"):
        return product(num_warps=(1, 2, 4))
    if kernel == "statistics":
        tiles = ((64, 4), (64, 8), (128, 4), (128, 8), (248, 8))
        return [
            {"TOKENS": tokens, "AHEAD": ahead, "EXPERTS": 32 * warps, "WINDOW": window}
            | {"num_warps": warps}
            for tokens, ahead in tiles
            for warps in (1, 4)
            for window in (0, 16)
        ]
    if kernel == "kda_backward_solve":
        return product(num_warps=(4, 8))
    if kernel == "kda_backward_chunk":  # 4 warps have no registers for it, 16 spill half of them
        return product(num_warps=(8,))
    if kernel == "depth_mix_forward":
        return product(OWN=(4, 8), num_warps=(4, 8))
    if kernel == "depth_mix_backward":
        return product(OWN=(4, 8), PROGRAMS=(132, 264), num_warps=(4, 8))
    return blocks


def calls(device: torch.device) -> Iterator[tuple[str, Callable[[], object]]]:
    """Forward and backward of every operator, by its name."""
    for work in works(device, heads=96, latent=3584, inner=3072, vocab=20480):
        inputs = work.draw(TOKENS)
        yield work.name, both_ways(partial(work.ways["triton"], *inputs), inputs)
        free_memory()
    sources, vectors = attention_residuals.inputs(
        8, tokens=TOKENS, width=7168, device=device, dtype=torch.bfloat16
    )
    mix = partial(
        attention_residuals.mix, sources, vectors, backend=AttentionResidualBackend.triton
    )
    yield "mix over depth", both_ways(mix, [*sources, *vectors])
    yield "chunks of KDA", kda_backward.ours(kda_backward.flow(96, TOKENS, device))
    free_memory()
    case = routing.build(
        ROUTED, placement=BinPlacement.centred, backend=KernelBackend.triton, device=device
    )
    routed = case.route()
    yield "routing", both_ways(lambda: case.route().weights, [case.logits])
    yield "margins", lambda: case.observe(routed)


def kernel_milliseconds(kernel: str, call: Callable[[], object]) -> float:
    """GPU time of one kernel of a call, the median."""
    call()
    found = []
    for _ in range(REPEATS):
        events = [e for e in gpu_kernels(call).events if e.key == f"_{kernel}"]
        found.append(sum(e.self_device_time_total for e in events) / 1e3)
    return statistics.median(found)


def tried(kernel: str, call: Callable[[], object]) -> list[Row]:
    """Every candidate, the fastest first; `now` marks what the table says."""
    now = {k: v for k, v in launch.read_table()[kernel][-1].items() if k != "up_to"}
    rows: list[Row] = []
    original = launch.read_table
    for settings in [now, *(c for c in candidates(kernel) if c != now)]:
        table = original() | {kernel: [{"up_to": None, **settings}]}
        launch.read_table = lambda table=table: table
        launch.launch_settings.cache_clear()
        try:
            took = kernel_milliseconds(kernel, call)
        # A candidate that asks for more registers or shared memory than there are is no candidate.
        except Exception as error:
            print(f"{kernel} {settings}: {type(error).__name__} {str(error)[:100]}")
            continue
        rows.append({**settings, "GPU ms": took, "now": "*" if settings == now else ""})
    launch.read_table = original
    launch.launch_settings.cache_clear()
    return sorted(rows, key=lambda row: row["GPU ms"])


def write(tables: dict[str, list[Row]]) -> None:
    """The fastest of each into the table's last entry."""
    known = launch.read_table()
    for kernel, rows in tables.items():
        best = {k: v for k, v in rows[0].items() if k not in ("GPU ms", "now")}
        known[kernel][-1] = {"up_to": None, **best}
    text = ",\n".join(
        f' "{kernel}": [\n' + ",\n".join(f"  {json.dumps(e)}" for e in entries) + "\n ]"
        for kernel, entries in known.items()
    )
    launch.TABLE.write_text("{\n" + text + "\n}\n")


def main() -> None:
    """Measures and prints, the tables last."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="also write the numbers there")
    parser.add_argument("--only", default="", help="kernels whose name begins like this")
    parser.add_argument("--write", action="store_true", help="keep the fastest in ops/launch.json")
    options = parser.parse_args()
    device = start()
    if device.type != "cuda":
        parser.exit(2, "launch settings: no GPU here; run it on the kind of GPU they are for\n")
    tables: dict[str, list[Row]] = {}
    for name, call in calls(device):
        begins = next(start for word, start in KERNELS.items() if word in name)
        for kernel in launch.read_table():
            if kernel.startswith(begins) and kernel.startswith(options.only):
                tables[kernel] = tried(kernel, call)
    if options.write:
        write(tables)
    finish(tables, failures=[], json_file=options.json)


if __name__ == "__main__":
    main()
