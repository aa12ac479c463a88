"""Ranks that save, load and compare checkpoints; started by the tests, one mode a launch.

one    FOLDER   1 rank: train, save step 2 as `one`, write full tensors and the next step's result
many   FOLDER   2 ranks: load it in every layout, compare, train on, save each layout's own
back   FOLDER   1 rank: load what each layout saved and compare
crash  FOLDER   1 rank: deletions that take long; saves that fail to write; then save step 1,
                    begin step 2 in the background, die in the middle of it
"""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ext.checkpoint import gather, paths, state
from megatron_ext.checkpoint import load as load_module
from megatron_ext.config.schema import ParallelOptions, Precision
from megatron_ext.errors import CheckpointError
from megatron_ext.optim.groups import parameter_groups
from megatron_ext.parallel import runtime
from tests.support.checkpoint_setup import Setup, layout, make_config

LAYOUTS = {
    "tensor": ParallelOptions(tensor=2),
    "pipeline": ParallelOptions(pipeline=2),
    "virtual": ParallelOptions(pipeline=2, virtual_pipeline=2),
    "data": ParallelOptions(),
    "data_plain": ParallelOptions(distributed_optimizer=False),
}


def gathered_state(precision: Precision) -> dict[str, Any]:
    """A sharded optimizer whose state says where it belongs, in many buckets with padding between
    them, gathered in many pieces: how many tensors are wrong, ours and megatron-core's."""
    setup = Setup(ParallelOptions(overlap_grad_reduce=True), precision, bucket_size=5000)
    gather.PIECE_BYTES = 4096
    (part,) = state.optimizer_parts(setup.optimizer)
    part.init_state_fn(part.optimizer, part.config)
    truth: dict[int, dict[str, Tensor]] = {}
    for index, (param, empty) in enumerate(gather.empty_state(part)):
        numbers = torch.arange(param.numel(), dtype=torch.float32)
        truth[index] = {
            name: (numbers + 10_000 * (3 * index + place)).view(param.shape)
            for place, name in enumerate(empty)
        }
        if param in part.model_param_group_index_map:
            held = part._get_main_param_and_optimizer_states(param)
            mine = part._get_model_param_range_map(param)["param"]
            for name, whole in truth[index].items():
                target = held["param" if name == "fp32_param" else name]
                target.detach().copy_(whole.flatten()[mine.start : mine.end])
    ours = list(gather.whole_state(part))
    theirs = part.sharded_param_state_fully_reshardable(
        state.model_state(setup.chunks, setup.mesh), False, state.sharding_metadata(setup.mesh)
    )
    wrong, copies = torch.zeros(2, dtype=torch.int64), 0
    for index, (param, tensors) in enumerate(ours):
        assert tensors.keys() == truth[index].keys()
        for name, tensor in tensors.items():
            other = theirs[index]["param" if name == "fp32_param" else name].data
            wrong[0] += not torch.equal(tensor, truth[index][name])
            wrong[1] += not torch.equal(other, truth[index][name])
            if name != "fp32_param" and param in part.model_param_group_index_map:
                own = part._get_main_param_and_optimizer_states(param)[name]
                copies += own.data_ptr() != tensor.data_ptr()
    dist.all_reduce(wrong)
    setup.close()
    return {
        "wrong": int(wrong[0]),
        "wrong in megatron-core": int(wrong[1]),
        "names": sorted({name for tensors in truth.values() for name in tensors}),
        "count": len(ours),
        "copies": copies,
    }


def differences(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> dict[str, float]:
    """Relative L2 difference of every tensor; names must agree. Float64, so equal means 0."""
    if found.keys() != wanted.keys():
        raise AssertionError(f"other names: {sorted(found.keys() ^ wanted.keys())}")
    return {
        name: float(
            (found[name].double() - wanted[name].double()).norm()
            / wanted[name].double().norm().clamp_min(1e-12)
        )
        for name in wanted
    }


def one(folder: Path, results: dict[str, Any]) -> None:
    with layout(ParallelOptions()) as setup:
        results["decay"] = decayed_numels(setup)
        for number in (1, 2):
            setup.step(number)
        setup.save(folder / "one", 2)
        saved = setup.tensors()
        noise = torch.rand(3)
        results["norm"] = setup.step(3)
        after = setup.tensors()
        torch.save({"saved": saved, "after": after, "norm": results["norm"]}, folder / "truth.pt")
    with layout(ParallelOptions()) as setup:
        torch.manual_seed(99)
        results["extra"] = setup.load(folder / "one")
        results["same_noise"] = torch.equal(noise, torch.rand(3))
        results["resumed_norm_equal"] = setup.step(3) == results["norm"]
        results["resumed"] = max(differences(setup.tensors(), after).values())
        # Moments that come back as zeros would pass a test of a zero state: they are not zero.
        results["smallest_moment"] = min(
            float(t.norm()) for n, t in saved.items() if "exp_avg_sq" in n
        )
    with layout(ParallelOptions(), Precision.bf16) as setup:
        results["bf16_extra"] = setup.load(folder / "one")
        mains = {
            n.removeprefix(state.MAIN_WEIGHT): t
            for n, t in setup.tensors().items()
            if n.startswith(state.MAIN_WEIGHT)
        }
        results["bf16_mains"] = max(differences(mains, {n: saved[n] for n in mains}).values())
        results["bf16_count"] = len(mains)
        setup.step(3)
        setup.save(folder / "bf16", 3)
        low = setup.tensors()
        mains = {n: t for n, t in low.items() if n.startswith(state.MAIN_WEIGHT)}
        moments = {n: t for n, t in low.items() if "exp_avg" in n}
    with layout(ParallelOptions()) as setup:
        setup.load(folder / "bf16")
        found = setup.tensors()
        # Also against another optimizer, whose moments are named with no map of megatron-core's.
        results["bf16_moments"] = max(differences({n: found[n] for n in moments}, moments).values())
        results["fp32_from_bf16"] = max(
            float((found[n.removeprefix(state.MAIN_WEIGHT)] - t).abs().max())
            for n, t in mains.items()
        )
    with layout(ParallelOptions(distributed_optimizer=False), Precision.bf16) as setup:
        setup.load(folder / "bf16")
        plain = {n: t for n, t in setup.tensors().items() if n.startswith(state.MAIN_WEIGHT)}
        results["bf16_plain"] = max(differences(plain, mains).values())
    results["gathered"] = {kind.name: gathered_state(kind) for kind in Precision}
    errors(folder, results)


def decayed_numels(setup: Setup) -> dict[str, list[int]]:
    """Parameters by weight decay: in the optimizer, and as the table of groups has it."""
    found = {0.0: 0, setup.config.optim.weight_decay: 0}
    for group in setup.optimizer.param_groups:
        found[group["weight_decay"]] += sum(param.numel() for param in group["params"])
    decayed, spared = parameter_groups(setup.chunks)
    return {
        "optimizer": [found[setup.config.optim.weight_decay], found[0.0]],
        "table": [sum(p.numel() for _, p in g.parameters) for g in (decayed, spared)],
    }


def errors(folder: Path, results: dict[str, Any]) -> None:
    """Messages of loads that do not fit."""
    messages: dict[str, str] = {}
    with layout(ParallelOptions()) as setup:
        path = folder / "one" / "step_00000002"
        results["weights_only"] = load_module.load(path, setup.chunks, None, setup.mesh)
        for name, bad in {"absent": folder / "one" / "step_00000009", "other": folder}.items():
            messages[name] = failure(bad, setup)
        setup.chunks[0].module.output_layer.weight.data = torch.zeros(256, 32)
        messages["shape"] = failure(path, setup)
    with layout(ParallelOptions()) as setup:
        del setup.chunks[0].module.decoder.layers[1:]
        messages["left_over"] = failure(path, setup)
    with layout(ParallelOptions()) as setup:
        (path / ".metadata").rename(path / "gone")
        messages["damaged"] = failure(path, setup)
        (path / "gone").rename(path / ".metadata")
        data = max(path.glob("*.distcp"), key=lambda p: p.stat().st_size)
        whole = data.read_bytes()
        data.write_bytes(whole[:-1])
        messages["truncated"] = failure(path, setup)
        data.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        messages["flipped"] = failure(path, setup)
        data.write_bytes(whole)
        (path / "checksums.json").rename(folder / "gone")
        messages["no_sums"] = failure(path, setup)
        extra = (path / "extra.json").read_text()
        (path / "extra.json").write_text(extra.replace('"format": 2', '"format": 1'))
        results["older"] = load_module.load(path, setup.chunks, None, setup.mesh)
        data.write_bytes(whole[:-1])
        messages["older_truncated"] = failure(path, setup)
        data.write_bytes(whole)
        (path / "extra.json").write_text(extra)
        (folder / "gone").rename(path / "checksums.json")
        blocked = folder / "blocked"
        blocked.write_text("a file")
        try:
            setup.save(blocked, 1)
        except CheckpointError as error:
            messages["blocked"] = str(error)
        messages["not_json"] = ""
        try:
            setup.writer(folder / "one").save(5, setup.chunks, setup.optimizer, {"a": {1, 2}})
        except CheckpointError as error:
            messages["not_json"] = str(error)
    results["messages"] = messages
    results["left"] = sorted(p.name for p in (folder / "one").iterdir())


def full_disk(folder: Path, results: dict[str, Any]) -> None:
    """Writers that fail, as on a full disk, here by a limit on the size of a file."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for name, asynchronous in {"full_async": True, "full_sync": False}.items():
        with layout(ParallelOptions()) as setup:
            setup.save(folder / name, 1)
            writer = setup.writer(folder / name, asynchronous=asynchronous)
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
            try:
                writer.save(2, setup.chunks, setup.optimizer, {})
                writer.close()
            except CheckpointError as error:
                results[name] = str(error)
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            results[f"{name}_left"] = sorted(p.name for p in (folder / name).iterdir())
            writer.save(3, setup.chunks, setup.optimizer, {})
            writer.close()
            results[f"{name}_after"] = sorted(p.name for p in (folder / name).iterdir())


def slow_deletion(folder: Path, results: dict[str, Any]) -> None:
    """What names are there while old checkpoints are being deleted, and after."""
    go, real = threading.Event(), paths.delete

    def delete(old: list[Path]) -> None:
        if old:
            go.wait(60)
        real(old)

    paths.delete = delete
    with layout(ParallelOptions()) as setup:
        writer = setup.writer(folder / "slow")
        for step in (1, 2, 3):
            writer.save(step, setup.chunks, setup.optimizer, {})
        results["while_deleting"] = sorted(p.name for p in (folder / "slow").iterdir())
        go.set()
        writer.close()
        results["deleted"] = sorted(p.name for p in (folder / "slow").iterdir())
    paths.delete = real


def failure(path: Path, setup: Setup) -> str:
    try:
        load_module.load(path, setup.chunks, None, setup.mesh)
    except CheckpointError as error:
        return str(error)
    return ""


def many(folder: Path, results: dict[str, Any]) -> None:
    results["gathered"] = {kind.name: gathered_state(kind) for kind in Precision}
    truth = torch.load(folder / "truth.pt")
    for name, parallel in LAYOUTS.items():
        with layout(parallel) as setup:
            setup.load(folder / "one")
            loaded = max(differences(setup.tensors(), truth["saved"]).values())
            norm = setup.step(3)
            stepped = setup.tensors()
            trained = max(differences(stepped, truth["after"]).values())
            setup.save(folder / name, 3, asynchronous=name in ("tensor", "virtual"))
        if dist.get_rank() == 0:
            torch.save(stepped, folder / f"{name}.pt")
        with layout(parallel) as setup:
            setup.load(folder / name)
            again = max(differences(setup.tensors(), stepped).values())
        results[name] = {
            "loaded": loaded,
            "trained": trained,
            "norm": abs(norm / truth["norm"] - 1.0),
            "again": again,
        }


def back(folder: Path, results: dict[str, Any]) -> None:
    for name in LAYOUTS:
        for sharded in (True, False):
            with layout(ParallelOptions(distributed_optimizer=sharded)) as setup:
                setup.load(folder / name)
                found = differences(setup.tensors(), torch.load(folder / f"{name}.pt"))
                results[f"{name} {sharded}"] = max(found.values())


def crash(folder: Path, results: dict[str, Any]) -> None:
    slow_deletion(folder, results)
    full_disk(folder, results)
    with layout(ParallelOptions()) as setup:
        setup.step(1)
        setup.save(folder / "crash", 1, asynchronous=True)
        setup.step(2)
        writer = setup.writer(folder / "crash", asynchronous=True)
        writer.save(2, setup.chunks, setup.optimizer, {"tokens": 128})
        results["helpers"] = [
            p.name for p in multiprocessing.active_children() if "Manager" in p.name
        ]
        (folder / "crash.json").write_text(json.dumps(results))
        os._exit(9)


def main() -> None:
    mode, folder = sys.argv[1], Path(sys.argv[2])
    runtime.start(make_config(ParallelOptions()).run)
    results: dict[str, Any] = {}
    {"one": one, "many": many, "back": back, "crash": crash}[mode](folder, results)
    if dist.get_rank() == 0:
        (folder / f"{mode}.json").write_text(json.dumps(results, indent=1))
    runtime.stop()


if __name__ == "__main__":
    main()
