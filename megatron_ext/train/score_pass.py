"""The forward passes of `run.mode=score`, at any layout; what they find goes to rank 0.

Shapes: N tokens of all rows, one row after the other; E experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from megatron_ext.config.layout import expert_layers, sequence_parallel
from megatron_ext.config.schema import RunConfig
from megatron_ext.data.batches import MicroBatch
from megatron_ext.data.score_files import Rows
from megatron_ext.layers.replay import RoutingTape
from megatron_ext.model.build import build_chunks
from megatron_ext.parallel.mcore_config import transformer_config
from megatron_ext.parallel.pipeline import schedule_arguments
from megatron_ext.parallel.runtime import Runtime
from megatron_ext.train.balance import routers
from megatron_ext.train.micro_batch import model_inputs, token_losses
from megatron_ext.train.share import Share


@dataclass(frozen=True)
class Request:
    """What is to be scored.

    Attributes:
        rows: of token ids.
        routing: expert ids int32 [N, most of a token] by 0-based layer, -1 where there is none;
            None: the model chooses.
        vocab_size: of the checkpoint, padded.
    """

    rows: Rows
    routing: dict[int, npt.NDArray[np.int32]] | None
    vocab_size: int


@dataclass(frozen=True)
class Scores:
    """What came out, on rank 0; elsewhere the tensors are not filled.

    Attributes:
        log_probabilities: float64 [N]; NaN for the first token of a document.
        experts: bool [N, E] by 0-based layer, those that took the token.
        margins: float64 [N] by layer: the lowest biased score that the model itself would have
            taken minus the highest that it would not; infinite where there is no other expert.
        rerouted: tokens, summed over layers, that the model itself would have sent elsewhere.
    """

    log_probabilities: Tensor
    experts: dict[int, Tensor]
    margins: dict[int, Tensor]
    rerouted: int


def build(config: RunConfig, mesh: ProcessGroupCollection, *, vocab_size: int) -> list[GPTModel]:
    """The chunks of this rank, for evaluation; with `score.float64` they compute in float64."""
    tc = transformer_config(config)
    if config.score.float64:
        tc.params_dtype = tc.pipeline_dtype = tc.autocast_dtype = torch.float64
        config.residual.fp32 = False  # wider already
    chunks = build_chunks(config, tc, mesh, vocab_size=vocab_size)
    for chunk in chunks:
        chunk.eval()
    return chunks


@torch.no_grad()
def compute(
    config: RunConfig,
    request: Request,
    chunks: list[GPTModel],
    mesh: ProcessGroupCollection,
    runtime: Runtime,
) -> Scores:
    """Score all rows. Collective over all ranks, at any layout."""
    ranks = Ranks(config, request, mesh)
    tape = _tape(config, request, chunks, ranks)
    tape.attach(routers(chunks))
    feeds = [ranks.batches() for _ in chunks]
    many = len(chunks) > 1
    stored = get_forward_backward_func()(
        forward_step_func=partial(
            _forward,
            device=runtime.device,
            share=ranks.share,
            loss_chunk_tokens=config.train.loss_chunk_tokens,
        ),
        data_iterator=feeds if many else feeds[0],
        model=chunks if many else chunks[0],
        num_microbatches=ranks.rounds,
        micro_batch_size=1,
        forward_only=True,
        **schedule_arguments(
            config, stage=int(mesh.pp.rank()), sequence_length=ranks.share.padded(ranks.length)
        ),
    )
    tape.detach(routers(chunks))
    count, device = ranks.starts[-1], runtime.device
    losses = torch.zeros(count, dtype=torch.float64)
    for number, part in enumerate(stored if mesh.tp.rank() == 0 else ()):
        places = ranks.places(number, sequence=False)
        losses[places[places < count]] = part["losses"].flatten()[places < count].double().cpu()
    assert tape.margins is not None  # given by `_tape`
    experts, margins = {}, {}
    for layer in sorted(expert_layers(config.model)):
        mine = layer in tape.maps and ranks.alone
        width = config.model.experts.num_experts
        taken = tape.maps[layer].byte() if mine else torch.zeros(count, width, dtype=torch.uint8)
        margin = tape.margins[layer] if mine else torch.zeros(count, dtype=torch.float64)
        experts[layer], margins[layer] = _sum(taken, device).bool(), _sum(margin, device)
    rerouted = torch.tensor(sum(tape.rerouted.values()) if ranks.alone else 0)
    # The loss at a token is that of the next one.
    log_probabilities = -_sum(losses, device).roll(1)
    log_probabilities[request.rows.firsts] = torch.nan
    return Scores(log_probabilities, experts, margins, int(_sum(rerouted, device)))


class Ranks:
    """Which rows, and which tokens of them, this rank sees."""

    def __init__(self, config: RunConfig, request: Request, mesh: ProcessGroupCollection) -> None:
        self.rows, self.mesh = request.rows, mesh
        self.starts = request.rows.starts
        sequence = sequence_parallel(config.parallel)
        self.share = Share(context=mesh.cp, tensor=mesh.tp if sequence else None)
        #: No other rank sees the same tokens in the same layer, or those that do stand back.
        self.alone = sequence or mesh.tp.rank() == 0
        # A convolution reads that many tokens of the rank before.
        fewest = int(mesh.cp.size()) * max(1, config.model.kda.conv_width - 1)
        self.length = max(fewest, *(len(row) for row in self.rows.tokens))
        # The interleaved schedule takes whole rounds of the pipeline only.
        step = config.parallel.pipeline if config.parallel.virtual_pipeline > 1 else 1
        self.rounds = -(-len(self.rows.tokens) // (int(mesh.dp.size()) * step)) * step

    def batches(self) -> Iterator[MicroBatch]:
        return self.rows.batches(
            length=self.length,
            data_rank=int(self.mesh.dp.rank()),
            data_size=int(self.mesh.dp.size()),
            rounds=self.rounds,
        )

    def places(self, number: int, *, sequence: bool = True) -> Tensor:
        """Places of this rank's tokens of micro-batch `number` among all; of padding: N.

        Args:
            sequence: of those between layers, which tensor parallel ranks may share out.
        """
        row = number * int(self.mesh.dp.size()) + int(self.mesh.dp.rank())
        places = torch.full((self.share.padded(self.length),), self.starts[-1])
        if row < len(self.rows.tokens):
            length = len(self.rows.tokens[row])
            places[:length] = torch.arange(length) + self.starts[row]
        own, parts = self.mesh.cp.rank(), self.mesh.cp.size()
        if sequence and self.share.tensor is not None:
            own = own * self.share.tensor.size() + self.share.tensor.rank()
            parts *= self.share.tensor.size()
        return places.chunk(parts)[own]


def _tape(config: RunConfig, request: Request, chunks: list[GPTModel], ranks: Ranks) -> RoutingTape:
    count, maps, margins = ranks.starts[-1], {}, {}
    for router in routers(chunks):
        layer = router.layer
        maps[layer] = torch.zeros(count, config.model.experts.num_experts, dtype=torch.bool)
        margins[layer] = torch.zeros(count, dtype=torch.float64)
        if request.routing is not None:
            token, slot = np.nonzero(request.routing[layer] >= 0)
            maps[layer][token, request.routing[layer][token, slot]] = True
    replay = request.routing is not None
    return RoutingTape(maps, places=ranks.places, replay=replay, margins=margins)


def _forward(
    feed: Iterator[MicroBatch],
    model: Any,
    *,
    device: torch.device,
    share: Share,
    loss_chunk_tokens: int | None,
) -> tuple[Tensor, Any]:
    batch = share.part(next(feed))
    inputs = model_inputs(batch, model, device=device, share=share)
    output = token_losses(inputs, model, loss_chunk_tokens=loss_chunk_tokens)

    def keep(losses: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        return losses.sum(), torch.ones((), dtype=torch.int32, device=device), {"losses": losses}

    return output, keep


def _sum(tensor: Tensor, device: torch.device) -> Tensor:
    """Of all ranks, on rank 0; every number is of one rank, and zero on the others."""
    tensor = tensor.to(device)
    dist.reduce(tensor, dst=0)
    return tensor.cpu()
