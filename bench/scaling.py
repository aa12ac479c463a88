"""Layouts over the GPUs of a host: python bench/scaling.py [--set weak] [--ranks N] [key=value ...]

Sets: `weak` (mini with as much work a rank under data, expert and context parallelism), `k3_30b`
(the 30 B model on eight GPUs), `context` (131,072 tokens a rank in one sequence: a million on
eight), `resume` (saving while training, then going on with half of the ranks) and `custom` (one
layout by overrides). Each layout runs in processes of its own: warms up, is timed, and is profiled
for one step. The loss of its first step must be that of one rank, which goes through the same batch
forward; where not, or where a rank fails, the program ends with code 1. Tables: speed beside one
GPU, memory beside the plan's, messages that nothing hides, saving and going on.

Other words are overrides as for pretrain.py, of every layout. One rank a GPU; without GPUs two
ranks of gloo with `nano`, which shows that the program works and no speed. `--plan` prints the
planned memory and starts nothing.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from common import Row, finish, show
from support.layouts import COMMON, SETS, Layout, layouts
from support.ranks import RankFailedError, run_ranks

from megatron_ext.config.compose import compose
from megatron_ext.errors import ConfigError
from megatron_ext.parallel import runtime

# Relative. In bf16 layouts round other sums; in fp32 they add in another order (the tests' limits).
TOLERANCE = {"bf16": 1e-3, "fp32": 1e-5}
# Words that change no loss.
OF_A_LAYOUT = ("parallel.", "train.micro_batch_size=", "residual.cache_sources=")
Found = dict[str, Any]


class Runner:
    """Starts the processes of one layout after the other.

    Args:
        options: of the command line.
        extra: overrides of every layout.
        folder: for results, traces and checkpoints.
    """

    def __init__(self, options: argparse.Namespace, extra: list[str], folder: Path) -> None:
        self.options, self.extra, self.folder = options, extra, folder
        self.gpus = 0 if options.cpu else torch.cuda.device_count()
        self._losses: dict[tuple[str, ...], float] = {}

    def start(self, function: str, *arguments: Any, ranks: int) -> None:
        """Run a function of `support.scaling_rank`, which is imported here only to be forked."""
        module = importlib.import_module("support.scaling_rank")
        run_ranks(
            getattr(module, function),
            *arguments,
            ranks=ranks,
            folder=self.folder,
            limit=self.options.limit,
            fork=not self.gpus,
            shared=0 < self.gpus < ranks,
        )

    def plans(self, chosen: list[Layout]) -> dict[str, list[float]]:
        """GiB of a rank of each pipeline stage, by layout; all at once where there are many CPUs,
        as there are beside GPUs: a plan takes up to half a minute."""
        with ThreadPoolExecutor() as pool:
            found = (pool.map if self.gpus else map)(self._plan, chosen)
            return {layout.name: gib for layout, gib in zip(chosen, found, strict=True)}

    def _plan(self, layout: Layout) -> list[float]:
        file = self.folder / f"plan {layout.name}.json"
        self.start("plan_rank", layout, self.extra, file, ranks=1)
        return list(json.loads(file.read_text())["planned_gib"])

    def reference(self, layout: Layout) -> float:
        """The first loss of one rank; layouts with the same batch share it."""
        given = [*COMMON, *layout.words, *self.extra]
        words = [word for word in given if not word.startswith(OF_A_LAYOUT)]
        key = (*words, str(layout.balanced))
        if key not in self._losses:
            file = self.folder / "reference.json"
            self.start("reference_rank", layout, words, file, ranks=1)
            self._losses[key] = float(json.loads(file.read_text())["loss"])
        return self._losses[key]

    def run(self, layout: Layout) -> Found:
        """Everything about one layout."""
        found: Found = {"ranks": layout.ranks, "words": [*layout.words, *self.extra]}
        options, module = self.options, importlib.import_module("support.scaling_rank")
        arguments = (layout, self.extra, self.folder, options.steps, options.warm_up)
        self.start("layout_rank", *arguments, ranks=layout.ranks)
        found |= module.result(layout, self.folder)
        if options.verify and "losses" in found:
            found["reference_loss"] = self.reference(layout)
        return found


def loss_error(found: Found) -> float | None:
    """Relative difference of the first loss from one rank's; None where it was not asked for."""
    if "reference_loss" not in found:
        return None
    return abs(float(found["losses"][0]) / found["reference_loss"] - 1)


def fullest(found: Found) -> tuple[float | None, float]:
    """Peak memory of the rank that comes nearest to its stage's plan or furthest above it, and that
    plan; both GiB. No peak on a CPU, whose processes hold more than tensors."""
    planned = found["planned_gib"]
    peaks = [(peak, planned[stage]) for stage, peak in found["stage_and_peak_gib"] if peak]
    return max(peaks, key=lambda pair: pair[0] / pair[1]) if peaks else (None, max(planned))


def speed_row(layout: Layout, found: Found, base: Found | None) -> Row:
    """A layout beside one GPU."""
    if "failed" in found:
        return {"layout": layout.name, "ranks": layout.ranks, "remark": found["failed"]}
    peak, planned = fullest(found)
    row: Row = {
        "layout": layout.name,
        "ranks": layout.ranks,
        "step s": found["step_seconds"],
        "tokens/s": found["tokens_per_second"],
        "TFLOP/s a rank": found["tflops_a_rank"],
        "tokens/s of ideal": None,
        "TFLOP/s of one": None,
        "peak GiB": peak,
        "planned GiB": planned,
        "peak / planned": peak / planned if peak else None,
        "busiest expert": found["busiest_expert"],
        "first loss": found["losses"][0],
        "error of it": loss_error(found),
    }
    if base and "failed" not in base:
        ideal = base["tokens_per_second"] * layout.ranks / base["ranks"]
        row["tokens/s of ideal"] = f"{100 * found['tokens_per_second'] / ideal:.1f} %"
        share = found["tflops_a_rank"] / base["tflops_a_rank"]
        row["TFLOP/s of one"] = f"{100 * share:.1f} %"
    if "profile" in found:
        kernels = max(rank["kernels_a_layer"] for rank in found["profile"])
        row["kernels a layer"] = kernels or None
    return row


def message_rows(layout: Layout, found: Found) -> list[Row]:
    """Messages of a profiled step by kind: mean and worst rank."""
    ranks = found.get("profile", [])
    if len(ranks) < 2:
        return []
    kinds = sorted({kind for rank in ranks for kind in rank["total"]})
    parts = {kind: [(r["total"].get(kind, 0), r["exposed"].get(kind, 0)) for r in ranks]
             for kind in kinds}  # fmt: skip
    parts["any"] = [(sum(r["total"].values()), r["all_exposed"]) for r in ranks]
    step = sum(rank["seconds"] for rank in ranks) / len(ranks)
    rows = []
    for kind, pairs in parts.items():
        total, exposed = (sum(values) / len(ranks) for values in zip(*pairs, strict=True))
        rows.append(
            {
                "layout": layout.name,
                "messages": kind,
                "ms": 1e3 * total,
                "exposed ms": 1e3 * exposed,
                "exposed, worst rank": 1e3 * max(pair[1] for pair in pairs),
                "of the profiled step": f"{100 * exposed / step:.1f} %",
            }
        )
    return rows


def checkpoint_rows(layout: Layout, found: Found, all_found: dict[str, Found]) -> list[Row]:
    """Saves of a layout, or how it went on."""
    rows: list[Row] = [
        {
            "layout": layout.name,
            "what": f"save {number}",
            "training waited s": saved["stall_seconds"],
            "until complete s": saved["save_seconds"],
            "steps meanwhile": saved["steps_meanwhile"],
            "step then s": saved["step_seconds"],
            "step alone s": found["step_seconds"],
        }
        for number, saved in enumerate(found.get("saves", []), 1)
    ]
    error = resumed_error(layout, found, all_found)
    if error is not None:
        rows.append(
            {
                "layout": layout.name,
                "what": f"goes on from {layout.resumes}",
                "load s": found["load_seconds"],
                "error of the next loss": error,
            }
        )
    return rows


def resumed_error(layout: Layout, found: Found, all_found: dict[str, Found]) -> float | None:
    """Relative difference of the first loss after loading from that of the run that saved."""
    saved = all_found.get(layout.resumes, {}).get("saves")
    if not saved or "next_loss" not in found:
        return None
    return abs(float(found["next_loss"]) / saved[-1]["next_loss"] - 1)


def report(chosen: list[Layout], all_found: dict[str, Found]) -> dict[str, list[Row]]:
    """All tables that have rows."""
    done = [(layout, all_found[layout.name]) for layout in chosen if layout.name in all_found]
    timed = [x for x in done if not x[0].resumes or "failed" in x[1]]
    good = [x for x in done if "failed" not in x[1]]
    tables = {
        "speed": [speed_row(x, found, all_found.get(x.baseline)) for x, found in timed],
        "messages of a step": [row for x in good for row in message_rows(*x)],
        "checkpoints": [row for x in good for row in checkpoint_rows(*x, all_found)],
    }
    return {title: rows for title, rows in tables.items() if rows}


def wrong(chosen: list[Layout], all_found: dict[str, Found], precision: str) -> list[str]:
    """What failed, or is not what one rank computes."""
    lines, allowed = [], TOLERANCE[precision]
    for layout in chosen:
        found = all_found[layout.name]
        if "failed" in found:
            lines.append(f"{layout.name}: {found['failed']}")
            continue
        errors = {
            "first loss": loss_error(found),
            "next loss": resumed_error(layout, found, all_found),
        }
        for what, error in errors.items():
            if error is not None and not error <= allowed:
                lines.append(f"{layout.name}: {what} off by {error:.1e}, allowed {allowed:.0e}")
    return lines


def checked(options: argparse.Namespace, extra: list[str], gpus: int) -> list[Layout]:
    """The layouts of the command line, all of them valid.

    Raises:
        SystemExit: the ranks do not fit the host or the set, or a configuration is wrong.
    """
    ranks = options.ranks or gpus or 2
    if not options.plan and 0 < gpus < ranks and not options.share_gpu:
        sys.exit(
            f"--ranks {ranks}: this host has {gpus} GPU(s) (allowed: up to {gpus}; more with "
            "--share-gpu, which shows correctness and nothing about speed)"
        )
    try:
        every = layouts(options.set, ranks=ranks, large=options.large or gpus > 0)
        chosen = [layout for layout in every if options.only in layout.name]
        if not chosen:
            names = "; ".join(layout.name for layout in every)
            sys.exit(f"--only {options.only!r}: in no layout's name (allowed: a part of: {names})")
        needed = {name for layout in chosen for name in (layout.baseline, layout.resumes)}
        chosen = [layout for layout in every if layout in chosen or layout.name in needed]
        for layout in chosen:
            compose([*COMMON, *layout.words, *extra], world_size=layout.ranks)
    except ValueError as error:
        sys.exit(f"--set {options.set} --ranks {ranks}: {error}")
    except ConfigError as error:
        sys.exit(str(error))
    return chosen


def main() -> None:
    """Runs and prints, the tables last."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--set", choices=SETS, default="weak")
    parser.add_argument(
        "--only", default="", help="layouts with this in their name, and their base"
    )
    parser.add_argument("--ranks", type=int, help="processes; default: one a GPU, without one 2")
    parser.add_argument("--share-gpu", action="store_true", help="allow more ranks than GPUs")
    parser.add_argument("--cpu", action="store_true", help="use no GPU")
    parser.add_argument("--large", action="store_true", help="sizes for GPUs, also without one")
    parser.add_argument("--plan", action="store_true", help="print the planned memory and stop")
    parser.add_argument("--steps", type=int, default=3, help="timed steps")
    parser.add_argument("--warm-up", type=int, default=3, help="steps before; the first is checked")
    parser.add_argument("--no-verify", dest="verify", action="store_false", help="no check of it")
    parser.add_argument("--limit", type=float, default=240, help="seconds a layout may take")
    parser.add_argument("--folder", type=Path, help="for checkpoints; default: a temporary one")
    parser.add_argument("--json", type=Path, help="also write everything there, layout by layout")
    options, extra = parser.parse_known_args()
    runtime.quiet()
    if options.cpu and not options.plan:
        extra = ["run.device=cpu", *extra]
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        runner = Runner(options, extra, Path(folder))
        chosen = checked(options, extra, runner.gpus)
        if options.plan:
            show("planned memory", planned(chosen, runner.plans(chosen)))
            return
        plans = runner.plans(chosen)
        all_found: dict[str, Found] = {}
        for layout in chosen:
            try:
                all_found[layout.name] = runner.run(layout) | {"planned_gib": plans[layout.name]}
            except RankFailedError as error:
                all_found[layout.name] = {"failed": str(error).splitlines()[0]}
                print(f"{layout.name}: {error}", file=sys.stderr)
            if options.json:  # after each, since a machine may be taken away
                options.json.write_text(json.dumps(all_found, indent=1) + "\n", encoding="utf-8")
            for title, rows in report([layout], all_found).items():
                show(title, rows)
    precision = compose([*COMMON, *chosen[-1].words, *extra]).run.precision.value
    failures = wrong(chosen, all_found, precision)
    finish(report(chosen, all_found), failures=failures)


def planned(chosen: list[Layout], plans: dict[str, list[float]]) -> list[Row]:
    """What would be needed."""
    return [
        {
            "layout": layout.name,
            "ranks": layout.ranks,
            "GiB of a rank, by pipeline stage": " ".join(f"{x:.1f}" for x in plans[layout.name]),
        }
        for layout in chosen
    ]


if __name__ == "__main__":
    main()
