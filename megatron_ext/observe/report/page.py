"""The HTML of a report: one file that asks for nothing else, on a phone as on a wide screen."""

from __future__ import annotations

from datetime import UTC, datetime
from html import escape
from pathlib import Path

import yaml

from megatron_ext.observe.console import human_count, human_lr
from megatron_ext.observe.report.lines import Plot
from megatron_ext.observe.report.plots import sections
from megatron_ext.observe.report.run_data import RunData

_STYLE = """
:root { color-scheme: light; }
body { margin: 0; background: #f3f5f7; color: #1f2933; font: 16px/1.45 system-ui, sans-serif; }
header, main, footer { max-width: 1160px; margin: 0 auto; padding: 0 12px; }
h1 { font-size: 1.35rem; margin: 18px 0 2px; overflow-wrap: anywhere; }
h2 { font-size: 1.1rem; margin: 26px 0 8px; }
h3 { font-size: .95rem; margin: 0 0 4px; }
p { margin: 4px 0; }
.quiet { color: #52606d; font-size: .85rem; overflow-wrap: anywhere; }
.tiles { display: grid; grid-template-columns: repeat(auto-fill, minmax(140px, 1fr)); gap: 8px;
  margin: 12px 0; padding: 0; }
.tiles div, figure, .none { background: #fff; border: 1px solid #e4e7eb; border-radius: 8px; }
.tiles div { padding: 8px 12px; }
dt { color: #52606d; font-size: .78rem; }
dd { margin: 0; font-size: 1.1rem; font-variant-numeric: tabular-nums; }
.plots { columns: 440px 2; column-gap: 12px; }
figure { margin: 0 0 12px; padding: 10px 12px; break-inside: avoid; }
figure svg { display: block; width: 100%; height: auto; }
figcaption { color: #52606d; font-size: .85rem; }
.none { padding: 10px 12px; }
pre { overflow-x: auto; background: #fff; border: 1px solid #e4e7eb; border-radius: 8px;
  padding: 10px; font-size: .78rem; line-height: 1.35; }
details { margin: 18px 0; }
summary { cursor: pointer; }
""".strip()


def render(data: RunData) -> str:
    """The whole page. Well-formed XML but for the first line."""
    name = str(data.config.get("run", {}).get("name") or data.folder.resolve().name)
    body = "\n".join(section(heading, plots) for heading, plots in sections(data))
    return document(
        name,
        header=f'<p class="quiet">{escape(_origin(data))}</p>\n{_tiles(data)}',
        body=f"{body}\n{_details(data)}",
        source=data.folder,
    )


def document(title: str, *, header: str, body: str, source: Path) -> str:
    """A page that asks for nothing else.

    Args:
        title: text.
        header: HTML below it.
        body: HTML.
        source: folder that it was made from.
    """
    written = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8"/>
<meta name="viewport" content="width=device-width, initial-scale=1"/>
<title>{escape(title)}</title>
<style>
{_STYLE}
</style>
</head>
<body>
<header>
<h1>{escape(title)}</h1>
{header}
</header>
<main>
{body}
</main>
<footer><p class="quiet">Made {written} from {escape(str(source))}</p></footer>
</body>
</html>
"""


def _origin(data: RunData) -> str:
    run = data.run
    versions, git = run.get("versions", {}), run.get("git", {})
    layout = run.get("layout") or [""]
    parts = [
        f"started {run['started']}" if run.get("started") else "",
        f"on {run['host']}" if run.get("host") else "",
        str(layout[0]),
        *(f"{key} {versions[key]}" for key in ("megatron-ext", "torch") if key in versions),
        f"git {git['sha'][:10]}{' with changes' if git.get('dirty') else ''}"
        if git.get("sha")
        else "",
    ]
    return ", ".join(part for part in parts if part)


def _tiles(data: RunData) -> str:
    last = data.rows[-1]
    # Of a curriculum each stage has its own.
    staged = data.config.get("curriculum", {}).get("stages")
    total = None if staged else data.config.get("train", {}).get("steps")
    tiles = [
        ("state", _state(data)),
        ("step", f"{last['step']}/{total}" if total else str(last["step"])),
        ("tokens", human_count(last["tokens"])),
    ]
    for label, name, form in (
        ("loss, nats", "loss", "{:.4f}".format),
        ("held-out loss, nats", "eval/loss", "{:.4f}".format),
        ("learning rate", "lr", human_lr),
        ("tokens a second", "tokens_per_second", human_count),
        ("MFU", "mfu", "{:.1%}".format),
        # As the console shows it: over the mean, not above it.
        ("max load / mean", "moe/max_violation", lambda value: f"{1 + value:.2f}"),
    ):
        value = data.last(name)
        if value is not None:
            tiles.append((label, form(value)))
    cells = "\n".join(
        f"<div><dt>{escape(label)}</dt><dd>{escape(text)}</dd></div>" for label, text in tiles
    )
    return f'<dl class="tiles">\n{cells}\n</dl>'


def _state(data: RunData) -> str:
    if data.ending is None:
        return "running, or crashed"
    code = str(data.ending.get("code"))
    return {"0": "finished", "10": "stopped, resumable"}.get(code, f"ended with code {code}")


def section(heading: str, plots: list[Plot]) -> str:
    """Figures below a heading, and why others are missing."""
    drawn = [
        f'<figure id="{plot.key}" data-points="{plot.points}">\n<h3>{escape(plot.title)}</h3>\n'
        f"{plot.svg}\n<figcaption>{escape(plot.note)}</figcaption>\n</figure>"
        for plot in plots
        if plot.svg
    ]
    # Plots without data share a line where they share a reason.
    reasons: dict[str, list[str]] = {}
    for plot in plots:
        if not plot.svg:
            reasons.setdefault(plot.note, []).append(plot.title)
    absent = "\n".join(
        f'<p class="none quiet">{escape(reason)} Hence no plot of: {escape("; ".join(titles))}.</p>'
        for reason, titles in reasons.items()
    )
    figures = '<div class="plots">\n' + "\n".join(drawn) + "\n</div>\n" if drawn else ""
    return f"<section>\n<h2>{escape(heading)}</h2>\n{figures}{absent}\n</section>"


def _details(data: RunData) -> str:
    parts = []
    if data.ending is not None:
        parts.append(f"<p>Ended: {escape(str(data.ending.get('reason', '')))}</p>")
    for title, text in (
        ("Layout", "\n".join(map(str, data.run.get("layout", [])))),
        ("Command", " ".join(map(str, data.run.get("command", [])))),
        (
            "Configuration",
            yaml.safe_dump(data.config, sort_keys=False, allow_unicode=True) if data.config else "",
        ),
    ):
        if text:
            parts.append(
                f"<details><summary>{title}</summary>\n<pre>{escape(text)}</pre>\n</details>"
            )
    return "\n".join(parts)
