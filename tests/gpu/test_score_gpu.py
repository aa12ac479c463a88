"""Scores on a GPU against the second implementation, in float64 on the CPU: every backend is held
against the same published model. Experts are those of the reference, so that a near choice that
rounding decides does not hide what else differs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_ext.checkpoint.hf.loading import load_folder
from megatron_ext.config.compose import compose
from megatron_ext.config.schema import Device
from megatron_ext.parallel.runtime import Runtime
from megatron_ext.train.score_pass import Request, build, compute
from tests.support import hf_configs
from tests.support.one_rank import one_rank
from tests.support.reference_files import write_random_folder
from tests.support.reference_model import ReferenceModel
from tests.unit.test_score_reference import some_rows

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
GPU = Runtime(0, 1, 0, torch.device("cuda", 0), "nccl")
PLAIN = ["model.kda.backend=dense", "model.kernels.backend=dense"]
OURS = ["model.kda.backend=dense", "model.kernels.backend=triton"]


Published = tuple[Path, dict[str, Any], Any, Any]


@pytest.fixture(scope="module")
def groups() -> Iterator[Any]:
    with one_rank(Device.cuda) as collection:
        yield collection


@pytest.fixture(scope="module", params=[0, 3, 4, 8])
def published(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Published:
    """A folder of weights, its fields, rows of tokens, and the reference's results for them."""
    folder, seed = tmp_path_factory.mktemp("published") / "model", request.param
    fields = hf_configs.random_kind(seed)
    write_random_folder(folder, fields, seed)
    rows = some_rows(fields["vocab_size"], seed)
    return folder, fields, rows, ReferenceModel(folder)(rows.tokens, rows.documents)


def distance(published: Published, groups: Any, words: list[str]) -> float:
    """Mean difference of a log-probability from the reference's, in nats."""
    folder, fields, rows, truth = published
    config = compose(
        [
            f"model={folder}/config.json",
            "run.mode=score",
            "run.device=cuda",
            "score.tokens=none",
            "score.output=neither",
            *words,
        ]
    )
    chunks = build(config, groups, vocab_size=fields["vocab_size"])
    load_folder(folder, chunks, groups)
    routing = {
        layer: np.concatenate([routes[layer].experts.int().numpy() for routes in truth.routes])
        for layer in truth.routes[0]
    }
    request = Request(rows, routing, fields["vocab_size"])
    scores = compute(config, request, chunks, groups, GPU)
    expected = torch.cat(truth.log_probabilities).detach()
    found = scores.log_probabilities.cpu()
    assert torch.equal(found.isnan(), expected.isnan())
    return float((found - expected).abs().nanmean())


@pytest.mark.parametrize("words", [PLAIN, OURS], ids=["dense", "triton"])
def test_float32_scores_are_those_of_the_reference(
    published: Published, groups: Any, words: list[str]
) -> None:
    assert distance(published, groups, words) <= 1e-4


def test_fast_kernels_cost_no_more_than_bfloat16_does(published: Published, groups: Any) -> None:
    """What bfloat16 costs depends on the model: 0.02 to 0.09 for these on a CPU."""
    rounding = distance(published, groups, ["run.precision=bf16", *PLAIN])
    assert distance(published, groups, ["run.precision=bf16"]) <= 1.5 * rounding
