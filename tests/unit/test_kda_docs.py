"""What docs/kda.md shows is what happens."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "kda.md"


def test_examples_of_the_page_run_and_print_what_it_says(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = PAGE.read_text()
    scope: dict[str, object] = {}
    pairs = re.findall(r"```python\n(.*?)```\n+(?:```text\n(.*?)```)?", text, re.DOTALL)
    assert len(pairs) >= 2
    for code, printed in pairs:
        exec(code, scope)
        assert capsys.readouterr().out.strip() == printed.strip()
