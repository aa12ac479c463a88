"""A conversion holds a few parts of tensors in memory, never the model."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch

from tests.support import hf_configs
from tests.support.reference_config import parse_config
from tests.support.reference_files import expected_shapes, write_folder
from tests.support.runs import ROOT

# Most of it in one stacked tensor of ours, the first matrices of the experts of a layer.
FIELDS = hf_configs.kimi_k3(
    vocab_size=256,
    hidden_size=512,
    num_hidden_layers=2,
    num_experts=64,
    moe_intermediate_size=512,
    routed_expert_hidden_size=512,
    linear_attn_config={"kda_layers": [1], "full_attn_layers": [2]},
)
PART = 2 << 20
# Prints how much more memory the larger one took, at the largest moment of each.
CONVERT = f"""
import re, sys
from pathlib import Path
import torch
from megatron_ext.checkpoint.hf import exporting, importing
torch.set_num_threads(1)
importing.CHUNK_BYTES = exporting.STRIDE = {PART}
importing.FILE_BYTES = 40 * {PART}
peaks = []
for folder in map(Path, sys.argv[1:]):
    importing.import_folder(folder / "in", folder / "ours", dtype=None, workers=1)
    what = exporting.Export(folder / "ours", torch.float32, 40 * {PART})
    exporting.export(what, folder / "out", workers=1)
    # Not getrusage, whose largest moment may be one of the process that started this one.
    status = Path("/proc/self/status").read_text()
    peaks.append(1024 * int(re.search(r"VmHWM:\\s+(\\d+) kB", status)[1]))
print(peaks[1] - peaks[0])
"""


def test_memory_is_that_of_a_few_parts(tmp_path: Path) -> None:
    for name, changes in (("small", {"num_experts": 4}), ("large", {})):
        fields = FIELDS | changes
        shapes = expected_shapes(parse_config(fields))
        tensors = {
            # Bounds of decay are in A_log, whose padding must be zero, as all of it may be.
            key: torch.zeros(shape) if key.endswith("A_log") else torch.full(shape, 0.01)
            for key, shape in shapes.items()
        }
        write_folder(tmp_path / name / "in", fields, tensors)
    size = sum(tensor.nbytes for tensor in tensors.values())
    assert size > 200e6
    del tensors
    command = [sys.executable, "-c", CONVERT, *(str(tmp_path / n) for n in ("small", "large"))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    # Three parts of a chunk or file under way, and what the allocator keeps of those before.
    assert int(done.stdout) < 12 * PART
