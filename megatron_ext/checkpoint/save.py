"""Writing checkpoints: in the background if asked to, complete or not at all."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from threading import Thread
from typing import Any, TypeVar, cast

import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelSaveStrategyWrapper,
)
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

from megatron_ext.checkpoint import carry, history, paths, rng, state
from megatron_ext.checkpoint.carry import Carried
from megatron_ext.checkpoint.checksums import Entry
from megatron_ext.checkpoint.history import History
from megatron_ext.checkpoint.staging import Staging
from megatron_ext.checkpoint.writing import Report, shielded, with_checksums, without_helper
from megatron_ext.config.trainable import Trainable
from megatron_ext.errors import CheckpointError

T = TypeVar("T")

FILE_BYTES = 4 << 30  # that a rank writes into one file, about
MOST_FILES = 6  # of one rank, at a time: 2.1 GB/s reach a disk that takes 1.3 of one file


class Checkpointer:
    """Saves the state of a run into one folder. Every method is collective over all ranks.

    Args:
        folder: the folder of checkpoints, `<run folder>/checkpoints`, seen by every host. Made when
            missing; what interrupted saves left in it is removed.
        mesh: process groups.
        asynchronous: return from `save` when the state is copied, and write meanwhile.
        keep: newest checkpoints to keep; 0: all.
        keep_every: multiples of this step are never deleted; 0: none.
        trained: what was trained when; default: everything, always.
        source: the checkpoint that the run goes on from, which holds the moments of frozen
            parameters.

    Raises:
        CheckpointError: the folder cannot be made or written.
    """

    def __init__(
        self,
        folder: Path,
        *,
        mesh: ProcessGroupCollection,
        asynchronous: bool,
        keep: int,
        keep_every: int,
        trained: History | None = None,
        source: Path | None = None,
    ) -> None:
        self.folder = folder
        self._history = trained or History().then(Trainable(), reset=False)
        self._source = source
        self._carried: Carried | None = None
        self._mesh = mesh
        self._asynchronous = asynchronous
        self._keep = keep
        self._keep_every = keep_every
        self._pending: int | None = None
        self._temporary = folder
        self._report: Report | None = None
        self._saved: int | None = None
        self._deletion: Thread | None = None
        self._begun = 0.0
        #: How long the last save took from its call until `latest` named it, in seconds.
        self.save_seconds: float | None = None
        self._queue = AsyncCallsQueue(persistent=False)
        self._staging = Staging()
        self._files = TorchDistSaveShardedStrategy()
        # Kept between saves: it remembers which rank writes which replica.
        self._strategy = FullyParallelSaveStrategyWrapper(
            self._files, mesh.dp_cp, do_cache_distribution=True
        )

        def make() -> None:
            folder.mkdir(parents=True, exist_ok=True)
            paths.clean(folder)

        self._on_rank_0(make, "the folder of checkpoints cannot be prepared")

    def reserve(self, chunks: Sequence[nn.Module], optimizer: MegatronOptimizer) -> None:
        """Get the main memory that a save copies a GPU's tensors to, while training goes on."""
        self._staging.reserve(state.device_bytes(chunks, optimizer, self._mesh))

    def save(
        self,
        step: int,
        chunks: Sequence[nn.Module],
        optimizer: MegatronOptimizer,
        extra: dict[str, Any],
    ) -> None:
        """Save model, optimizer, random states and `extra` as the checkpoint of `step`.

        An asynchronous save that still runs is waited for. A step that this object has just saved
        is not saved again.

        Args:
            step: optimizer steps done.
            chunks: model chunks of this rank, DDP-wrapped or bare.
            optimizer: of these chunks.
            extra: JSON-able values, the same on every rank (rank 0's are written). `extra.json`
                holds them, with ours under `checkpoint`.

        Raises:
            CheckpointError: the save, or the one that was waited for, failed. Nothing with a
                checkpoint's name is left of it, and `latest` is as it was.
        """
        self._finish(blocking=True)
        if step == self._saved:
            return
        self._end_deletion()  # the disk need not hold what is deleted and what is new
        self._begun = time.monotonic()
        updates = state.optimizer_step(optimizer)
        if paths.RESERVED in extra:
            raise ValueError(f"extra may not have the key {paths.RESERVED!r}")
        ours = {
            "format": paths.FORMAT,
            "step": step,
            "optimizer_step": updates,
            history.KEY: self._history.written(total=updates),
            "layout": state.layout(chunks, self._mesh),
            "megatron_core": version("megatron-core"),
        }
        self._temporary = self._on_rank_0(
            lambda: paths.prepare(self.folder, step, {**extra, paths.RESERVED: ours}),
            f"step {step}: extra.json cannot be written",
        )
        self._plan_carrying()
        model = state.model_state(chunks, self._mesh)
        content = {
            "model": model,
            "optimizer": state.optimizer_state(optimizer, model, self._mesh, loading=False),
            "rng": state.rng_object(rng.capture()),
        }
        self._pending = step
        self._files.thread_count = state.files(chunks, file_bytes=FILE_BYTES, most=MOST_FILES)
        try:
            without_helper()
            request = dist_checkpointing.save(
                content,
                str(self._temporary),
                self._strategy,
                # Gathers a description of every tensor from every rank: once a run is enough.
                validate_access_integrity=self._saved is None,
                # Always in a forked writer, waited for below if need be: where torch fails to
                # write in the training process, that process crashes at its next collection.
                async_sharded_save=True,
                async_strategy="mcore",
            )
        except (CheckpointException, CheckpointingException, OSError) as error:
            self._fail(error)
        share = self._carried.shares[dist.get_rank()] if self._carried is not None else None
        request, self._report = with_checksums(
            request,
            staging=self._staging,
            carried=share if share is not None and share.pieces else None,
            folder=self._temporary,
        )
        request.add_finalize_fn(partial(self._publish, step))
        with shielded():  # the writer is forked here
            self._queue.schedule_async_request(request)
        if not self._asynchronous:
            self._finish(blocking=True)

    def poll(self) -> None:
        """Finish an asynchronous save that all ranks have written; return at once otherwise.

        Costs nothing when no save runs, one small reduction over all ranks when one does.

        Raises:
            CheckpointError: the save failed on some rank.
        """
        self._finish(blocking=False)

    def close(self) -> None:
        """Wait for a running save and finish it, and until old checkpoints are deleted.

        Raises:
            CheckpointError: the save failed on some rank.
        """
        self._finish(blocking=True)
        self._end_deletion()

    def _end_deletion(self) -> None:
        if self._deletion is not None:
            self._deletion.join()
            self._deletion = None

    def _finish(self, *, blocking: bool) -> None:
        if self._pending is None:
            return
        try:
            self._queue.maybe_finalize_async_calls(blocking=blocking)
        except (CheckpointException, CheckpointingException, OSError) as error:
            self._fail(error)

    def _publish(self, step: int) -> None:
        assert self._report is not None
        parts: list[dict[str, Entry]] = [{} for _ in range(dist.get_world_size())]
        dist.all_gather_object(parts, self._report.entries)
        self._pending = None
        written = {name: entry for part in parts for name, entry in part.items()}
        final = self._on_rank_0(
            lambda: self._complete(step, written), f"step {step}: cannot be completed"
        )
        if self._carried is not None:
            self._carried = self._carried.after(final)
        self._saved = step
        self.save_seconds = time.monotonic() - self._begun

        old = self._on_rank_0(
            lambda: paths.prune(self.folder, keep=self._keep, keep_every=self._keep_every),
            "old checkpoints cannot be deleted",
        )
        if old and dist.get_rank() == 0:
            self._deletion = Thread(target=paths.delete, args=(old,))
            self._deletion.start()

    def _complete(self, step: int, written: dict[str, Entry]) -> Path:
        if self._carried is not None:
            self._carried.enter(self._temporary)
        return paths.publish(self._temporary, step, written)

    def _plan_carrying(self) -> None:
        """Find out, once, what is to be copied from checkpoint to checkpoint."""
        source, rule = self._source, self._history.rule
        if source is None or rule.everything or self._carried is not None:
            return
        self._carried = self._on_rank_0(
            lambda: carry.plan(
                source,
                frozen=lambda name: bool(name) and not rule.trains(name),
                ranks=dist.get_world_size(),
            ),
            f"{source}: moments of frozen parameters cannot be taken over",
        )

    def _fail(self, error: BaseException) -> None:
        """Every rank comes here for the same failure: megatron-core gathers the writers' errors."""
        step, self._pending = self._pending, None
        name = paths.step_name(step or 0)
        if dist.get_rank() == 0:
            shutil.rmtree(self._temporary, ignore_errors=True)
        # megatron-core tells the first rank alone which ranks failed and how.
        failures = getattr(error, "failures", {}) or {}
        reason = "; ".join(f"rank {rank}: {cause[0]}" for rank, cause in failures.items())
        reason = reason or str(error) or "a rank could not write, rank 0 says which"
        raise CheckpointError(
            f"{self.folder / name}: not written ({reason}). `latest` still names the one before. "
            "Check free space, quota and rights of the folder on every host, then relaunch"
        ) from error

    def _on_rank_0(self, action: Callable[[], T], what: str) -> T:
        """Do something to the folder on rank 0; its result, or its failure, on every rank."""
        outcome: list[Any] = [None, None]
        if dist.get_rank() == 0:
            try:
                outcome[0] = action()
            except OSError as error:
                outcome[1] = (
                    f"{error}). Check free space, quota and rights of the folder, then relaunch"
                )
            except (TypeError, ValueError) as error:
                outcome[1] = f"{error}). Only values that JSON has can be kept"
            except CheckpointError as error:
                outcome[1] = f"{error})"
        dist.broadcast_object_list(outcome, src=0)
        if outcome[1] is not None:
            raise CheckpointError(f"{self.folder}: {what} ({outcome[1]}")
        return cast("T", outcome[0])
