"""What the tests of Triton kernels share. They run on a GPU, or anywhere in Triton's interpreter.

Files here are not named test_*: `tests/unit/test_kernels.py` runs them in a process whose
TRITON_INTERPRET is set before Triton is imported, `tests/gpu/test_kernels_gpu.py` on the GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

# Relative L2 error. Of results with 8 bits: at most 2^-8 rounded as on a GPU, 2^-7 cut off as in
# the interpreter. Of float32 arithmetic with a GPU's exponentials and roots: some 2^-22.
TOLERANCE = {torch.bfloat16: 2**-8 if DEVICE == "cuda" else 2**-7, torch.float32: 2e-6}


def interpret_half_products() -> None:
    """Let Triton's interpreter multiply bfloat16 matrices: it multiplies their bits as integers."""
    import numpy
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    original = builder.create_dot

    def wide(x):
        data = interpreter._convert_float(x.data, x.dtype, interpreter.tl.float32, None)
        return interpreter.TensorHandle(data.view(numpy.float32), interpreter.tl.float32)

    def create_dot(self, a, b, d, *options):
        half = interpreter.tl.bfloat16
        a, b = (wide(x) if x.dtype.scalar == half else x for x in (a, b))
        return original(self, a, b, d, *options)

    if original.__name__ == "create_dot" and not hasattr(builder, "half_products"):
        builder.create_dot, builder.half_products = create_dot, True


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Standard normal numbers on the device."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(DEVICE, dtype)


def errors(
    fast: Callable[..., Tensor], slow: Callable[..., Tensor], inputs: Sequence[Tensor]
) -> list[float]:
    """Relative L2 error of the result and of every input's gradient; `slow` runs in float64."""
    found, wanted = _run(fast, inputs), _run(slow, [x.double() for x in inputs])
    assert [x.dtype for x in found] == [inputs[0].dtype, *(x.dtype for x in inputs)]
    assert [x.shape for x in found] == [x.shape for x in wanted]
    return [((a.double() - b).norm() / b.norm()).item() for a, b in zip(found, wanted, strict=True)]


def _run(function: Callable[..., Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    # Views keep their strides; a clone would lose them.
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = function(*leaves)
    upstream = draw(*out.shape, dtype=torch.bfloat16, seed=99).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, leaves, upstream)]


def far_apart(rows: int, width: int, dtype: torch.dtype) -> Tensor:
    """Random [rows, width] whose rows lie 2^30 elements apart: three of them pass 2^31.

    On a CPU the pages between are never touched, so they cost no memory.
    """
    step = 2**30
    storage = torch.empty((rows - 1) * step + width, dtype=dtype, device=DEVICE)
    return storage.as_strided((rows, width), (step, 1)).copy_(draw(rows, width, dtype=dtype))
