"""The one place that numbers go through: to the console, metrics.jsonl, wandb and TensorBoard.

One rank is the writer. The others hold the same object, whose methods then do nothing, so that the
training loop needs no `if` for it; numbers of other ranks are reduced before they come here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TextIO

from megatron_ext.config.schema import LoggingOptions
from megatron_ext.errors import MegatronExtError
from megatron_ext.observe import registry, run_files
from megatron_ext.observe.attention_health import (
    health_metrics,
    health_record,
    health_statistics,
)
from megatron_ext.observe.console import Console
from megatron_ext.observe.depth_health import depth_metrics, depth_record
from megatron_ext.observe.expert_load import ExpertLoad, LoadTable
from megatron_ext.observe.jsonl import JsonlSink
from megatron_ext.observe.layer_history import LayerHistory, expert_record, is_due
from megatron_ext.observe.tensorboard_sink import TensorboardSink
from megatron_ext.observe.wandb_layers import interval as media_interval
from megatron_ext.observe.wandb_sink import WandbSink

if TYPE_CHECKING:
    from megatron_ext.ops.attn_res.health import MixHealth
    from megatron_ext.ops.kda.health import LayerHealth
    from megatron_ext.ops.quantile.load import LayerLoad


class Metrics:
    """Takes one row of numbers a step.

    As a context manager it flushes and closes however the block is left. An error of ours writes
    `exit.json` with its code; any other one leaves none, which launchers read as a crash.

    Args:
        folder: the run folder; made if missing.
        logging: where numbers go.
        run_id: fixed id of the run, kept in the checkpoint by the caller.
        config: the resolved configuration: becomes `config.yaml`, and goes to wandb redacted.
        resume_step: the step of the checkpoint that training goes on from, 0 for a new run.
            Later rows of an earlier launch are dropped.
        writer: True on exactly one rank.
        total_steps: steps of the whole run.
        expert_parallel: ranks over which the experts of a layer are spread.
        stage: of the curriculum, named in every row of `metrics.jsonl`; "" without one.
        stream: where the console prints; default: standard output.
    """

    def __init__(
        self,
        folder: Path,
        *,
        logging: LoggingOptions,
        run_id: str,
        config: dict[str, Any],
        resume_step: int,
        writer: bool,
        total_steps: int,
        expert_parallel: int = 1,
        stage: str = "",
        stream: TextIO | None = None,
    ) -> None:
        self._folder = folder
        self._writer = writer
        self._step = resume_step
        self._finished = False
        if not writer:
            return
        folder.mkdir(parents=True, exist_ok=True)
        run_files.remove_exit(folder)
        run_files.write_config(folder, config)
        self._console = Console(
            total_steps=total_steps,
            interval=logging.interval,
            start_step=resume_step,
            stream=stream,
        )
        self._jsonl = JsonlSink(folder / "metrics.jsonl", resume_step=resume_step, stage=stage)
        self._expert_load = ExpertLoad(expert_parallel=expert_parallel)
        self._expert_interval = logging.expert_interval
        self._media_interval = media_interval(logging.expert_interval, total_steps=total_steps)
        self._depth_interval = media_interval(logging.health_interval, total_steps=total_steps)
        self._total_steps = total_steps
        self._history = LayerHistory(folder, resume_step=resume_step)
        if self._jsonl.last_step < resume_step:
            self._console.warn(
                f"metrics.jsonl: ends at step {self._jsonl.last_step}, training goes on after step "
                f"{resume_step}; the rows between are missing"
            )
        warn = self._console.warn
        self._wandb = WandbSink(
            folder,
            logging=logging,
            run_id=run_id,
            name=str(config.get("run", {}).get("name") or run_id),
            config=config,
            resume_step=resume_step,
            warn=warn,
        )
        self._tensorboard = (
            TensorboardSink(folder, resume_step=resume_step, warn=warn)
            if logging.tensorboard
            else None
        )

    @property
    def wandb_url(self) -> str | None:
        """Page of the run; None when there is none."""
        return self._wandb.url if self._writer else None

    def header(self, lines: Iterable[str]) -> None:
        """Lines for a person, before the first row or after the last."""
        if self._writer:
            self._console.header(lines)

    def warn(self, text: str) -> None:
        """One line for a person that should not be overlooked."""
        if self._writer:
            self._console.warn(text)

    def step(
        self,
        step: int,
        values: Mapping[str, float],
        *,
        loads: Sequence[LayerLoad] = (),
        health: Sequence[LayerHealth] = (),
        depth: Sequence[MixHealth] = (),
    ) -> None:
        """The row of a step, with what an evaluation after it found.

        Write it before the step's checkpoint becomes the latest one: a kill between the two would
        otherwise lose the row.

        Args:
            step: optimizer step, from 1; each step once, in order.
            values: metrics by registered name; what every row holds must be there (NaN becomes
                null).
            loads: of the expert layers in this step, from the whole global batch.
            health: of the attention layers, where they were measured in this step.
            depth: of the mixes of attention residuals, likewise.

        Raises:
            ValueError: a name is not registered or missing, or the step is out of order.
        """
        if not self._writer:
            return
        row = {"step": float(step), **{name: float(value) for name, value in values.items()}}
        history: dict[str, Any] = {}
        if loads:
            row |= self._experts(step, LoadTable.gather(loads), history)
        if health:
            found = health_statistics(health)
            row |= health_metrics(health, found)
            history["attention"] = health_record(health, found)
        if depth:
            row |= depth_metrics(depth)
            history["residual"] = depth_record(depth)
            if is_due(step, interval=self._depth_interval, total_steps=self._total_steps):
                self._wandb.write_depth(step, history["residual"])
        if history:
            self._history.write(step, history)
        row = {name: row[name] for name in registry.ordered(row)}
        missing = [name for name in registry.required_names() if name not in row]
        if missing:
            raise ValueError(
                f"step {step}: {', '.join(missing)} missing; every row has "
                f"{', '.join(registry.required_names())} (NaN where there is no value)"
            )
        self._jsonl.write(row)
        self._step = step
        self._console.step(step, row)
        self._wandb.write(step, row)
        if self._tensorboard is not None:
            self._tensorboard.write(step, row)

    def _experts(self, step: int, table: LoadTable, history: dict[str, Any]) -> dict[str, float]:
        """The metrics of the expert layers; when it is due their detail goes to the history."""
        statistics = self._expert_load.statistics(table)
        if is_due(step, interval=self._expert_interval, total_steps=self._total_steps):
            history["experts"] = expert_record(table, statistics)
        if is_due(step, interval=self._media_interval, total_steps=self._total_steps):
            self._wandb.write_layers(step, table, statistics)
        return self._expert_load.metrics(table, statistics)

    def evaluation(self, step: int, tokens: int, values: Mapping[str, float]) -> dict[str, float]:
        """Show an evaluation, and hand its values back to be merged into the row of its step.

        Args:
            step: the step after which was evaluated; 0: before training.
            tokens: tokens consumed so far.
            values: `eval/...` metrics by registered name.

        Raises:
            ValueError: a name is not registered, or is none of an evaluation.
        """
        checked = {name: float(values[name]) for name in registry.ordered(values)}
        for name in checked:
            if not name.startswith("eval/"):
                raise ValueError(f"evaluation: {name} given, only eval/... is allowed")
        if self._writer:
            self._console.evaluation(step, tokens, checked)
        return checked

    def complete(self, step: int, values: Mapping[str, float]) -> None:
        """Add what was found later to the row of the last step, such as an evaluation after it.

        Args:
            step: of that row.
            values: metrics by registered name that the row does not have yet.

        Raises:
            ValueError: a name is not registered.
        """
        if not self._writer:
            return
        row = {name: float(values[name]) for name in registry.ordered(values)}
        self._jsonl.complete(step, row)
        self._wandb.write(step, row)
        if self._tensorboard is not None:
            self._tensorboard.write(step, row)

    def finish(self, code: int, reason: str) -> None:
        """Flush, close, and write `exit.json`. Only the first call counts.

        Args:
            code: exit code of the run, see `megatron_ext.errors`.
            reason: one line for a person.
        """
        self._close(code, reason=reason)

    def _close(self, code: int, *, reason: str | None) -> None:
        if not self._writer or self._finished:
            return
        self._finished = True
        self._console.close()
        self._jsonl.close()
        self._history.close()
        if self._tensorboard is not None:
            self._tensorboard.close()
        # exit.json before wandb: an upload over a slow network must not hide how the run ended.
        if reason is not None:
            run_files.write_exit(self._folder, code=code, reason=reason, step=self._step)
        self._wandb.close(code)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            self._close(0, reason="done")
        elif isinstance(error, MegatronExtError):
            self._close(error.exit_code, reason=str(error))
        else:
            self._close(1, reason=None)
