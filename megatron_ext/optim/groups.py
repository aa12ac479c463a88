"""Which parameters are weight-decayed: one rule, told to megatron-core and printed as a table.

A parameter is not decayed when its layer marked it `no_weight_decay`, or when it has fewer than two
dimensions (norms, biases, A_log). Decaying those changes what a layer can express instead of
regularising it, and refactorings elsewhere have done so unnoticed, hence the table at every start.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from megatron.core.optimizer import ParamKey, ParamPredicate
from megatron.core.optimizer_param_scheduler import ParamGroupOverride
from torch import Tensor, nn

# Updates of the run that a group's moments have not seen: of parameters that rested for a while. An
# attribute of the parameter, and a key of its group.
LATE = "late_updates"


@dataclass(frozen=True)
class ParameterGroup:
    """Names of this rank's parameters that share one treatment.

    Args:
        name: `decayed` or `not decayed`.
        parameters: (name, parameter), in the order of the chunks; a name is prefixed by `chunk N: `
            when there are several chunks.
    """

    name: str
    parameters: tuple[tuple[str, Tensor], ...]


def is_decayed(param: Tensor) -> bool:
    """Whether weight decay applies to a parameter."""
    return param.dim() >= 2 and not getattr(param, "no_weight_decay", False)


def config_overrides(chunks: Sequence[nn.Module] = ()) -> dict[ParamKey, ParamGroupOverride]:
    """The rule in the form that `get_megatron_optimizer` takes, and a group of its own for each
    number of missed updates among the parameters of `chunks`."""
    overrides = {
        _key("not_decayed", lambda param: not is_decayed(param)): ParamGroupOverride(wd_mult=0.0)
    }
    counts = {getattr(param, LATE, 0) for chunk in chunks for param in chunk.parameters()}
    for count in sorted(counts - {0}):
        override: Any = {LATE: count}  # theirs names its own keys, and hands on any
        overrides[_key(f"late_{count}", partial(_is_late, count=count))] = override
    return overrides


def _key(name: str, holds: Callable[[Tensor], bool]) -> ParamKey:
    return ParamKey(predicate=ParamPredicate(name=name, fn=holds))


def _is_late(param: Tensor, *, count: int) -> bool:
    return getattr(param, LATE, 0) == count


def parameter_groups(chunks: Sequence[nn.Module]) -> list[ParameterGroup]:
    """Every trainable parameter of this rank in exactly one group; chunks bare or DDP-wrapped."""
    decayed: list[tuple[str, Tensor]] = []
    spared: list[tuple[str, Tensor]] = []
    for index, chunk in enumerate(chunks):
        prefix = f"chunk {index}: " if len(chunks) > 1 else ""
        for name, param in chunk.named_parameters():
            if param.requires_grad:
                name = prefix + name.removeprefix("module.")
                (decayed if is_decayed(param) else spared).append((name, param))
    return [ParameterGroup("decayed", tuple(decayed)), ParameterGroup("not decayed", tuple(spared))]


def group_table(chunks: Sequence[nn.Module]) -> str:
    """The groups of this rank as text: one line a name, layers of equal names and shapes joined.

    Frozen parameters are listed too, so that the counts add up to the model.
    """
    groups = parameter_groups(chunks)
    frozen = tuple(
        (name.removeprefix("module."), param)
        for chunk in chunks
        for name, param in chunk.named_parameters()
        if not param.requires_grad
    )
    if frozen:
        groups.append(ParameterGroup("frozen", frozen))
    lines = []
    for group in groups:
        count = sum(param.numel() for _, param in group.parameters)
        lines.append(f"{group.name}: {len(group.parameters)} tensors, {count:,} parameters")
        joined: dict[tuple[str, str], int] = {}
        for name, param in group.parameters:
            pattern = re.sub(r"^chunk \d+: ", "", re.sub(r"\.\d+\.", ".*.", name))
            row = (pattern, "x".join(map(str, param.shape)) or "scalar")
            joined[row] = joined.get(row, 0) + 1
        for (pattern, shape), times in joined.items():
            lines.append(f"  {pattern:<60} {shape:>14}" + (f"  x {times}" if times > 1 else ""))
    return "\n".join(lines)
