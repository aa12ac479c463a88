"""Reading a checkpoint at any layout: everything asked for, exactly that, or an error naming it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import (
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
)
from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata

from megatron_ext.checkpoint import carry, paths, rng, safe, state, verify
from megatron_ext.checkpoint.history import History
from megatron_ext.errors import CheckpointError

MOMENTS = ("exp_avg", "exp_avg_sq")


def load(
    path: Path,
    chunks: Sequence[nn.Module],
    optimizer: MegatronOptimizer | None,
    mesh: ProcessGroupCollection,
    *,
    verified: bool = False,
    trained: History | None = None,
) -> dict[str, Any]:
    """Fill model chunks and optimizer from a checkpoint. Collective over all ranks.

    The layout may differ from the one that saved: tensor, pipeline, virtual pipeline, data parallel
    sizes, with or without a sharded optimizer, fp32 or bf16. Random states are restored at the same
    layout only, where going on is then bit-exact.

    Args:
        path: a `step_*` folder.
        chunks: model chunks of this rank, DDP-wrapped or bare; filled in place.
        optimizer: their optimizer, filled too. None reads the weights only and restores no random
            states; call it before the optimizer is built, whose main weights copy the model's.
        mesh: process groups.
        verified: its files have been compared with their checksums just now; else they are here.
        trained: what was trained when, up to now; default: as the checkpoint says. Moments of
            frozen parameters are not read, and some of others begin anew.

    Returns:
        The `extra` values that were given to `save`.

    Raises:
        CheckpointError: no complete checkpoint there, a file of it is damaged or holds more than
            data, or its tensors are not those of the model: missing, left over, or of another
            shape. The same on every rank.
    """
    extra, stored = _agree_on(path, verified=verified)
    ours = extra.pop(paths.RESERVED)
    request: dict[str, Any] = {"model": state.model_state(chunks, mesh)}
    if optimizer is not None:
        request["optimizer"] = state.optimizer_state(
            optimizer, request["model"], mesh, loading=True
        )
        if ours["layout"] == state.layout(chunks, mesh):
            request["rng"] = state.rng_object(None)
    saved = History.read(ours)
    trained = trained or saved
    anew = _leave_out_anew(request, trained, saved)
    later = _adapt_precision(request, stored)
    _drop_absent_extra_states(request["model"], stored)
    expected = Expected(trained, saved, weights_only=optimizer is None)
    _check(path, request, later, stored, device=_device(chunks), expected=expected)
    loaded = _read(path, request)
    for (part, index, name), zeros in anew.items():
        loaded.setdefault("optimizer", {}).setdefault(part, {}).setdefault(index, {})[name] = zeros
    for (part, index), tensor in (_read(path, later) if later else {}).items():
        loaded["optimizer"][part][index]["fp32_param"] = tensor
    for index, chunk in enumerate(chunks):
        # Of a chunk or rank without parameters nothing comes back.
        values = loaded.get("model", {}).get(f"chunk_{index}", {})
        # Not strict: buffers and extra states that a backend adds need not be in a checkpoint.
        state.unwrap(chunk).load_state_dict(values, strict=False)
    if optimizer is not None:
        state.fill_optimizer(optimizer, loaded.get("optimizer", {}))
        state.set_optimizer_step(optimizer, int(ours["optimizer_step"]))
    if "rng" in request:
        rng.restore(loaded["rng"])
    return extra


def _read(path: Path, request: dict[Any, Any]) -> dict[Any, Any]:
    """Read what is asked for, without any communication but agreement on failure."""
    problem, loaded = [], {}
    try:
        loaded = dist_checkpointing.load(request, str(path), validate_access_integrity=False)
    except (CheckpointException, CheckpointingException, OSError, RuntimeError) as error:
        problem.append(_damaged(path, error))
    raise_together(path, problem)
    return loaded


def _damaged(path: Path, error: BaseException) -> str:
    reason = " ".join(str(error).split())[:300]
    return (
        f"{path}: damaged ({type(error).__name__}: {reason}). Resume from another checkpoint: "
        f"write its name into {path.parent / paths.LATEST}"
    )


def _device(chunks: Sequence[nn.Module]) -> torch.device:
    return next((p.device for chunk in chunks for p in chunk.parameters()), torch.device("cpu"))


def _agree_on(path: Path, *, verified: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """`extra.json` and the description of every stored tensor and object, by name."""
    lines = [] if verified else verify.problems(path)
    if lines:
        raise CheckpointError(verify.explain(path, lines))
    problem: list[str] = []
    extra: dict[str, Any] = {}
    stored: dict[str, Any] = {}
    try:
        extra = paths.read_extra(path)
        metadata = safe.read_metadata(path)
        if dist.get_rank() == 0:
            _check_sizes(path, metadata)
        objects = safe.object_names(metadata)
        safe.check_objects(path, metadata, objects[dist.get_rank() :: dist.get_world_size()])
        stored = TorchDistLoadShardedStrategy().load_tensors_metadata(path, metadata)
        stored |= {name: ShardedObject.empty_from_unique_key(name) for name in objects}
    except CheckpointError as error:
        problem.append(str(error))
    except Exception as error:  # A table that is not what it should be raises anything.
        problem.append(_damaged(path, error))
    raise_together(path, problem)
    return extra, stored


def _check_sizes(path: Path, metadata: Metadata) -> None:
    """Notice a file that is missing or cut short; all there is without checksums."""
    needed: dict[str, int] = {}
    for info in metadata.storage_data.values():
        end = info.offset + info.length
        needed[info.relative_path] = max(end, needed.get(info.relative_path, 0))
    for name, size in sorted(needed.items()):
        found = (path / name).stat().st_size
        if found < size:
            raise OSError(f"{name} has {found} bytes, not the {size} that were written")


def raise_together(path: Path, problems: list[str]) -> None:
    """Raise on all ranks what any rank found, each line once."""
    lines = verify.gather(problems)
    if lines:
        if len(lines) == 1 and str(path) in lines[0]:
            raise CheckpointError(lines[0])
        text = "\n".join(f"  {line}" for line in lines[: verify.SHOWN])
        more = "\n  ... and more" if len(lines) > verify.SHOWN else ""
        raise CheckpointError(
            f"{path}: does not fit this model:\n{text}{more}\nUse the configuration that it was "
            "saved with (config.yaml in its run folder), or start anew with run.fresh=true"
        )


def _pieces(values: Iterable[Any]) -> list[ShardedTensor | ShardedObject]:
    """Tensors and objects asked for, with those that a factory (a split tensor) stands for."""
    pieces: list[ShardedTensor | ShardedObject] = []
    for value in values:
        if isinstance(value, ShardedTensorFactory):
            pieces += _pieces(nested_values(value.build()))
        elif isinstance(value, ShardedTensor | ShardedObject):
            pieces.append(value)
    return pieces


def _adapt_precision(request: dict[str, Any], stored: dict[str, Any]) -> dict[Any, Any]:
    """Ask for what is there when the checkpoint's precision is not the model's.

    A float32 or float64 model reads the main weights of a bf16 checkpoint; a bf16 model's main
    weights read the weights of a float32 checkpoint, in a second pass, which is returned: a tensor
    can be asked for once only.
    """
    for chunk in request["model"].values():
        for name, value in chunk.items():
            if not isinstance(value, ShardedTensor | ShardedTensorFactory):
                continue
            wanted = replace(value, key=state.MAIN_WEIGHT + value.key)
            pieces = _pieces([wanted])
            if value.data.dtype in (torch.float32, torch.float64) and all(
                p.key in stored for p in pieces
            ):
                chunk[name] = wanted
    later = {}
    for part, entries in request.get("optimizer", {}).items():
        for index, entry in entries.items():
            main = entry.get("fp32_param")
            if main is not None and not any(p.key in stored for p in _pieces([main])):
                later[part, index] = replace(
                    entry.pop("fp32_param"), key=main.key.removeprefix(state.MAIN_WEIGHT)
                )
    return later


def _leave_out_anew(
    request: dict[str, Any], trained: History, saved: History
) -> dict[tuple[str, int, str], torch.Tensor]:
    """Do not ask for moments that begin anew: zeros in their place, by part, index and name."""
    zeros = {}
    for part, entries in request.get("optimizer", {}).items():
        for index, entry in entries.items():
            parameter = carry.parameter_of(entry["exp_avg"].key)
            if parameter is None or not trained.begins_anew(parameter, saved):
                continue
            for name in [name for name in entry if name != "fp32_param"]:
                zeros[part, index, name] = torch.zeros_like(entry.pop(name).data)
    return zeros


@dataclass(frozen=True)
class Expected:
    """Which of a checkpoint's tensors need not be asked for, and which must be there unasked.

    Attributes:
        trained: what was trained when, up to now.
        saved: the same, as the checkpoint says.
        weights_only: no optimizer is read.
    """

    trained: History
    saved: History
    weights_only: bool

    def unasked(self, name: str) -> bool:
        """Whether a stored moment is left where it is."""
        parameter = carry.parameter_of(name)
        if parameter is None:
            return False
        frozen = not self.trained.rule.trains(parameter)
        return self.weights_only or frozen or self.trained.begins_anew(parameter, self.saved)

    def missing(self, parameters: Iterable[str], stored: Collection[str]) -> list[str]:
        """Moments of frozen parameters that a checkpoint should hold and does not."""
        resting = [
            name
            for name in parameters
            if not self.trained.rule.trains(name) and self.saved.keeps(name)
        ]
        wanted = [f"{carry.PREFIX}{what}.{name}" for name in resting for what in MOMENTS]
        return [] if self.weights_only else [name for name in wanted if name not in stored]


def _drop_absent_extra_states(model: dict[str, Any], stored: dict[str, Any]) -> None:
    """Objects that only some backends keep with a module (Transformer Engine's) may be absent."""
    for chunk in model.values():
        for name in [n for n, v in chunk.items() if isinstance(v, ShardedObject)]:
            if chunk[name].unique_key not in stored:
                del chunk[name]


def _check(
    path: Path,
    request: dict[str, Any],
    later: dict[Any, Any],
    stored: dict[str, Any],
    *,
    device: torch.device,
    expected: Expected,
) -> None:
    """Compare names and shapes with the checkpoint's, over all ranks."""
    problems = []
    # Each rank asks for its part; a name is left over when no rank asks for it.
    names = sorted(stored)
    asked = torch.zeros(len(names), dtype=torch.int32)
    place = {name: i for i, name in enumerate(names)}
    for piece in _pieces([*nested_values(request), *later.values()]):
        name = piece.unique_key if isinstance(piece, ShardedObject) else piece.key
        if name not in stored:
            problems.append(f"missing in the checkpoint: {name}")
            continue
        asked[place[name]] = 1
        if isinstance(piece, ShardedTensor):
            # Leading axes that only number the pieces (experts) are part of the stored shape.
            theirs, mine = tuple(stored[name].global_shape), tuple(piece.global_shape)
            if theirs != mine:
                problems.append(f"shape: {name} is {list(theirs)} there and {list(mine)} here")
    for chunk in request["model"].values():
        parameters = [
            piece.key.removeprefix(state.MAIN_WEIGHT)
            for value in chunk.values()
            if isinstance(getattr(value, "data", None), nn.Parameter)
            for piece in _pieces([value])
        ]
        missing = expected.missing(parameters, stored)
        problems += [f"missing in the checkpoint: {name}" for name in missing]
    asked = asked.to(device)
    dist.all_reduce(asked, op=dist.ReduceOp.MAX)
    for name, is_asked in zip(names, asked.tolist(), strict=True):
        optional = (
            not isinstance(stored[name], ShardedTensor)
            or name.startswith(state.MAIN_WEIGHT)
            # Replaced by its main weight of higher precision.
            or state.MAIN_WEIGHT + name in stored
            or expected.unasked(name)
        )
        if not is_asked and not optional:
            problems.append(f"not in the model: {name}")
    raise_together(path, sorted(problems))
