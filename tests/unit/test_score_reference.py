"""Our model is the published one: token by token what a second implementation says of it.

The reference (`tests/support/reference_model.py`) was written from the formulas and shares no code
with the package. Both read the same files; the configurations are random and their sizes differ.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_ext.checkpoint.hf.loading import load_folder
from megatron_ext.config.compose import compose
from megatron_ext.config.schema import RunConfig
from megatron_ext.data.score_files import Rows
from megatron_ext.parallel.runtime import Runtime
from megatron_ext.train.micro_batch import model_inputs, token_losses
from megatron_ext.train.score_pass import Ranks, Request, Scores, build, compute
from tests.support import hf_configs
from tests.support.one_rank import one_rank
from tests.support.reference_files import write_folder, write_random_folder
from tests.support.reference_model import ReferenceModel

# Blocks of 1, 2, 3, 4, 6, 7, 9, 11 and 12 layers; seed 4 is of the Kimi-Linear kind.
SEEDS = (0, 1, 2, 3, 4, 5, 6, 8, 10, 11)
CPU = Runtime(0, 1, 0, torch.device("cpu"), "gloo")


@pytest.fixture(scope="module")
def groups() -> Iterator[Any]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tensors of a few numbers
    with one_rank() as collection:
        yield collection
    torch.set_num_threads(threads)


def some_rows(vocab_size: int, seed: int) -> Rows:
    """Rows of several lengths; of one, a few and many documents, also of one token."""
    random = Random(seed)
    documents = [[23], [9, 1, 14, 3], [2, 5], [1, 1, 17, 7, 4]]
    return Rows(
        [[random.randrange(vocab_size) for _ in range(sum(row))] for row in documents], documents
    )


def load(folder: Path, groups: Any, *, float64: bool) -> tuple[RunConfig, Any]:
    """Our model of a folder."""
    words = [f"model={folder}/config.json", "run.mode=score", "run.device=cpu"]
    words += ["score.tokens=none", "score.output=neither", f"score.float64={float64}"]
    config = compose(words)
    chunks = build(config, groups, vocab_size=int(str(config.model.vocab_size)))
    load_folder(folder, chunks, groups)
    return config, chunks


def chosen(scores: Scores, rows: Rows) -> list[dict[int, Tensor]]:
    """Experts of each row by layer, as the reference has them."""
    pairs = zip(rows.starts[:-1], rows.starts[1:], strict=True)
    return [
        {
            layer: taken[first:end].nonzero()[:, 1].view(end - first, -1)
            for layer, taken in scores.experts.items()
        }
        for first, end in pairs
    ]


def difference(ours: Tensor, theirs: Tensor) -> float:
    """The largest one; infinite where only one of both is no number."""
    assert ours.shape == theirs.shape
    if not torch.equal(ours.isnan(), theirs.isnan()):
        return torch.inf
    return float((ours - theirs)[~ours.isnan()].abs().max())


@pytest.mark.parametrize("seed", SEEDS)
def test_scores_and_gradients_are_those_of_the_reference(
    tmp_path: Path, groups: Any, seed: int
) -> None:
    fields = hf_configs.random_kind(seed)
    folder = tmp_path / "model"
    write_random_folder(folder, fields, seed)
    rows = some_rows(fields["vocab_size"], seed)
    reference = ReferenceModel(folder)
    truth = reference(rows.tokens, rows.documents)
    expected = torch.cat(truth.log_probabilities)
    expected.nansum().backward()
    expected = expected.detach()
    config, chunks = load(folder, groups, float64=True)
    request = Request(rows, None, fields["vocab_size"])

    scores = compute(config, request, chunks, groups, CPU)
    # Sums of a few dozen terms in float64, through up to 13 layers.
    assert difference(scores.log_probabilities, expected) <= 1e-9
    for mine, theirs in zip(chosen(scores, rows), truth.routes, strict=True):
        assert mine.keys() == theirs.keys()
        for layer, route in theirs.items():
            assert torch.equal(mine[layer], route.experts), layer
    for layer, margins in scores.margins.items():
        nearest = torch.cat([routes[layer].margins for routes in truth.routes])
        assert difference(margins, nearest) <= 1e-9

    # The reference's gradients are written as a folder and read into a second model of ours, so
    # that they lie where our parameters' own ones do.
    slopes = {name: _slope(name, tensor) for name, tensor in reference.tensors.items()}
    write_folder(tmp_path / "gradients", fields, slopes)
    _, (theirs,) = load(tmp_path / "gradients", groups, float64=True)
    assert wrong_gradients(chunks[0], theirs, config, request, groups) == {}

    routing = {
        layer: np.concatenate([routes[layer].experts.int().numpy() for routes in truth.routes])
        for layer in scores.experts
    }
    config, chunks = load(folder, groups, float64=False)
    request = Request(rows, routing, fields["vocab_size"])
    replayed = compute(config, request, chunks, groups, CPU)
    # float32 keeps seven digits; 5e-5 was seen, after ten layers.
    assert difference(replayed.log_probabilities, expected) <= 1e-4
    assert all(torch.equal(replayed.experts[layer], scores.experts[layer]) for layer in routing)


def wrong_gradients(
    model: Any, theirs: Any, config: RunConfig, request: Request, groups: Any
) -> dict[str, float]:
    """Relative L2 distances that are too large, of gradients of the sum of log-probabilities.

    Args:
        theirs: a model whose weights are the gradients to be had.
    """
    ranks = Ranks(config, request, groups)
    for batch in ranks.batches():
        inputs = model_inputs(batch, model, device=CPU.device, share=ranks.share)
        losses = token_losses(inputs, model.train())
        (-losses.sum()).backward()
    pairs = dict(zip(model.named_parameters(), theirs.parameters(), strict=True))
    assert len(pairs) > 20
    wrong = {}
    for (name, ours), slope in pairs.items():
        # A_log, dt_bias and convolutions are float32 in every precision, and so is their gradient.
        allowed = 1e-9 if ours.dtype is torch.float64 else 1e-6
        distance = float((ours.grad - slope).norm() / slope.norm())
        if not distance <= allowed:
            wrong[name] = distance
    return wrong


def _slope(name: str, tensor: Tensor) -> Tensor:
    """Its gradient, in the form of a weight; of what has none, zeros."""
    value = torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
    return value.float() if name.endswith("e_score_correction_bias") else value.detach()
