"""The report: one self-contained page, every plot has data, and damaged files are named."""

from __future__ import annotations

import io
import json
import math
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from megatron_ext.config.schema import LoggingOptions
from megatron_ext.errors import DataError
from megatron_ext.observe.metrics import Metrics
from megatron_ext.observe.report import depth_plots, plots
from megatron_ext.observe.report.__main__ import main, write_report
from megatron_ext.observe.report.lines import legend_columns, running_mean, thin
from megatron_ext.observe.report.run_data import read_run
from megatron_ext.observe.report.svg import new_figure, style
from megatron_ext.observe.run_files import write_run
from tests.support.loads import draw_depth, draw_health, draw_loads

ROOT = Path(__file__).resolve().parents[2]
TRAINING = {"loss", "loss-by-source", "optimizer", "throughput"}
ATTENTION = {"decay", "decay-by-layer", "gates", "state"}
RESIDUAL = {"depth-weights", "depth-entropy", "source-norms"}
EXPERTS = {"violation", "violation-over-time", "loads", "bias", "prediction", "lost"}
# What would make a browser ask for something: any address, any import, any script.
ADDRESS = re.compile(r"https?:|//|@import|url\((?!#)|<script|<link|<iframe", re.I)


def write_steps(
    folder: Path, *, steps: int = 6, experts: int = 16, interval: int = 2, health: int = 2
) -> Path:
    """A run folder as training writes it; 0 leaves experts or the health of attention out."""
    with Metrics(
        folder,
        logging=LoggingOptions(expert_interval=interval),
        run_id="small-1",
        config={
            "run": {"name": "<small> & first"},
            "train": {"steps": steps},
            "hub": {"token": "abc123", "url": "https://me:word@example.org/x"},
        },
        resume_step=0,
        writer=True,
        total_steps=steps,
        stream=io.StringIO(),
    ) as log:
        write_run(folder, run_id="small-1", layout="1 rank = data 1\nKKM", world_size=1, command=[])
        for step in range(1, steps + 1):
            loss = 5 / step + 1
            values = {
                "tokens": 8192.0 * step,
                "loss": loss,
                "grad_norm": 10.0 / step,
                "lr": 1e-3,
                "step_seconds": 0.1,
                "tokens_per_second": 81920.0,
                "mfu": math.nan,
                "memory_gib": 0.5,
                "loss/code": loss - 0.1,
                "loss/prose": loss + 0.1,
            }
            if step % 3 == 0:
                values |= log.evaluation(step, 1, {"eval/loss": loss, "eval/loss/code": loss})
            log.step(
                step,
                values,
                loads=draw_loads(step, experts=experts) if experts else (),
                health=draw_health(step) if health and step % health == 0 else (),
                depth=draw_depth(step) if health and step % health == 0 else (),
            )
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_steps(tmp_path_factory.mktemp("report") / "run")


@pytest.fixture(scope="module")
def text(run: Path) -> str:
    """The page of that run: drawing it takes seconds."""
    return render(run)


class Page(HTMLParser):
    """Fails on tags that are not closed in order; collects attributes and the text."""

    VOID = ("meta", "br", "img")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def render(folder: Path) -> str:
    return write_report(folder).read_text(encoding="utf-8")


def numbers_drawn(figure: ElementTree.Element) -> int:
    """Places that the lines of a plot go through, dots, and bytes of pictures."""
    places = sum(len(re.findall(r"[ML] ", path.get("d", ""))) for path in figure.iter("path"))
    pictures = [image.get("href", "") for image in figure.iter("image")]
    return places + len(list(figure.iter("use"))) + sum(map(len, pictures))


def test_the_page_is_one_file_that_parses_and_asks_for_nothing(text: str) -> None:
    page = Page(text)
    ElementTree.fromstring(text.removeprefix("<!DOCTYPE html>"))
    inside = [
        value for _, name, value in page.attributes if name.endswith(("src", "href", "srcset"))
    ]
    assert inside
    for value in inside:
        assert value.startswith(("#", "data:image/png;base64,")), value[:80]
    without_pictures = re.sub(r'"data:image/png;base64,[A-Za-z0-9+/=]+"', '""', text)
    # The configuration may hold addresses, as text.
    shown = re.sub(r"<pre>.*?</pre>", "", without_pictures, flags=re.S)
    assert ADDRESS.search(shown) is None, ADDRESS.search(shown)
    assert "DejaVu" not in text  # a font of the machine that made it
    ids = [value for _, name, value in page.attributes if name == "id"]
    assert len(ids) == len(set(ids))
    assert "width=device-width" in text


def test_secrets_stay_out_and_names_are_text(text: str) -> None:
    assert "abc123" not in text
    assert "me:word" not in text
    assert "&lt;small&gt; &amp; first" in text
    assert "<small>" not in text
    assert "1 rank = data 1" in text


def test_every_plot_has_data(text: str) -> None:
    root = ElementTree.fromstring(text.removeprefix("<!DOCTYPE html>"))
    figures = {figure.get("id", ""): figure for figure in root.iter("figure")}
    assert figures.keys() == TRAINING | EXPERTS | ATTENTION | RESIDUAL
    for key, figure in figures.items():
        (svg,) = figure.iter("svg")
        assert svg.get("viewBox"), key
        # The axes alone are made of about 60 pieces.
        points = int(figure.get("data-points", "0"))
        assert points > 0, key
        assert numbers_drawn(figure) > points, key
        assert (figure.findtext("figcaption") or "").strip(), key
        assert "nan" not in "".join(svg.itertext()).lower(), key


def test_plots_show_the_numbers_of_the_run(run: Path) -> None:
    data = read_run(run)
    steps, values = data.column("moe/max_violation")
    assert list(steps) == [1, 2, 3, 4, 5, 6]
    assert not data.has("mfu")  # null in every row
    assert plots.loss(data).points == 6 + 2
    violation = plots.violation(data)
    assert violation.points == 4 * 6
    assert f"worst layer {values[-1]:.4g}" in violation.svg
    assert plots.violation_over_time(data).points == 3 * 4  # steps 1, 2, 4, 6
    loads = plots.latest_loads(data)
    assert loads.points == 3 * 16
    assert "Step 6, 512 tokens, 4 of 16 experts" in loads.note
    weights = depth_plots.depth_weights(data)
    # Four layers in blocks of two: seven sublayers read 2, 2, 2, 2, 3, 3, 3 sources, the output 3.
    assert weights.points == 4 * 2 + 4 * 3
    assert weights.note.startswith("Step 6, mean over tokens")
    assert ">out<" in weights.svg
    assert ">1a<" in weights.svg
    assert depth_plots.source_norms(data).points == 3 * 3  # steps 2, 4, 6


def test_a_run_without_experts_and_health_has_fewer_plots_and_says_why(tmp_path: Path) -> None:
    page = Page(render(write_steps(tmp_path / "run", experts=0, health=0)))
    keys = {value for tag, name, value in page.attributes if (tag, name) == ("figure", "id")}
    assert keys == TRAINING
    assert (
        "No layer of this run is a mixture of experts. Hence no plot of: Max violation" in page.text
    )
    assert "logging.health_interval was 0" in page.text


def test_a_run_that_kept_no_loads_says_why(tmp_path: Path) -> None:
    page = Page(render(write_steps(tmp_path / "run", interval=0)))
    keys = {value for tag, name, value in page.attributes if (tag, name) == ("figure", "id")}
    assert "violation" in keys
    assert "loads" not in keys
    assert "logging.expert_interval was 0" in page.text


def test_it_works_while_the_run_goes_on(run: Path, tmp_path: Path) -> None:
    """After each byte that the run appends: what is complete is drawn."""
    folder = shutil.copytree(run, tmp_path / "run")
    (folder / "exit.json").unlink()
    for name in ("metrics.jsonl", "layers.jsonl"):
        whole = (run / name).read_bytes()
        for cut in (len(whole) - 1, len(whole) - 20, len(whole) // 2):
            (folder / name).write_bytes(whole[:cut])
            data = read_run(folder)
            complete = whole[:cut].count(b"\n")
            assert len(data.rows if name.startswith("m") else data.history) == complete
        (folder / name).write_bytes(whole[: whole.index(b"\n") + 5])
    page = Page(render(folder))
    assert "running, or crashed" in page.text
    assert "1/6" in page.text
    keys = {value for tag, name, value in page.attributes if (tag, name) == ("figure", "id")}
    assert keys == (TRAINING | EXPERTS) - {"prediction"}  # attention is measured in step 2


def break_line(path: Path, number: int, line: str) -> None:
    lines = path.read_text().splitlines()
    lines[number - 1] = line
    path.write_text("\n".join(lines) + "\n")


@pytest.mark.parametrize(
    ("name", "line", "message"),
    [
        ("metrics.jsonl", '{"step": 2, "loss', r"metrics\.jsonl: line 2 is damaged"),
        ("metrics.jsonl", "[1]", r"metrics\.jsonl: line 2 has no step, tokens, loss"),
        ("metrics.jsonl", '{"step": 2, "loss": 1}', r"line 2 has no tokens, grad_norm.*version"),
        ("layers.jsonl", "{}", r"layers\.jsonl: line 2 has no step"),
        ("layers.jsonl", '{"step": 1}', r"layers\.jsonl: line 2 is of step 1, after step 1"),
        ("layers.jsonl", '{"step": "2"}', r"layers\.jsonl: line 2 is of step 2"),
        ("layers.jsonl", '{"step": 2, "experts": 3}', r"record of step 2 is damaged"),
        ("layers.jsonl", '{"step": 2, "experts": {"counts": {}}}', r"record of step 2 is damaged"),
        ("layers.jsonl", '{"step": 2, "attention": {"layers": []}}', r"of step 2 is damaged"),
        ("layers.jsonl", '{"step": 2, "residual": {"weights": []}}', r"of step 2 is damaged"),
        ("run.json", '{"run_id": ', r"run\.json: damaged"),
        ("config.yaml", "a: [", r"config\.yaml: damaged"),
    ],
)
def test_damaged_and_old_files_are_named(
    run: Path, tmp_path: Path, name: str, line: str, message: str
) -> None:
    folder = shutil.copytree(run, tmp_path / "run")
    break_line(folder / name, 2, line)
    with pytest.raises(DataError, match=message):
        read_run(folder)


def test_layers_that_do_not_fit_their_counts_are_damaged(run: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(run, tmp_path / "run")
    record = json.loads((folder / "layers.jsonl").read_text().splitlines()[1])
    record["experts"]["layers"].pop()
    break_line(folder / "layers.jsonl", 2, json.dumps(record))
    with pytest.raises(DataError, match=r"step 2 is damaged \(experts: lists of \[2, 3\]"):
        read_run(folder)


def test_folders_that_are_no_run_are_errors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path / "none")]) == DataError.exit_code
    assert "does not exist; give the folder of a run" in capsys.readouterr().err
    assert main([str(tmp_path)]) == DataError.exit_code
    assert "has no metrics.jsonl" in capsys.readouterr().err
    (tmp_path / "metrics.jsonl").write_text('{"step": 1')
    assert main([str(tmp_path)]) == DataError.exit_code
    assert "no step is complete yet" in capsys.readouterr().err
    assert not (tmp_path / "report.html").exists()


def test_the_command_imports_no_torch_and_writes_where_it_is_told(
    run: Path, tmp_path: Path
) -> None:
    code = (
        "import sys; from megatron_ext.observe.report.__main__ import main;"
        "assert main(sys.argv[1:]) == 0;"
        "heavy = {'torch', 'megatron', 'wandb', 'matplotlib.pyplot'} & set(sys.modules);"
        "sys.exit(f'imported: {heavy}' if heavy else 0)"
    )
    output = tmp_path / "page.html"
    done = subprocess.run(
        [sys.executable, "-c", code, str(run), "--output", str(output)],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{output}\n"
    Page(output.read_text())
    missing = tmp_path / "no" / "page.html"
    assert main([str(run), "--output", str(missing)]) == DataError.exit_code


def test_a_long_run_of_92_layers_of_896_experts_is_below_2_mb(tmp_path: Path) -> None:
    folder = write_steps(tmp_path / "run", steps=2, interval=1)
    rows = (folder / "metrics.jsonl").read_text().splitlines()
    template = json.loads(rows[1])
    rng = np.random.default_rng(0)
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, 2001):
            noise = {
                name: value * float(rng.normal(1, 0.1))
                for name, value in template.items()
                if isinstance(value, float)
            }
            file.write(json.dumps({**template, **noise, "step": step}) + "\n")
    # One record as big as they get, then the statistics alone.
    big = write_steps_of_k3(tmp_path / "k3")
    with (folder / "layers.jsonl").open("w") as file:
        for step in range(1, 321):
            for values in big["experts"]["statistics"].values():
                values[:] = [float(f"{value:.6g}") for value in rng.lognormal(size=92)]
            file.write(json.dumps({**big, "step": step}) + "\n")
    text = render(folder)
    assert len(text.encode()) < 2_000_000
    figures = re.findall(r'id="([\w-]+)" data-points="(\d+)"', text)
    assert dict(figures)["loads"] == str(92 * 896)


def write_steps_of_k3(folder: Path) -> dict:
    with Metrics(
        folder,
        logging=LoggingOptions(),
        run_id="k3",
        config={},
        resume_step=0,
        writer=True,
        total_steps=1,
        stream=io.StringIO(),
    ) as log:
        row = dict.fromkeys(("tokens", "loss", "grad_norm", "lr", "step_seconds"), 1.0)
        row |= dict.fromkeys(("tokens_per_second", "mfu", "memory_gib"), 1.0)
        log.step(1, row, loads=draw_loads(1, layers=92, experts=896))
    return json.loads((folder / "layers.jsonl").read_text())


@pytest.mark.parametrize(
    ("labels", "columns"),
    [
        (["training 3.108", "held-out 3.105"], 2),
        (["mean 0.4885", "lowest layer 0.2326", "highest layer 0.6647"], 2),
        (["experts without a token 0", "margins out of range 0", "slots dropped 0"], 2),
        (["moe/load_entropy 0.9928", "moe/load_entropy/mean 0.993"], 1),
    ],
)
def test_a_legend_is_no_wider_than_its_panel(labels: list[str], columns: int) -> None:
    with style(salt="x"):
        assert legend_columns(labels) == columns
        figure = new_figure()
        ax = figure.add_subplot()
        for label in labels:
            ax.plot([0.001, 0.002], label=label)
        ax.set_ylabel("y")
        legend = ax.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=columns, borderpad=0)
        figure.draw_without_rendering()
        assert legend.get_window_extent().x1 <= figure.bbox.x1
        # Nor does it push the axis aside.
        assert ax.get_window_extent().width > 0.75 * figure.bbox.width


def test_thinning_keeps_the_mean_or_the_worst_and_the_last_step() -> None:
    x = np.arange(1.0, 1001.0)
    y = np.sin(x)
    y[500] = 9.0
    steps, mean = thin(x, y, points=100)
    assert (len(steps), steps[-1]) == (100, 1000)
    assert mean.mean() == pytest.approx(y.mean())
    assert thin(x, y, worst=True, points=100)[1].max() == 9.0
    assert thin(x, y, points=1000)[1] is y
    assert np.allclose(running_mean(np.array([1.0, 2.0, 6.0]), 1), [1.5, 3.0, 4.0])


def test_stages_and_lengths_are_drawn_where_they_were_measured(run: Path) -> None:
    plain = read_run(run)
    assert not {"switches", "retrieval"} & {plot.key for plot in plots.sections(plain)[0][1]}
    before = {"eval/before/loss": 3.0, "eval/before/apart/loss": 3.5}
    lengths = [64 * 4**n for n in range(8)]
    found = {f"eval/retrieval/{n}/{depth}": 2.0 for n in lengths for depth in (0, 50)}
    rows = [plain.rows[0] | before, *plain.rows[1:-1], plain.rows[-1] | found]
    drawn = {plot.key: plot for plot in plots.sections(replace(plain, rows=rows))[0][1]}
    assert drawn["switches"].points >= 2 + len(rows)  # and the violation of every step
    assert drawn["retrieval"].points == 2 * 6  # the longest six lengths
