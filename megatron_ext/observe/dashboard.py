"""A saved view of a project on wandb, made from code.

    python -m megatron_ext.observe.dashboard --entity TEAM --project PROJECT      saves it there
    python -m megatron_ext.observe.dashboard --json FILE                          needs no login
    python -m megatron_ext.observe.dashboard --preview RUN      RUN/dashboard.html, neither

The view shows the metrics of the registry in the order in which one asks: is it healthy, is it
learning, how fast, are the experts balanced, what does attention do.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_ext.errors import ConfigError, MegatronExtError
from megatron_ext.observe.report.lines import Line, Panel, Plot, draw_lines
from megatron_ext.observe.report.page import document, section
from megatron_ext.observe.report.run_data import RunData, read_run
from megatron_ext.observe.run_files import replace_file
from megatron_ext.observe.wandb_layers import DEPTH_MAP, HISTOGRAM, LOAD_MAP, TABLE

if TYPE_CHECKING:
    from wandb_workspaces.workspaces import Workspace


@dataclass(frozen=True)
class Curves:
    """One chart.

    Attributes:
        title: above it.
        metrics: registered names.
        family: instead: every name that begins so, such as `loss/` for the loss of each source.
        log: logarithmic axis.
        dashed: of the metrics, what the others are compared with.
    """

    title: str
    metrics: tuple[str, ...] = ()
    family: str = ""
    log: bool = False
    dashed: str = ""


def _worst_and_mean(name: str) -> tuple[str, str]:
    return name, f"{name}/mean"


def _spread(name: str) -> tuple[str, str, str]:
    return name, f"{name}/min", f"{name}/max"


SECTIONS: tuple[tuple[str, tuple[Curves, ...]], ...] = (
    (
        "Health",
        (
            Curves("Loss", ("loss", "eval/loss")),
            Curves("Gradient norm", ("grad_norm",), log=True),
            Curves(
                "Max violation and its floor",
                ("moe/max_violation", "moe/violation_floor"),
                log=True,
                dashed="moe/violation_floor",
            ),
            Curves("Step time", ("step_seconds",)),
            Curves("Memory", ("memory_gib",)),
        ),
    ),
    (
        "Loss",
        (
            Curves("Training, by source", family="loss/"),
            Curves("Held-out, by source", family="eval/loss/"),
        ),
    ),
    (
        "Throughput",
        (
            Curves("Tokens a second", ("tokens_per_second",)),
            Curves("Model FLOPs utilisation", ("mfu",)),
            Curves("Waiting", ("data/wait_seconds", "checkpoint/stall_seconds")),
        ),
    ),
    (
        "Expert balance",
        (
            Curves("Max violation", _worst_and_mean("moe/max_violation"), log=True),
            Curves("Layer with the largest", ("moe/max_violation/layer",)),
            Curves("Load CV", _worst_and_mean("moe/load_cv")),
            Curves("Load entropy", _worst_and_mean("moe/load_entropy")),
            Curves("Dead experts and dropped slots", ("moe/dead_fraction", "moe/dropped")),
            Curves("Load of expert parallel ranks", _worst_and_mean("moe/rank_load")),
        ),
    ),
    (
        "Balancing",
        (
            Curves("Bias range", _worst_and_mean("balance/bias_range")),
            Curves("Bias change", _worst_and_mean("balance/bias_change"), log=True),
            Curves(
                "Predicted and real load",
                (*_worst_and_mean("balance/prediction_error"), "moe/violation_floor"),
                log=True,
                dashed="moe/violation_floor",
            ),
            Curves("Violation with the new bias", _worst_and_mean("balance/predicted_violation")),
            Curves("Margins out of range", ("balance/out_of_range",)),
        ),
    ),
    (
        "Attention",
        (
            Curves("Decay", ("kda/decay_p99", "kda/decay_p50", "kda/decay_p01", "kda/decay_mean")),
            Curves("Saturated gates", ("kda/saturated_low", "kda/saturated_high")),
            Curves("Decay of a tile, nats", _worst_and_mean("kda/tile_decay")),
            Curves("State norm", _worst_and_mean("kda/state_norm"), log=True),
            Curves("Write strength", _spread("kda/beta_mean")),
            Curves("Output gate, linear attention", _spread("kda/output_gate_mean")),
            Curves("Output gate, full attention", _spread("mla/gate_mean")),
        ),
    ),
    (
        "Attention residuals",
        (
            Curves("Entropy over depth", _spread("residual/entropy")),
            Curves("Weight of the embedding", _spread("residual/embedding_weight")),
            Curves("Weight of the running sum", _spread("residual/running_weight")),
            Curves("Norm of sources", _spread("residual/source_norm"), log=True),
        ),
    ),
    ("Optimizer", (Curves("Learning rate", ("lr",)), Curves("Gradient norm", ("grad_norm",)))),
    (
        "Data",
        (
            Curves("Tokens by source", family="tokens/"),
            Curves("Epochs by source", family="data/epoch/"),
        ),
    ),
)


def workspace(*, entity: str, project: str) -> Workspace:
    """The view, unsaved. Needs no login.

    Raises:
        ConfigError: the package wandb-workspaces is missing.
    """
    try:
        import wandb_workspaces.reports.v2 as panels
        import wandb_workspaces.workspaces as spaces
    except ImportError as error:
        raise ConfigError(
            f"the dashboard needs the package wandb-workspaces ({error}); "
            "pip install 'megatron-ext[dashboard]' brings it"
        ) from error

    def chart(curves: Curves) -> Any:
        return panels.LinePlot(
            title=curves.title,
            x="tokens",  # steps mean nothing across batch sizes
            y=list(curves.metrics),
            metric_regex=f"^{curves.family}" if curves.family else None,
            log_y=curves.log or None,
            line_marks={curves.dashed: "dashed"} if curves.dashed else None,
        )

    sections: list[Any] = [
        spaces.Section(name=name, panels=[chart(curves) for curves in charts], is_open=place < 2)
        for place, (name, charts) in enumerate(SECTIONS)
    ]
    maps: list[Any] = [
        panels.MediaBrowser(title="Load of every expert", media_keys=[LOAD_MAP], num_columns=1),
        panels.MediaBrowser(title="Spread of the loads", media_keys=[HISTOGRAM], num_columns=1),
        panels.WeavePanelSummaryTable(table_name=TABLE),
        panels.MediaBrowser(title="Weights over depth", media_keys=[DEPTH_MAP], num_columns=1),
    ]
    sections.append(spaces.Section(name="Layers and experts", panels=maps))
    return spaces.Workspace(
        entity=entity,
        project=project,
        name="megatron-ext",
        sections=sections,
        settings=spaces.WorkspaceSettings(x_axis="tokens", max_runs=20),
    )


def preview(data: RunData) -> str:
    """The curves of the view from the numbers of one run, as a page. wandb draws them its own way:
    over tokens, and with what lies on its server.
    """

    def plot(heading: str, curves: Curves) -> Plot:
        metrics = curves.metrics or data.names(curves.family)
        lines = [
            Line(name, name, reference=name == curves.dashed, dots=name.startswith("eval/"))
            for name in metrics
        ]
        return draw_lines(
            data,
            re.sub(r"[^a-z]+", "-", f"{heading} {curves.title}".lower()),
            curves.title,
            [Panel("", lines, log_from=1.0 if curves.log else math.inf)],
            note="",
            missing="This run has no such numbers.",
        )

    body = "\n".join(
        section(heading, [plot(heading, curves) for curves in charts])
        for heading, charts in SECTIONS
    )
    header = (
        '<p class="quiet">The curves of the dashboard, drawn from one run over its '
        "steps. On wandb a section with the table, the histogram and the maps of the layers "
        "follows.</p>"
    )
    return document("Dashboard", header=header, body=body, source=data.folder)


def specification(view: Workspace) -> dict[str, Any]:
    """What wandb's server is sent, as JSON."""
    # A private name, and the only way to see it without a login: the version is pinned.
    text = view._to_model().model_dump_json(by_alias=True, exclude_none=True)
    found: dict[str, Any] = json.loads(text)
    return found


def save(view: Workspace) -> str:
    """Save the view on wandb and return its address.

    Raises:
        ConfigError: wandb knows no key, or refuses.
    """
    import wandb

    try:
        known = wandb.login(prompt=False, verify=False)
    except wandb.errors.UsageError:
        known = False  # its way to say that there is no key and nobody to ask
    if not known:
        raise ConfigError(
            "wandb: no API key is known here, so the dashboard was not saved; `wandb login` sets "
            "one, or --json FILE writes the dashboard without a login"
        )
    try:
        view.save()
    # Its client raises errors of several libraries for a wrong team, project or network.
    except Exception as error:
        raise ConfigError(
            f"--entity={view.entity} --project={view.project}: wandb did not take the dashboard "
            f"({type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}); both "
            "must exist there and be writable with this key"
        ) from error
    return str(view.url)


def main(words: Sequence[str] | None = None) -> int:
    """The command. Returns an exit code of `megatron_ext.errors`."""
    parser = argparse.ArgumentParser(
        prog="python -m megatron_ext.observe.dashboard",
        description="Saves a dashboard for the runs of a project on wandb.",
    )
    parser.add_argument("--entity", default="", help="team or user on wandb")
    parser.add_argument("--project", default="megatron-ext", help="default: megatron-ext")
    parser.add_argument("--json", type=Path, help="write it here instead of saving it on wandb")
    parser.add_argument(
        "--preview", type=Path, metavar="RUN", help="only draw its curves from this run folder"
    )
    arguments = parser.parse_args(words)
    try:
        if arguments.preview is not None:
            output = arguments.preview / "dashboard.html"
            replace_file(output, preview(read_run(arguments.preview)).encode())
            print(output)
            return 0
        view = workspace(entity=arguments.entity, project=arguments.project)
        if arguments.json is not None:
            text = json.dumps(specification(view), indent=1) + "\n"
            replace_file(arguments.json, text.encode())
            print(arguments.json)
            return 0
        if not arguments.entity:
            raise ConfigError("--entity: not given; name the team or user that owns the project")
        print(save(view))
    except MegatronExtError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
