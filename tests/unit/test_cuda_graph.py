"""What a step does with `train.cuda_graph`, without a GPU: refusals, and the same numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from megatron_ext.config import validate_graph
from megatron_ext.config.compose import compose
from megatron_ext.errors import ConfigError
from megatron_ext.ops.grouped_mlp.fused import ALIGNMENT
from megatron_ext.parallel import cpu_support, runtime
from megatron_ext.train.micro_batch import TrainInputs
from megatron_ext.train.state import TrainState, build_state
from megatron_ext.train.step import train_step

SMALL = [
    "model=nano",
    "data=sample",
    "data.sequence_length=32",
    "train.batch_tokens=128",
    "train.micro_batch_size=1",
    "optim.schedule=constant",
]


@pytest.fixture(autouse=True)
def stopped() -> Iterator[None]:
    yield
    runtime.stop()
    cpu_support.uninstall()


@dataclass
class Uncaptured:
    """In the place of the graph: what it does before it is captured."""

    calls: int = 0

    def __call__(self, run: Callable[[TrainInputs], Tensor], inputs: TrainInputs) -> Tensor:
        self.calls += 1
        return run(inputs)


def steps(state: TrainState) -> list[tuple[float, float]]:
    rows = [train_step(state) for _ in range(3)]
    return [(row["loss"], row["grad_norm"]) for row in rows]


def test_micro_batch_by_micro_batch_the_step_is_the_same_to_the_bit(tmp_path: Path) -> None:
    config = compose([*SMALL, f"run.dir={tmp_path}"])
    place = runtime.start(config.run)
    first = build_state(config, place)
    plain = steps(first)
    state = build_state(config, place, mesh=first.mesh)
    graph: Any = Uncaptured()
    state.graph = graph
    assert steps(state) == plain
    assert graph.calls == 3 * 4


@pytest.mark.parametrize(
    "words",
    [
        ["train.recompute=full"],
        ["data.isolate_documents=true"],
        ["balance=reject"],
        ["parallel.expert=2", "parallel.tensor=2"],
        ["model.experts.backend=loop"],
        ["parallel.overlap_grad_reduce=true"],
        ["run.device=cpu"],
        ["run.precision=fp32"],
        ["run.deterministic=true"],
        ["model.mla.backend=transformer_engine"],
        ["model.experts.dispatcher=allgather"],
        ["model.experts.latent_size=12", "model.experts.feed_forward_size=20"],
    ],
)
def test_what_cannot_be_captured_is_refused_by_name(words: list[str]) -> None:
    given = {"run.precision": "bf16", "train.cuda_graph": "true"}
    given |= dict(word.split("=", 1) for word in words)
    with pytest.raises(ConfigError) as error:
        compose([*SMALL, *(f"{key}={value}" for key, value in given.items())])
    told = [line for line in error.value.problems if "train.cuda_graph=true: cannot" in line]
    assert len(told) == len(words)
    for word in words:
        assert any(word.replace("balance=", "balance.rule=") in line for line in told)


def test_widths_of_experts_that_are_allowed_are_those_of_grouped_mm() -> None:
    assert validate_graph.WIDTH == ALIGNMENT
    words = ["run.precision=bf16", "train.cuda_graph=true", "model.experts.latent_size=null"]
    compose([*SMALL, *words])
    with pytest.raises(ConfigError, match=r"cannot have model\.hidden_size=100"):
        compose([*SMALL, *words, "model.hidden_size=100"])


def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    if runtime.choose_device(compose(SMALL).run.device).type == "cuda":
        pytest.skip("there is a GPU")
    config = compose([*SMALL, f"run.dir={tmp_path}", "run.precision=bf16", "train.cuda_graph=true"])
    with pytest.raises(ConfigError, match="is for GPUs, and this run is on cpu"):
        build_state(config, runtime.start(config.run))


def test_what_captures_nothing_needs_no_gpu(tmp_path: Path) -> None:
    """A checkpoint that was trained with graphs is evaluated by the same words on a CPU."""
    words = [f"run.dir={tmp_path}", "run.mode=evaluate", "run.device=cpu", "train.cuda_graph=true"]
    config = compose([*SMALL, *words])
    assert build_state(config, runtime.start(config.run)).graph is None
