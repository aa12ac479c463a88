"""Routing that was recorded, used again: so that two runs can be compared token by token.

Rounding can move a token whose scores nearly tie to another expert, after which no tolerance covers
the difference. With the routing of one run replayed in the other, what remains is rounding.

Shapes: T tokens of a forward pass on this rank, E experts, N tokens of the stream.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from megatron_ext.layers.balance import Selection
from megatron_ext.layers.router import BalancedRouter


class RoutingTape:
    """Which experts took which token, by layer and place in the stream: records, or replays.

    Recomputation runs a pass without gradients first and again with them, when others may have come
    between: the tape counts it once and remembers where it was.

    Args:
        maps: bool [N, E] by 0-based layer: filled by recording, read by replaying.
        places: from the number of a router's forward pass (0, 1, ...) to the places int64 [T] of
            its tokens in the stream. Places from N on are padding, which no expert takes.
        replay: read instead of recording.
        margins: float64 [N] by layer, filled in either case: how near each token's own choice was
            to another one, the lowest biased score that it took minus the highest that it did not
            (infinite where there is no other).

    Attributes:
        rerouted: while replaying, tokens that would have gone elsewhere, by layer; on this rank.
        margin: the largest distance of a score that decided so from its token's cut-off.
    """

    def __init__(
        self,
        maps: dict[int, Tensor],
        *,
        places: Callable[[int], Tensor],
        replay: bool,
        margins: dict[int, Tensor] | None = None,
    ) -> None:
        self.maps = maps
        self.replay = replay
        self.margins = margins
        self.rerouted: dict[int, int] = {}
        self.margin = 0.0
        self._places = places
        self._passes: dict[int, int] = {}
        self._waiting: dict[int, deque[Tensor]] = {}

    def attach(self, routers: Iterable[BalancedRouter]) -> None:
        """Make the routers ask this tape."""
        for router in routers:
            router.hook = self

    @staticmethod
    def detach(routers: Iterable[BalancedRouter]) -> None:
        """Let the routers choose by themselves again."""
        for router in routers:
            router.hook = None

    def __call__(self, router: BalancedRouter, scores: Tensor, selection: Selection) -> Tensor:
        """The map to use where the router has chosen; see `RouteHook`."""
        layer, chosen = router.layer, selection.map
        waiting = self._waiting.setdefault(layer, deque())
        again = torch.is_grad_enabled() and bool(waiting)
        if again:
            places = waiting.popleft()
        else:
            number = self._passes.get(layer, 0)
            self._passes[layer] = number + 1
            places = self._places(number)
            if router.training and not torch.is_grad_enabled():
                waiting.append(places)
        table = self.maps[layer]
        known = places < len(table)
        if self.margins is not None:
            self.margins[layer][places[known]] = _margins(router, scores, chosen).cpu()[known]
        if not self.replay:
            table[places[known]] = chosen.cpu()[known]
            return chosen
        taken = torch.zeros_like(chosen, device="cpu")
        taken[known] = table[places[known]]
        taken = taken.to(chosen.device)
        if not again:
            moved = taken != chosen
            self.rerouted[layer] = self.rerouted.get(layer, 0) + int(moved.any(-1).sum())
            distance = (scores + router.balancer.bias - selection.cutoff.unsqueeze(-1)).abs()
            self.margin = max(self.margin, float((distance * moved).max()))
        return taken


def _margins(router: BalancedRouter, scores: Tensor, chosen: Tensor) -> Tensor:
    """float64 [T]; see `RoutingTape`."""
    biased = (scores + router.balancer.bias).double()
    taken = biased.masked_fill(~chosen, torch.inf).amin(1)
    return taken - biased.masked_fill(chosen, -torch.inf).amax(1)
