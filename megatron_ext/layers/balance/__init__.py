"""How the load of experts is levelled: one rule a module, all behind `base.Balancer`."""

from megatron_ext.layers.balance.base import Balancer, Selection, TokenGroup
from megatron_ext.layers.balance.build import build_balancer
from megatron_ext.layers.balance.reduction import Reduction, reduce, start_reduce

__all__ = [
    "Balancer",
    "Reduction",
    "Selection",
    "TokenGroup",
    "build_balancer",
    "reduce",
    "start_reduce",
]
