"""What `megatron_ext.ops.kda.tune` runs of linear attention, and how wrong it is."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_ext.config.schema import Gate, KdaBackend
from megatron_ext.ops.kda import kda, short_conv


@dataclass(frozen=True)
class Kda:
    """Convolution and KDA of one row of tokens, forward and backward.

    Attributes:
        heads, tokens, width: of the row.
        unbounded: the softplus gate instead of the bounded one.
        dtype: of the tensors of a token.
        documents: their bounds, if there are any; the last is `tokens`.
        initial: states come in, and get a gradient.
        final: the last states are asked for; they have a gradient if `initial`.
    """

    heads: int
    tokens: int
    width: int = 128
    unbounded: bool = False
    dtype: torch.dtype = torch.bfloat16
    documents: tuple[int, ...] | None = None
    initial: bool = False
    final: bool = False

    def __call__(self, *, tokens: int, exact: bool = False) -> list[Tensor]:
        """Outputs and all gradients.

        Args:
            tokens: to run; with documents all of `self.tokens`.
            exact: compute in float64 by the reference, on the CPU, from the same rounded inputs.
        """
        generator = torch.Generator().manual_seed(0)
        device, wide = ("cpu", torch.float64) if exact else ("cuda", torch.float32)
        backend = KdaBackend.reference if exact else KdaBackend.fla
        heads, width = self.heads, self.width

        def draw(*shape: int, scale: float = 1.0, dtype: torch.dtype = self.dtype) -> Tensor:
            made = (torch.randn(*shape, generator=generator) * scale).to(dtype)
            return made.to(device, wide if exact else dtype).requires_grad_()

        row = (1, tokens, heads, width)
        x = draw(1, tokens, heads * width)
        taps = draw(heads * width, 4, scale=0.5, dtype=torch.float32)
        k, v, z, beta = draw(*row), draw(*row), draw(*row), draw(1, tokens, heads)
        slope = torch.zeros(heads, device=device, dtype=wide, requires_grad=True)
        bias = torch.zeros(heads, width, device=device, dtype=wide, requires_grad=True)
        leaves = [x, taps, k, v, z, beta, slope, bias]
        lengths = None if self.documents is None else torch.tensor(self.documents, device=device)
        state = None
        if self.initial:
            count = 1 if self.documents is None else len(self.documents) - 1
            state = draw(count, heads, width, width, scale=0.1, dtype=torch.float32)
            leaves.append(state)
        q, _ = short_conv(x, taps, cu_seqlens=lengths, backend=backend)
        o, last = kda(
            q.view(row),
            k,
            v,
            z,
            beta,
            slope,
            bias,
            gate=Gate.softplus if self.unbounded else Gate.bounded,
            lower_bound=-5.0,
            cu_seqlens=lengths,
            initial_state=state,
            output_final_state=self.final,
            backend=backend,
        )
        outputs = [o]
        if self.initial and last is not None:
            outputs.append(last)
        upstream = [
            torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
            .to(self.dtype)
            .to(out)
            for out in outputs
        ]
        return [*outputs, *torch.autograd.grad(outputs, leaves, upstream)]


def accuracy(work: Kda, *, tokens: int) -> dict[str, float]:
    """Relative L2 errors of outputs and gradients against float64, by name; without documents."""
    names = ["o", "final"] if work.initial else ["o"]
    names += ["dx", "dtaps", "dk", "dv", "dz", "dbeta", "dA_log", "ddt_bias"]
    names += ["dinitial"] if work.initial else []
    exact, found = work(tokens=tokens, exact=True), work(tokens=tokens)
    return {
        name: ((a.detach().cpu().double() - b).norm() / b.norm()).item()
        for name, a, b in zip(names, found, exact, strict=True)
    }
