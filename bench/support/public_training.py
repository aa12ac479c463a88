"""A whole model of public parts and its training step, as somebody would write it for one GPU.

bf16 weights with float32 main weights and gradients, torch's fused AdamW, one clipping over all.
Shapes: b sequences of a micro-batch, s tokens, h hidden.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_ext.config.residual import opens_source
from megatron_ext.config.schema import OptimOptions, ResidualKind, RunConfig
from megatron_ext.data.batches import MicroBatch
from megatron_ext.optim.groups import is_decayed
from support.public_kernels import PublicKernels
from support.public_layers import Layer, Mixture, Norm, leaf, under


class PublicModel(nn.Module):
    """Embedding, layers, head; loss of each token summed.

    Args:
        weights: of our model on one rank, by name.
        config: `residual` standard or block.
    """

    def __init__(
        self, weights: Mapping[str, Tensor], config: RunConfig, kernels: PublicKernels
    ) -> None:
        super().__init__()
        model, residual = config.model, config.residual
        if residual.kind not in (ResidualKind.standard, ResidualKind.block):
            raise ValueError(f"residual={residual.kind.value}: the plain model has standard, block")
        self.embedding = leaf(weights["embedding.word_embeddings.weight"])
        self.head = leaf(weights["output_layer.weight"])
        self.layers = nn.ModuleList(
            Layer(
                under(weights, f"decoder.layers.{number}."),
                model,
                kernels,
                opens=opens_source(residual, number)[0],
            )
            for number in range(model.num_layers)
        )
        last = under(weights, f"decoder.layers.{model.num_layers}.")  # the mix over depth, if any
        last["weight"] = weights["decoder.final_layernorm.weight"]
        self.norm = Norm(last, kernels, eps=model.norm_eps)
        self.loss = kernels.compiled(_loss)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """int64 [b, s] each to the sum of the losses in nats, float32 []."""
        sources: tuple[Tensor, ...] = (F.embedding(tokens, self.embedding),)
        for layer in self.layers:
            sources = layer(*sources)
        return self.loss(self.norm(*sources).flatten(0, 1), self.head, labels.flatten())


def _loss(hidden: Tensor, head: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, head).float(), labels, reduction="sum")


class PublicTrainer:
    """Accumulates gradients of micro-batches in float32, clips, updates.

    Args:
        model: on its device.
        options: AdamW and clipping; the rate stays at `lr`.
    """

    def __init__(self, model: PublicModel, options: OptimOptions) -> None:
        self.model, self.options = model, options
        self.low: list[Tensor] = []  # 16-bit weights, and their main weights
        self.main: list[Tensor] = []
        every: list[Tensor] = []
        groups: dict[bool, list[Tensor]] = {True: [], False: []}
        for parameter in model.parameters():
            master: Tensor = parameter
            if parameter.dtype is not torch.float32:
                master = parameter.detach().float()
                master.grad = torch.zeros_like(master)
                parameter.register_post_accumulate_grad_hook(partial(_add, master))
                self.low.append(parameter)
                self.main.append(master)
            every.append(master)
            groups[is_decayed(parameter)].append(master)
        self.every = every
        self.optimizer = torch.optim.AdamW(
            [
                {"params": groups[True], "weight_decay": options.weight_decay},
                {"params": groups[False], "weight_decay": 0.0},
            ],
            lr=options.lr,
            betas=(options.beta1, options.beta2),
            eps=options.eps,
            fused=every[0].is_cuda,
        )
        self.mixtures = [m for m in model.modules() if isinstance(m, Mixture)]

    def step(self, batches: Iterable[MicroBatch], *, tokens: int) -> dict[str, float]:
        """One optimizer step.

        Args:
            batches: of the step, on the host, every token counting.
            tokens: in all of them.

        Returns:
            `loss` in nats, `grad_norm` before clipping, `step_seconds`.
        """
        begin = time.perf_counter()
        total = torch.zeros((), device=self.model.head.device)
        for batch in batches:
            inputs, labels = (
                torch.from_numpy(array).to(total.device, non_blocking=True)
                for array in (batch.tokens, batch.labels)
            )
            loss = self.model(inputs, labels) / tokens
            loss.backward()
            total += loss.detach()
        norm = self._update()
        return {
            "loss": float(total),
            "grad_norm": float(norm),
            "step_seconds": time.perf_counter() - begin,
        }

    @torch.no_grad()
    def _update(self) -> Tensor:
        """Clip, update, clear; the norm before clipping."""
        norm = torch.nn.utils.clip_grad_norm_(self.every, self.options.clip_grad, foreach=True)
        self.optimizer.step()
        if self.low:
            torch._foreach_copy_(self.low, self.main)
        torch._foreach_zero_([master.grad for master in self.every if master.grad is not None])
        for mixture in self.mixtures:
            mixture.update()
        return norm


def _add(master: Tensor, parameter: Tensor) -> None:
    """Move a new gradient to the float32 one."""
    assert master.grad is not None
    assert parameter.grad is not None
    master.grad += parameter.grad
    parameter.grad = None
