"""Which implementation of an operator runs: our Triton kernel or plain torch.

`auto` is careful: on a GPU it takes the kernel after one small input has gone through both,
forward and backward, with the same result. A kernel that fails this is rejected with a warning,
or, with `require`, an error.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable, Sequence
from functools import cache
from typing import Protocol

import torch
from torch import Tensor

from megatron_ext.config.schema import KernelBackend
from megatron_ext.errors import ConfigError

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Relative L2 error that rounding explains: of the results to 8 and 11 bits, of sums in float32.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 5e-3}


@cache
def triton_misfit(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why our Triton kernels cannot run on such tensors; None if they can. Imports no Triton."""
    if device.type != "cuda":
        return f"it needs a CUDA device, the tensors are on {device.type}"
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "it needs a GPU of compute capability 8.0 or above"
    if dtype not in DTYPES:
        return f"it takes float32, bfloat16 and float16, the tensors are {dtype}"
    return None


def planned(x: Tensor, backend: KernelBackend) -> bool:
    """Whether what a kernel allocates is asked for: on the meta device, where a plan counts memory,
    the stand-ins of `ops.without_memory` take the place of our Triton kernels."""
    return x.device.type == "meta" and backend in (KernelBackend.auto, KernelBackend.triton)


def choose_backend(
    backend: KernelBackend,
    *,
    operator: str,
    device: torch.device,
    misfit: str | None,
    check: Callable[[], str | None],
    require: bool,
) -> KernelBackend:
    """The backend that will run: what is asked for where it can, else `dense`; never `auto`.

    Args:
        backend: what the configuration asks for.
        operator: name, for the message.
        device: of the tensors.
        misfit: why the kernel cannot run here, or None.
        check: why the kernel is rejected, or None; called for `auto` on a GPU only. It keeps its
            answer.
        require: make a fallback an error: of `triton` anywhere, of `auto` on a GPU.

    Raises:
        ConfigError: `require`, and the kernel cannot run or is rejected.
    """
    if backend in (KernelBackend.reference, KernelBackend.dense):
        return backend
    reason = misfit
    if reason is None and backend is KernelBackend.auto:
        reason = check()
    if reason is None:
        return KernelBackend.triton
    if require and (backend is KernelBackend.triton or device.type == "cuda"):
        raise ConfigError(
            f"model.kernels.backend={backend.name}: with model.kernels.require=true the Triton "
            f"kernel of {operator} must run, and cannot: {reason} (allowed "
            "model.kernels.backend=dense, or model.kernels.require=false)"
        )
    return KernelBackend.dense


class Resolve(Protocol):
    """Finds the backend of an operator that will run on such tensors; never `auto`."""

    def __call__(
        self,
        backend: KernelBackend,
        device: torch.device,
        dtype: torch.dtype,
        *sizes: int,
        require: bool = False,
    ) -> KernelBackend: ...


def resolver(operator: str, rejected: Callable[..., str | None]) -> Resolve:
    """`choose_backend` for an operator whose kernel takes whatever `triton_misfit` lets through.

    Args:
        operator: name, for messages.
        rejected: of (device, dtype, *sizes), why the kernel is rejected there, or None.

    Returns:
        A function that keeps its answers. Its sizes are those that `rejected` takes.
    """

    @cache
    def resolve_backend(
        backend: KernelBackend,
        device: torch.device,
        dtype: torch.dtype,
        *sizes: int,
        require: bool = False,
    ) -> KernelBackend:
        return choose_backend(
            backend,
            operator=operator,
            device=device,
            misfit=triton_misfit(device, dtype),
            check=lambda: rejected(device, dtype, *sizes),
            require=require,
        )

    return resolve_backend


def rejection(
    operator: str,
    *,
    fast: Callable[..., Tensor],
    slow: Callable[..., Tensor],
    inputs: Sequence[Tensor],
) -> str | None:
    """Why a kernel must not be used: it fails, or differs from the slow path on the same input.

    Says so in a warning, too. Draws from no generator that training uses.

    Args:
        operator: name, for the message.
        fast: the kernel, of `inputs`.
        slow: the same function in plain torch; it is given the inputs in float64.
        inputs: floating tensors on the device in question; gradients of all are compared. The
            first one's dtype sets the tolerance.
    """
    allowed = TOLERANCE[inputs[0].dtype]
    try:
        error = worst_error(fast, slow, inputs)
        reason = f"relative error {error:.1e} against float64, allowed {allowed:.0e}"
    # Compilers and drivers raise what they like, and nobody asked for this kernel by name: the
    # run goes on without it.
    except Exception as failure:
        error = float("inf")
        reason = f"{type(failure).__name__}: {str(failure).splitlines()[:1]}"
    if error <= allowed:
        return None
    return _rejected(operator, inputs[0].device, reason)


def rejection_exact(
    operator: str,
    *,
    fast: Callable[..., Tensor],
    slow: Callable[..., Tensor],
    inputs: Sequence[Tensor],
) -> str | None:
    """As `rejection`, for results that must be the same bits, without gradients: both are given
    the same inputs."""
    try:
        with torch.inference_mode(False), torch.no_grad():
            different = int((fast(*inputs) != slow(*inputs)).sum())
        reason = f"{different} numbers differ, allowed none"
    # See `rejection`.
    except Exception as failure:
        different = 1
        reason = f"{type(failure).__name__}: {str(failure).splitlines()[:1]}"
    if not different:
        return None
    return _rejected(operator, inputs[0].device, reason)


def _rejected(operator: str, device: torch.device, reason: str) -> str:
    warnings.warn(
        f"{operator}: the Triton kernel is rejected on {device}, plain torch runs instead, "
        f"slower: {reason}",
        RuntimeWarning,
        stacklevel=3,
    )
    return reason


def worst_error(
    fast: Callable[..., Tensor], slow: Callable[..., Tensor], inputs: Sequence[Tensor]
) -> float:
    """Largest relative L2 difference of the result and of the gradients; NaN counts as infinite."""
    with torch.inference_mode(False), torch.enable_grad():
        found = _run(fast, [x.detach().clone() for x in inputs])
        wanted = _run(slow, [x.detach().double() for x in inputs])
    errors = [
        ((a.double() - b).norm() / b.norm().clamp(min=1e-30)).item()
        for a, b in zip(found, wanted, strict=True)
    ]
    return max(error if error == error else float("inf") for error in errors)


def _run(function: Callable[..., Tensor], inputs: list[Tensor]) -> list[Tensor]:
    leaves = [x.requires_grad_() for x in inputs]
    out = function(*leaves)
    generator = torch.Generator().manual_seed(1)
    upstream = torch.randn(out.shape, generator=generator, dtype=torch.float32)
    # Cut to the precision of the fast path on both sides: the same input.
    upstream = upstream.bfloat16().to(out)
    return [out.detach(), *torch.autograd.grad(out, leaves, upstream)]
