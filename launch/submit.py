"""Submit a run to SLURM: python -m launch.submit [--go] [key=value ...]

Prints the script of the job; `--go` submits it. `-m key=1,2` makes an array, a task a combination;
`--then 'key=value ...'` adds a job that starts when the one before is done, with the same words
and its own. A job is started again by itself until its run is done.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from launch.command import REPOSITORY, job_folder
from launch.snapshot import snapshot
from megatron_ext.config.compose import compose
from megatron_ext.config.schema import Mode, RunConfig
from megatron_ext.config.sweep import expand
from megatron_ext.errors import ConfigError

TEMPLATE = Path(__file__).with_name("slurm.sbatch")
# With no save measured yet: enough for a checkpoint of some terabytes on a fair file system.
LEAD_SECONDS = 300
LONGEST_LEAD = 65535  # what SLURM takes


@dataclass
class Job:
    """One sbatch script: a run, or an array of runs that ask for the same hosts.

    Attributes:
        configs: of the runs.
        lines: their words.
        folder: where the script, the code and the output go.
    """

    configs: list[RunConfig]
    lines: list[list[str]]
    folder: Path

    @property
    def code(self) -> Path:
        """The files that run."""
        return self.folder / "code" if self.configs[0].launch.snapshot else REPOSITORY


def plan_jobs(words: Sequence[str], then: Sequence[str], *, sweep: bool) -> list[Job]:
    """Compose everything before anything is written or submitted.

    Raises:
        ConfigError: a run that would be refused, or an array of unlike jobs.
    """
    stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    chain = [list(words), *([*words, *shlex.split(more)] for more in then)]
    jobs = []
    for number, link in enumerate(chain):
        lines = expand(link) if sweep else [link]
        configs = [compose(_last_wins(line), world_size=_world_size) for line in lines]
        first = configs[0]
        unlike = [config for config in configs if config.launch != first.launch]
        if unlike:
            raise ConfigError(
                "launch: the jobs of an array ask for the same hosts, but values of launch.* were "
                "swept (submit them one by one)"
            )
        for config in configs:
            if config.run.mode is not Mode.train:
                raise ConfigError(
                    f"run.mode={config.run.mode.name}: jobs train (allowed train; "
                    "launch/local.sh takes the other modes)"
                )
        folder = job_folder(first) / f"{stamp}-{number}"
        jobs.append(Job(configs, [_last_wins(line) for line in lines], folder))
    return jobs


def node_ranks(config: RunConfig) -> int:
    """Ranks of one host. The machine that submits says nothing about it."""
    return config.launch.ranks_per_node or config.launch.gpus_per_node or 1


def _world_size(config: RunConfig) -> int:
    return node_ranks(config) * config.launch.nodes


def _last_wins(words: Sequence[str]) -> list[str]:
    """Of words with one key the last: what a link of a chain gives replaces the common one. A
    mapping, `train={steps:9}`, is merged into what is there, and stays."""
    by_key = {
        word if value.startswith("{") else key.lstrip("+"): word
        for word in words
        for key, _, value in [word.partition("=")]
    }
    return list(by_key.values())


def options(job: Job) -> list[str]:
    """The `#SBATCH` options of a job."""
    config, count = job.configs[0], len(job.configs)
    launch = config.launch
    ranks = node_ranks(config)
    output = "%A_%a" if count > 1 else "%j"
    given = {
        "--job-name": re.sub(r"[^\w.+-]", "-", config.run.name),
        "--output": f"{job.folder / 'logs' / output}.out",
        "--open-mode": "append",
        "--nodes": launch.nodes,
        "--ntasks-per-node": 1 if launch.torchrun else ranks,
        "--time": launch.time,
        "--signal": f"B:USR1@{min(lead_seconds(job), LONGEST_LEAD)}",
        "--requeue": "",
        "--exclusive": "" if launch.exclusive else None,
        "--wait-all-nodes": 1 if launch.nodes > 1 else None,
        "--array": f"0-{count - 1}" if count > 1 else None,
        "--cpus-per-task": _cpus(config, ranks),
        "--gpus-per-node": launch.gpus_per_node,
        "--mem": launch.memory,
        "--partition": launch.partition,
        "--account": launch.account,
        "--qos": launch.qos,
        "--constraint": launch.constraint,
        "--exclude": launch.exclude,
        "--mail-type": "END,FAIL" if launch.mail else None,
        "--mail-user": launch.mail,
    }
    lines = [
        key if value == "" else f"{key}={_quoted(str(value))}"
        for key, value in given.items()
        if value is not None
    ]
    return [*lines, *launch.sbatch]


def _cpus(config: RunConfig, ranks: int) -> int | None:
    cpus = config.launch.cpus_per_node
    if cpus is None:
        return None
    return cpus if config.launch.torchrun else max(1, cpus // ranks)


def _quoted(text: str) -> str:
    """A value in a `#SBATCH` line, which sbatch reads as a shell would."""
    return text if re.fullmatch(r"[\w@%+=:,./-]*", text) else shlex.quote(text)


def lead_seconds(job: Job) -> int:
    """How long before the time limit the run is told to save: twice its slowest save and step so
    far, and half a minute; SLURM's clock ticks in half minutes and may be early."""
    launch = job.configs[0].launch
    if launch.lead_seconds is not None:
        return launch.lead_seconds
    slowest = max(_slowest(Path(str(config.run.dir))) for config in job.configs)
    return LEAD_SECONDS if slowest == 0 else max(60, round(2 * slowest + 30))


def _slowest(folder: Path) -> float:
    """Seconds of the slowest save and the slowest step in a run's `metrics.jsonl`; 0: no save."""
    save = step = 0.0
    try:
        lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0.0
    for line in lines:
        try:
            row = json.loads(line)
        except ValueError:
            continue
        save = max(save, row.get("checkpoint/save_seconds") or 0.0)
        step = max(step, row.get("step_seconds") or 0.0)
    return save + step if save else 0.0


def render(job: Job) -> str:
    """The script of a job."""
    config = job.configs[0]
    launch = config.launch
    srun = ["--kill-on-bad-exit=1"]
    if launch.container:
        srun += [f"--container-image={launch.container}"]
        srun += [f"--container-mounts={launch.mounts}"] if launch.mounts else []
    preflight = 'step "$python" -m launch.preflight --output "$run_dir.preflight" || exit $?'
    values = {
        "OPTIONS": "\n".join(f"#SBATCH {line}" for line in options(job)),
        "CODE": shlex.quote(str(job.code)),
        "PYTHON": shlex.quote(launch.python or sys.executable),
        "RUN_DIRS": shlex.join(str(config.run.dir) for config in job.configs),
        "LINES": shlex.join(shlex.join(_absolute(job, number)) for number in range(len(job.lines))),
        "SETUP": f"source {shlex.quote(launch.setup)}\n" if launch.setup else "",
        "SRUN": shlex.join(srun),
        "PREFLIGHT": preflight if launch.preflight else "",
        "RANKS": _rank_words(config),
        "LIMIT": str(launch.stalled_restarts),
    }
    text = TEMPLATE.read_text(encoding="utf-8")
    return re.sub(r"@([A-Z_]+)@", lambda match: values[match[1]], text)


def _absolute(job: Job, number: int) -> list[str]:
    """The words of a run, with its folder absolute: jobs start wherever they were submitted."""
    words = [word for word in job.lines[number] if not word.startswith("run.dir=")]
    folder = str(job.configs[number].run.dir).replace("\\", "\\\\").replace("'", "\\'")
    return [*words, f"run.dir='{folder}'"]


def _rank_words(config: RunConfig) -> str:
    """The command that a task of the step runs, before the script and its words."""
    launch = config.launch
    if not launch.torchrun:
        return '"$python" -u'
    words = f'"$python" -m torch.distributed.run --nproc-per-node {node_ranks(config)}'
    if launch.nodes == 1:
        return f"{words} --standalone"
    return (
        # As in `command.rank_environment`: a store of its own for every restart.
        f"env TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 {words} "
        f"--nnodes {launch.nodes} --rdzv-backend c10d --rdzv-endpoint "
        '"$MASTER_ADDR:$MASTER_PORT" --rdzv-id "$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}" '
        f"--max-restarts {launch.node_restarts}"
    )


def submit(job: Job, *, after: str | None) -> str:
    """Write the job's folder and hand it to SLURM. Returns the job's number.

    Raises:
        ConfigError: SLURM refuses it, or is not there.
    """
    (job.folder / "logs").mkdir(parents=True)
    if job.code != REPOSITORY:
        snapshot(REPOSITORY, job.code)
    script = job.folder / "job.sbatch"
    script.write_text(render(job), encoding="utf-8")
    command = ["sbatch", "--parsable"]
    command += [f"--dependency=afterok:{after}", "--kill-on-invalid-dep=yes"] if after else []
    try:
        done = subprocess.run([*command, str(script)], capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise ConfigError("sbatch: not found; submit from a host that has SLURM") from error
    if done.returncode:
        raise ConfigError(f"sbatch {script}: {done.stderr.strip()}")
    return done.stdout.strip().partition(";")[0]


def main(words: Sequence[str]) -> int:
    """The command. Returns 0, or 20 with everything that is wrong."""
    parser = argparse.ArgumentParser(prog="launch.submit", description=__doc__)
    parser.add_argument("--go", action="store_true", help="submit; else only print")
    parser.add_argument("--after", help="number of a job that must be done first")
    parser.add_argument("--then", action="append", default=[], help="words of a following job")
    parser.add_argument("-m", "--multirun", action="store_true", help="an array of combinations")
    given, rest = parser.parse_known_args(list(words))
    try:
        jobs = plan_jobs(rest, given.then, sweep=given.multirun)
        after = given.after
        for job in jobs:
            if not given.go:
                print(render(job))
                continue
            after = submit(job, after=after)
            print(f"job {after}: {job.folder}")
    except ConfigError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    if not given.go:
        print("# nothing was submitted: --go does", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
