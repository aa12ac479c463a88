"""Choose fla's kernel variants once for this GPU: python -m megatron_ext.ops.kda.tune

fla tries up to 24 variants of each kernel at the first call of a shape, and compiles each: minutes
before the first step. This runs the shapes that the presets use, takes down what was chosen and
writes it where `megatron_ext.ops.kda.tuned` looks for it; runs on such a GPU then start with these.
Nothing is written if a result differs from float64 by more than its precision allows: a variant
that is fast and wrong has been seen.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

from megatron_ext.config.schema import Gate, KdaBackend
from megatron_ext.ops.kda import kda, short_conv, tuned

# The worst seen of fla with correct variants: 2.3e-2 (A_log, a sum of rounded terms) in bfloat16;
# float32 inputs meet TensorFloat-32 in fla's products.
LARGEST_ERROR = {torch.bfloat16: 5e-2, torch.float32: 1e-2}
# Heads as tensor parallelism leaves them, and a length that is short to tune at.
SHAPES = ((12, 8192, 128), (16, 4096, 128), (96, 8192, 128))
DOCUMENTS = (0, 1000, 1001, 3000, 4096)


def main() -> int:
    """Tune, check, write. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, help="default: where runs on this GPU look")
    options = parser.parse_args()
    begin, worst = time.perf_counter(), 0.0
    for dtype in (torch.bfloat16, torch.float32):
        for gate in (Gate.bounded, Gate.softplus):
            errors = accuracy(gate=gate, dtype=dtype)
            worst = max(worst, *(value / LARGEST_ERROR[dtype] for value in errors.values()))
            print(dtype, gate.value, {name: f"{e:.1e}" for name, e in errors.items()}, flush=True)
    for heads, tokens, width in SHAPES:
        for gate in (Gate.bounded, Gate.softplus):
            run(heads, tokens, width, gate=gate)
        print(f"{heads} x {tokens}: {time.perf_counter() - begin:.0f} s since start", flush=True)
    run(16, DOCUMENTS[-1], 128, gate=Gate.bounded, documents=DOCUMENTS)
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


def run(
    heads: int,
    tokens: int,
    width: int,
    *,
    gate: Gate,
    dtype: torch.dtype = torch.bfloat16,
    documents: tuple[int, ...] | None = None,
    exact: bool = False,
) -> list[torch.Tensor]:
    """Convolution and KDA, forward and backward: the output and all gradients.

    Args:
        dtype: the inputs are rounded to it.
        exact: compute in float64 by the reference, on the CPU, from the same rounded inputs.
    """
    generator = torch.Generator().manual_seed(0)
    device, wide = ("cpu", torch.float64) if exact else ("cuda", torch.float32)
    backend = KdaBackend.reference if exact else KdaBackend.fla

    def draw(*shape: int, scale: float = 1.0) -> torch.Tensor:
        made = (torch.randn(*shape, generator=generator) * scale).to(dtype)
        return made.to(device, wide if exact else dtype).requires_grad_()

    row = (1, tokens, heads, width)
    x = draw(1, tokens, heads * width)
    taps = draw(heads * width, 4, scale=0.5)
    k, v, z, beta = draw(*row), draw(*row), draw(*row), draw(1, tokens, heads)
    slope = torch.zeros(heads, device=device, dtype=wide, requires_grad=True)
    bias = torch.zeros(heads, width, device=device, dtype=wide, requires_grad=True)
    lengths = None
    if documents is not None:
        lengths = torch.tensor(documents, device=device)
    q, _ = short_conv(x, taps, cu_seqlens=lengths, backend=backend)
    o, _ = kda(
        q.view(row),
        k,
        v,
        z,
        beta,
        slope,
        bias,
        gate=gate,
        lower_bound=-5.0,
        cu_seqlens=lengths,
        backend=backend,
    )
    weight = torch.randn(o.shape, generator=torch.Generator().manual_seed(1)).to(dtype).to(o)
    return [o, *torch.autograd.grad(o, (x, taps, k, v, z, beta, slope, bias), weight)]


def accuracy(*, gate: Gate, dtype: torch.dtype) -> dict[str, float]:
    """Relative L2 errors of the output and each gradient against float64, 2 heads x 256 tokens."""
    names = ("o", "dx", "dtaps", "dk", "dv", "dz", "dbeta", "dA_log", "ddt_bias")
    exact = run(2, 256, 128, gate=gate, dtype=dtype, exact=True)
    found = run(2, 256, 128, gate=gate, dtype=dtype)
    return {
        name: ((a.detach().cpu().double() - b).norm() / b.norm()).item()
        for name, a, b in zip(names, found, exact, strict=True)
    }


def chosen() -> dict[str, dict[str, Any]]:
    """What every autotuner of fla holds now, in the form that fla reads."""
    import triton
    from fla.ops.utils.cache import AutotuneKey, CachedAutotuner

    files: dict[str, dict[str, Any]] = {}
    for tuner in gc.get_objects():
        if not isinstance(tuner, CachedAutotuner) or not tuner.cache:
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
