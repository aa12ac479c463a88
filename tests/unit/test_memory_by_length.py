"""No tensor of a training step grows faster than the sequence: no [s, s] scores, no masks."""

from collections.abc import Iterator

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_ext.config.compose import compose
from megatron_ext.parallel import cpu_support, runtime
from megatron_ext.train.state import build_state
from megatron_ext.train.step import train_step


class LargestStorage(TorchDispatchMode):
    """Bytes of the largest tensor that any operator gave."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self.bytes = max(self.bytes, leaf.untyped_storage().nbytes())
        return out


@pytest.fixture
def started(tmp_path) -> Iterator[None]:
    yield
    runtime.stop()
    cpu_support.uninstall()


@pytest.mark.parametrize("isolate", [False, True])
def test_the_largest_tensor_of_a_step_grows_as_the_length_does(tmp_path, started, isolate):
    largest = []
    for length in (1024, 2048):
        config = compose(
            [
                "model=nano",
                "data=sample",
                "residual=block",
                f"run.dir={tmp_path}/{length}",
                f"data.isolate_documents={str(isolate).lower()}",
                f"data.sequence_length={length}",
                f"train.batch_tokens={length}",
                "train.micro_batch_size=1",
                "train.recompute=full",
                "optim.schedule=constant",
            ]
        )
        state = build_state(config, runtime.start(config.run))
        with LargestStorage() as seen:
            train_step(state)
        largest.append(seen.bytes)
        runtime.stop()
    assert largest[1] <= 2.1 * largest[0]
