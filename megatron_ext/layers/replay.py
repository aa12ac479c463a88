"""Routing that was recorded, used again: so that two runs can be compared token by token.

Rounding can move a token whose scores nearly tie to another expert, after which no tolerance covers
the difference. With the routing of one run replayed in the other, what remains is rounding.

Shapes: T tokens of a forward pass on this rank, E experts, N tokens of the stream.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import torch
from torch import Tensor

from megatron_ext.layers.router import BalancedRouter


class RoutingTape:
    """Which experts took which token, by layer and place in the stream: records, or replays.

    Set `positions` before each forward pass and `attach` the tape to the routers. Recomputation
    runs a pass without gradients first and with them later, when other micro-batches may have come
    between: the tape remembers where such a pass was.

    Args:
        maps: bool [N, E] by 0-based layer: filled by recording, read by replaying.
        replay: read instead of recording.

    Attributes:
        positions: int64 [T], places of the tokens of the coming forward pass in the stream.
        rerouted: tokens that would have gone elsewhere than the tape says, by layer, while
            replaying; over the passes of this rank.
    """

    def __init__(self, maps: dict[int, Tensor], *, replay: bool) -> None:
        self.maps = maps
        self.replay = replay
        self.positions: Tensor | None = None
        self.rerouted: dict[int, int] = {}
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

    def __call__(self, layer: int, chosen: Tensor) -> Tensor:
        """The map to use where the router of `layer` has chosen bool [T, E]."""
        waiting = self._waiting.setdefault(layer, deque())
        again = torch.is_grad_enabled() and bool(waiting)
        places = waiting.popleft() if again else self.positions
        if places is None:
            raise ValueError("RoutingTape: no positions are set for this forward pass")
        if not torch.is_grad_enabled():
            waiting.append(places)
        if not self.replay:
            self.maps[layer][places] = chosen.to(self.maps[layer].device)
            return chosen
        taken = self.maps[layer][places].to(chosen.device)
        if not again:
            moved = int((taken != chosen).any(-1).sum())
            self.rerouted[layer] = self.rerouted.get(layer, 0) + moved
        return taken
