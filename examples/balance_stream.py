"""Assigns a skewed, drifting stream of items to thousands of bins, without a transformer.

python examples/balance_stream.py [--bins 2048] [--items 4096] [--batches 24] [--seed 0]

An item has a score with every bin: how well they match, and how popular the bin is just now. Six
ways to choose a bin for each item; the load is that of all items of the second half together.
"""

import argparse
import heapq
import math
from collections.abc import Callable, Iterator

import numpy as np

from megatron_ext.ops.quantile import QuantileBalancer

FEATURES = 16


def stream(bins: int, items: int, batches: int, seed: int) -> Iterator[np.ndarray]:
    """Scores float32 [items, bins] in (0, 1) of each batch."""
    random = np.random.default_rng(seed)
    matches = random.standard_normal((FEATURES, bins), np.float32) / math.sqrt(FEATURES)
    popularity = random.standard_normal(bins, np.float32)
    for _ in range(batches):
        features = random.standard_normal((items, FEATURES), np.float32)
        yield 1 / (1 + np.exp(-features @ matches - popularity))
        popularity += 0.05 * random.standard_normal(bins, np.float32)


def best(scores: np.ndarray) -> np.ndarray:
    """Plain top-1."""
    return scores.argmax(1)


class RoundRobin:
    """One bin after the other, whatever the scores."""

    def __init__(self) -> None:
        self.seen = 0

    def __call__(self, scores: np.ndarray) -> np.ndarray:
        first, self.seen = self.seen, self.seen + len(scores)
        return np.arange(first, self.seen) % scores.shape[1]


class LeastLoaded:
    """The bin with the fewest items so far, of all; of bins with as many, the first."""

    def __init__(self, bins: int) -> None:
        self.heap = [(0, name) for name in range(bins)]

    def __call__(self, scores: np.ndarray) -> np.ndarray:
        chosen = []
        for _ in scores:
            load, name = self.heap[0]
            heapq.heapreplace(self.heap, (load + 1, name))
            chosen.append(name)
        return np.array(chosen)


class LeastLoadedOfBest:
    """The bin with the fewest items so far, of the few with the largest scores."""

    def __init__(self, bins: int, candidates: int) -> None:
        self.load, self.candidates = [0] * bins, candidates

    def __call__(self, scores: np.ndarray) -> np.ndarray:
        candidates = np.argpartition(-scores, self.candidates, axis=1)[:, : self.candidates]
        chosen = []
        for row in candidates.tolist():
            name = min(row, key=self.load.__getitem__)
            self.load[name] += 1
            chosen.append(name)
        return np.array(chosen)


class Quantile:
    """Ours: biases level the batch before, the scores decide the rest."""

    def __init__(self, bins: int) -> None:
        self.balancer = QuantileBalancer(bins)

    def __call__(self, scores: np.ndarray) -> np.ndarray:
        chosen = self.balancer.assign(scores)[:, 0]
        self.balancer.update()
        return chosen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("bins", 2048), ("items", 4096), ("batches", 24), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    bins, batches = options.bins, options.batches
    ways: dict[str, Callable[[np.ndarray], np.ndarray]] = {
        "plain top-1": best,
        "round-robin": RoundRobin(),
        "least loaded": LeastLoaded(bins),
        "least loaded of the 16 best": LeastLoadedOfBest(bins, 16),
        "least loaded of the 256 best": LeastLoadedOfBest(bins, 256),
        "quantile": Quantile(bins),
    }
    counts = {name: np.zeros(bins, np.int64) for name in ways}
    lost = dict.fromkeys(ways, 0.0)
    for number, scores in enumerate(stream(bins, options.items, batches, options.seed)):
        for name, way in ways.items():
            chosen = way(scores)
            if number >= batches // 2:
                counts[name] += np.bincount(chosen, minlength=bins)
                lost[name] += (
                    scores.max(1) - np.take_along_axis(scores, chosen[:, None], 1)[:, 0]
                ).sum()
    items = (batches - batches // 2) * options.items
    mean = items / bins
    print(f"{items} items, {bins} bins, {mean:g} a bin; chance alone leaves a largest load of")
    print(
        f"{1 + math.sqrt(2 * math.log(bins) / mean):.2f} x the mean where all bins are as likely\n"
    )
    print("| assignment | largest load / mean | least / mean | bins without an item | score lost |")
    print("| --- | --- | --- | --- | --- |")
    for name, count in counts.items():
        print(
            f"| {name} | {count.max() / mean:.2f} | {count.min() / mean:.2f} "
            f"| {(count == 0).mean():.1%} | {lost[name] / items:.4f} |"
        )


if __name__ == "__main__":
    main()
