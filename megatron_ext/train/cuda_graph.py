"""A micro-batch's forward and backward pass as one CUDA graph, which the host starts by one call.

A layer and micro-batch is some 300 kernels, many of which take a GPU less time than the host needs
to start them: without graphs the GPU waits.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from megatron_ext.errors import ConfigError
from megatron_ext.train.micro_batch import ModelInputs, TrainInputs

# What is compiled, tried out or allocated at first use must be there before a graph is captured.
EAGER_CALLS = 2


def own_stream(device: torch.device) -> None:
    """Make a new stream the current one; call it before the model is wrapped.

    Autograd adds up a weight's gradient on the stream on which its wrapper was made, and the
    default stream cannot be captured.

    Raises:
        ConfigError: the run is on no GPU.
    """
    if device.type != "cuda":
        raise ConfigError(
            f"train.cuda_graph=true: is for GPUs, and this run is on {device.type} (allowed false)"
        )
    torch.cuda.synchronize()
    torch.cuda.set_stream(torch.cuda.Stream())


class MicroBatchGraph:
    """Calls a function of a micro-batch; from the third call on as a CUDA graph.

    The function must have the same shapes every time, wait for nothing and keep what it changes in
    place. Its memory stays with it from call to call: calls that are not captured use the same.
    """

    def __init__(self, chunks: Sequence[nn.Module]) -> None:
        self._pool = torch.cuda.MemPool()
        self._watched = [
            module for chunk in chunks for module in chunk.modules() if hasattr(module, "health")
        ]
        self._hooked = [
            module for chunk in chunks for module in chunk.modules() if hasattr(module, "hook")
        ]
        self._calls = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._inputs: TrainInputs | None = None
        self._result = torch.empty(0)

    def __call__(self, run: Callable[[TrainInputs], Tensor], inputs: TrainInputs) -> Tensor:
        """What ``run`` returns for ``inputs``; the next call overwrites it.

        While layers are measured or their routing is replayed it is called as it is.
        """
        self._calls += 1
        if self._calls <= EAGER_CALLS or self._observed():
            with self._memory():
                return run(inputs)
        if self._graph is None or self._inputs is None:
            self._inputs = _copy(inputs)
            self._graph, self._result = self._capture(run, self._inputs)
        for kept, given in zip(_tensors(self._inputs), _tensors(inputs), strict=True):
            kept.copy_(given)
        self._graph.replay()
        return self._result

    def _observed(self) -> bool:
        return any(module.health is not None for module in self._watched) or any(
            module.hook is not None for module in self._hooked
        )

    def _memory(self) -> AbstractContextManager[None]:
        return torch.cuda.use_mem_pool(self._pool)

    def _capture(
        self, run: Callable[[TrainInputs], Tensor], inputs: TrainInputs
    ) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        gc.collect()
        graph = torch.cuda.CUDAGraph()
        # Other threads, such as NCCL's watchdog, may ask the GPU meanwhile.
        with torch.cuda.graph(
            graph,
            pool=self._pool.id,  # type: ignore[arg-type]  # torch has two types for such a name
            stream=torch.cuda.current_stream(),
            capture_error_mode="thread_local",
        ):
            result = run(inputs)
        return graph, result


def _tensors(inputs: TrainInputs) -> list[Tensor]:
    model = inputs.model
    found = [model.tokens, model.labels, inputs.mask, inputs.members]
    return found if model.padding is None else [*found, model.padding]


def _copy(inputs: TrainInputs) -> TrainInputs:
    model = inputs.model
    padding = None if model.padding is None else model.padding.clone()
    return TrainInputs(
        ModelInputs(model.tokens.clone(), model.labels.clone(), padding, model.packing),
        inputs.mask.clone(),
        inputs.members.clone(),
    )
