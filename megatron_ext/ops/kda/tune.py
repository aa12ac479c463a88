"""Choose fla's kernel variants once for this GPU: python -m megatron_ext.ops.kda.tune

fla tries up to 24 variants of each kernel at the first call of a shape, and compiles each: minutes
before the first step. This runs what the presets use, takes down what was chosen and writes it
where `megatron_ext.ops.kda.tuned` looks for it; runs on such a GPU then start with these. First as
many processes as there are cores compile a share of the variants each, into Triton's cache.

Nothing is written if a result differs from float64 by more than its precision allows: a variant
that is fast and wrong has been seen.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatron_ext.config.schema import AttentionResidualBackend
from megatron_ext.ops.attn_res import depth_mix
from megatron_ext.ops.kda import tuned
from megatron_ext.ops.kda.tune_work import Kda, accuracy

# The worst seen of fla with correct variants: 2.3e-2 (A_log, a sum of rounded terms) in bfloat16;
# float32 inputs meet TensorFloat-32 in fla's products.
LARGEST_ERROR = {torch.bfloat16: 5e-2, torch.float32: 1e-2}
# A choice serves every call that differs from it in numbers only. Flags must be the same, and which
# tensors are given: documents, states (context parallelism), the final state (measured steps).
DOCUMENTS = (0, 1000, 1001, 3000, 4096)
CHECKED = (
    Kda(16, 4096),
    Kda(16, 4096, unbounded=True),
    Kda(16, 4096, dtype=torch.float32),
    Kda(16, 4096, initial=True, final=True),
)
WORK = (
    *CHECKED,
    Kda(16, 4096, final=True),
    Kda(16, 4096, documents=DOCUMENTS),
    Kda(16, 4096, documents=DOCUMENTS, initial=True, final=True),
    Kda(96, 8192),
    Kda(12, 65536),
)
# Wide first: a choice for many numbers a row may serve few, not the other way round.
MIXES = tuple(
    (width, norm, dtype)
    for width, dtype in ((7168, torch.bfloat16), (1536, torch.bfloat16), (1536, torch.float32))
    for norm in (True, False)
)
SHORT = 4096  # tokens while compiling: the code does not depend on their number
# float32 numbers a thread holds of its tile; variants beyond take minutes to compile, and spill.
MOST_REGISTERS = 128


def main() -> int:
    """Compile, tune, check, write. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, help="default: where runs on this GPU look")
    parser.add_argument("--processes", type=int, help="that compile; default: one a core")
    parser.add_argument("--share", help=argparse.SUPPRESS)  # of such a process: 3/14
    options = parser.parse_args()
    if options.share:
        compile_share(*(int(part) for part in options.share.split("/")))
        return 0
    begin, worst = time.perf_counter(), 0.0
    compile_all(options.processes or len(os.sched_getaffinity(0)))
    print(f"compiled: {time.perf_counter() - begin:.0f} s", flush=True)
    for tuner in tuners():
        tuner.do_bench = short_bench
    for number in range(len(WORK) + len(MIXES)):
        run(number)
        print(f"{describe(number)}: {time.perf_counter() - begin:.0f} s since start", flush=True)
    for work in CHECKED:
        errors = accuracy(work, tokens=256)
        worst = max(worst, *(value / LARGEST_ERROR[work.dtype] for value in errors.values()))
        print(work, {name: f"{error:.1e}" for name, error in errors.items()}, flush=True)
    if worst > 1:
        print(f"error {worst:.1f} times what is allowed: nothing written", file=sys.stderr)
        return 1
    name = torch.cuda.get_device_name()
    folder = options.output or tuned.folder(name)
    files = chosen()
    folder.mkdir(parents=True, exist_ok=True)
    for kernel, content in files.items():
        (folder / f"{kernel}.json").write_text(json.dumps(content, indent=1) + "\n")
    entries = sum(len(content["autotune_entries"]) for content in files.values())
    print(f"{name}: {len(files)} kernels, {entries} shapes in {folder}")
    return 0


def compile_all(processes: int) -> None:
    """Fill Triton's cache. A process that fails says so; what it left is compiled later."""
    module = "megatron_ext.ops.kda.tune"
    started = []
    for share in range(processes):
        log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed below)
        command = [sys.executable, "-m", module, "--share", f"{share}/{processes}"]
        started.append((subprocess.Popen(command, stdout=log, stderr=log), log))
    for share, (process, log) in enumerate(started):
        if process.wait():
            log.seek(0)
            print(f"share {share} of {processes} failed:", *log.readlines()[-3:], flush=True)
        log.close()


def compile_share(share: int, shares: int) -> None:
    """Run everything with a share of every kernel's variants, each but once."""
    for tuner in tuners():
        tuner.configs = share_of(tuner.configs, share, shares)
        tuner.do_bench = run_once
        tuner.cache_results = False
    count = len(WORK) + len(MIXES)
    for number in range(count):
        # Each begins elsewhere, so that they meet at few kernels.
        run((number + share) % count, tokens=SHORT)


def share_of(configs: Sequence[Any], share: int, shares: int) -> list[Any]:
    """Every `shares`-th variant, and the first, which needs the least and always runs."""
    own = list(configs[share::shares])
    return own if share == 0 else [*own, configs[0]]


def run_once(call: Any, quantiles: Any = None) -> list[float]:
    """In the place of Triton's measuring: compiles."""
    call()
    return [1.0, 1.0, 1.0]


def short_bench(call: Any, quantiles: Any = None) -> Any:
    """In the place of Triton's measuring: 5 ms of warm-up and 25 ms of measuring a variant."""
    import triton.testing

    return triton.testing.do_bench(call, warmup=5, rep=25, quantiles=quantiles)


def tuners() -> list[Any]:
    """Every autotuner of the operators that are tuned here; without variants that are too wide."""
    import fla.modules.convolution
    import fla.ops.attnres
    import fla.ops.kda  # noqa: F401 (its autotuners are looked up below)
    from fla.ops.utils.cache import CachedAutotuner

    # By type: asking a dead weak reference what it is an instance of raises.
    found: list[Any] = [x for x in gc.get_objects() if issubclass(type(x), CachedAutotuner)]
    widest = 1 << (max(width for width, *_ in MIXES) - 1).bit_length()
    for tuner in found:
        if tuner.kernel_name.startswith("attnres"):
            tuner.configs = [
                config
                for config in tuner.configs
                if config.kwargs.get("BL", 0) * widest <= 32 * config.num_warps * MOST_REGISTERS
            ]
    return found


def describe(number: int) -> str:
    """What `run` does with a number."""
    if number < len(WORK):
        return str(WORK[number])
    return "mix of width {}, norm {}, {}".format(*MIXES[number - len(WORK)])


def run(number: int, *, tokens: int | None = None) -> None:
    """One piece of work, forward and backward."""
    if number < len(WORK):
        work = WORK[number]
        work(tokens=work.tokens if tokens is None else min(tokens, work.tokens))
        return
    width, norm, dtype = MIXES[number - len(WORK)]
    rows = 8192 if tokens is None else 512
    draw = partial(torch.randn, device="cuda", requires_grad=True)
    for count in (8, 9):  # sources: there is one kernel for up to 8, one for up to 16
        sources = [draw(rows, width, dtype=dtype) for _ in range(count)]
        query, key_weight = draw(width), draw(width)
        weight = draw(width, dtype=dtype) if norm else None
        out = depth_mix(
            sources,
            query,
            key_weight,
            eps=1e-5,
            norm_weight=weight,
            backend=AttentionResidualBackend.fla,
            require=True,
        )
        torch.autograd.grad(out, [*sources, query, key_weight], torch.ones_like(out))


def chosen() -> dict[str, dict[str, Any]]:
    """What every autotuner of fla holds now, in the form that fla reads."""
    import triton
    from fla.ops.utils.cache import AutotuneKey

    files: dict[str, dict[str, Any]] = {}
    for tuner in tuners():
        if not tuner.cache:
            continue
        entries = {
            AutotuneKey.key_hash(key): {"autotune_key": list(key), "config": plain(config)}
            for key, config in tuner.cache.items()
        }
        content = files.setdefault(
            tuner.kernel_name,
            {
                "kernel_name": tuner.kernel_name,
                "triton_version": triton.__version__,
                "autotune_entries": {},
                "default_config": next(iter(entries.values()))["config"],
            },
        )
        content["autotune_entries"].update(entries)
    return dict(sorted(files.items()))


def plain(config: Any) -> dict[str, Any]:
    """A variant's settings without what is not written down as JSON."""
    names = ("num_warps", "num_stages", "num_ctas", "maxnreg", "ir_override")
    return {"kwargs": config.kwargs} | {name: getattr(config, name, None) for name in names}


if __name__ == "__main__":
    sys.exit(main())
