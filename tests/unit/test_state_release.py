"""A model and its optimizer are gone when nobody holds them: stages of a run follow each other in
one process, and a second model beside the first would not fit a GPU."""

import gc
import weakref
from collections.abc import Iterator

import pytest

from megatron_ext.config.compose import compose
from megatron_ext.parallel import cpu_support, runtime
from megatron_ext.train.state import build_state
from megatron_ext.train.step import train_step


@pytest.fixture
def stopped() -> Iterator[None]:
    yield
    runtime.stop()
    cpu_support.uninstall()


@pytest.mark.parametrize(
    "words",
    [[], ["model.experts.dispatcher=allgather"], ["residual=block", "train.recompute=full"]],
)
def test_nothing_outlives_its_state(tmp_path, stopped, words):
    config = compose(
        [
            "model=nano",
            "data=sample",
            f"run.dir={tmp_path}/run",
            "data.sequence_length=64",
            "train.batch_tokens=64",
            "train.micro_batch_size=1",
            "optim.schedule=constant",
            *words,
        ]
    )
    state = build_state(config, runtime.start(config.run))
    train_step(state)
    chunk = state.chunks[0]
    found = {
        "state": weakref.ref(state),
        "optimizer": weakref.ref(state.optimizer),
        "chunk": weakref.ref(chunk),
        "gradients": weakref.ref(chunk.buffers[0]),
        "weights": weakref.ref(next(chunk.parameters())),
    }
    del state, chunk
    gc.collect()
    assert [name for name, held in found.items() if held() is not None] == []
