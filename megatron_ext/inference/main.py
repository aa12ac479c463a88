"""`run.mode=generate`: text from a checkpoint of this run, or of `checkpoint.load`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from megatron.core.models.gpt import GPTModel

from megatron_ext.checkpoint.weights import load_weights
from megatron_ext.config.schema import RunConfig
from megatron_ext.config.stages import stage_config
from megatron_ext.data.tokenizers import load_tokenizer
from megatron_ext.inference.generate import sample
from megatron_ext.model.build import build_chunks, choose_vocab_size
from megatron_ext.parallel.mcore_config import transformer_config
from megatron_ext.parallel.mesh import build_mesh
from megatron_ext.parallel.runtime import start, stop


def generate(config: RunConfig) -> int:
    """Print the prompt and what the model adds to it. Returns the exit code.

    The checkpoint may come from any layout; generation itself runs on one pipeline stage, and
    without sequence parallelism, since a growing text does not divide evenly.

    Raises:
        ConfigError: the checkpoint is of another model.
        CheckpointError: there is no checkpoint.
    """
    config = stage_config(config, config.curriculum.stage or "")
    config.parallel.sequence = False
    config.train.kda_recompute = True  # no backward pass: any backend will do
    options = config.generate
    runtime = start(config.run)
    try:
        mesh = build_mesh(
            config.parallel, seed=config.run.seed, timeout_seconds=config.run.timeout_seconds
        )
        tokenizer = load_tokenizer(config.data.tokenizer)
        tc = transformer_config(config)
        vocab_size = choose_vocab_size(config, tokenizer.vocab_size)
        chunks = build_chunks(config, tc, mesh, vocab_size=vocab_size)
        path, extra = load_weights(config, chunks, mesh, tokenizer=tokenizer.fingerprint)
        model = chunks[0].eval()
        tokens = sample(
            next_logits(model, device=runtime.device, size=tokenizer.vocab_size),
            tokenizer.encode(options.prompt) or [tokenizer.eod],
            max_new_tokens=options.max_new_tokens,
            temperature=options.temperature,
            top_k=options.top_k,
            seed=config.run.seed,
            eod=tokenizer.eod,
        )
        if runtime.rank == 0:
            print(f"[{path}, step {extra['step']}]")
            print(options.prompt + tokenizer.decode(tokens))
        return 0
    finally:
        stop()


def next_logits(
    model: GPTModel, *, device: torch.device, size: int
) -> Callable[[list[int]], torch.Tensor]:
    """The logits of the next token, float [size], from the whole text so far (no cache)."""

    def logits(tokens: list[int]) -> torch.Tensor:
        ids = torch.tensor([tokens], device=device)
        with torch.no_grad():
            out = model(
                input_ids=ids, position_ids=None, attention_mask=None, runtime_gather_output=True
            )
        last: torch.Tensor = out[0, -1, :size]
        return last

    return logits
