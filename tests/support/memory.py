"""Bytes of tensors alive at the same time, counted operator by operator; exact and repeatable."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.weak import WeakIdKeyDictionary


class PeakMemory(TorchDispatchMode):
    """Counts the tensors that are made inside `with`; those handed in from outside are free.

    What an operator makes and frees inside itself is not seen.

    Attributes:
        live: bytes alive now. peak: most of them. largest: bytes of the largest single one.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = self.largest = 0
        self._known: Any = WeakIdKeyDictionary()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        for given in _storages((args, kwargs)):
            self._known.setdefault(given, None)
        result = func(*args, **(kwargs or {}))
        for made in _storages(result):
            if made not in self._known:
                self._known[made] = None
                self.live += made.nbytes()
                weakref.finalize(made, self._free, made.nbytes())
                self.peak = max(self.peak, self.live)
                self.largest = max(self.largest, made.nbytes())
        return result

    def _free(self, size: int) -> None:
        self.live -= size


def _storages(tree: Any) -> list[torch.UntypedStorage]:
    return [x.untyped_storage() for x in tree_iter(tree) if isinstance(x, torch.Tensor)]
