"""What docs/add_a_layer.md shows is what happens."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "add_a_layer.md"


def test_the_example_of_the_page_is_a_causal_layer_that_trains(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = PAGE.read_text()
    scope: dict[str, object] = {}
    pairs = re.findall(r"```python\n(.*?)```\n+(?:```text\n(.*?)```)?", text, re.DOTALL)
    assert len(pairs) == 2
    for code, printed in pairs:
        exec(code, scope)
        assert capsys.readouterr().out.strip() == printed.strip()
