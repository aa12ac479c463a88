"""The rows that a person reads."""

from __future__ import annotations

import io
import math

import pytest

from megatron_ext.observe.console import (
    WIDTH,
    Console,
    evaluation_rows,
    human_count,
    human_lr,
    human_seconds,
    step_row,
)

VALUES = {
    "tokens": 98_304.0,
    "loss": 5.1234,
    "grad_norm": 0.841,
    "lr": 3e-4,
    "step_seconds": 0.5,
    "tokens_per_second": 41_200.0,
    "mfu": 0.312,
    "memory_gib": 0.94,
}


def test_a_row_reads_as_documented() -> None:
    row = step_row(12, VALUES, total_steps=100, seconds_left=42)
    assert row == (
        "step 12/100  12.0%  loss 5.123  gnorm 0.84  lr 3.0e-4  tok 98.3k  41.2k tok/s"
        "  MFU 31.2%  mem 0.9G  eta 0:00:42"
    )


def test_imbalance_is_the_busiest_expert_over_the_mean_and_needs_experts() -> None:
    values = {**VALUES, "moe/max_violation": 0.0834}
    row = step_row(12, values, total_steps=100, seconds_left=42)
    assert "  imb 1.08  " in row
    assert len(row) <= WIDTH
    for violation in (math.nan, math.inf):
        values["moe/max_violation"] = violation
        assert "imb" not in step_row(12, values, total_steps=100, seconds_left=42)


def test_mfu_is_left_out_where_it_is_not_known_and_a_broken_loss_is_shown() -> None:
    row = step_row(
        1, {**VALUES, "mfu": math.nan, "loss": math.nan}, total_steps=100, seconds_left=math.inf
    )
    assert "MFU" not in row
    assert "loss nan" in row
    assert row.endswith("eta -")


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6, 1e30, math.inf, -math.inf, math.nan])
def test_rows_fit_in_120_columns_whatever_the_numbers(scale: float) -> None:
    values = {name: value * scale for name, value in VALUES.items()}
    values["moe/max_violation"] = 55 * scale
    row = step_row(12_345_678, values, total_steps=99_999_999, seconds_left=8e8)
    assert len(row) <= WIDTH
    for kept in ("step 12345678/99999999", "loss", "gnorm", "lr", "eta 9259d06h"):
        assert kept in row
    for text in evaluation_rows(
        7, 10**13, {"eval/loss": scale, **{f"eval/loss/source_{i}": scale for i in range(30)}}
    ):
        assert len(text) <= WIDTH


def test_numbers_have_units_and_never_four_digits_before_them() -> None:
    counts = [0, 7, 950, 999.96, 1e3, 98_304, 999_960, 1_250_000, 15.6e12, math.nan]
    assert [human_count(value) for value in counts] == [
        *("0", "7", "950", "1.00k", "1.00k", "98.3k", "1.00M", "1.25M", "15.6T", "-")
    ]
    assert [human_seconds(value) for value in (0, 42.4, 3600, 86_399.4, 86_400, 273_600)] == [
        *("0:00:00", "0:00:42", "1:00:00", "23:59:59", "1d00h", "3d04h")
    ]
    assert [human_lr(value) for value in (3e-4, 1e-10, 0.0, 1.0)] == [
        *("3.0e-4", "1.0e-10", "0.0e0", "1.0e0")
    ]


def test_evaluation_shows_every_source() -> None:
    rows = evaluation_rows(
        5, 40_960, {"eval/loss": 2.0, "eval/loss/web": 2.5, "eval/loss/code": 1.5}
    )
    assert rows == ["eval step 5  tok 41.0k  loss 2.0000  ppl 7.4  code 1.5000  web 2.5000"]


def test_without_a_terminal_rows_are_plain_lines_at_the_interval() -> None:
    stream = io.StringIO()
    console = Console(total_steps=10, interval=4, start_step=1, stream=stream)
    console.header(["[model] nano"])
    for step in range(2, 11):
        loss = math.nan if step == 7 else 5.0
        console.step(step, {**VALUES, "loss": loss, "step_seconds": float(step)})
    console.warn("look")
    console.close()
    lines = stream.getvalue().splitlines()
    assert lines[0] == "[model] nano"
    # The first, every fourth, the broken one, and the last.
    assert [line.split()[1] for line in lines[1:-1]] == ["2/10", "4/10", "7/10", "8/10", "10/10"]
    assert lines[2].endswith("eta 0:00:18")  # mean of 2, 3, 4 seconds, 6 steps left
    assert lines[-1] == "warning: look"
    assert "\x1b" not in stream.getvalue()


def test_on_a_terminal_a_bar_is_drawn_and_rows_stay_whole() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    stream = Terminal()
    console = Console(total_steps=3, stream=stream)
    for step in (1, 2, 3):
        console.step(step, VALUES)
    console.close()
    console.header(["[bold] next: 'pretrain.py'"])
    text = stream.getvalue()
    assert "\x1b" in text
    assert step_row(2, VALUES, total_steps=3, seconds_left=0.5) in text
    assert text.endswith("[bold] next: 'pretrain.py'\n")
