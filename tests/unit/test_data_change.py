"""A resume notices that the data is not what the checkpoint was trained on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.config.schema import DataOptions, SourceOptions
from megatron_ext.data.change import check_next_blend, check_unchanged, go_on_with, remember
from megatron_ext.data.prepare import PrepareOptions, prepare
from megatron_ext.data.stream import TokenStream, open_corpus
from megatron_ext.data.tokenizers import ByteTokenizer
from megatron_ext.errors import DataError


def corpus(folder: Path, *, extra: str = "") -> Path:
    text = folder.with_suffix(".jsonl")
    rows = [f"document {i} {'x' * i}" for i in range(40)]
    rows[7] += extra
    text.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    prepare([text], output=folder, name=folder.name, options=PrepareOptions())
    return folder


def stream(
    *folders: Path, weight: float = 1.0, seed: int = 1, held_out: float = 0.1
) -> TokenStream:
    sources = [SourceOptions(name=f"s{i}", path=str(path)) for i, path in enumerate(folders)]
    sources[0].weight = weight
    options = DataOptions(sources=sources, held_out=held_out)
    return open_corpus(options, seed=seed, tokenizer=ByteTokenizer(), split="train")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("corpora")
    return corpus(folder / "first"), corpus(folder / "second", extra="!")


def test_the_same_text_in_another_folder_is_no_change(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    saved = json.loads(json.dumps(remember(stream(folders[0]))))
    again = corpus(tmp_path / "again")
    assert check_unchanged(saved, stream(again), allow=False) == []


def test_every_kind_of_change_is_named_with_the_way_on(folders: tuple[Path, Path]) -> None:
    first, second = folders
    saved = json.loads(json.dumps(remember(stream(first))))
    changed = {
        "content of source s0: was 40 documents": stream(second),
        "weight of source s0: was 1.0, is 2.0": stream(first, weight=2.0),
        "content of source s1: was absent, is 40 documents": stream(first, second),
        "order of data.sources: was s0, is s0, s1": stream(first, second),
        "run.seed: was 1, is 2": stream(first, seed=2),
        "data.held_out: was 0.1, is 0.2": stream(first, held_out=0.2),
    }
    for words, now in changed.items():
        assert now.fingerprint != saved["fingerprint"]
        with pytest.raises(DataError) as caught:
            check_unchanged(saved, now, allow=False)
        assert words in str(caught.value)
        assert "data.allow_change=true" in str(caught.value)
        assert caught.value.exit_code == 30
        assert any(line.startswith(words) for line in check_unchanged(saved, now, allow=True))


def test_the_next_stage_may_blend_otherwise_but_not_read_other_documents(
    folders: tuple[Path, Path],
) -> None:
    first, second = folders
    saved = json.loads(json.dumps(remember(stream(first), 100)))
    assert not check_next_blend(saved, stream(first))
    assert check_next_blend(saved, stream(first, weight=2.0))
    more = stream(first, second)
    assert check_next_blend(saved, more)
    go_on_with(saved, more, other_blend=True)
    later = json.loads(json.dumps(remember(more, 300)))
    assert (later["begin"], later["begun"]) == (100, saved["places"])
    again = stream(first, second)
    go_on_with(later, again, other_blend=False)
    assert again.read(300, 50).tokens.tolist() == more.read(300, 50).tokens.tolist()
    for wrong in (stream(second), stream(first, seed=2), stream(first, held_out=0.2)):
        with pytest.raises(DataError, match="the data of the next stage"):
            check_next_blend(saved, wrong)


def test_a_source_comes_back_with_the_documents_that_it_had(folders: tuple[Path, Path]) -> None:
    first, second = folders

    def stage(saved: dict[str, Any] | None, now: TokenStream, position: int) -> dict[str, Any]:
        if saved is not None:
            go_on_with(saved, now, other_blend=check_next_blend(saved, now))
        kept: dict[str, Any] = json.loads(json.dumps(remember(now, position)))
        return kept

    both = stage(None, stream(first, second), 100)
    one = stage(both, stream(first), 200)
    again = stream(first)
    go_on_with(one, again, other_blend=False)  # a resume in between
    one = remember(again, 250)
    assert list(one["left"]) == ["content of source s1"]
    with pytest.raises(DataError, match="content of source s1: was 40 documents"):
        stage(one, stream(first, first), 300)
    assert stage(one, stream(first, second), 300)["left"] == {}
