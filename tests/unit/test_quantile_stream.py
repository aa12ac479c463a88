"""The balancer of streams: the rule of the formula, in any cut into calls and shards."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ext.config.schema import BinPlacement
from megatron_ext.ops.quantile import Bins, QuantileBalancer, reference
from tests.support.threads import run_ranks

ROOT = Path(__file__).parents[2]
BINS, TOP_K = 24, 3


def stream(items: int, *, seed: int = 0, span: float = 1.0) -> Tensor:
    """Scores float32 [T, E] of bins that differ in popularity."""
    generator = torch.Generator().manual_seed(seed)
    popularity = torch.randn(BINS, generator=torch.Generator().manual_seed(99))
    return span * torch.sigmoid(torch.randn(items, BINS, generator=generator) + popularity)


def positions(scores: Tensor) -> Tensor:
    return torch.arange(len(scores))


@pytest.mark.parametrize("span", [1.0, 40.0])
@pytest.mark.parametrize("placement", ["centred", "uniform"])
def test_assignment_and_bias_are_those_of_the_formula(placement: str, span: float) -> None:
    balancer = QuantileBalancer(BINS, top_k=TOP_K, placement=placement, span=span, resolution=4096)
    widest = 0.0
    for step in range(3):
        scores = stream(200, seed=step, span=span)
        bias = balancer.bias.clone()
        taken = balancer.assign(scores)
        load = balancer.update()
        expected, _ = reference.top_k(scores + bias, TOP_K)
        assert torch.equal(torch.zeros_like(expected).scatter_(1, taken, True), expected)
        assert torch.equal(load.counts, expected.sum(0))
        bins = Bins(4096, BinPlacement[placement], span)
        widest = float(bins.edges(bias).diff().max()) if placement == "uniform" else 0.01 * span
        error = balancer.bias.double() - reference.next_bias(scores, bias, TOP_K)
        assert error.abs().max() < 2 * widest  # a bin, and that of the mean


@pytest.mark.filterwarnings("error")  # torch warns of arrays that must not be written
def test_numpy_in_numpy_out_with_the_numbers_of_torch() -> None:
    one, two = QuantileBalancer(BINS, top_k=TOP_K), QuantileBalancer(BINS, top_k=TOP_K)
    for step in range(3):
        scores = stream(100, seed=step)
        tensor = one.assign(scores)
        array = scores.numpy()[::-1].copy()[::-1]  # strides that torch does not take
        if step:
            array = scores.numpy()
            array.flags.writeable = False
        numpy = two.assign(array)
        assert isinstance(numpy, np.ndarray)
        assert isinstance(tensor, Tensor)
        assert numpy.dtype == np.int64
        assert (numpy == tensor.numpy()).all()
        load, other = one.update(), two.update()
        assert isinstance(load.counts, Tensor)
        assert isinstance(other.counts, np.ndarray)
        assert (load.counts.numpy() == other.counts).all()
    assert torch.equal(one.bias, two.bias)
    assert one.assign(stream(5).half()).shape == (5, TOP_K)


def test_the_load_of_a_skewed_stream_becomes_level() -> None:
    balancer = QuantileBalancer(BINS, top_k=TOP_K)
    loads = []
    for step in range(12):
        balancer.assign(stream(4000, seed=step))
        loads.append(balancer.update())
    assert loads[0].max_violation > 1
    # Random draws: the floor is about the mean of the largest of 24 counts.
    assert max(load.max_violation for load in loads[3:]) < 2 * loads[0].floor
    assert loads[0].floor == pytest.approx((2 * np.log(24) / 500) ** 0.5)


def test_calls_and_shards_change_no_bit() -> None:
    scores = stream(500)
    scores[100:200] = 0.5  # ties
    places = positions(scores)
    one = QuantileBalancer(BINS, top_k=TOP_K)
    taken = one.assign(scores, positions=places)
    load = one.update()

    def shard(group: dist.ProcessGroup) -> tuple[list[Tensor], Tensor, Tensor]:
        mine = QuantileBalancer(BINS, top_k=TOP_K, reduce=lambda x: dist.all_reduce(x, group=group))
        # Shards of different sizes; the last has no item.
        parts = [slice(0, 7), slice(7, 300)], [slice(300, 500)], []
        taken = [mine.assign(scores[p], positions=places[p]) for p in parts[group.rank()]]
        return taken, mine.update().counts, mine.bias

    shards = run_ranks(3, shard)
    assert torch.equal(torch.cat([part for parts, _, _ in shards for part in parts]), taken)
    for _, counts, bias in shards:
        assert torch.equal(counts, load.counts)
        assert torch.equal(bias, one.bias)


def test_ties_favour_no_bin_even_one_item_a_call() -> None:
    balancer = QuantileBalancer(8, top_k=3)
    for _ in range(16):
        balancer.assign(torch.zeros(1, 8))
    assert balancer.update().counts.tolist() == [6] * 8


def test_a_saved_state_goes_on_as_if_nothing_had_happened() -> None:
    one = QuantileBalancer(BINS, top_k=TOP_K)
    one.assign(stream(100, seed=1))
    one.update()
    one.assign(stream(100, seed=2))
    file = io.BytesIO()
    torch.save(one.state_dict(), file)
    file.seek(0)
    two = QuantileBalancer(BINS, top_k=TOP_K)
    two.load_state_dict(torch.load(file, weights_only=True))
    for balancer in (one, two):
        balancer.assign(stream(100, seed=3))
        balancer.update()
    assert torch.equal(one.bias, two.bias)
    with pytest.raises(ValueError, match="top_k: given 3, allowed 2"):
        QuantileBalancer(BINS, top_k=2).load_state_dict(one.state_dict())


def test_looking_changes_nothing_and_no_items_leave_the_bias() -> None:
    balancer = QuantileBalancer(BINS, top_k=TOP_K)
    balancer.assign(stream(100))
    balancer.update()
    before = balancer.state_dict()
    balancer.assign(stream(50, seed=5), count=False)
    assert balancer.assign(stream(0)).shape == (0, TOP_K)
    assert torch.equal(before["statistics"], balancer.state_dict()["statistics"])
    load = balancer.update()
    assert torch.equal(before["bias"], balancer.bias)
    assert (load.items, load.max_violation, load.floor) == (0, 0.0, float("inf"))


@pytest.mark.parametrize(
    ("scores", "message"),
    [
        (torch.zeros(4, BINS + 1), r"allowed floating \[T, 24\]"),
        (torch.zeros(4, BINS, dtype=torch.int64), r"allowed floating \[T, 24\]"),
        (torch.full((4, BINS), torch.nan), "differ by nan"),
        (torch.eye(BINS) * torch.inf, "differ by"),
        (3 * torch.eye(BINS), "differ by 3, allowed up to span=1"),
    ],
)
def test_scores_that_do_not_fit_are_refused_and_not_counted(scores: Tensor, message: str) -> None:
    balancer = QuantileBalancer(BINS)
    with pytest.raises(ValueError, match=message):
        balancer.assign(scores)
    assert balancer.update().items == 0


@pytest.mark.parametrize(
    "wrong", [{"top_k": 0}, {"top_k": BINS}, {"span": 0.0}, {"placement": "x"}, {"resolution": 3}]
)
def test_numbers_out_of_range_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(
        ValueError, match=re.escape(next(iter(wrong)).replace("resolution", "number"))
    ):
        QuantileBalancer(BINS, **wrong)


def test_the_example_levels_a_skewed_stream_without_megatron_core() -> None:
    script = (
        "import runpy, sys; runpy.run_path(sys.argv.pop(1), run_name='__main__');"
        "assert not {'megatron', 'hydra', 'omegaconf'} & set(sys.modules)"
    )
    words = ["--bins", "1024", "--items", "2048", "--batches", "8"]
    done = subprocess.run(
        [sys.executable, "-c", script, str(ROOT / "examples" / "balance_stream.py"), *words],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    table = {
        cells[0]: [float(cell.rstrip("%")) for cell in cells[1:]]
        for line in done.stdout.splitlines()
        if len(cells := line.strip("| ").split(" | ")) == 5 and "." in cells[1]
    }
    largest, _, empty, lost = zip(
        *(table[name] for name in ("plain top-1", "quantile", "round-robin")), strict=True
    )
    assert largest[1] < largest[0] / 20
    assert empty[1] < 1 < 50 < empty[0]
    assert lost[0] == 0 < lost[1] < lost[2] / 4


def test_examples_of_the_page_run_and_print_what_it_says(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = (ROOT / "docs" / "stream_balancing.md").read_text()
    pairs = re.findall(r"```python\n(.*?)```\n+(?:```text\n(.*?)```)?", text, re.DOTALL)
    assert len(pairs) >= 3
    scope: dict[str, object] = {}
    for code, printed in pairs:
        exec(code, scope)
        assert capsys.readouterr().out.strip() == printed.strip()
