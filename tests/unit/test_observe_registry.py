"""The table of metrics, and the page that is printed from it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_ext.observe import registry
from megatron_ext.observe.metric_table import METRICS

ROOT = Path(__file__).resolve().parents[2]


def test_docs_page_is_what_the_table_prints_and_nothing_heavy_is_imported() -> None:
    code = (
        "import sys, runpy; runpy.run_module('megatron_ext.observe.registry', run_name='__main__');"
        "import megatron_ext.observe.metrics;"
        "heavy = {'torch', 'megatron', 'wandb', 'tensorboard', 'rich'} & set(sys.modules);"
        "sys.exit(f'imported: {heavy}' if heavy else 0)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    assert result.stdout == (ROOT / "docs" / "metrics.md").read_text(), (
        "docs/metrics.md is old: python -m megatron_ext.observe.registry > docs/metrics.md"
    )


def test_an_unregistered_name_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(
        ValueError, match=r"metric grad_nrom: not registered; did you mean grad_norm"
    ):
        registry.find("grad_nrom")
    for name in ("loss/", "loss/a b", "loss/a/b", "eval", "loss\n"):
        with pytest.raises(ValueError, match="not registered"):
            registry.find(name)


def test_a_family_takes_any_source_and_each_name_has_one_entry() -> None:
    assert registry.find("loss/web-2.1_en").name == "loss/<source>"
    assert registry.find("eval/loss/code").name == "eval/loss/<source>"
    names = [metric.name for metric in METRICS]
    assert len(set(names)) == len(names)
    for metric in METRICS:
        example = re.sub(r"<\w+>", "1024", metric.name.replace("<source>", "code"))
        assert [other.name for other in METRICS if other.matches(example)] == [metric.name]
        assert metric.unit
        assert metric.meaning
        assert "\n" not in metric.meaning


def test_every_row_has_the_published_columns_in_their_order() -> None:
    columns = ["step", "tokens", "loss", "grad_norm", "lr", "step_seconds", "tokens_per_second"]
    columns += ["mfu", "memory_gib"]
    assert list(registry.required_names()) == columns
    assert registry.ordered(["loss/b", "mfu", "step", "loss/a", "loss"]) == [
        *("step", "loss", "mfu", "loss/a", "loss/b")
    ]
    times = {name for name in columns if not registry.is_reproducible(name)}
    assert times == {"step_seconds", "tokens_per_second", "mfu", "memory_gib"}
