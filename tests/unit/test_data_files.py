"""Shards, manifests and tokenizers: exact, interchangeable with megatron-core, and never silent."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import numpy as np
import pytest

from megatron_ext.data.checksum import BLOCK, BlockHasher, check_blocks
from megatron_ext.data.indexed import ShardReader, ShardWriter
from megatron_ext.data.manifest import open_shards, read_manifest
from megatron_ext.data.prepare import PrepareOptions, prepare
from megatron_ext.data.tokenizers import ByteTokenizer, Tokenizer, load_tokenizer
from megatron_ext.errors import DataError

DOCUMENTS = [[1, 2, 3, 256], [256], [7] * 300 + [256], [65, 256]]


def write(prefix: Path, dtype: type[np.generic] = np.uint16) -> None:
    with ShardWriter(prefix, dtype=dtype) as writer:
        for document in DOCUMENTS:
            writer.add(document)
        writer.finish()


def prepared(folder: Path) -> Path:
    text = folder / "in.txt"
    text.write_text("some text\n" * 50)
    prepare([text], output=folder / "out", name="text", options=PrepareOptions())
    return folder / "out"


@pytest.mark.parametrize("dtype", [np.uint16, np.int32], ids=["uint16", "int32"])
def test_megatron_core_reads_our_shards_and_we_read_its(
    tmp_path: Path, dtype: type[np.generic]
) -> None:
    indexed = pytest.importorskip("megatron.core.datasets.indexed_dataset")
    import torch

    write(tmp_path / "ours", dtype)
    theirs = indexed.IndexedDataset(str(tmp_path / "ours"))
    assert [theirs[i].tolist() for i in range(len(theirs))] == DOCUMENTS
    assert theirs.document_indices.tolist() == [0, 1, 2, 3, 4]
    assert theirs[2].dtype == dtype

    builder = indexed.IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=dtype)
    for document in DOCUMENTS:
        builder.add_document(torch.tensor(document), [len(document)])
    builder.finalize(str(tmp_path / "theirs.idx"))
    ours = ShardReader(tmp_path / "theirs")
    assert [ours.read(i).tolist() for i in range(len(ours))] == DOCUMENTS
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"ours{suffix}").read_bytes() == (
            tmp_path / f"theirs{suffix}"
        ).read_bytes()


def test_parts_of_a_document_can_be_read(tmp_path: Path) -> None:
    write(tmp_path / "a")
    shard = ShardReader(tmp_path / "a")
    assert shard.read(0, begin=1, end=3).tolist() == [2, 3]
    assert shard.read(2, begin=299).tolist() == [7, 256]
    with pytest.raises(IndexError):
        shard.read(0, begin=0, end=5)


def test_a_writer_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    with (
        pytest.raises(DataError, match="70000 does not fit"),
        ShardWriter(tmp_path / "a", dtype=np.uint16) as writer,
    ):
        writer.add([1, 70000])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("part", ["bin", "idx"])
def test_truncated_shards_are_named_with_offset_and_remedy(tmp_path: Path, part: str) -> None:
    folder = prepared(tmp_path)
    path = folder / f"shard-00000.{part}"
    raw = path.read_bytes()
    path.write_bytes(raw[:-10])
    message = rf"shard-00000\.{part}: truncated at offset {len(raw) - 10}.*--overwrite"
    with pytest.raises(DataError, match=message):
        open_shards(folder, tokenizer=ByteTokenizer())
    with pytest.raises(DataError, match="truncated at offset"):  # without a manifest too
        ShardReader(folder / "shard-00000")


def test_a_flipped_bit_is_noticed_at_open(tmp_path: Path) -> None:
    folder = prepared(tmp_path)
    path = folder / "shard-00000.bin"
    raw = bytearray(path.read_bytes())
    raw[100] ^= 1
    path.write_bytes(raw)
    with pytest.raises(DataError, match=f"bin: damaged between offset 0 and {len(raw)}"):
        open_shards(folder, tokenizer=ByteTokenizer())


def test_damage_is_located_by_block(tmp_path: Path) -> None:
    path = tmp_path / "big"
    raw = bytearray(BLOCK + 5)
    hasher = BlockHasher()
    hasher.update(bytes(raw[:1000]))
    hasher.update(bytes(raw[1000:]))
    entry = hasher.result()
    path.write_bytes(raw)
    check_blocks(path, entry, remedy="")
    raw[BLOCK + 2] = 1
    path.write_bytes(raw)
    with pytest.raises(DataError, match=f"between offset {BLOCK} and {BLOCK + 5}"):
        check_blocks(path, entry, remedy="")


def test_large_sources_are_hashed_only_on_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = prepared(tmp_path)
    monkeypatch.setattr("megatron_ext.data.manifest.ALWAYS_VERIFIED", 0)
    path = folder / "shard-00000.bin"
    raw = bytearray(path.read_bytes())
    raw[0] ^= 1
    path.write_bytes(raw)
    open_shards(folder, tokenizer=ByteTokenizer())
    with pytest.raises(DataError, match="damaged"):
        open_shards(folder, tokenizer=ByteTokenizer(), verify=True)


def test_another_tokenizer_and_broken_manifests_are_errors(tmp_path: Path) -> None:
    folder = prepared(tmp_path)

    class Other(ByteTokenizer):
        name, fingerprint = "other", "other-1"

    with pytest.raises(DataError, match=r"tokenizer byte \(byte-257\), the run uses other"):
        open_shards(folder, tokenizer=Other())
    whole = (folder / "manifest.json").read_text()
    for name in ("../shard-00000", "/etc/shard-00000"):
        (folder / "manifest.json").write_text(whole.replace('"shard-00000"', f'"{name}"'))
        with pytest.raises(DataError, match=f"names the shard '{name}', which is not in its"):
            open_shards(folder, tokenizer=ByteTokenizer())
    (folder / "manifest.json").write_text(whole)
    (folder / "shard-00000.idx").unlink()
    with pytest.raises(DataError, match="listed in the manifest but not there"):
        open_shards(folder, tokenizer=ByteTokenizer())
    (folder / "manifest.json").write_text('{"format": 1,')
    with pytest.raises(DataError, match="damaged at offset"):
        read_manifest(folder)
    (folder / "manifest.json").write_text('{"format": 99}')
    with pytest.raises(DataError, match="format 99"):
        read_manifest(folder)
    with pytest.raises(DataError, match=r"no such file.*data/prepare\.py"):
        read_manifest(tmp_path / "nowhere")


def test_other_files_are_no_shards(tmp_path: Path) -> None:
    write(tmp_path / "a")
    (tmp_path / "a.idx").write_bytes(b"x" * 100)
    with pytest.raises(DataError, match="no index of an indexed dataset"):
        ShardReader(tmp_path / "a")
    (tmp_path / "a.idx").write_bytes(b"MM")
    with pytest.raises(DataError, match="truncated at offset 2"):
        ShardReader(tmp_path / "a")


# ------------------------------------------------------------------------------------ tokenizers
TEXT = "def f(x):\n    return 'naïve café 漢字 🙂' # <|endoftext|>\n"


@pytest.fixture
def hugging_face(tmp_path: Path) -> Path:
    tokenizers = pytest.importorskip("tokenizers")
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([TEXT], trainer)
    backend.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


@pytest.fixture
def tiktoken_file(tmp_path: Path) -> Path:
    pytest.importorskip("tiktoken")
    pieces = [bytes([i]) for i in range(256)] + [b"re", b"tu", b"retu"]
    path = tmp_path / "ranks.tiktoken"
    lines = [f"{base64.b64encode(piece).decode()} {rank}" for rank, piece in enumerate(pieces)]
    path.write_text("\n".join(lines))
    return path


def check(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode(TEXT)
    assert tokenizer.decode([*tokens, tokenizer.eod]) == TEXT
    assert tokenizer.eod not in tokens, "text must not be able to end a document"
    assert max(tokens) < tokenizer.vocab_size
    assert tokenizer.eod < tokenizer.vocab_size
    assert tokenizer.encode("") == []


def test_text_survives_every_tokenizer(hugging_face: Path, tiktoken_file: Path) -> None:
    check(load_tokenizer("byte"))
    check(load_tokenizer(str(hugging_face)))
    check(load_tokenizer(str(hugging_face.parent)))
    check(load_tokenizer(str(tiktoken_file)))
    assert load_tokenizer("byte").vocab_size == 257
    assert load_tokenizer(str(tiktoken_file)).encode("return") == [258, 114, 110]


def test_fingerprints_follow_content(hugging_face: Path, tiktoken_file: Path) -> None:
    prints = {load_tokenizer(str(p)).fingerprint for p in ("byte", hugging_face, tiktoken_file)}
    assert len(prints) == 3
    (tiktoken_file.parent / "ranks.tiktoken.json").write_text(json.dumps({"pattern": r"\w+|\W+"}))
    assert load_tokenizer(str(tiktoken_file)).fingerprint not in prints
    config = hugging_face.with_name("tokenizer_config.json")
    config.write_text(json.dumps({"eos_token": {"content": "a"}}))
    other = load_tokenizer(str(hugging_face))
    assert other.fingerprint not in prints
    assert other.eod == other.encode("a")[0]


def test_files_that_are_no_tokenizers_are_errors(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such tokenizer"):
        load_tokenizer(str(tmp_path / "none.json"))
    (tmp_path / "a.json").write_text("{}")
    with pytest.raises(DataError, match="no Hugging Face tokenizer"):
        load_tokenizer(str(tmp_path / "a.json"))
    (tmp_path / "b").write_text("hello")
    with pytest.raises(DataError, match="b, line 1: no tiktoken rank"):
        load_tokenizer(str(tmp_path / "b"))
