"""What the launcher says about this process; the only place that reads its variables. No torch.

The entry point needs the number of ranks before anything heavy is imported, to check the layout.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from megatron_ext.errors import FINAL

# Set by launch/: a name for everything that one `local.sh` or SLURM job starts.
LAUNCH = "MEGATRON_EXT_LAUNCH"


@dataclass(frozen=True)
class Environment:
    """What the launcher says about this process.

    Attributes:
        rank: this process among all, from 0.
        world_size: number of processes.
        local_rank: this process among those of its host.
        local_world_size: processes of its host.
        launched: whether a launcher started it; otherwise it is alone.
        launch: names the launch, the same for every restart that its launcher makes by itself;
            empty when it has no name.
        restarts: how often torchrun has restarted its ranks; may differ between hosts.
        elastic: whether torchrun watches over this process.
        ours: whether one of `launch/` is behind it, which acts on `exit.json`.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    launched: bool = False
    launch: str = ""
    restarts: int = 0
    elastic: bool = False
    ours: bool = False

    def process_code(self, code: int) -> int:
        """What this process ends with, given a code that *all* ranks end with.

        torchrun may restart ranks whatever they failed with, also those that somebody stopped, and
        reports a failure for each. Under a launcher of ours, which reads the true code in
        `exit.json`, they end with 0: torchrun takes the job for done. A rank that fails alone must
        not: torchrun would let the others wait for it.
        """
        return 0 if self.ours and self.elastic and code in FINAL else code


def read_environment() -> Environment:
    """Read torchrun's variables, or SLURM's where `srun` starts one process a rank.

    SLURM counts only with more than one task in the step and MASTER_ADDR and MASTER_PORT set:
    the variables of an allocation are also there in an interactive shell, which is one process.
    """
    values = os.environ
    ours, elastic = values.get(LAUNCH, ""), values.get("TORCHELASTIC_RUN_ID", "")
    launch: dict[str, Any] = {
        # "none" is torchrun's own default, which names nothing.
        "launch": ours or ("" if elastic == "none" else elastic),
        "restarts": int(values.get("TORCHELASTIC_RESTART_COUNT", "0")),
        "elastic": elastic != "",
        "ours": ours != "",
    }
    if "RANK" in values and "WORLD_SIZE" in values:
        return Environment(
            rank=int(values["RANK"]),
            world_size=int(values["WORLD_SIZE"]),
            local_rank=int(values.get("LOCAL_RANK", "0")),
            local_world_size=int(values.get("LOCAL_WORLD_SIZE", "1")),
            launched=True,
            **launch,
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
            **launch,
        )
    return Environment(**launch)


def variables_of_shared_gpu(rank: int) -> dict[str, str]:
    """What NCCL must be told where ranks share a GPU, which is meant for correctness tests.

    It refuses two ranks on one GPU of one host, so each claims a host of its own and talks to the
    others through the loopback interface.
    """
    return {
        "NCCL_HOSTID": f"rank-{rank}",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_IB_DISABLE": "1",
        "NCCL_P2P_DISABLE": "1",
        "NCCL_SHM_DISABLE": "1",
        "NCCL_NVLS_ENABLE": "0",
    }
