"""Which parameters are trained: a rule on names, which are the same in every layout. No torch.

Names are those of checkpoints, with layers counted over the whole model:
`decoder.layers.3.self_attention.A_log`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache

from megatron_ext.config.keys import suggest
from megatron_ext.config.problem import Problem
from megatron_ext.config.schema import RunConfig, TrainOptions

SETS: dict[str, tuple[str, ...]] = {
    "all": ("*",),
    "embedding": ("embedding.*",),
    # There is no position embedding. What knows of order: decay and convolution of linear
    # attention, and the matrix of full attention that makes the key part which all heads share.
    "position": (
        "*.A_log",
        "*.dt_bias",
        "*.decay_down.weight",
        "*.decay_up.weight",
        "*.conv_weight",
        "*.kv_down.weight",
    ),
    "experts": ("*.mlp.experts.*",),
    "head": ("output_layer.*",),
}
_LAYER = re.compile(r"(?:^|\.)decoder\.layers\.(\d+)\.")
_EMBEDDING = "embedding."


@dataclass(frozen=True)
class Trainable:
    """The rule.

    Attributes:
        names: of `SETS`, or patterns of parameter names with `*`, `?` and `[...]`.
        frozen_layers: the lowest layers, of which and below which nothing is trained.
    """

    names: tuple[str, ...] = ("all",)
    frozen_layers: int = 0

    @classmethod
    def of(cls, options: TrainOptions) -> Trainable:
        """The rule of a configuration."""
        return cls(tuple(options.trainable), options.frozen_layers)

    @property
    def everything(self) -> bool:
        """Whether nothing is frozen."""
        return self.frozen_layers == 0 and bool({"all", "*"} & set(self.names))

    def trains(self, parameter: str) -> bool:
        """Whether a parameter is trained."""
        return not self.below(parameter) and any(matches(n, parameter) for n in self.names)

    def below(self, parameter: str) -> bool:
        """Whether a parameter belongs to the frozen layers, or to the embedding below them."""
        if self.frozen_layers == 0:
            return False
        layer = _LAYER.search(parameter)
        return int(layer[1]) < self.frozen_layers if layer else parameter.startswith(_EMBEDDING)

    def problems(self, parameters: Sequence[str]) -> Iterator[str]:
        """What does not fit a model, given the names of all its parameters."""
        for name in self.names:
            found = [p for p in parameters if matches(name, p)]
            if not found:
                kinds = sorted({_LAYER.sub("decoder.layers.*.", p) for p in parameters})
                near = suggest(_LAYER.sub("decoder.layers.*.", name), kinds, count=3)
                yield (
                    f"train.trainable: {name}: matches no parameter of this model (sets: "
                    f"{', '.join(SETS)}; names such as {', '.join(near or kinds[:3])})"
                )
            elif all(self.below(p) for p in found):
                yield (
                    f"train.trainable: {name}: matches frozen parameters only, since "
                    f"train.frozen_layers={self.frozen_layers} (fewer frozen layers, or leave it "
                    "out)"
                )


@lru_cache(maxsize=1 << 16)
def matches(name: str, parameter: str) -> bool:
    """Whether a set or pattern holds a parameter."""
    return any(fnmatchcase(parameter, pattern) for pattern in SETS.get(name, (name,)))


def trainable_problems(config: RunConfig) -> Iterator[Problem]:
    """What is wrong whatever the names of the parameters are; `Trainable.problems` is the rest."""
    train, layers = config.train, config.model.num_layers
    if not train.trainable:
        yield Problem(
            "train.trainable=[]: nothing would be trained (such as [all], or "
            f"[{','.join(list(SETS)[1:3])}]; sets: {', '.join(SETS)})",
            ("train.trainable",),
        )
    for name in train.trainable:
        if name not in SETS and not re.search(r"[.*?\[]", name):
            near = suggest(name, SETS, count=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            yield Problem(
                f"train.trainable: {name}: no such set (allowed {', '.join(SETS)}, or a pattern of "
                f"parameter names such as '*.norm.weight'{hint})",
                ("train.trainable",),
            )
    if train.frozen_layers > layers:
        yield Problem(
            f"train.frozen_layers={train.frozen_layers}: must not exceed model.num_layers={layers} "
            f"(nearest {layers})",
            ("train.frozen_layers", "model.num_layers"),
        )
