"""The image keeps its torch, Triton, Transformer Engine and Apex, by what the files say."""

from __future__ import annotations

import importlib.util
import re
import shlex
from fnmatch import fnmatch
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCKER = ROOT / "docker"
KEPT = {"torch", "triton", "transformer-engine", "apex"}


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("packages", DOCKER / "packages.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


packages = load()
LOCK = packages.pins((ROOT / "requirements.lock").read_text())
CONSTRAINTS = packages.pins((DOCKER / "constraints.txt").read_text())
TEXT = (DOCKER / "Dockerfile").read_text()
# One instruction an entry: continued lines joined, comments left out.
LINES = [
    line
    for line in re.sub(r"\\\n", " ", re.sub(r"^#.*\n", "", TEXT, flags=re.M)).splitlines()
    if line.strip()
]


def test_no_step_would_install_what_the_image_brings() -> None:
    assert set(CONSTRAINTS) == KEPT
    assert {"torch", "triton"} <= set(LOCK), "else this test would show nothing"
    # Also where the image's list could not be read, or names them otherwise.
    for installed in ([], ["numpy"], ["Torch", "apex"]):
        lines = packages.missing(LOCK, installed, CONSTRAINTS)
        names = {line.split("==")[0] for line in lines}
        assert not names & KEPT
        assert not [name for name in names if name.startswith(("nvidia-", "cuda-"))]
        assert not names & {packages.plain(name) for name in installed}
        assert f"megatron-core=={LOCK['megatron-core']}" in lines
        assert not names & {"pytest", "ruff", "mypy"}
    for line in LINES:
        for command in re.split(r"&&|\|\|", line):
            words = shlex.split(command)
            if "install" in words and "pip" in words:
                assert "--no-deps" in words, command
                given = {packages.plain(re.split(r"[=<>\[]", word)[0]) for word in words}
                assert not given & KEPT, command


def test_the_check_names_every_difference() -> None:
    image = {"torch": "2.11.0a0+abc", "triton": "3.6.0", "apex": "0.1", "numpy": "1"}
    assert packages.differences(CONSTRAINTS, {**image, "transformer-engine": "2.12.0+x"}) == []
    assert packages.differences(CONSTRAINTS, {**image, "triton": "3.7.1"}) == [
        "triton: 3.6.0 expected, got 3.7.1",
        "transformer-engine: 2.12.0 expected, not there",
    ]
    checks = [number for number, line in enumerate(LINES) if "packages.py check" in line]
    installs = [number for number, line in enumerate(LINES) if "pip install" in line]
    assert set(installs) <= set(checks)
    for line in (LINES[number] for number in installs):
        assert line.rindex("pip install") < line.rindex("packages.py check")


def test_the_commands_work_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert packages.main(["missing", str(ROOT / "requirements.lock")]) == 0
    assert capsys.readouterr().out.strip() == "", "this environment lacks nothing of the lock"
    assert packages.main(["check", str(DOCKER / "constraints.txt")]) == 1
    assert "apex: 0.1 expected, not there" in capsys.readouterr().err


def test_the_image_is_pinned_and_its_user_is_not_root() -> None:
    froms = [line.split()[1] for line in LINES if line.startswith("FROM ")]
    (image,) = froms
    assert re.fullmatch(r"nvcr\.io/nvidia/pytorch:\d\d\.\d\d-py3", image)
    assert f"# Image: {image}\n" in (DOCKER / "constraints.txt").read_text()
    users = [number for number, line in enumerate(LINES) if line.startswith("USER ")]
    assert LINES[users[-1]] != "USER root"
    assert all(not line.startswith(("RUN ", "COPY ")) for line in LINES[users[-1] :])
    assert not [line for line in LINES if line.startswith("ADD ")]
    assert "sudo" not in TEXT


def test_what_is_copied_exists_and_is_sent_to_the_builder() -> None:
    rules = (DOCKER / "Dockerfile.dockerignore").read_text().splitlines()
    sent = {rule.removeprefix("!") for rule in rules if rule.startswith("!")}
    assert "*" in rules, "nothing else is: no .git, no runs, no environment"
    for line in LINES:
        if line.startswith("COPY "):
            for source in line.split()[1:-1]:
                assert (ROOT / source).exists(), source
                assert any(fnmatch(source.split("/")[0], rule) for rule in sent), source
