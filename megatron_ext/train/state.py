"""What a training run is made of: model chunks, optimizer, data, and how far it has come."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_ext.checkpoint.history import History
from megatron_ext.checkpoint.load import load
from megatron_ext.config.curriculum import OnUnfreeze
from megatron_ext.config.layout import probe_lengths
from megatron_ext.config.schema import Mode, RunConfig
from megatron_ext.config.trainable import Trainable
from megatron_ext.data.batches import MicroBatch
from megatron_ext.data.change import remember
from megatron_ext.data.stream import TokenStream, open_corpus
from megatron_ext.data.tokenizers import Tokenizer, load_tokenizer
from megatron_ext.errors import ConfigError
from megatron_ext.model import same
from megatron_ext.model.build import build_chunks, choose_vocab_size
from megatron_ext.model.freeze import freeze
from megatron_ext.model.init import initialize
from megatron_ext.ops.quantile import LayerLoad
from megatron_ext.optim.build import build_optimizer
from megatron_ext.parallel.mcore_config import ddp_config, transformer_config
from megatron_ext.parallel.mesh import build_mesh
from megatron_ext.parallel.runtime import Runtime
from megatron_ext.resilience.health import Health
from megatron_ext.train import balance
from megatron_ext.train.accuracy import check_kda
from megatron_ext.train.cuda_graph import MicroBatchGraph, own_stream
from megatron_ext.train.curriculum import WHOLE_RUN, Stage, stage_of


class ReadAhead(NamedTuple):
    """A global batch that was begun before its step: where it begins in the data, and its
    micro-batches."""

    position: int
    batches: Iterator[MicroBatch]


@dataclass
class TrainState:
    """One rank's share of a run. `step` and `tokens` say how far it has come.

    Attributes:
        chunks: model chunks of this pipeline rank, wrapped for data parallelism.
        tokens: tokens consumed; the data position and the learning rate follow from it.
        first_evaluation: held-out loss before the first step, in nats; None if not measured.
        loads: what the experts of each layer were given in the last step, on the host; the same on
            every rank. Empty before the first step and without experts.
        health: judges each step by the recent ones.
        windows: stretches [first, last) of the data that are left out, after rewinds.
        left_out: tokens of those that lie behind; the next batch starts at `tokens + left_out`.
        stage: of the curriculum; `config` is its own.
        trained: what was trained when; its last segment is what is trained now.
        source: the checkpoint that this launch goes on from.
        graph: runs the passes of training, with `train.cuda_graph`; None where nothing is trained.
        ahead: the next batch, as far as it has been read.
    """

    config: RunConfig
    runtime: Runtime
    mesh: ProcessGroupCollection
    tc: TransformerConfig
    tokenizer: Tokenizer
    vocab_size: int
    chunks: list[DistributedDataParallel]
    optimizer: MegatronOptimizer
    train_data: TokenStream
    held_out_data: TokenStream
    run_id: str
    health: Health
    step: int = 0
    tokens: int = 0
    first_evaluation: float | None = None
    loads: list[LayerLoad] = field(default_factory=list)
    windows: list[tuple[int, int]] = field(default_factory=list)
    left_out: int = 0
    stage: Stage = WHOLE_RUN
    trained: History = field(default_factory=History)
    source: Path | None = None
    graph: MicroBatchGraph | None = None
    ahead: ReadAhead | None = None

    @property
    def sources(self) -> list[str]:
        """Names of the data sources, in the order of `MicroBatch.source`."""
        return list(self.train_data.tokens_per_epoch)

    @property
    def total_tokens(self) -> int:
        """Tokens at the end of the run or stage, with the batch size that is configured now."""
        train = self.config.train
        return self.tokens + (train.steps - self.step) * train.batch_tokens

    @property
    def schedule_tokens(self) -> int:
        """Length of the learning rate's schedule, which begins with the stage."""
        return self.total_tokens - self.stage.first_tokens

    @property
    def position(self) -> int:
        """Where in the data the next batch starts, in tokens."""
        return self.tokens + self.left_out

    def pass_windows(self) -> None:
        """Move past the windows that the next batch would reach into."""
        for first, last in sorted(self.windows):
            begin = self.position
            if begin < last and begin + self.config.train.batch_tokens > first:
                self.left_out += last - begin

    def extra(self) -> dict[str, Any]:
        """What a checkpoint holds beside tensors, as plain JSON."""
        return {
            "step": self.step,
            "tokens": self.tokens,
            "total_tokens": self.total_tokens,
            "run_id": self.run_id,
            "seed": self.config.run.seed,
            "model": same.remember(self.config),
            "vocab_size": self.vocab_size,
            "tokenizer": self.tokenizer.fingerprint,
            "data": remember(self.train_data, self.position),
            "first_evaluation": self.first_evaluation,
            "health": self.health.state(),
            "windows": [list(window) for window in self.windows],
            "left_out": self.left_out,
            "stage": self.stage.extra(),
        }

    def take_over(self, checkpoint: Path, *, verified: bool = False) -> None:
        """Go on from a checkpoint of this run. Collective.

        Args:
            checkpoint: its folder.
            verified: its files have been compared with their checksums just now.

        Raises:
            CheckpointError: see `checkpoint.load`.
        """
        extra = load(
            checkpoint,
            self.chunks,
            self.optimizer,
            self.mesh,
            verified=verified,
            trained=self.trained,
        )
        self.restore(extra)
        self.source = checkpoint

    def restore(self, extra: dict[str, Any]) -> None:
        """Take over what `extra` wrote."""
        self.step, self.tokens = int(extra["step"]), int(extra["tokens"])
        self.first_evaluation = extra.get("first_evaluation")
        self.health.restore(extra.get("health", {}))
        if stage_of(extra) != self.stage:
            self.health.begin_stage()
        self.windows = [(int(first), int(last)) for first, last in extra.get("windows", ())]
        self.left_out = int(extra.get("left_out", 0))


def build_state(
    config: RunConfig,
    runtime: Runtime,
    *,
    run_id: str = "",
    stage: Stage = WHOLE_RUN,
    mesh: ProcessGroupCollection | None = None,
    before: History | None = None,
) -> TrainState:
    """Create groups, open the data, build and initialise the model, and wrap it.

    Args:
        config: of the run or stage.
        runtime: the started process.
        run_id: identity of the run.
        stage: of the curriculum.
        mesh: the groups, where this process has them already.
        before: what was trained when, in the checkpoint that is gone on from.

    Raises:
        ConfigError: the layout does not fit the ranks, the vocabulary not the tokenizer, a length
            of evaluation not the data, or what is to be trained not the model; or the backend of
            KDA is too inaccurate here.
        DataError: a source cannot be read.
    """
    mesh = mesh or build_mesh(
        config.parallel, seed=config.run.seed, timeout_seconds=config.run.timeout_seconds
    )
    tokenizer = load_tokenizer(config.data.tokenizer)
    vocab_size = choose_vocab_size(config, tokenizer.vocab_size)
    train_data, held_out_data = (
        open_corpus(config.data, seed=config.run.seed, tokenizer=tokenizer, split=split)
        for split in ("train", "held_out")
    )
    if problem := probe_length_problem(config, held_out_data):
        raise ConfigError(problem)
    check_kda(config, runtime.device)
    captured = config.train.cuda_graph and config.run.mode is Mode.train
    if captured:
        own_stream(runtime.device)
    tc = transformer_config(config)
    chunks = build_chunks(config, tc, mesh, vocab_size=vocab_size)
    initialize(chunks, seed=config.run.seed)
    freeze(config, chunks)
    reset = config.curriculum.on_unfreeze is OnUnfreeze.reset
    trained = (before or History()).then(Trainable.of(config.train), reset=reset)
    wrapped = [
        DistributedDataParallel(
            tc, ddp_config(config), chunk, disable_bucketing=number > 0, pg_collection=mesh
        )
        for number, chunk in enumerate(chunks)
    ]
    optimizer = build_optimizer(config, wrapped, mesh, late=trained.late)
    connect(tc, wrapped, optimizer, mesh)
    return TrainState(
        config=config,
        runtime=runtime,
        mesh=mesh,
        tc=tc,
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        chunks=wrapped,
        optimizer=optimizer,
        train_data=train_data,
        held_out_data=held_out_data,
        run_id=run_id,
        health=Health(config.resilience),
        stage=stage,
        trained=trained,
        graph=MicroBatchGraph(wrapped) if captured else None,
    )


def probe_length_problem(config: RunConfig, stream: TokenStream) -> str:
    """Texts in which the evaluation by length hides keys must not say anything twice: the line for
    a source that would begin again within one, or nothing."""
    longest, (source, there) = max(probe_lengths(config), default=0), stream.longest_without_repeat
    if longest <= there:
        return ""
    return (
        f"evaluate.lengths: {longest}: in a text of more than {there} tokens what is held out "
        f"of {source} would be seen twice (allowed up to that; or a larger data.held_out, a "
        "smaller weight of that source, smaller evaluate.length_factors)"
    )


def connect(
    tc: TransformerConfig,
    chunks: list[DistributedDataParallel],
    optimizer: MegatronOptimizer,
    mesh: ProcessGroupCollection,
) -> None:
    """Tell megatron-core's schedules how gradients are scaled, reduced and finished."""

    def finalize(*args: Any, **kwargs: Any) -> None:
        # The statistics of experts travel while the gradients do.
        reduction = balance.start(chunks, mesh, sequence_parallel=tc.sequence_parallel)
        finalize_model_grads(*args, **kwargs)
        reduction.finish()

    # Not the method: hooks in C++, which Python's collector does not see through, would keep model
    # and optimizer alive when nobody holds them any more, as between stages.
    weak = weakref.proxy(optimizer)
    tc.grad_scale_func = lambda loss: weak.scale_loss(loss)
    tc.finalize_model_grads_func = finalize
    ddp = chunks[0].ddp_config
    if ddp.overlap_grad_reduce:
        hooks = [chunk.no_sync for chunk in chunks]
        tc.no_sync_func = hooks if len(hooks) > 1 else hooks[0]


def gather_parameters(chunks: list[DistributedDataParallel]) -> None:
    """Wait for weights that are still being gathered, before anything but a forward reads them."""
    for chunk in chunks:
        if chunk.ddp_config.overlap_param_gather:
            chunk.start_param_sync(force_sync=True)
    if torch.cuda.is_available():
        torch.cuda.current_stream().synchronize()
