"""Compile every kernel for Hopper, on any machine; fails where registers spill to memory, and where
the assembler made code that reads a uniform register before it is written.

Started by `tests/unit/test_kernels.py`: a process without TRITON_INTERPRET. The arguments are those
of large training shapes in bfloat16: pointers and strides divisible by 16.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from megatron_ext.ops.attn_res import triton as attn_res
from megatron_ext.ops.attn_res import triton_kernels as mix_kernels
from megatron_ext.ops.cross_entropy import triton as cross_entropy
from megatron_ext.ops.expert_rows import triton as expert_rows
from megatron_ext.ops.gating import triton as gating
from megatron_ext.ops.kda import own_backward
from megatron_ext.ops.kda import own_kernels as kda_own
from megatron_ext.ops.kda import triton as kda_inputs
from megatron_ext.ops.kda import triton_health as kda_health
from megatron_ext.ops.kda.health import BINS
from megatron_ext.ops.launch import launch_settings
from megatron_ext.ops.qkv_conv import triton as conv
from megatron_ext.ops.quantile import triton as statistics
from megatron_ext.ops.quantile import triton_update as update
from megatron_ext.ops.rms_norm import triton as rms_norm
from megatron_ext.ops.router import triton as router
from megatron_ext.ops.situ import triton as situ

HOPPER = GPUTarget("cuda", 90, 32)
TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"

# Kernel, launch settings, constants, types that are not *bf16 (all integers are divisible by 16).
SITU = {"scale": "*fp32", "d_scale": "*fp32", "beta": "fp32", "linear_beta": "fp32"}
K3 = {"HAS_SCALE": True, "BOUNDED_GATE": True, "BOUNDED_UP": True}
ROWS = {"rows": "*bf16", "order": "*i64", "starts": "*i64"}
GATE = {"d_weight": "*fp32", "eps": "fp32"}
CONV = {
    "starts": "*i64",
    "weight": "*fp32",
    "d_weight": "*fp32",
    "halo": "i32",
    "grads": ("*bf16",) * 3,
}
INPUTS = {
    **dict.fromkeys(("slope", "bias", "g_out", "beta_out", "g_grad", "beta_grad"), "*fp32"),
    **dict.fromkeys(("q_inverse", "k_inverse", "q_grad", "k_grad"), "*fp32"),
    **dict.fromkeys(("d_slope", "d_bias"), "*fp32"),
    **dict.fromkeys(("lower_bound", "eps"), "fp32"),
    **dict.fromkeys(("q_row", "k_row", "z_row", "beta_row", "dz_row"), "i32"),
}
HEALTH = {
    **dict.fromkeys(("slope", "bias", "numbers"), "*fp32"),
    **dict.fromkeys(("lower_bound", "limit"), "fp32"),
    **dict.fromkeys(("tokens", "width", "z_batch", "z_token", "z_head"), "i32"),
    "histogram": "*i64",
}
LOSS = {
    **dict.fromkeys(("largest", "total", "chosen", "log_sum", "upstream"), "*fp32"),
    "local": "*i64",
}
NORM = {**dict.fromkeys(("inverse", "d_weight"), "*fp32"), "eps": "fp32", "turns": "i32"}
MIX = {
    **dict.fromkeys(("query", "key", "norm", "kept", "d_w", "d_norm"), "*fp32"),
    "eps": "fp32",
    "added": "i32",
}
ROUTE = {
    **dict.fromkeys(
        ("logits", "bias", "weights", "scores", "cutoff", "taken_scores", "grad", "d_logits"),
        "*fp32",
    ),
    **dict.fromkeys(("valid", "map"), "*u8"),
    **dict.fromkeys(("top_k", "ranked"), "i32"),
    "positions": "*i64",
    "expert": "*i16",
    "scaling": "fp32",
}
STATISTICS = {
    **dict.fromkeys(("scores", "bias", "cutoff"), "*fp32"),
    **dict.fromkeys(("valid", "map"), "*u8"),
    "histogram": "*i32",
    "counts": "*i64",
    "number": "i32",
    "span": "fp32",
}
UPDATE = {
    **dict.fromkeys(("value", "predicted", "widest", "bin_width"), "*fp64"),
    **dict.fromkeys(("histogram", "outside"), "*i32"),
    **dict.fromkeys(("counts", "kept", "numbers"), "*i64"),
    **dict.fromkeys(("bias", "old_bias", "new_bias"), "*fp32"),
    **dict.fromkeys(("number", "top_k"), "i32"),
    "span": "fp32",
}
CHUNKS = {
    **dict.fromkeys(("decay", "beta", "d_q", "d_k", "d_g", "d_beta", "diagonal", "units"), "*fp32"),
    **dict.fromkeys(("cu_seqlens", "chunk_indices"), "*i64"),
    "chunks": "i32",
    "scale": "fp32",
}
# Bytes of stack a thread. One tile of this kernel is 16 registers of a thread, and some ten are
# alive at once: about 50 numbers of a thread lie in memory for a while.
ALLOWED = {"_kda_backward_chunk": 256, "depth_mix_backward": 32}  # the latter by triton 3.7
KERNELS = [
    (
        router._route_forward,
        launch_settings("route_forward", 896),
        {"PLACES": True, "VALID": True, "KEEP": True, "FOURS": True, "SLOTS": 16, "BLOCK": 1024},
        ROUTE,
    ),
    (
        router._route_backward,
        launch_settings("route_backward", 896),
        {"VALID": True, "SLOTS": 16, "BLOCK": 1024},
        ROUTE,
    ),
    (
        statistics._statistics,
        launch_settings("statistics", 896),
        {"CENTRED": True, "SHIFT": 21, "VALID": True, "ALL": 1024},
        STATISTICS,
    ),
    (
        statistics._statistics,
        launch_settings("statistics", 896) | {"WINDOW": 0},
        {"CENTRED": False, "SHIFT": 21, "VALID": True, "ALL": 1024},
        STATISTICS,
    ),
    (
        update._update_experts,
        {"num_warps": 4},
        {"CENTRED": False, "SHIFT": 21, "ALL": 1024, "PLACES": 1024},
        UPDATE,
    ),
    (update._update_all, {"num_warps": 4}, {"LEVEL": True, "ALL": 1024}, UPDATE),
    *(
        (
            getattr(mix_kernels, name),
            attn_res.settings(name, 7168, count),
            {"N": count, "NORM": True},
            MIX | dict.fromkeys(("sources", "d_sources"), ("*bf16",) * count),
        )
        for name in ("depth_mix_forward", "depth_mix_backward")
        for count in (8, 9)
    ),
    *(
        (kernel, launch_settings(kernel.fn.__name__[1:], 20480), {}, LOSS)
        for kernel in (cross_entropy._cross_entropy_forward, cross_entropy._cross_entropy_backward)
    ),
    (situ._situ_forward, launch_settings("situ_forward", 3072), K3, SITU),
    (situ._situ_backward, launch_settings("situ_backward", 3072), K3, SITU),
    (expert_rows._expert_rows_sum, launch_settings("expert_rows", 3584), {}, ROWS),
    (
        gating._head_gate_forward,
        gating._settings("head_gate_forward", heads=96, width=128),
        {"NORM": True},
        GATE,
    ),
    (
        gating._head_gate_backward,
        gating._settings("head_gate_backward", heads=96, width=128),
        {"NORM": True, "TOKENS": gating.TOKENS},
        GATE,
    ),
    *(
        (kernel, rms_norm._settings(kernel.fn.__name__[1:], width), constants, NORM)
        for kernel, constants in (
            (rms_norm._rms_norm_forward, {}),
            (rms_norm._rms_norm_backward, {"PASSED": True}),
        )
        for width in (128, 1536, 7168, 16384)
    ),
    (
        conv._qkv_conv_forward,
        launch_settings("qkv_conv_forward", 12288),
        {"DOCUMENTS": True, "TAPS": 4},
        CONV,
    ),
    (
        conv._qkv_conv_backward,
        launch_settings("qkv_conv_backward", 12288),
        {"DOCUMENTS": True, "TAPS": 4},
        CONV,
    ),
    (
        kda_inputs._kda_inputs_forward,
        kda_inputs._settings("kda_inputs_forward", 128),
        {"SLOPE": True},
        INPUTS,
    ),
    (
        kda_inputs._kda_inputs_backward,
        kda_inputs._settings("kda_inputs_backward", 128),
        {"SLOPE": True, "UNIT": True},
        INPUTS,
    ),
    (
        kda_health._decay_health,
        {"num_warps": 4, "LOWEST": -20, "AN_OCTAVE": 8, "TILE": 16, "TILES": kda_health.TILES},
        {"BINS": BINS, "ALL": 512, "SOFTPLUS": True, "WIDTH": 128},
        HEALTH,
    ),
    (
        own_backward._kda_backward_solve,
        launch_settings("kda_backward_solve", 128),
        {"VALUE": 128, "DOCUMENTS": True},
        CHUNKS,
    ),
    (
        own_backward._kda_backward_chunk,
        launch_settings("kda_backward_chunk", 128),
        {"WIDTH": 128, "VALUE": 128, "DOCUMENTS": True, "COMPILED": True},
        CHUNKS,
    ),
    (
        kda_own._kda_unit_rows,
        launch_settings("kda_unit_rows", 128),
        {"WIDTH": 128},
        {**dict.fromkeys(("q_inverse", "k_inverse"), "*fp32"), "eps": "fp32"},
    ),
    (
        kda_own._kda_values_backward,
        launch_settings("kda_values_backward", 128),
        {"WIDTH": 128, "DOCUMENTS": True},
        {"starts": "*i64", "places": "*i64"},
    ),
]
INTEGERS = re.compile(r"width|rows|tokens|heads|length|batch|channels|.*_(row|head|batch|part)")


UNIFORM = re.compile(r"(gdesc\[)?\bUR(\d+)")


def unwritten(code: str) -> list[str]:
    """Instructions of `nvdisasm` that read a uniform register which none before them writes.

    ptxas 12.8 made such code of a form of `_kda_backward_chunk` with 4 warps: a matrix descriptor
    from a register of chance, and wrong gradients.
    """
    written: set[int] = set()
    found = []
    for line in code.splitlines():
        text = re.sub(r"/\*.*?\*/", "", line).strip(" ;")
        match = re.match(r"(?:@!?U?P\w+ +)?([A-Z][\w.]+) +(.*)", text)
        if match is None:
            continue
        name, operands = match[1], match[2].split(", ")
        if re.match(r"UP(\d|T)$", operands[0]):  # a carry beside the result
            operands = operands[1:]
        result = re.match(r"UR(\d+)$", operands[0])
        read = UNIFORM.findall(", ".join(operands[1 if result else 0 :]))
        # of four registers the last two describe the matrix in shared memory
        if any(int(number) + 2 * bool(matrix) not in written for matrix, number in read):
            found.append(text)
        if result is not None:
            wide = ".64" in name or "WIDE" in name
            written |= {int(result[1]), int(result[1]) + wide}
    return found


def compile_kernel(kernel, settings, constants, types) -> tuple[str, list[str]]:
    """What `cuobjdump` tells of the use of registers and memory, and ``unwritten``."""
    names = kernel.arg_names
    constants = constants | {n: v for n, v in settings.items() if n in names}
    signature, attributes = {}, {}
    for index, name in enumerate(names):
        kind = types.get(name) or ("i32" if INTEGERS.fullmatch(name) else "*bf16")
        signature[name] = "constexpr" if name in constants else kind
        if isinstance(kind, tuple):
            attributes |= {(index, place): [["tt.divisibility", 16]] for place in range(len(kind))}
        elif signature[name] == "i32" or signature[name].startswith("*"):
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(
        kernel,
        signature,
        {(names.index(n),): value for n, value in constants.items()},
        attributes,
    )
    options = {n: v for n, v in settings.items() if n in ("num_warps", "maxnreg")}
    compiled = triton.compile(source, target=HOPPER, options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        shown, code = (
            subprocess.run([*command, file.name], text=True, capture_output=True, check=True).stdout
            for command in (
                [TOOLS / "cuobjdump", "--dump-resource-usage"],
                [TOOLS / "nvdisasm", "-c"],
            )
        )
    usage = re.search(r"REG:\d+ STACK:\d+ SHARED:\d+ LOCAL:\d+", shown).group()
    return usage, unwritten(code)


def main() -> int:
    faults = 0
    for kernel, settings, constants, types in KERNELS:
        usage, unsound = compile_kernel(kernel, settings, constants, types)
        print(kernel.fn.__module__, kernel.fn.__name__, settings, usage, *unsound[:2])
        stack = int(re.search(r"STACK:(\d+)", usage)[1])
        faults += len(unsound) > 0
        faults += stack > ALLOWED.get(kernel.fn.__name__, 0) or "LOCAL:0" not in usage
    return int(faults > 0)


if __name__ == "__main__":
    sys.exit(main())
