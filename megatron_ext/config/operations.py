"""Options of what surrounds training: health, hangs, launching, sampling. No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from megatron_ext.config.option import option


class HealthAction(Enum):
    ignore = "ignore"
    warn = "warn"  # one line, and go on
    skip = "skip"  # leave this update out
    rewind = "rewind"  # back to a checkpoint, and past the data
    halt = "halt"  # stop with exit code 40


@dataclass
class ResilienceOptions:
    nonfinite: HealthAction = option(
        HealthAction.halt, "Loss or gradient that is not finite: skip, rewind, halt"
    )
    loss_spike: HealthAction = option(HealthAction.warn, "A loss far above the recent ones")
    norm_spike: HealthAction = option(HealthAction.ignore, "A gradient norm far above recent ones")
    loss_deviations: float = option(8.0, "Robust standard deviations that make a loss spike")
    norm_factor: float = option(10.0, "Times the median that makes a norm spike")
    window_steps: int = option(128, "Recent steps that a spike is measured against", unit="steps")
    max_skips: int = option(10, "Skips in a row after which the run halts", unit="steps")
    max_rewinds: int = option(3, "Rewinds after which a launch halts")
    rewind_steps: int = option(
        8, "Data that a rewind leaves out, up to the bad step", unit="batches"
    )
    replay_interval: int = option(
        0,
        "Data parallel ranks compute one micro-batch and compare, every so many steps; 0: never",
        unit="steps",
    )
    corruption: HealthAction = option(HealthAction.halt, "When they differ: warn, halt")
    straggler_excess: float = option(
        0.2, "A rank is called slow when it takes this share more time than the median"
    )
    hang_seconds: float | None = option(
        None,
        "Longest step or save; 0: any; default: 2/3 of timeout_seconds",
        unit="seconds",
    )


@dataclass
class LaunchOptions:
    id: str | None = option(None, "Name of this launch, the same on all of its hosts")
    nodes: int = option(1, "Hosts of the job")
    ranks_per_node: int | None = option(None, "Ranks a host; default: its GPUs, or 1")
    host: str | None = option(None, "First host, as HOST or HOST:PORT; automatic on SLURM")
    address: str | None = option(None, "Address of this host that the others reach it by")
    node_restarts: int = option(10, "Restarts by torchrun with several hosts; a fault can cost two")
    stalled_restarts: int = option(2, "Restarts without a new checkpoint before giving up")
    stop_seconds: float = option(600.0, "Longest wait for a save once stopped", unit="seconds")
    python: str | None = option(None, "Python of the hosts; default: the one that launches")
    setup: str | None = option(None, "Shell file that is sourced first: modules, NCCL variables")
    time: str = option("24:00:00", "Time limit of a SLURM job")
    lead_seconds: int | None = option(
        None, "Save this long before the limit; default: as measured", unit="seconds"
    )
    partition: str | None = option(None, "SLURM partition")
    account: str | None = option(None, "SLURM account")
    qos: str | None = option(None, "SLURM quality of service")
    constraint: str | None = option(None, "SLURM features that a host must have")
    exclude: str | None = option(None, "Hosts to avoid, as preflight names them")
    gpus_per_node: int | None = option(None, "GPUs to ask of SLURM a host")
    cpus_per_node: int | None = option(None, "Cores to ask of SLURM a host")
    memory: str | None = option(None, "Memory to ask of SLURM a host, as 900G; 0: all of it")
    exclusive: bool = option(True, "Take whole hosts")
    mail: str | None = option(None, "Where SLURM reports the end and failures")
    container: str | None = option(None, "Image for SLURM's container plug-in (pyxis)")
    mounts: str | None = option(None, "Mounts of the container")
    snapshot: bool = option(True, "SLURM jobs run a copy of the tracked files, kept with the job")
    torchrun: bool = option(True, "One SLURM task a host, torchrun's; false: one task a rank")
    preflight: bool = option(False, "SLURM jobs check their hosts first")
    sbatch: list[str] = option([], "Further options of sbatch, such as ['--comment=x']")


@dataclass
class ProfileOptions:
    steps: list[int] = option(
        [], "Steps to profile, counted over the whole run; each writes RUN/profile/", unit="steps"
    )
    ranks: list[int] = option([0], "Ranks that profile them")
    memory: bool = option(True, "On GPUs a snapshot of every allocation of such a step too")


@dataclass
class GenerateOptions:
    prompt: str = option("def ", "Text to go on from")
    max_new_tokens: int = option(128, "Tokens to add", unit="tokens")
    temperature: float = option(0.8, "0 takes the likeliest token")
    top_k: int = option(40, "Sample among the likeliest k; 0: all")


@dataclass
class ScoreOptions:
    tokens: str | None = option(None, "JSON file with the rows of token ids to score")
    output: str | None = option(None, "JSON file to write; replaced when there is one")
    routing: str | None = option(
        None, "Use the experts in this JSON file, such as an earlier output; default: the model's"
    )
    float64: bool = option(False, "Compute in float64; needs run.device=cpu")
