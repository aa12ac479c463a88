"""Random states of a rank: torch, CUDA, Python, NumPy, and megatron-core's tracker."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker


def capture() -> dict[str, Any]:
    """The states as tensors, numbers and lists only, so that they outlive library versions."""
    name, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    version, internal, gauss_next = random.getstate()
    states: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": [version, list(internal), gauss_next],
        "numpy": [name, keys.tolist(), int(position), int(has_gauss), float(gauss)],
        "tracker": {
            key: value.clone() for key, value in get_cuda_rng_tracker().get_states().items()
        },
    }
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def restore(states: dict[str, Any]) -> None:
    """Put captured states back. A CUDA state is left out where there is no CUDA device."""
    torch.set_rng_state(states["torch"])
    version, internal, gauss_next = states["python"]
    random.setstate((version, tuple(internal), gauss_next))
    name, keys, position, has_gauss, gauss = states["numpy"]
    np.random.set_state((name, np.asarray(keys, dtype=np.uint32), position, has_gauss, gauss))
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
    if states["tracker"] and ("cuda" in states) == torch.cuda.is_available():
        get_cuda_rng_tracker().set_states(dict(states["tracker"]))
