"""`run.mode=score`: log-probabilities of given tokens, their experts, and how near the choice was.

What another implementation is compared with: token by token, with its routing replayed if need be.
"""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron_ext.checkpoint.hf.loading import is_folder
from megatron_ext.checkpoint.paths import find, read_extra
from megatron_ext.checkpoint.weights import load_weights
from megatron_ext.config.hf_read import read_architecture
from megatron_ext.config.layout import expert_layers
from megatron_ext.config.schema import BalanceRule, RunConfig
from megatron_ext.config.stages import stage_config
from megatron_ext.data.manifest import write_json
from megatron_ext.data.score_files import Rows, read_routing, read_rows
from megatron_ext.errors import CheckpointError, DataError, MegatronExtError
from megatron_ext.parallel.mesh import build_mesh
from megatron_ext.parallel.runtime import start, stop
from megatron_ext.train.score_pass import Request, Scores, build, compute

SHOWN = 20


def score(config: RunConfig) -> int:
    """Score the rows of `score.tokens` into `score.output`. Returns the exit code.

    Raises:
        DataError: something is wrong with the files; all of it is listed.
        ConfigError: the checkpoint is of another model.
        CheckpointError: there is no checkpoint, or it gives numbers that are not finite.
    """
    config = stage_config(config, config.curriculum.stage or "")
    try:
        request = read_request(config)
    except MegatronExtError as error:
        error.shared = True  # each host looks at its own files
        raise
    runtime = start(config.run)
    try:
        mesh = build_mesh(
            config.parallel, seed=config.run.seed, timeout_seconds=config.run.timeout_seconds
        )
        chunks = build(config, mesh, vocab_size=request.vocab_size)
        path, extra = load_weights(config, chunks, mesh, tokenizer=None)
        scores = compute(config, request, chunks, mesh, runtime)
        if runtime.rank == 0:
            check_finite(scores, request.rows, path)
            content = to_json(scores, request.rows)
            content |= {"checkpoint": str(path), "step": extra["step"]}
            content["precision"] = "float64" if config.score.float64 else config.run.precision.name
            write_json(Path(str(config.score.output)), content, indent=None)
            print("\n".join(summary(scores, request, config, path)))
        return 0
    finally:
        stop()


def read_request(config: RunConfig) -> Request:
    """Read and check the files. Every rank reads them; nothing has been started yet.

    Raises:
        DataError: with everything that is wrong.
        CheckpointError: there is no checkpoint.
    """
    options, problems = config.score, list[str]()
    path = find(Path(str(config.run.dir)), chosen=config.checkpoint.load)
    if is_folder(path):
        vocab_size = int(read_architecture(path / "config.json")["model.vocab_size"])
    else:
        vocab_size = int(read_extra(path)["vocab_size"])
    folder = Path(str(options.output)).parent
    if not folder.is_dir():
        problems.append(f"score.output: the folder {folder} does not exist (make it first)")
    rows = read_rows(Path(str(options.tokens)), vocab_size=vocab_size, problems=problems)
    routing = None
    if options.routing is not None and rows is not None:
        balance, experts = config.balance, config.model.experts
        some = balance.rule is BalanceRule.reject and not balance.refill
        routing = read_routing(
            Path(options.routing),
            rows,
            layers=sorted(expert_layers(config.model)),
            num_experts=experts.num_experts,
            top_k=None if some else experts.top_k,
            problems=problems,
        )
    if problems:
        lines = [f"  {i}. {text}" for i, text in enumerate(problems[:SHOWN], 1)]
        lines += [f"  ... and {len(problems) - SHOWN} more"] if len(problems) > SHOWN else []
        raise DataError("\n".join([f"{len(problems)} in what is to be scored:", *lines]))
    assert rows is not None  # else there would be a problem
    return Request(rows, routing, vocab_size)


def check_finite(scores: Scores, rows: Rows, path: Path) -> None:
    """Raises CheckpointError where the model gave no number."""
    wrong = ~scores.log_probabilities.isfinite()
    wrong[rows.firsts] = False
    if wrong.any():
        place = int(wrong.nonzero()[0])
        row = max(i for i, start in enumerate(rows.starts) if start <= place)
        raise CheckpointError(
            f"{path}: {int(wrong.sum())} log-probabilities are not finite, the first of token "
            f"{place - rows.starts[row]} of row {row}; its weights are broken, or they need "
            "run.precision=fp32"
        )


def to_json(scores: Scores, rows: Rows) -> dict[str, Any]:
    """What `score.output` holds: by row; of experts by row and layer. What is no number is null."""
    pairs = list(pairwise(rows.starts))
    experts: list[dict[str, Any]] = [{} for _ in pairs]
    margins: list[dict[str, Any]] = [{} for _ in pairs]
    for layer, taken in scores.experts.items():
        chosen = [ids.tolist() for ids in taken.nonzero()[:, 1].split(taken.sum(1).tolist())]
        near = _numbers(scores.margins[layer])
        for (first, end), its_experts, its_margins in zip(pairs, experts, margins, strict=True):
            its_experts[str(layer)], its_margins[str(layer)] = chosen[first:end], near[first:end]
    numbers = _numbers(scores.log_probabilities)
    return {
        "tokens": rows.tokens,
        "documents": rows.documents,
        "log_probabilities": [numbers[first:end] for first, end in pairs],
        "experts": experts,
        "margins": margins,
    }


def _numbers(tensor: Tensor) -> list[float | None]:
    return [value if math.isfinite(value) else None for value in tensor.tolist()]


def summary(scores: Scores, request: Request, config: RunConfig, path: Path) -> list[str]:
    """What is printed."""
    known = scores.log_probabilities[~scores.log_probabilities.isnan()]
    lines = [
        f"checkpoint   {path}",
        f"scored       {len(known)} of {request.rows.starts[-1]} tokens in "
        f"{len(request.rows.tokens)} rows, mean log-probability {float(known.mean()):.6f}",
    ]
    if scores.margins:
        nearest = min(float(margin.min()) for margin in scores.margins.values())
        lines.append(f"routing      smallest margin {nearest:.2e}")
    if request.routing is not None:
        lines.append(
            f"replayed     {config.score.routing}: {scores.rerouted} choices (a token in a layer) "
            "would have been others"
        )
    return [*lines, f"written      {config.score.output}"]
