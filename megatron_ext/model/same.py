"""Whether a checkpoint is of the model that the configuration describes.

Reading it compares names and shapes; a gate, a bound or an epsilon changes what the same tensors
compute, and nothing would fail.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

from megatron_ext.config.compose import from_keys
from megatron_ext.config.hf_write import OTHER_SELECTION
from megatron_ext.config.keys import table
from megatron_ext.config.layout import expert_layers
from megatron_ext.config.schema import BalanceRule, ResidualKind, RunConfig
from megatron_ext.config.validate import value_of
from megatron_ext.data.change import changes
from megatron_ext.errors import ConfigError

# Initial values, kernels, and what the tokenizer decides.
FREE = {
    "model.name",
    "model.vocab_size",
    "model.init_std",
    "model.kda.gate_init",
    "model.kda.backend",
    "model.kda.require",
    "model.kda.check",
    "model.mla.backend",
    "model.mla.require",
    "model.experts.router_matmul",
    "model.experts.dispatcher",
    "model.experts.backend",
    "model.experts.fp8",
    "model.experts.require",
}

# What decides, besides the state in the checkpoint, which tokens experts of rule=reject reject.
REJECTION = ("balance.overload", "balance.rejection_probability", "balance.refill")


def remember(config: RunConfig) -> dict[str, str]:
    """What a checkpoint keeps of the options: all that the function depends on, by key."""
    keys = [key for key in table() if key.startswith("model.") and key not in FREE]
    keys.append("residual.kind")
    if config.residual.kind in (ResidualKind.block, ResidualKind.shared):
        keys.append("residual.block_size")
    if expert_layers(config.model):
        keys.append("balance.rule")
        if config.balance.rule is BalanceRule.reject:
            keys.extend(REJECTION)
    values = {key: value_of(config, key) for key in keys}
    return {key: str(getattr(value, "name", value)) for key, value in values.items()}


def recall(extra: Mapping[str, Any]) -> RunConfig:
    """The options that `remember` kept, with defaults for the rest.

    Raises:
        ConfigError: an option is not one of ours.
    """
    keys, values = table(), dict[str, Any]()
    for key, text in extra["model"].items():
        # Numbers, lists and truth values; names of enumerations stay text.
        values[key] = (
            None if text == "None" else text if keys[key].allowed else yaml.safe_load(text)
        )
    return from_keys(values)


def check_same(extra: Mapping[str, Any], config: RunConfig, *, tokenizer: str | None) -> None:
    """Compare what a checkpoint remembers with the options of now.

    Args:
        extra: what the checkpoint holds beside tensors; `model` is what `remember` gave.
        config: of now.
        tokenizer: fingerprint of the tokenizer in use; None: there is no text.

    Raises:
        ConfigError: the model or its tokenizer differs.
    """
    found = []
    if "model" in extra:
        # Checkpoints of before there was a choice do not say it.
        before, now = {"residual.kind": "standard", **extra["model"]}, remember(config)
        if "balance.rule" not in before:
            now = {key: value for key, value in now.items() if not key.startswith("balance.")}
        elif _select_alike(before["balance.rule"], now.get("balance.rule")):
            now["balance.rule"] = before["balance.rule"]
        found = changes(before, now)
    if tokenizer is not None and extra.get("tokenizer", tokenizer) != tokenizer:
        found.append(f"data.tokenizer: now {tokenizer}, in the checkpoint {extra['tokenizer']}")
    if found:
        raise ConfigError(
            [
                f"{line}: not the model that this checkpoint was trained with (allowed: the "
                "options in config.yaml of its run folder; or run.fresh=true)"
                for line in found
            ]
        )


def _select_alike(before: str, now: str | None) -> bool:
    """Whether a trained model takes the k largest of score + bias under both rules."""
    return now is not None and not {rule.name for rule in OTHER_SELECTION} & {before, now}
