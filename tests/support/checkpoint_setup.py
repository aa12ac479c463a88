"""A small model with its optimizer in one layout, for the ranks of `checkpoint_worker`."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from megatron_ext.checkpoint import load as load_module
from megatron_ext.checkpoint import paths, state
from megatron_ext.checkpoint import save as save_module
from megatron_ext.checkpoint.save import Checkpointer
from megatron_ext.config.schema import Device, ParallelOptions, Precision, RunConfig
from megatron_ext.model.build import build_chunks
from megatron_ext.model.init import initialize
from megatron_ext.optim.build import build_optimizer, set_learning_rate
from megatron_ext.parallel.mcore_config import ddp_config, transformer_config
from megatron_ext.parallel.mesh import build_mesh

SEQUENCE, SEQUENCES, VOCABULARY = 16, 4, 128

save_module.FILE_BYTES = 1 << 16  # so that ranks write several files, as those of large models do


def make_config(parallel: ParallelOptions, precision: Precision = Precision.fp32) -> RunConfig:
    config = RunConfig()
    config.run.device = Device.cpu
    config.run.precision = precision
    config.parallel = parallel
    model = config.model
    model.num_layers, model.hidden_size, model.feed_forward_size = 4, 32, 64
    model.vocab_size = VOCABULARY
    model.kda = replace(model.kda, num_heads=2, head_dim=16, value_dim=16, decay_rank=8)
    model.mla = replace(
        model.mla,
        num_heads=2,
        q_lora_rank=16,
        kv_lora_rank=8,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=16,
    )
    config.data.sequence_length = SEQUENCE
    # Rounding of gradients near epsilon is amplified at 1e-8; see the invariant on layouts.
    config.optim.eps = 1e-5
    return config


class Setup:
    """Groups, model, optimizer of one layout, until `close`."""

    def __init__(
        self,
        parallel: ParallelOptions,
        precision: Precision = Precision.fp32,
        *,
        bucket_size: int | None = None,
    ) -> None:
        self.config = make_config(parallel, precision)
        self.mesh = build_mesh(parallel)
        tc = transformer_config(self.config)
        bare = build_chunks(self.config, tc, self.mesh, vocab_size=VOCABULARY)
        initialize(bare, seed=7)
        ddp = replace(ddp_config(self.config), bucket_size=bucket_size)
        self.chunks = [
            DistributedDataParallel(tc, ddp, chunk, pg_collection=self.mesh) for chunk in bare
        ]
        self.optimizer = build_optimizer(self.config, self.chunks, self.mesh)
        set_learning_rate(self.optimizer, 1e-3)
        tc.finalize_model_grads_func = finalize_model_grads

    def close(self) -> None:
        parallel_state.destroy_model_parallel()

    def step(self, number: int) -> float:
        """One step on a batch that depends on its number only; the gradient norm."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        tokens = torch.randint(
            0,
            VOCABULARY,
            (SEQUENCES, SEQUENCE + 1),
            generator=torch.Generator().manual_seed(number),
        )
        mine = tokens[self.mesh.dp.rank() :: self.mesh.dp.size()]
        batches = [iter(list(mine.split(1))) for _ in self.chunks]

        def forward(iterator: Any, model: Any) -> Any:
            row = next(iterator)
            output = model(row[:, :-1], None, None, labels=row[:, 1:])

            def total(losses: Tensor) -> Any:
                count = torch.tensor(losses.numel(), dtype=torch.int)
                return losses.sum(), count, {"loss": losses.sum().detach()}

            return output, total

        get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=batches if len(self.chunks) > 1 else batches[0],
            model=self.chunks,
            num_microbatches=mine.shape[0],
            seq_length=SEQUENCE,
            micro_batch_size=1,
        )
        success, norm, _ = self.optimizer.step()
        assert success
        return float(norm)

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor of model and optimizer, whole, on every rank, by logical name."""
        model = state.model_state(self.chunks, self.mesh)
        optimizer = state.optimizer_state(self.optimizer, model, self.mesh, loading=False)
        pieces = [
            (p.key, tuple(p.global_shape), tuple(p.global_offset), p.data.detach().clone())
            for p in load_module._pieces(nested_values({"model": model, "optimizer": optimizer}))
            if hasattr(p, "global_offset") and isinstance(p.data, Tensor)
        ]
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, pieces)
        whole: dict[str, Tensor] = {}
        for key, shape, offset, data in (piece for rank in gathered for piece in rank):
            target = whole.setdefault(key, torch.full(shape, torch.nan, dtype=data.dtype))
            part = target
            for axis, start in enumerate(offset[len(offset) - data.dim() :]):
                part = part.narrow(axis, start, data.shape[axis])
            part.copy_(data)
        assert not any(tensor.isnan().any() for tensor in whole.values())
        return whole

    def save(self, folder: Path, step: int, *, asynchronous: bool = False) -> None:
        writer = self.writer(folder, asynchronous=asynchronous)
        writer.save(step, self.chunks, self.optimizer, {"tokens": step * 64, "run": "abc"})
        writer.close()

    def writer(self, folder: Path, *, asynchronous: bool = False) -> Checkpointer:
        return Checkpointer(folder, mesh=self.mesh, asynchronous=asynchronous, keep=2, keep_every=0)

    def load(self, folder: Path) -> dict[str, Any]:
        path = paths.latest(folder)
        assert path is not None
        return load_module.load(path, self.chunks, self.optimizer, self.mesh)


@contextmanager
def layout(parallel: ParallelOptions, precision: Precision = Precision.fp32) -> Any:
    setup = Setup(parallel, precision)
    yield setup
    setup.close()
