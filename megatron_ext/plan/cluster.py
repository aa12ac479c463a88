"""The machines to plan for, from a JSON file."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path

from megatron_ext.errors import ConfigError


@dataclass(frozen=True)
class Cluster:
    """GPUs of one kind, in nodes of one size.

    Attributes:
        gpus: of the job.
        gpus_per_node: a group within a node uses the fast link.
        memory_gib: of a GPU, of which `reserved_gib` are left to CUDA, NCCL and fragmentation.
        in_node_gbs, between_nodes_gbs: GB/s of a GPU each way.
    """

    gpus: int
    gpus_per_node: int
    memory_gib: float
    reserved_gib: float
    in_node_gbs: float
    between_nodes_gbs: float

    @property
    def usable_gib(self) -> float:
        """What torch may allocate."""
        return self.memory_gib - self.reserved_gib


def load_cluster(path: str) -> Cluster:
    """Read a cluster file: one object with the names of `Cluster`.

    Raises:
        ConfigError: it cannot be read, a name is missing or unknown, or a number is not above 0.
    """
    key, names = f"plan.cluster={path}", [field.name for field in fields(Cluster)]
    try:
        read = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{key}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{key}: is no JSON: {error}") from error
    if not isinstance(read, dict) or set(read) != set(names):
        given = ", ".join(read) if isinstance(read, dict) else type(read).__name__
        raise ConfigError(f"{key}: given {given}; allowed one object with {', '.join(names)}")
    whole = ("gpus", "gpus_per_node")
    wrong = [
        f"{key}: {name}={value!r}: must be {'whole and ' if name in whole else ''}above 0"
        for name, value in read.items()
        if isinstance(value, bool)
        or not isinstance(value, int if name in whole else int | float)
        or value <= 0
    ]
    if wrong:
        raise ConfigError(wrong)
    return Cluster(**read)
