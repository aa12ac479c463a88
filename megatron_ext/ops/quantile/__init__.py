"""Balancing by quantiles: top-k with neutral ties, histograms of margins, and their quantiles.

`QuantileBalancer` balances any stream of scored items; the rest are its parts, and those of
`layers.balance`. Needs torch and nothing of megatron-core. Source: Kimi K3, section 2.3.3 (quantile
balancing).
"""

from megatron_ext.ops.quantile.exact import next_bias, quantile_exact
from megatron_ext.ops.quantile.histogram import Bins, HistogramQuantile
from megatron_ext.ops.quantile.load import HostCopy, LayerLoad, settle, to_host
from megatron_ext.ops.quantile.statistics import add_load, add_statistics, level
from megatron_ext.ops.quantile.stream import QuantileBalancer, StreamLoad
from megatron_ext.ops.quantile.top_k import TopK, select_top_k

__all__ = [
    "Bins",
    "HistogramQuantile",
    "HostCopy",
    "LayerLoad",
    "QuantileBalancer",
    "StreamLoad",
    "TopK",
    "add_load",
    "add_statistics",
    "level",
    "next_bias",
    "quantile_exact",
    "select_top_k",
    "settle",
    "to_host",
]
