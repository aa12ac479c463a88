"""Every number that a run may log: its name, its unit and what it means."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Metric:
    """One name, or with `<...>` in it one family of names.

    Attributes:
        name: key in `metrics.jsonl`, on wandb and in TensorBoard. `<source>` stands for any text of
            letters, digits, `_`, `-` and `.`.
        unit: unit of the value, `1` for a pure number.
        meaning: one line.
        required: stands in every row of `metrics.jsonl`.
        reproducible: the same, byte for byte, in a run that was killed and relaunched. Times, what
            is derived from them, and memory are not.
        integer: written without a decimal point.
    """

    name: str
    unit: str
    meaning: str
    required: bool = False
    reproducible: bool = True
    integer: bool = False

    @property
    def is_family(self) -> bool:
        return "<" in self.name

    def matches(self, name: str) -> bool:
        if not self.is_family:
            return name == self.name
        parts = re.split(r"<\w+>", self.name)
        pattern = r"[A-Za-z0-9_.-]+".join(re.escape(part) for part in parts)
        return re.fullmatch(pattern, name) is not None


# Layers listed after the worst one (which has its own entries), by largest violation.
TOP_LAYERS = 4


def _over_layers(
    name: str, unit: str, meaning: str, *, worst: str = "largest", reproducible: bool = True
) -> tuple[Metric, ...]:
    """One number a layer, as three keys whatever the number of layers: worst, mean, and where."""
    return (
        Metric(name, unit, f"{meaning}; of the layer with the {worst}", reproducible=reproducible),
        Metric(f"{name}/mean", unit, "Mean of it over layers", reproducible=reproducible),
        Metric(
            f"{name}/layer",
            "layer",
            f"The layer with the {worst}, from 0",
            reproducible=reproducible,
            integer=True,
        ),
    )


# Of a layer's experts in one step, from the counts of the whole global batch without padding; dense
# layers have none. "Load" is the number of tokens that an expert was given.
EXPERT_METRICS: tuple[Metric, ...] = (
    *_over_layers("moe/max_violation", "1", "Largest load over the mean load, minus 1"),
    Metric(
        "moe/violation_floor",
        "1",
        "What moe/max_violation is expected to be when every expert is chosen equally often, by "
        "chance alone: sqrt(2 ln E / (tokens * k / E))",
    ),
    *(
        Metric(f"moe/top/{place}/{what}", unit, meaning, integer=unit == "layer")
        for place in range(2, TOP_LAYERS + 1)
        for what, unit, meaning in (
            ("max_violation", "1", f"The {place}. largest moe/max_violation of a layer"),
            ("layer", "layer", "The layer that has it"),
        )
    ),
    *_over_layers("moe/load_cv", "1", "Standard deviation of the loads over their mean"),
    *_over_layers(
        "moe/load_entropy",
        "fraction",
        "Entropy of the loads over its maximum ln E: 1 is even, 0 is one expert for all",
        worst="smallest",
    ),
    *_over_layers("moe/dead_fraction", "fraction", "Share of experts that no token was given to"),
    *_over_layers("moe/max_share", "fraction", "Share of all slots that one expert took"),
    *_over_layers(
        "moe/rank_load",
        "1",
        "Largest load of an expert parallel rank over the mean of the ranks; each holds E/ranks "
        "experts in a row. Depends on parallel.expert",
    ),
    *_over_layers("moe/dropped", "fraction", "Share of the tokens * k slots that no expert took"),
    *_over_layers("balance/bias_range", "1", "Largest minus smallest bias in use"),
    *_over_layers("balance/bias_change", "1", "Largest change of a bias by this step's update"),
    *_over_layers("balance/out_of_range", "fraction", "Share of the margins outside the histogram"),
    *_over_layers(
        "balance/predicted_violation",
        "1",
        "moe/max_violation of this batch had the new bias been in use, cut-offs held. Counted "
        "under rule quantile_exact; about 0 by construction under rule quantile, hence no evidence "
        "there; other rules predict nothing",
    ),
    *_over_layers(
        "balance/prediction_error",
        "1",
        "Largest difference between an expert's load and what the step before predicted, over the "
        "mean load. Missing in the first row of a launch",
        reproducible=False,
    ),
)


def _spread(
    name: str, meaning: str, *, unit: str = "fraction", of: str = "layer"
) -> tuple[Metric, ...]:
    """A mean that may be bad at either end, as three keys."""
    return (
        Metric(name, unit, meaning),
        Metric(f"{name}/min", unit, f"Its smallest mean over a {of}"),
        Metric(f"{name}/max", unit, f"Its largest mean over a {of}"),
    )


# In the steps in which attention is measured (logging.health_interval), over all tokens of the
# global batch and all heads. The decay of a token, head and channel is exp(g), g its log-decay.
ATTENTION_METRICS: tuple[Metric, ...] = (
    *_spread("kda/decay_mean", "Mean decay: what is kept of the state from a token to the next"),
    *(
        Metric(
            f"kda/decay_p{percent}", "fraction", f"{percent}th percentile of the decays, all layers"
        )
        for percent in ("01", "50", "99")
    ),
    *_over_layers(
        "kda/saturated_low",
        "fraction",
        "Share of gates within 1 % of the lower bound: as forgetful as can be",
    ),
    *_over_layers(
        "kda/saturated_high",
        "fraction",
        "Share of gates within 1 % of 0: exp(0.01 * lower_bound) or more is kept",
    ),
    *_over_layers(
        "kda/tile_decay",
        "nats",
        "Strongest decay over a tile of 16 tokens, ln(max |1/Gamma|): float32 overflows above 88",
    ),
    *_over_layers(
        "kda/state_norm",
        "1",
        "Largest Frobenius norm of a head's last state; not where the layout pads sequences",
    ),
    *_spread("kda/beta_mean", "Mean write strength beta"),
    *_spread("kda/output_gate_mean", "Mean of the output gate"),
    *_spread("mla/gate_mean", "Mean of the output gate of full attention"),
)

# In the same steps, with attention residuals, over all tokens of the global batch.
RESIDUAL_METRICS: tuple[Metric, ...] = (
    *_spread(
        "residual/entropy",
        "Mean entropy of the weights over depth, over its maximum: 1 is even, 0 is one source",
        of="sublayer",
    ),
    *_spread("residual/embedding_weight", "Mean weight of the embedding", of="sublayer"),
    *_spread("residual/running_weight", "Mean weight of the sum that runs", of="sublayer"),
    Metric(
        "residual/output_weight",
        "fraction",
        "Mean weight of the last sum in the mix after the last layer",
    ),
    *_spread("residual/source_norm", "Mean root mean square of the sources", unit="1", of="source"),
)

# The order of this table is the order of the keys in a row of metrics.jsonl.
METRICS: tuple[Metric, ...] = (
    Metric("step", "steps", "Optimizer step, from 1", required=True, integer=True),
    Metric("stage", "text", "Stage of the curriculum; in `metrics.jsonl` only, absent without one"),
    Metric(
        "tokens",
        "tokens",
        "Tokens consumed since the start of the run, this step included",
        required=True,
        integer=True,
    ),
    Metric(
        "loss",
        "nats",
        "Mean cross-entropy of the valid tokens of the global batch, before the update",
        required=True,
    ),
    Metric("grad_norm", "1", "L2 norm of the whole gradient, before clipping", required=True),
    Metric("lr", "1", "Learning rate of this step's update", required=True),
    Metric(
        "step_seconds",
        "s",
        "Wall-clock time of the step, without evaluation and saving; on a GPU with the update "
        "of the step before it in place of its own",
        required=True,
        reproducible=False,
    ),
    Metric(
        "tokens_per_second",
        "tokens/s",
        "Tokens of the global batch over step_seconds, all ranks together",
        required=True,
        reproducible=False,
    ),
    Metric(
        "mfu",
        "fraction",
        "Model FLOPs (forward and backward, no recomputation) over the peak of the ranks' GPUs; "
        "null where the peak is not known, as on a CPU",
        required=True,
        reproducible=False,
    ),
    Metric(
        "memory_gib",
        "GiB",
        "Peak memory of the fullest rank: allocated on its GPU, or resident on a CPU",
        required=True,
        reproducible=False,
    ),
    Metric("loss/<source>", "nats", "As loss, over the tokens of one data source"),
    Metric(
        "loss/position/<start>",
        "nats",
        "As loss, over tokens that can look back on so many tokens or more, below the next bucket",
    ),
    Metric(
        "tokens/<source>", "tokens", "Valid tokens of one data source in this step", integer=True
    ),
    Metric(
        "data/epoch/<source>", "epochs", "Times that a data source was read, fractions included"
    ),
    Metric("data/documents", "documents", "Documents of this step, also in part", integer=True),
    Metric(
        "data/cut_documents",
        "documents",
        "Of them, those that lie in more than one sequence",
        integer=True,
    ),
    Metric(
        "data/length/<start>",
        "fraction",
        "Share of this step's tokens whose whole document has so many tokens or more, below the "
        "next bucket",
    ),
    Metric(
        "data/wait_seconds", "s", "Time in which the step waited for its data", reproducible=False
    ),
    *EXPERT_METRICS,
    *ATTENTION_METRICS,
    *RESIDUAL_METRICS,
    Metric("eval/loss", "nats", "Mean cross-entropy of the held-out tokens, after the update"),
    Metric(
        "eval/apart/loss",
        "nats",
        "Of a curriculum's stage that lets documents see each other: eval/loss with each alone",
    ),
    Metric(
        "eval/before/loss",
        "nats",
        "In the first row of a run or stage: eval/loss before its first step, in its own length",
    ),
    Metric("eval/before/apart/loss", "nats", "As eval/before/loss, of eval/apart/loss"),
    Metric("eval/loss/<source>", "nats", "As eval/loss, over one data source"),
    Metric("eval/loss/position/<start>", "nats", "As loss/position/<start>, over eval/tokens"),
    Metric(
        "eval/retrieval/<length>/<depth>",
        "nats",
        "Loss a token of a key of five digits that stands at a depth (percent) of a text of a "
        "length, or is absent",
    ),
    Metric(
        "eval/context/<length>/<seen>",
        "nats",
        "Loss of the last eighth of a text of which the whole, half or a quarter is seen",
    ),
    Metric("eval/tokens", "tokens", "Held-out tokens that eval/loss is the mean of", integer=True),
    Metric("eval/seconds", "s", "Wall-clock time of the evaluation", reproducible=False),
    Metric(
        "checkpoint/stall_seconds",
        "s",
        "Time in which training stood still for a checkpoint",
        reproducible=False,
    ),
    Metric(
        "checkpoint/save_seconds",
        "s",
        "From the beginning of the last save until it could be resumed from",
        reproducible=False,
    ),
    Metric(
        "straggler/ratio",
        "1",
        "Time that a rank does not wait for others, over the median of its pipeline stage; of the "
        "slowest rank, over the steps since the row before that has it",
        reproducible=False,
    ),
    Metric("straggler/rank", "rank", "The rank that has it", reproducible=False, integer=True),
    Metric(
        "straggler/probe_ratio",
        "1",
        "Time of a fixed matrix product without communication over the median of all ranks; of the "
        "slowest",
        reproducible=False,
    ),
    Metric(
        "straggler/probe_rank", "rank", "The rank that has it", reproducible=False, integer=True
    ),
    Metric(
        "straggler/wait_share",
        "fraction",
        "Share of a step in which a rank waits for others; median of the ranks",
        reproducible=False,
    ),
    Metric(
        "straggler/wait_share/min", "fraction", "The smallest share of a rank", reproducible=False
    ),
    Metric(
        "profile/kernels",
        "kernels",
        "In a step of profile.steps: kernels a layer and micro-batch, of the rank with most; on a "
        "CPU operators that are no part of another. Includes the optimizer's",
        reproducible=False,
    ),
    Metric(
        "health/skipped", "steps", "Steps so far whose update was left out as bad", integer=True
    ),
    Metric("health/spikes", "steps", "Steps so far that were told as spikes", integer=True),
    Metric(
        "health/left_out_tokens", "tokens", "Tokens of the data left out by rewinds", integer=True
    ),
)
