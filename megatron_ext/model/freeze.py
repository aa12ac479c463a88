"""Parameters that are not trained: marked before gradient buffers and optimizer are made, so that
they have neither."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from megatron_ext.config.schema import Recompute, RunConfig
from megatron_ext.config.stages import stage_config
from megatron_ext.config.trainable import Trainable
from megatron_ext.errors import ConfigError
from megatron_ext.model.init import named_shards


def freeze(config: RunConfig, chunks: Sequence[nn.Module]) -> None:
    """Mark the parameters that `train.trainable` and `train.frozen_layers` leave out. Collective.

    Args:
        config: of the run or stage; the rules of all stages are checked, not of this one alone.
        chunks: bare model chunks of this rank.

    Raises:
        ConfigError: a name of a rule matches nothing of the model, or nothing is left to train.
    """
    names = (name for chunk in chunks for name, _ in parameter_names(chunk))
    check_rules(config, _of_all_ranks(names))
    mark(config, chunks)


def mark(config: RunConfig, chunks: Sequence[nn.Module]) -> None:
    """`freeze` without the check, on one rank alone."""
    rule = Trainable.of(config.train)
    if rule.everything:
        return
    for chunk in chunks:
        for name, parameter in parameter_names(chunk):
            parameter.requires_grad_(rule.trains(name))
        if config.train.recompute is not Recompute.none:
            _begin_gradients(chunk)


def parameter_names(chunk: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Each parameter with its name in checkpoints, which is the same in every layout."""
    for parameter, shard in named_shards(chunk):
        yield shard.key, parameter


def check_rules(config: RunConfig, parameters: Sequence[str]) -> None:
    """Hold the rules of the run, or of all its stages, against the names of all parameters.

    Raises:
        ConfigError: see `freeze`. A later stage would else be refused when its time comes.
    """
    problems = []
    for stage in config.curriculum.stages or {"": None}:
        rule = Trainable.of(stage_config(config, stage).train if stage else config.train)
        where = f"{stage}: " if stage else ""
        found = list(rule.problems(parameters))
        if not found and not any(rule.trains(name) for name in parameters):
            found = ["train.trainable: leaves nothing to train"]
        problems += [where + text for text in found]
    if problems:
        raise ConfigError(problems)


def _of_all_ranks(names: Iterable[str]) -> list[str]:
    if not dist.is_initialized():
        return sorted(set(names))
    gathered: list[set[str]] = [set() for _ in range(dist.get_world_size())]
    dist.all_gather_object(gathered, set(names))
    return sorted(set().union(*gathered))


def _begin_gradients(chunk: nn.Module) -> None:
    """Let hidden states require gradients from the embedding on, where that is frozen.

    megatron-core's recomputation gives a region's parameters gradients only if what goes into it
    requires one; above frozen layers nothing would, and the parameters would be left as they are
    without a word.
    """
    embedding: Any = getattr(chunk, "embedding", None)
    trained = [p.requires_grad for p in chunk.parameters()]
    if embedding is None or not any(trained):
        return
    if not any(p.requires_grad for p in embedding.parameters()):
        embedding.register_forward_hook(_require_gradient)


def _require_gradient(module: nn.Module, inputs: Any, output: Tensor) -> Tensor | None:
    # Not in evaluation, where gradients are off.
    return output.requires_grad_() if module.training else None
