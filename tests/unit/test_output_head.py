"""The output head: with labels the losses of its own logits, which then never exist as a whole."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from megatron_ext.layers.output_head import OutputHead, losses_of
from tests.support.memory import PeakMemory
from tests.support.one_rank import draw, one_rank, small_config


def test_losses_are_those_of_the_logits_and_the_logits_are_never_whole() -> None:
    batch, tokens, vocab = 2, 40, 64
    with one_rank() as groups:
        head = OutputHead(small_config(), vocab_size=vocab, pg_collection=groups)
        draw(head)
        hidden = torch.randn(tokens, batch, 24, dtype=torch.float64)
        labels = torch.randint(0, vocab, (batch, tokens))
        logits, _ = head(hidden)
        with PeakMemory() as memory:
            losses = losses_of(hidden_states=hidden, output_layer=head, labels=labels, context=8)
    truth = F.cross_entropy(logits.permute(1, 2, 0), labels, reduction="none")
    torch.testing.assert_close(losses, truth, rtol=1e-12, atol=1e-12)
    assert memory.largest == 8 * vocab * 8
