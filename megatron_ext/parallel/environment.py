"""What the launcher says about this process; the only place that reads its variables. No torch.

The entry point needs the number of ranks before anything heavy is imported, to check the layout.
"""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class Environment:
    """What the launcher says about this process.

    Attributes:
        rank: this process among all, from 0.
        world_size: number of processes.
        local_rank: this process among those of its host.
        local_world_size: processes of its host.
        launched: whether a launcher started it; otherwise it is alone.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    launched: bool = False


def read_environment() -> Environment:
    """Read torchrun's variables, or SLURM's where `srun` starts one process a rank.

    SLURM counts only with more than one task in the step and MASTER_ADDR and MASTER_PORT set:
    the variables of an allocation are also there in an interactive shell, which is one process.
    """
    values = os.environ
    if "RANK" in values and "WORLD_SIZE" in values:
        return Environment(
            rank=int(values["RANK"]),
            world_size=int(values["WORLD_SIZE"]),
            local_rank=int(values.get("LOCAL_RANK", "0")),
            local_world_size=int(values.get("LOCAL_WORLD_SIZE", "1")),
            launched=True,
        )
    tasks = int(values.get("SLURM_STEP_NUM_TASKS", "1"))
    if tasks > 1 and "MASTER_ADDR" in values and "MASTER_PORT" in values:
        return Environment(
            rank=int(values["SLURM_PROCID"]),
            world_size=tasks,
            local_rank=int(values.get("SLURM_LOCALID", "0")),
            # "4(x2)" or "4": tasks of each node of the step
            local_world_size=int(values.get("SLURM_STEP_TASKS_PER_NODE", "1").split("(")[0]),
            launched=True,
        )
    return Environment()
