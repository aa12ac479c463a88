"""Layouts of `layout_worker` against one rank: launched, read back, compared tensor by tensor."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from megatron_ext.ops.attn_res.health import MixHealth
from megatron_ext.ops.kda.health import LayerHealth
from tests.support.layout_cases import truth_of

ROOT = Path(__file__).resolve().parents[2]
ON_CPU = {"CUDA_VISIBLE_DEVICES": ""}
# Ranks are forked: the process that forks them may ask whether there is a GPU, not open it.
ON_GPU = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
LOSS = 1e-5  # float32 sums in another order; seen 1e-7
TENSOR = 1e-4  # seen up to 7e-5 (updates divide by the root of the second moment)
# Of a share that counts gates beyond a threshold: rounding moves a few of 65 000 across it.
HEALTH = 1e-3
DEPTH = 1e-5  # means over tokens of smooth functions
# Below this share of the whole gradient's norm a tensor counts as about zero: what is left of it is
# rounding of larger terms.
FLOOR = 1e-6
# A token is routed otherwise in step 1 only where rounding decides: float32 scores of 0.5 carry an
# error of some 1e-7, through five layers.
CUT_OFF = 1e-5


def launch(folder: Path, cases: Sequence[str], *, ranks: int, on_gpu: bool = False) -> None:
    """Run cases of `layout_worker`; FOLDER/overrides.json says what they share.

    Args:
        on_gpu: ranks beyond the number of GPUs share them.
    """
    command = [sys.executable, "-W", "ignore", "-m", "tests.support.layout_worker"]
    done = subprocess.run(
        [*command, str(folder), str(ranks), *cases],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | (ON_GPU if on_gpu else ON_CPU),
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]


def read(folder: Path, case: str) -> dict[str, Any]:
    """What a case wrote down, on the CPU."""
    path = folder / f"{case.replace(':', '_')}.pt"
    return dict(torch.load(path, map_location="cpu", weights_only=False))


def worst(ours: dict[str, torch.Tensor], truth: dict[str, torch.Tensor]) -> tuple[float, str]:
    """The largest relative L2 distance of any tensor, and its name."""
    assert ours.keys() == truth.keys()
    scale = torch.stack([t.double().norm() for t in truth.values()]).norm()
    distances = {
        key: float((ours[key].double() - t.double()).norm() / max(t.double().norm(), FLOOR * scale))
        for key, t in truth.items()
    }
    # NaN (replicas that differ) is worst of all.
    name = max(distances, key=lambda key: (math.isnan(distances[key]), distances[key]))
    return distances[name], name


def health_distance(
    ours: dict[int, LayerHealth], truth: dict[int, LayerHealth], *, case: str
) -> float:
    """Largest difference of a statistic of attention; infinite where something was counted more
    or less often."""
    if "appended" in case:  # nothing tells the watch of this padding, so it counts it
        return 0.0
    # Parts of a sequence have tiles of their own; a padded one has no state without the padding.
    split = {"tile_decay"} if "cp" in case else set()
    split |= {"state_norm"} if re.search("padded|awkward|everything", case) else set()
    if ours.keys() != truth.keys():
        return math.inf
    distances = [0.0]
    for layer, wanted in truth.items():
        found = ours[layer]
        names = wanted.values.keys() - split
        if found.values.keys() - split != names or sum(found.rates) != sum(wanted.rates):
            return math.inf
        for name in names:
            value = wanted.values[name]
            distances.append(abs(found.values[name] - value) / max(abs(value), 0.1))
        moved = sum(abs(a - b) for a, b in zip(found.rates, wanted.rates, strict=True))
        distances.append(moved / max(1, sum(wanted.rates)))
    return max(distances)


def depth_distance(ours: Sequence[MixHealth], truth: Sequence[MixHealth], *, case: str) -> float:
    """Largest relative difference of a statistic of attention residuals; infinite where other
    mixes, sources or tokens were counted."""
    if "appended" in case:  # as in `health_distance`
        return 0.0
    if [(m.sublayer, m.tokens, len(m.weights)) for m in ours] != [
        (m.sublayer, m.tokens, len(m.weights)) for m in truth
    ]:
        return math.inf
    return max(
        (
            abs(a - b) / b
            for mine, its in zip(ours, truth, strict=True)
            for a, b in zip(
                (mine.entropy, *mine.weights, *mine.norms),
                (its.entropy, *its.weights, *its.norms),
                strict=True,
            )
        ),
        default=0.0,
    )


def compare(folder: Path, case: str) -> dict[str, Any]:
    """The largest differences of a case from one rank."""
    ours, truth = read(folder, case), read(folder, truth_of(case))
    row: dict[str, Any] = {
        "loss": max(
            abs(a - b) / b
            for key in ("loss", "evaluation")
            for a, b in zip(ours[key], truth[key], strict=True)
        ),
        "norm": max(
            abs(a - b) / b for a, b in zip(ours["grad_norm"], truth["grad_norm"], strict=True)
        ),
        "initial": worst(ours["initial"], truth["initial"])[0],
        "update": worst(ours["update"], truth["update"]),
        **compare_loads(ours, truth),
        "health": health_distance(ours["health"], truth["health"], case=case),
        "depth": depth_distance(ours["depth"], truth["depth"], case=case),
    }
    # A rank of a sharded optimizer holds whole gradients of its own share only.
    row["gradient"] = (
        worst(ours["gradient"], truth["gradient"]) if "gradient" in ours else (0.0, "-")
    )
    if "resumed_loss" in ours and "resumed_loss" in truth:
        row["resumed_loss"] = abs(ours["resumed_loss"] - truth["resumed_loss"])
        row["resumed"] = worst(ours["resumed_update"], truth["resumed_update"])
    return row


def is_equal(row: dict[str, Any]) -> bool:
    """Whether a row of `compare` is that of the same model."""
    return (
        row["initial"] == 0.0
        and row["loss"] <= LOSS
        and row["norm"] <= TENSOR
        and row["gradient"][0] <= TENSOR
        and row["update"][0] <= TENSOR
        and row["counts"] == 0
        and row["bias"] <= 1.0
        and row["margin"] <= CUT_OFF
        and row["health"] <= HEALTH
        and row["depth"] <= DEPTH
        and row.get("resumed_loss", 0.0) <= LOSS * 10
        and row.get("resumed", (0.0,))[0] <= TENSOR
    )


def compare_faulty(folder: Path, case: str) -> dict[str, Any]:
    """As `compare`, of a case with a seeded fault."""
    ours, truth = read(folder, case), read(folder, truth_of(case))
    return {
        "loss": max(abs(a - b) / b for a, b in zip(ours["loss"], truth["loss"], strict=True)),
        "norm": max(
            abs(a - b) / b for a, b in zip(ours["grad_norm"], truth["grad_norm"], strict=True)
        ),
        "gradient": worst(ours["gradient"], truth["gradient"]),
        "update": worst(ours["update"], truth["update"]),
        **compare_loads(ours, truth),
        "health": health_distance(ours["health"], truth["health"], case=case),
        "depth": depth_distance(ours["depth"], truth["depth"], case=case),
    }


def compare_loads(ours: dict[str, Any], truth: dict[str, Any]) -> dict[str, Any]:
    """Experts: differing counts, the largest distance of biases in bins, and rerouted tokens."""
    pairs = [
        (a, b)
        for mine, its in zip(ours["loads"], truth["loads"], strict=True)
        for a, b in zip(mine, its, strict=True)
    ]
    assert all(a.layer == b.layer for a, b in pairs)
    return {
        "counts": sum(int((a.counts != b.counts).sum()) for a, b in pairs)
        + sum(a.tokens != b.tokens for a, b in pairs),
        "bias": max(
            (float((a.new_bias - b.new_bias).abs().max() / b.bin_width) for a, b in pairs),
            default=0.0,
        ),
        "rerouted": ours["rerouted"],
        "margin": ours["margin"],
    }


def table(rows: dict[str, dict[str, Any]]) -> str:
    """Largest relative differences from one rank, by case. With experts also: the distance of new
    biases in bins, the tokens that a free run would reroute (in step 1 / in all passes, summed over
    layers and ranks), and how far from its cut-off a score of step 1 was that decided so."""
    lines = [
        f"{'case':<28}{'loss':>9}{'norm':>9}{'gradient':>10}{'update':>9}{'health':>9}"
        f"{'depth':>9}{'resumed':>9}{'bias':>6}{'rerouted':>10}{'margin':>9}  worst gradient"
    ]
    for case, row in rows.items():
        resumed = f"{row['resumed'][0]:9.1e}" if "resumed" in row else f"{'-':>9}"
        lines.append(
            f"{case:<28}{row['loss']:9.1e}{row['norm']:9.1e}{row['gradient'][0]:10.1e}"
            f"{row['update'][0]:9.1e}{row['health']:9.1e}"
            f"{row['depth']:9.1e}{resumed}{row['bias']:6.2f}"
            f"{'{}/{}'.format(*reversed(row['rerouted'])):>10}{row['margin']:9.1e}"
            f"  {row['gradient'][1]}"
        )
    return "\n".join(lines)
