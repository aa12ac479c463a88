"""`train.cuda_graph` trains the same model: also where health is measured and evaluated between."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron_ext.config.compose import compose
from megatron_ext.parallel import runtime
from megatron_ext.train.depth_health import DepthWatch
from megatron_ext.train.evaluate import held_out_loss
from megatron_ext.train.health import HealthWatch
from megatron_ext.train.state import build_state
from megatron_ext.train.step import train_step

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

STEPS = 8
MEASURED = 5  # a step after the graph was captured
MODEL = [
    "data=sample",
    "data.sequence_length=512",
    "train.micro_batch_size=2",
    "train.batch_tokens=4096",
    "run.precision=bf16",
    "model.kda.backend=fla",
    "model.kda.head_dim=64",
    "model.kda.value_dim=64",
    "optim.schedule=constant",
]


def train(
    folder: Path, *overrides: str
) -> tuple[list[float], dict[str, torch.Tensor], list, float]:
    """Losses, weights and biases, records of a measured step, and a held-out loss."""
    config = compose([f"run.dir={folder}", *MODEL, *overrides])
    place = runtime.start(config.run)
    stream = torch.cuda.current_stream()
    try:
        state = build_state(config, place)
        watches = HealthWatch(state), DepthWatch(state)
        losses, records, held_out = [], [], 0.0
        for step in range(STEPS):
            if step == MEASURED:
                for watch in watches:
                    watch.begin()
            losses.append(train_step(state)["loss"])
            if step == MEASURED:
                records = [record for watch in watches for record in watch.end()]
                held_out = held_out_loss(state)["eval/loss"]
        kept = {
            name: value.float().cpu()
            for name, value in state.chunks[0].state_dict().items()
            if isinstance(value, torch.Tensor)
        }
        return losses, kept, records, held_out
    finally:
        runtime.stop()
        torch.cuda.set_stream(stream)


@pytest.mark.parametrize("residual", ["standard", "block"])
def test_a_captured_step_trains_the_same_model(tmp_path: Path, residual: str) -> None:
    kind = [f"residual={residual}", "residual.block_size=2"] if residual == "block" else []
    plain = train(tmp_path / "plain", *kind)
    graph = train(tmp_path / "graph", *kind, "train.cuda_graph=true")
    again = train(tmp_path / "again", *kind)
    assert graph[0] == pytest.approx(plain[0], rel=2e-3)
    assert len(graph[2]) == len(plain[2]) > 0
    assert graph[3] == pytest.approx(plain[3], rel=2e-3)
    for name, value in plain[1].items():
        size = value.norm()
        noise = (again[1][name] - value).norm()
        assert (graph[1][name] - value).norm() <= max(3 * noise, 2e-2 * size), name
