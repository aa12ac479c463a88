"""`run.mode=plan` as a user starts it: quick, complete, and without GPU, groups or files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from megatron_ext.config.compose import compose
from megatron_ext.plan import main as planning
from megatron_ext.plan.hops import hop_bytes, hops_table, sent_by, source_tokens
from megatron_ext.plan.numbers import human

REPOSITORY = Path(__file__).resolve().parents[2]

# Runs the entry point, then reports what the process has touched and the CPU time it took.
PROBE = """
import sys, time
sys.path.insert(0, sys.argv.pop(1))
import pretrain

class Clock:
    first = None
    def write(self, text):
        Clock.first = Clock.first or ("FLOPs a token" in text and time.process_time()) or None
        return sys.__stdout__.write(text)
    def flush(self):
        sys.__stdout__.flush()

sys.stdout = Clock()
code = pretrain.main(sys.argv[1:])
import torch
print("PROBE", code, torch.cuda.is_initialized(), torch.distributed.is_initialized(),
      Clock.first, time.process_time(), file=sys.stderr)
sys.exit(code)
"""


def start(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", PROBE, str(REPOSITORY), "run.mode=plan", *words]
    return subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, timeout=300, check=False
    )


def test_the_whole_of_kimi_k3_is_planned_for_4096_ranks_in_seconds(tmp_path: Path) -> None:
    done = start(
        *("model=k3", "parallel.tensor=8", "parallel.pipeline=8", "parallel.expert=64"),
        "plan.world_size=4096",
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    probe = done.stderr.splitlines()[-1].split()
    assert probe[:4] == ["PROBE", "0", "False", "False"]
    # 20 s and 60 s are promised on a machine of one's own; CPU time, since others may share this
    layout_and_counts, everything = float(probe[4]), float(probe[5])
    assert layout_and_counts < 20
    assert everything < 60
    assert list(tmp_path.iterdir()) == []
    text = done.stdout
    for line in (
        "Plan of k3 on 4,096 ranks",
        "  stage 7   layers 82-92   Ke Me Ke Ke Ke Me Ke Ke Ke Me Me head",
        "data              64  0 8 16 ... 504",
        "  KDA                                   30,618,086,496  69 x 443.7 M",
        "  gated MLA                              5,572,706,304  24 x 232.2 M",
        "  dense feed-forward                       726,663,168  1 x 726.7 M",
        "  total                              2,779,484,379,232  2.7795 T",
        "  active, without input embedding      104,189,515,872  104.19 B",
        "experts: 92 layers of 896, 16 a token; 14 on each of 64 expert parallel ranks, 8 copies",
        "  63            882-895       63 127 191 255 319 383 447 511",
        "  tokens a step           67,108,864  8,192 sequences of 8,192",
    ):
        assert line in text
    assert max(len(line) for line in text.splitlines()) <= 120
    assert "Warning" not in done.stderr


def test_the_default_is_the_fewest_ranks_of_the_layout(capsys: pytest.CaptureFixture[str]) -> None:
    layout = ["parallel.tensor=2", "parallel.pipeline=2", "parallel.virtual_pipeline=2"]
    assert planning.plan(compose(["run.mode=plan", "model=nano", *layout])) == 0
    text = capsys.readouterr().out
    assert "on 4 ranks" in text
    assert "stage 1.1" in text
    assert "idle in the pipeline" in text


def test_bytes_of_every_hop_are_told_for_each_way_to_send_sources() -> None:
    k3 = ["model=k3", "residual=block", "run.precision=bf16", "parallel.pipeline=8"]
    source = 8192 * 7168 * 2
    assert hop_bytes(compose(k3)) == [slots * source for slots in (2, 3, 4, 5, 6, 7, 8)]
    text = hops_table(compose(k3))
    assert "one source            117.4 MB  8,192 tokens x 7,168 bfloat16" in text
    assert "plain residual        822.1 MB  7 hops of 1 source\n" in text
    assert "all sources            4.11 GB  7 hops of 2 3 4 5 6 7 8 sources" in text
    assert "cached" not in text
    interleaved = [*k3, "parallel.virtual_pipeline=4"]
    text = hops_table(compose(interleaved))
    assert "all sources           32.77 GB  31 hops of 9 sources\n" in text
    assert "cached sources        10.92 GB  31 hops of 3 sources  in use" in text
    text = hops_table(compose([*interleaved, "residual.cache_sources=false"]))
    assert "31 hops of 9 sources  in use" in text
    assert hops_table(compose(["model=k3", "residual=block"])) == ""
    # An inner stage sends sources onward and gradients back.
    assert sent_by(compose(k3), stage=1, micro_batches=1) == [2 * source, 3 * source]


def test_a_hop_has_the_tokens_of_one_rank_with_their_padding() -> None:
    words = ["data=sample", "data.sequence_length=27", "train.batch_tokens=216"]
    words += ["train.micro_batch_size=2", "parallel.pipeline=2"]
    assert source_tokens(compose(words)) == 54
    split = [*words, "parallel.context=2", "parallel.tensor=2"]
    assert source_tokens(compose(split)) == 2 * 28 // 4
    assert source_tokens(compose([*split, "data.isolate_documents=true"])) == 56 // 4
    whole = compose([*split, "parallel.sequence=false", "residual=block", "residual.fp32=true"])
    assert source_tokens(whole) == 2 * 28 // 2
    assert hop_bytes(whole) == [28 * 128 * 4 * 2]


def test_a_world_size_that_does_not_fit_is_a_configuration_error(tmp_path: Path) -> None:
    done = start("model=nano", "parallel.tensor=2", "plan.world_size=3", cwd=tmp_path)
    assert done.returncode == 20
    assert "plan.world_size=3" in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0, "", "0"),
        (999, "", "999"),
        (443_740_384, "", "443.7 M"),
        (2.7796e12, "", "2.78 T"),
        (250.4e9, "FLOP", "250.4 GFLOP"),
        (1.68e19, "FLOP", "16.8 EFLOP"),
        (12, "FLOP", "12 FLOP"),
    ],
)
def test_numbers_read_with_four_digits_and_their_unit(value: float, unit: str, text: str) -> None:
    assert human(value, unit=unit) == text
