"""Weights & Biases, as a guest: it gets the numbers, and no failure of it reaches training.

The run id comes from the caller, who keeps it in the checkpoint: a relaunch goes on in that run.
Our own step goes with every row. Without a key, a network or a working installation the run is
recorded offline below the run folder, with one warning that says how to upload it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_ext.config.schema import LoggingOptions, Wandb
from megatron_ext.observe.expert_load import Floats, LoadTable
from megatron_ext.observe.redact import redact
from megatron_ext.observe.run_files import plain
from megatron_ext.observe.wandb_layers import depth_media, layer_media

if TYPE_CHECKING:
    import wandb

_FINISH_SECONDS = 120.0


class WandbSink:
    """One wandb run.

    Args:
        folder: the run folder; wandb writes to `folder/wandb`.
        logging: mode, project, entity and group.
        run_id: fixed id of the run.
        name: what the run is called on the page.
        config: the configuration; secrets are redacted before they leave.
        resume_step: the step that training goes on from.
        warn: called with one line when something does not work. Nothing is ever raised.
        init_seconds: how long the server may take to answer before the run goes offline.
    """

    def __init__(
        self,
        folder: Path,
        *,
        logging: LoggingOptions,
        run_id: str,
        name: str,
        config: Mapping[str, Any],
        resume_step: int,
        warn: Callable[[str], None],
        init_seconds: float = 30.0,
    ) -> None:
        self._folder = folder
        self._warn = warn
        self._run: wandb.Run | None = None
        self._sends_media = True
        mode = logging.wandb
        if mode is Wandb.disabled:
            return
        online = mode in (Wandb.auto, Wandb.online)
        if online and not self._has_key():
            online = False
            warn(
                "wandb: no API key, so the run is recorded offline; "
                f"`wandb login`, then `wandb sync {folder / 'wandb'}/offline-run-*` uploads it"
            )

        def start(mode_name: str) -> None:
            self._run = _start(
                folder,
                mode=mode_name,
                logging=logging,
                run_id=run_id,
                name=name,
                config=config,
                init_seconds=init_seconds,
            )

        if online:
            try:
                start("online")
            # wandb raises errors of its own, of its service's pipe and of its HTTP client, and none
            # of them may reach training. That holds for every such clause in this file.
            except Exception as error:
                online = False
                # The service keeps the id of a run that failed to start as "in use".
                _end_service()
                warn(f"wandb: cannot go online ({_short(error)}); the run is recorded offline")
        if not online:
            try:
                start("offline")
            except Exception as error:
                warn(f"wandb: {_short(error)}; this run is not on wandb, metrics.jsonl has it all")
        if self._run is not None and self._run.step > resume_step + 1:
            warn(
                f"wandb: the run there is at step {self._run.step}; it takes new rows from there, "
                "the steps before it are in metrics.jsonl"
            )

    @property
    def url(self) -> str | None:
        """Page of the run; None offline."""
        return None if self._run is None else self._run.url

    def write(self, step: int, row: Mapping[str, float]) -> None:
        """One row under our own step. After a failure: one warning, then silence."""
        if self._run is None:
            return
        try:
            self._run.log(dict(row), step=step)
        except Exception as error:
            self._run = None
            self._warn(f"wandb: {_short(error)}; no more rows go there, metrics.jsonl goes on")

    def write_layers(self, step: int, table: LoadTable, statistics: Mapping[str, Floats]) -> None:
        """Every layer and expert of a step; call it before the row of that step."""
        self._write_media(step, lambda: layer_media(table, statistics))

    def write_depth(self, step: int, record: Mapping[str, Any]) -> None:
        """The weights over depth of a step (`depth_record`); call it before its row."""
        self._write_media(step, lambda: depth_media(record))

    def _write_media(self, step: int, draw: Callable[[], dict[str, Any]]) -> None:
        if self._run is None or not self._sends_media:
            return
        try:
            self._run.log(draw(), step=step)
        except Exception as error:  # also of matplotlib: a picture is not worth a run
            self._sends_media = False
            self._warn(f"wandb: {_short(error)}; no more pictures go there, layers.jsonl goes on")

    def close(self, code: int) -> None:
        """Flush and end. 0 and 10 (stopped on request) count as success, everything else not."""
        run, self._run = self._run, None
        if run is None:
            return
        try:
            run.finish(exit_code=0 if code in (0, 10) else code)
            # `finish` returns up to 0.2 s before the last records are in the file.
            _end_service()
        except Exception as error:
            self._warn(
                f"wandb: {_short(error)} at the end; `wandb sync` on {self._folder / 'wandb'} "
                "uploads what is missing"
            )

    def _has_key(self) -> bool:
        """Whether wandb knows a key, by its own rules. Asks neither the user nor the network."""
        try:
            import wandb

            wandb.setup(settings=wandb.Settings(silent=True))  # login is talkative otherwise
            return bool(wandb.login(prompt=False, verify=False))
        except Exception:  # a broken installation: then there is no key that could be used
            return False


def _start(
    folder: Path,
    *,
    mode: str,
    logging: LoggingOptions,
    run_id: str,
    name: str,
    config: Mapping[str, Any],
    init_seconds: float,
) -> wandb.Run:
    import wandb  # 0.6 s, and only runs that use it pay

    settings = wandb.Settings(
        init_timeout=init_seconds,
        finish_timeout=_FINISH_SECONDS,  # a dead network must not keep a finished job allocated
        console="off",  # standard output is ours; wrapping it breaks the progress bar
        save_code=False,
        silent=True,
    )
    run = wandb.init(
        dir=folder,
        mode="online" if mode == "online" else "offline",
        project=logging.wandb_project,
        entity=logging.wandb_entity,
        group=logging.wandb_group,
        id=run_id,
        name=name,
        resume="allow",
        config=redact(plain(config)),
        settings=settings,
    )
    # Steps mean nothing across batch sizes: charts go by tokens.
    run.define_metric("tokens")
    run.define_metric("*", step_metric="tokens")
    return run


def _end_service() -> None:
    """End wandb's service process, and with it wait for what it still has to write."""
    try:
        import wandb

        wandb.teardown()
    except Exception:
        return  # nothing depends on it: what is wrong shows when a run starts or ends


def _short(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:160]}" if lines else type(error).__name__
