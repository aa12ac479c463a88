"""Which hosts preflight calls bad, and what it measures on this one."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from launch.measure import Host, disk_rate, gpus, look_at_host, peers_of
from launch.preflight import find_faults, report


def host(name: str, **rates: float) -> Host:
    gpu = {"memory_mib": 143771.0, "used_mib": 4.0, "clock_mhz": 1980.0, "ecc_errors": math.nan}
    known = {"matmul TFLOP/s": 700.0, "network GB/s": 45.0, "disk GB/s": 2.0}
    return Host(
        name,
        versions={"torch": "2.11", "driver": "570"},
        memory_gib=900.0,
        gpus=[dict(gpu) for _ in range(8)],
        rates={**known, **{key.replace("_", " ", 1): value for key, value in rates.items()}},
    )


def healthy(count: int) -> list[Host]:
    return [host(f"n{number}") for number in range(count)]


def test_like_hosts_are_fine() -> None:
    assert find_faults(healthy(4)) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda h: h.versions.update(driver="550"), "driver 550, most hosts have 570"),
        (lambda h: h.gpus.pop(), "7 GPUs, most hosts have 8"),
        (lambda h: h.gpus[3].update(ecc_errors=2.0), "GPU 3: 2 ECC errors"),
        (lambda h: h.gpus[1].update(used_mib=9000.0), "GPU 1: 8.8 GiB taken by somebody else"),
        (lambda h: h.gpus[1].update(clock_mhz=1200.0), "GPU 1: limited to 1200 MHz of 1980"),
        (lambda h: h.rates.update({"matmul TFLOP/s": 300.0}), "matmul TFLOP/s 300"),
        (lambda h: h.rates.update({"network GB/s": 9.0}), "network GB/s 9, the median is 45"),
        (lambda h: h.rates.update({"disk GB/s": 0.0}), "cannot be written"),
        (lambda h: setattr(h, "skew_seconds", -4.0), "clock off by -4.0 s"),
    ],
)
def test_each_fault_names_its_host(
    change: object, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    hosts = healthy(5)
    change(hosts[2])  # type: ignore[operator]
    assert {name for name, _ in find_faults(hosts)} == {"n2"}
    assert report(hosts) == 1
    shown = capsys.readouterr().out
    assert words in shown
    assert "launch.exclude='n2'" in shown


@pytest.mark.parametrize("count", [2, 3, 4, 7, 8])
def test_every_host_has_peers_that_agree(count: int) -> None:
    rounds = list(zip(*(peers_of(rank, count) for rank in range(count)), strict=True))
    for pairs in rounds:
        for rank, peer in enumerate(pairs):
            assert peer < 0 or pairs[peer] == rank
    met = [{peer for peer in peers_of(rank, count) if peer >= 0} for rank in range(count)]
    assert all(met), "nobody is left out"
    if count % 2 == 0 and count > 2:
        assert all(len(peers) == 2 for peers in met)


def test_this_host_is_measured(tmp_path: Path) -> None:
    found = look_at_host(tmp_path, megabytes=2)
    assert found.rates["disk GB/s"] > 0
    assert found.rates["matmul TFLOP/s"] > 0
    assert found.memory_gib > 0
    assert found.versions["torch"] != "absent"
    assert report([found]) == 0
    assert list(tmp_path.iterdir()) == []
    assert disk_rate(tmp_path / "file" / "x", megabytes=1) > 0
    (tmp_path / "plain").touch()
    assert disk_rate(tmp_path / "plain", megabytes=1) == 0.0


def test_a_driver_without_a_value_says_nothing_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho '143771, 4, 1980, [N/A]'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    (gpu,) = gpus()
    assert gpu["clock_mhz"] == 1980.0
    assert math.isnan(gpu["ecc_errors"])
