"""Every `python pretrain.py` and `torchrun` line of the README and of the pages runs, shortened.

In a ```bash block each line is a command that is run here, the lines of a page one after the other
in one folder. A word after `bash` says why a block is not, or not like that:

- `gpu`: needs a GPU
- `make`: builds an environment; `.ci/run` does what it does
- `tests`: part of the suite itself
- `login`: needs an account
- `fails`: must end with exit code 20 and print the ```text block that follows
"""

from __future__ import annotations

import os
import re
import shlex
import socket
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.support.runs import ROOT, Launcher

REASONS = ("gpu", "make", "tests", "login", "fails")
# These have tests of their own: test_data_docs, test_kda_docs, test_plug_in, test_quantile_stream.
ELSEWHERE = ("data.md", "kda.md", "plug_in.md", "stream_balancing.md")
PAGES = [
    ROOT / "README.md",
    *sorted(page for page in (ROOT / "docs").glob("*.md") if page.name not in ELSEWHERE),
]
BLOCK = re.compile(r"^```(\w*) ?(\w*)\n(.*?)^```(?:\n+```text\n(.*?)^```)?", re.M | re.S)
SHORT = [
    "run.device=cpu",
    "data.sequence_length=64",
    "train.batch_tokens=512",
    "optim.warmup_tokens=0",
    "evaluate.tokens=128",
    "generate.max_new_tokens=2",
]


def blocks(page: Path) -> list[tuple[str, str, list[str], str]]:
    """Language, reason, lines, and the text block that follows, of each fenced block."""
    text = page.read_text(encoding="utf-8")
    return [
        (language, reason, body.replace("\\\n", " ").splitlines(), printed)
        for language, reason, body, printed in BLOCK.findall(text)
    ]


def runnable(page: Path) -> bool:
    return any(
        language == "bash" and reason in ("", "fails") for language, reason, *_ in blocks(page)
    )


class Shell:
    """Runs the lines of one page in an empty folder that looks like the repository."""

    def __init__(self, launcher: Launcher, folder: Path) -> None:
        self._launcher, self._folder = launcher, folder
        self._steps: Counter[str] = Counter()
        for name in ("pretrain.py", "data", "docs", "examples", "launch"):
            (folder / name).symlink_to(ROOT / name)

    def __call__(self, line: str) -> None:
        begin = time.monotonic()
        self._run(line)
        # Promised for the largest model in every layout; 10 to 15 s on a machine of one's own.
        if "run.mode=plan model=k3 " in line:
            assert time.monotonic() - begin < 60, line

    def _run(self, line: str) -> None:
        words = shlex.split(line)
        if words[:2] == ["python", "pretrain.py"]:
            self._pretrain(words[2:], ranks=1)
        elif words[:3] == ["torchrun", "--standalone", "--nproc-per-node"]:
            assert words[4] == "pretrain.py"
            self._pretrain(words[5:], ranks=int(words[3]))
        elif words[:2] == ["bash", "launch/local.sh"]:
            self._process([*words, *self._short(words)])
        else:
            assert words[0] == "python", f"{line}: neither a program of ours nor marked as not run"
            self._process([sys.executable, *words[1:]])

    def _process(self, command: list[str]) -> None:
        done = subprocess.run(
            command,
            cwd=self._folder,
            env=os.environ | {"PYTHON": sys.executable},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr

    def _short(self, words: list[str]) -> list[str]:
        # One step more each time, so that no command finds its run finished by the one before.
        run = " ".join(word for word in words if word.startswith(("run.dir=", "run.name=")))
        self._steps[run] += 1
        return [*SHORT, f"train.steps={self._steps[run]}"]

    def _pretrain(self, words: list[str], *, ranks: int) -> None:
        if "run.mode=plan" not in words:
            words = [*words, *self._short(words)]
        code, text = self.run(words, ranks=ranks)
        assert code == 0, f"{shlex.join(words)}\n{text}"

    def run(self, words: list[str], *, ranks: int) -> tuple[int, str]:
        """What torchrun does, without its own seconds: ranks with the variables that it sets."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        runs = []
        for rank in range(ranks):
            env = {
                "RANK": rank,
                "LOCAL_RANK": rank,
                "WORLD_SIZE": ranks,
                "LOCAL_WORLD_SIZE": ranks,
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
            }
            runs.append(
                self._launcher.start(
                    words,
                    output=self._folder / f"rank{rank}.out",
                    cwd=self._folder,
                    env={key: str(value) for key, value in env.items()} if ranks > 1 else {},
                )
            )
        codes = [run.wait() for run in runs]
        return max(codes, key=abs), "\n".join(run.text for run in runs)


@pytest.mark.parametrize("page", filter(runnable, PAGES), ids=lambda page: page.name)
def test_the_commands_of_the_page_run(page: Path, launcher: Launcher, tmp_path: Path) -> None:
    shell = Shell(launcher, tmp_path)
    for language, reason, lines, printed in blocks(page):
        if language == "bash" and reason == "":
            for line in lines:
                shell(line)
        elif language == "bash" and reason == "fails":
            (line,) = lines
            code, text = shell.run(shlex.split(line)[2:], ranks=1)
            assert (code, text.strip()) == (20, printed.strip())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_command_is_run_or_says_why_not(page: Path) -> None:
    for language, reason, lines, _ in blocks(page):
        if language == "bash":
            assert reason in ("", *REASONS), f"```bash {reason}: the reasons are {REASONS}"
        else:
            hidden = [line for line in lines if re.match(r"(python pretrain|torchrun|make) ", line)]
            assert language == "text" or hidden == [], f"put into a ```bash block: {hidden}"


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", *(ROOT / "docs").glob("*.md")], ids=os.path.basename
)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_the_index_lists_every_page() -> None:
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    missing = [page.name for page in (ROOT / "docs").glob("*.md") if f"]({page.name})" not in index]
    assert missing == ["index.md"]
