"""The project's own files: the environment script, the lock, the licence."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]


def script(path: Path, *lines: str) -> None:
    path.write_text("#!/bin/sh\n" + "\n".join(lines) + "\n", encoding="utf-8")
    path.chmod(0o755)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A copy of the environment script, its lock, and a PATH of our own in ``bin``."""
    (tmp_path / ".ci").mkdir()
    (tmp_path / "bin").mkdir()
    shutil.copy(REPOSITORY / ".ci" / "environment", tmp_path / ".ci")
    (tmp_path / "requirements.lock").write_text("a==1\n", encoding="utf-8")
    for tool in ("bash", "dirname", "cmp", "rm", "cp", "env", "mkdir", "cat"):
        found = shutil.which(tool)
        assert found is not None
        (tmp_path / "bin" / tool).symlink_to(found)
    # What an environment's python does here: it runs, and its pip is content with everything.
    script(
        tmp_path / "bin" / "good",
        'case "$*" in *"-m venv"*) mkdir -p "$3/bin"; cp "$0" "$3/bin/python";;',
        '  *"install"*) echo "$@" >> installs; test ! -e offline;; esac',
    )
    return tmp_path


def build(project: Path, *, python: str = "") -> subprocess.CompletedProcess[str]:
    environment = {"PATH": str(project / "bin"), "HOME": str(project / "home")}
    command = [str(project / ".ci" / "environment"), ".venv", python]
    return subprocess.run(
        command, cwd=project, env=environment, capture_output=True, text=True, check=False
    )


def installs(project: Path) -> int:
    file = project / "installs"
    return len(file.read_text(encoding="utf-8").splitlines()) if file.exists() else 0


def test_without_a_python_it_says_what_to_install(project: Path) -> None:
    done = build(project)
    assert done.returncode == 1
    assert "No Python 3.12 or 3.13 with venv was found" in done.stderr
    assert "apt install python3.12" in done.stderr
    assert not (project / ".venv").exists()


def test_a_python_that_was_asked_for_and_fails_is_an_error(project: Path) -> None:
    script(project / "bin" / "bad", "exit 127")
    shutil.copy(project / "bin" / "good", project / "bin" / "python3.12")
    done = build(project, python="bad")
    assert done.returncode == 1
    assert "PYTHON=bad cannot be used" in done.stderr


def test_a_failing_shim_is_passed_over(project: Path) -> None:
    script(project / "bin" / "python3.12", "exit 127")
    pyenv = project / "home" / ".pyenv" / "versions" / "3.12.9" / "bin"
    pyenv.mkdir(parents=True)
    shutil.copy(project / "bin" / "good", pyenv / "python")
    done = build(project)
    assert done.returncode == 0, done.stderr
    assert (project / ".venv" / "bin" / "python").exists()


def test_it_is_built_once_and_again_when_the_lock_changes_or_a_build_broke_off(
    project: Path,
) -> None:
    shutil.copy(project / "bin" / "good", project / "bin" / "python3.13")
    (project / "offline").touch()
    assert build(project).returncode != 0
    assert installs(project) == 1
    (project / "offline").unlink()
    assert build(project).returncode == 0
    assert installs(project) == 3  # the lock, then the project
    done = build(project)
    assert (done.returncode, done.stdout, installs(project)) == (0, "", 3)
    (project / "requirements.lock").write_text("a==2\n", encoding="utf-8")
    assert build(project).returncode == 0
    assert installs(project) == 5


@pytest.fixture
def audit(tmp_path: Path) -> Path:
    """A copy of the audit, with a python that pretends to be pip-audit as `endings` tells."""
    (tmp_path / ".ci").mkdir()
    (tmp_path / "bin").mkdir()
    shutil.copy(REPOSITORY / ".ci" / "audit", tmp_path / ".ci")
    (tmp_path / "requirements.lock").write_text("a==1\nb==2\n", encoding="utf-8")
    script(
        tmp_path / "bin" / "python",
        'case "$*" in *"-m venv"*) mkdir -p "$3/bin"; cp "$0" "$3/bin/python";;',
        f"  *pip_audit*) for last; do :; done; cd {tmp_path}",
        '    if test -e found; then cp found "$last"; exit 1; fi',
        "    if test -e silent; then echo timed out >&2; exit 1; fi;;",
        f"  *install*) if test -e {tmp_path}/offline; then echo no route >&2; exit 1; fi;;",
        "esac",
    )
    return tmp_path


@pytest.mark.parametrize(
    ("happens", "code", "words"),
    [
        ("", 0, "no known vulnerability in 2 packages"),
        ("found", 1, "a 1 has a hole"),
        ("offline", 3, "not audited: pip-audit cannot be installed\nno route"),
        ("silent", 3, "not audited: no answer about vulnerabilities\ntimed out"),
    ],
)
def test_an_audit_that_did_not_happen_is_no_clean_one(
    happens: str, code: int, words: str, audit: Path
) -> None:
    if happens:
        (audit / happens).write_text("a 1 has a hole\n")
    done = subprocess.run(
        [str(audit / ".ci" / "audit"), str(audit / "bin" / "python")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code, done.stderr
    assert words in done.stdout + done.stderr


def test_the_lock_has_versions_only_and_every_dependency() -> None:
    lines = (REPOSITORY / "requirements.lock").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if not line.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.]+", pin) for pin in pins)

    def plain(name: str) -> str:
        return re.sub(r"[-_.]+", "-", name).lower()

    locked = {plain(pin.split("==")[0]) for pin in pins}
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *extras["dev"], *extras["dashboard"]]
    names = {plain(re.split(r"[\s<>=!\[;]", text)[0]) for text in wanted}
    assert names <= locked, names - locked


def test_the_licence_is_apache_2() -> None:
    text = (REPOSITORY / "LICENSE").read_text(encoding="utf-8")
    assert "Apache License" in text
    assert "END OF TERMS AND CONDITIONS" in text


def test_scripts_can_be_run() -> None:
    for name in ("run", "environment", "audit"):
        assert os.access(REPOSITORY / ".ci" / name, os.X_OK)


def test_no_folder_of_tests_is_left_out(pytestconfig: pytest.Config) -> None:
    # By default pytest passes over folders named `dist`, `build` and others without a word.
    skipped = pytestconfig.getini("norecursedirs")
    for file in (REPOSITORY / "tests").rglob("test_*.py"):
        parts = file.relative_to(REPOSITORY).parent.parts
        assert not any(fnmatch(part, pattern) for part in parts for pattern in skipped), file


def test_every_python_file_is_linted() -> None:
    """ruff passes over folders of some names unless told otherwise, `dist` among them."""
    ruff = [sys.executable, "-m", "ruff", "check", "--show-files", "."]
    git = ["git", "ls-files", "*.py"]
    linted, ours = (
        subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout
        for command in (ruff, git)
    )
    seen = {str(Path(line).relative_to(REPOSITORY)) for line in linted.splitlines()}
    assert set(ours.splitlines()) <= seen
