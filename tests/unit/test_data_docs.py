"""Every command and program on the data page runs as it stands there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_data_page_runs(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "data.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```(bash|python)\n(.*?)```", page, flags=re.DOTALL)
    assert {kind for kind, _ in blocks} == {"bash", "python"}
    for name in ("data", "docs"):
        (tmp_path / name).symlink_to(ROOT / name)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    for kind, block in blocks:
        program = ["bash", "-e", "-c"] if kind == "bash" else [sys.executable, "-c"]
        done = subprocess.run(
            [*program, block],
            cwd=tmp_path,
            env={**os.environ, "PATH": path},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
    assert (tmp_path / "prepared" / "docs" / "manifest.json").is_file()
