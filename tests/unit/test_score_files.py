"""What `run.mode=score` reads is checked whole, what it writes is what was asked for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_ext.data.batches import part_of_rank
from megatron_ext.data.score_files import Rows, read_routing, read_rows
from megatron_ext.errors import CheckpointError
from megatron_ext.train.score import check_finite, to_json
from megatron_ext.train.score_pass import Scores

ROWS = Rows([[1, 2, 3], [4, 5]], [[2, 1], [2]])


def file(folder: Path, content: Any) -> Path:
    path = folder / "in.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("{", ["cannot be read as JSON"]),
        ("[1]", ["must hold an object, got list"]),
        (
            {"token": [[1]]},
            ["no such fields: ['token'] (allowed tokens, ", "tokens: must be a list"],
        ),
        ({"tokens": []}, ["tokens: must be a list of rows of token ids, at least one"]),
        (
            {"tokens": [[], "a", [1, 9, 1.5], [True]], "documents": [[1], [1], [3], [1]]},
            [
                "tokens[0]: must be a list of token ids, at least one",
                "tokens[1]: must be a list of token ids",
                "tokens[2][1]=9: must be a whole number from 0 to 7, as in the vocabulary (2 such",
                "tokens[3][0]=true: must be a whole number",
            ],
        ),
        ({"tokens": [[1]], "documents": [[1], [1]]}, ["documents: must be a list of 1, the len"]),
        (
            {"tokens": [[1, 2], [3, 4], [5, 6], [7]], "documents": [[1, 2], [2, 0], 2, [1]]},
            [
                "documents[0]=[1, 2]: must be whole numbers above 0 that add up to the 2 tokens",
                "documents[1]=[2, 0]: must be whole numbers above 0",
                "documents[2]=2: must be",
            ],
        ),
    ],
)
def test_everything_wrong_with_rows_is_told(
    tmp_path: Path, content: Any, expected: list[str]
) -> None:
    problems: list[str] = []
    assert read_rows(file(tmp_path, content), vocab_size=8, problems=problems) is None
    assert len(problems) == len(expected)
    for problem, part in zip(problems, expected, strict=True):
        assert part in problem


def test_rows_without_documents_are_one_each(tmp_path: Path) -> None:
    problems: list[str] = []
    rows = read_rows(file(tmp_path, {"tokens": [[0, 7], [3]]}), vocab_size=8, problems=problems)
    assert (rows, problems) == (Rows([[0, 7], [3]], [[2], [1]]), [])


def routing(folder: Path, content: Any, *, top_k: int | None = 2) -> tuple[Any, list[str]]:
    problems: list[str] = []
    found = read_routing(
        file(folder, content), ROWS, layers=[1, 2], num_experts=4, top_k=top_k, problems=problems
    )
    return found, problems


GOOD = {"1": [[0, 1]] * 3, "2": [[3, 0]] * 3}
SHORT = {"1": [[0, 1]] * 2, "2": [[3, 0]] * 2}


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({"experts": [GOOD]}, ["experts: must be a list of 2, one entry for each row"]),
        (
            {"tokens": [[1]], "documents": [[1]], "experts": [GOOD, SHORT]},
            ["tokens: not those of score.tokens", "documents: not those of score.tokens"],
        ),
        (
            {"experts": [GOOD | {"3": []}, {"1": [[0, 1]] * 3, "2": [[0, 1], [0, 4]]}]},
            [
                "experts[0]: has the layers ['1', '2', '3'], must have exactly ['1', '2']",
                'experts[1]["1"]: must be a list of 2, the experts of each token',
                'experts[1]["2"][1]=[0, 4]: must be 2 different experts from 0 to 3',
            ],
        ),
        (
            {"experts": [GOOD, {"1": [[1, 1]] * 2, "2": [[0]] * 2}]},
            ['"1"][0]=[1, 1]', '"2"][0]=[0]'],
        ),
    ],
)
def test_everything_wrong_with_routing_is_told(
    tmp_path: Path, content: Any, expected: list[str]
) -> None:
    found, problems = routing(tmp_path, content)
    assert found == {}
    assert len(problems) == len(expected)
    for problem, part in zip(problems, expected, strict=True):
        assert part in problem


def test_routing_is_read_in_the_order_of_the_rows(tmp_path: Path) -> None:
    found, problems = routing(tmp_path, {"experts": [GOOD, SHORT], "tokens": ROWS.tokens})
    assert problems == []
    assert found[2].tolist() == [[3, 0]] * 5
    some = {"1": [[0, 1, 2], [], [3]], "2": [[1]] * 3}
    found, problems = routing(tmp_path, {"experts": [some, SHORT]}, top_k=None)
    assert problems == []
    assert found[1].tolist() == [[0, 1, 2], [-1, -1, -1], [3, -1, -1], [0, 1, -1], [0, 1, -1]]


def test_what_is_written_is_valid_input_and_has_null_for_what_is_no_number(tmp_path: Path) -> None:
    nan, inf = torch.nan, torch.inf
    taken = torch.zeros(5, 4, dtype=torch.bool)
    taken[[0, 0, 2, 3, 3, 3, 4], [3, 1, 0, 0, 1, 2, 2]] = True  # any number, also none
    scores = Scores(
        torch.tensor([nan, -1.0, nan, nan, -2.5]).double(),
        {1: taken, 2: ~taken},
        {1: torch.tensor([0.5, inf, 0, 1, 2]).double(), 2: torch.ones(5).double()},
        0,
    )
    content = to_json(scores, ROWS)
    assert content["log_probabilities"] == [[None, -1.0, None], [None, -2.5]]
    assert content["experts"][0]["1"] == [[1, 3], [], [0]]
    assert content["experts"][1]["1"] == [[0, 1, 2], [2]]
    assert content["margins"][0]["1"] == [0.5, None, 0.0]
    assert json.loads(json.dumps(content, allow_nan=False)) == content
    found, problems = routing(tmp_path, content, top_k=None)
    assert problems == []
    assert np.sort(found[2][1]).tolist() == [0, 1, 2, 3]
    assert read_rows(file(tmp_path, content), vocab_size=8, problems=problems) == ROWS


def test_a_number_that_is_not_finite_is_an_error_that_names_its_place() -> None:
    values = torch.tensor([torch.nan, -1.0, torch.nan, torch.nan, -torch.inf])
    with pytest.raises(CheckpointError, match=r"here: 1 log-probab.* of token 1 of row 1"):
        check_finite(Scores(values, {}, {}, 0), ROWS, Path("here"))
    values[4] = -3.0
    check_finite(Scores(values, {}, {}, 0), ROWS, Path("here"))


def test_rows_are_shared_out_and_padding_stays_padding() -> None:
    """Row 1 and one of nothing but padding, over two ranks of two that shard it further."""
    for data_rank, there in ((1, True), (0, False)):
        *_, batch = ROWS.batches(length=5, data_rank=data_rank, data_size=2, rounds=1 + (not there))
        parts = [part_of_rank(batch, rank=r, ranks=2, multiple=2) for r in range(2)]
        tokens, labels, padding = (
            np.concatenate([getattr(part, name) for part in parts], axis=1)[0].tolist()
            for name in ("tokens", "labels", "padding")
        )
        assert tokens[:5] == ([4, 5, 0, 0, 0] if there else [0] * 5)
        assert labels[:5] == ([5, -1, -1, -1, -1] if there else [-1] * 5)
        assert padding == ([False, False] + [True] * 6 if there else [True] * 8)
        expected = [0, 2, 5, 8] if there else [0, 5, 8]
        assert all(part.cu_seqlens is not None for part in parts)
        assert [list(map(int, part.cu_seqlens)) for part in parts] == [expected] * 2  # type: ignore[arg-type] # said above
