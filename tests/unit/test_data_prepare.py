"""The prepare command: every format, any interruption, any number of workers, clear errors."""

from __future__ import annotations

import ast
import gzip
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from megatron_ext.config.schema import DataOptions
from megatron_ext.data import load_tokenizer, open_corpus
from megatron_ext.data import prepare as module
from megatron_ext.data.demo import ensure_demo, library_sources
from megatron_ext.data.manifest import Manifest, open_shards
from megatron_ext.data.prepare import OnError, PrepareOptions, prepare
from megatron_ext.data.readers import cut, expand
from megatron_ext.data.tokenizers import ByteTokenizer
from megatron_ext.errors import DataError

ROOT = Path(__file__).parents[2]
TEXTS = ["first document\n", "second: ünïcode 漢字", "third\nwith\nlines\n" * 20, "x"]


def jsonl(path: Path, texts: list[str], key: str = "text") -> Path:
    path.write_bytes(b"".join(json.dumps({key: text}).encode() + b"\n" for text in texts))
    return path


def run(inputs: list[Path], output: Path, **options: object) -> Manifest:
    return prepare(inputs, output=output, name="s", options=PrepareOptions(**options))  # type: ignore[arg-type]


def texts(folder: Path) -> list[str]:
    tokenizer = ByteTokenizer()
    _, shards = open_shards(folder, tokenizer=tokenizer, verify=True)
    rows = [shard.read(i).tolist() for shard in shards for i in range(len(shard))]
    assert all(row[-1] == 256 and 256 not in row[:-1] for row in rows)
    return [tokenizer.decode(row) for row in rows]


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def packed_zst(path: Path, raw: bytes) -> None:
    zstandard = pytest.importorskip("zstandard")
    half = len(raw) // 2  # two frames
    pack = zstandard.ZstdCompressor().compress
    path.write_bytes(pack(raw[:half]) + pack(raw[half:]))


def as_text(folder: Path) -> Path:
    (folder / "in").mkdir()
    for number, text in enumerate(TEXTS):
        (folder / "in" / f"{number}.txt").write_text(text, encoding="utf-8")
    (folder / "in" / ".hidden").write_text("no")
    return folder / "in"


def as_gzip(folder: Path) -> Path:
    raw = jsonl(folder / "a.jsonl", TEXTS).read_bytes()
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(raw))
    return folder / "a.jsonl.gz"


def as_zstd(folder: Path) -> Path:
    packed_zst(folder / "a.jsonl.zst", jsonl(folder / "a.jsonl", TEXTS).read_bytes())
    return folder / "a.jsonl.zst"


def as_parquet(folder: Path) -> Path:
    import pyarrow
    from pyarrow import parquet

    table = pyarrow.table({"text": TEXTS, "id": list(range(len(TEXTS)))})
    parquet.write_table(table, folder / "a.parquet", row_group_size=1)
    return folder / "a.parquet"


FORMATS: list[Callable[[Path], Path]] = [
    as_text,
    lambda folder: jsonl(folder / "a.jsonl", TEXTS),
    as_gzip,
    as_zstd,
    as_parquet,
]


@pytest.mark.parametrize("make", FORMATS, ids=["text", "jsonl", "gz", "zst", "parquet"])
@pytest.mark.parametrize("unit_bytes", [1 << 20, 60], ids=["one_shard", "many_shards"])
def test_every_format_gives_the_same_documents(
    tmp_path: Path, make: Callable[[Path], Path], unit_bytes: int
) -> None:
    manifest = run([make(tmp_path)], tmp_path / "out", unit_bytes=unit_bytes)
    assert texts(tmp_path / "out") == TEXTS
    assert manifest.documents == len(TEXTS)
    assert manifest.tokens == sum(len(text.encode()) + 1 for text in TEXTS)


@pytest.mark.parametrize("unit_bytes", range(1, 90, 8))
def test_a_jsonl_file_may_be_cut_anywhere(tmp_path: Path, unit_bytes: int) -> None:
    path = jsonl(tmp_path / "a.jsonl", [*TEXTS[:2], "end"])
    path.write_bytes(path.read_bytes().rstrip(b"\n"))  # no newline at the end
    run([path], tmp_path / "out", unit_bytes=unit_bytes)
    assert texts(tmp_path / "out") == [*TEXTS[:2], "end"]


def test_workers_do_not_change_the_result(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", [f"document {i} " * (i % 7 + 1) for i in range(200)])
    run([path], tmp_path / "one", unit_bytes=4000)
    run([path], tmp_path / "two", unit_bytes=4000, workers=2)
    assert content(tmp_path / "one") == content(tmp_path / "two")
    assert len(content(tmp_path / "one")) > 5


def test_an_interrupted_preparation_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = jsonl(tmp_path / "a.jsonl", [f"document {i}" for i in range(60)])
    run([path], tmp_path / "whole", unit_bytes=300)
    made: list[int] = []
    make = module._make

    def interrupted(unit: module._Unit) -> dict[str, object]:
        if len(made) == 2:
            raise KeyboardInterrupt
        made.append(unit.number)
        return make(unit)

    monkeypatch.setattr(module, "_make", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run([path], tmp_path / "out", unit_bytes=300)
    assert not (tmp_path / "out" / "manifest.json").exists()
    (tmp_path / "out" / ".shard-00002.bin.7.partial").write_bytes(b"left by a killed process")
    (tmp_path / "out" / "shard-00001.bin").write_bytes(b"cut")  # finished but damaged since
    again: list[int] = []

    def counted(unit: module._Unit) -> dict[str, object]:
        again.append(unit.number)
        late = tmp_path / "out" / ".shard-00002.bin.8.partial"
        late.write_bytes(b"begun by a worker that outlived its killed command")
        return make(unit)

    monkeypatch.setattr(module, "_make", counted)
    run([path], tmp_path / "out", unit_bytes=300)
    assert 0 not in again
    assert 1 in again
    assert content(tmp_path / "out") == content(tmp_path / "whole")
    again.clear()
    run([path], tmp_path / "out", unit_bytes=300)
    assert again == [], "a finished folder is left as it is"


def test_a_killed_command_goes_on_and_leaves_no_process(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", [f"document {i} " * 500 for i in range(700)])
    arguments = [path, "--output", tmp_path / "out", "--workers", "2", "--shard-mib", "0.2"]
    program = [sys.executable, ROOT / "data" / "prepare.py", *arguments]
    work = tmp_path / "out" / ".work"
    with subprocess.Popen([str(part) for part in program]) as killed:
        deadline = time.monotonic() + 60
        while not list(work.glob("shard-*.json")) and time.monotonic() < deadline:
            time.sleep(0.01)
        with pytest.raises(DataError, match="another process is preparing"):
            prepare(
                [path],
                output=tmp_path / "out",
                name="out",
                options=PrepareOptions(unit_bytes=int(0.2 * 2**20)),
            )
        workers = psutil.Process(killed.pid).children(recursive=True)
        assert len(workers) >= 2
        killed.kill()
    assert not (tmp_path / "out" / "manifest.json").exists()
    _, alive = psutil.wait_procs(workers, timeout=20)
    assert alive == []
    done = command(*arguments)
    assert done.returncode == 0, done.stderr
    run([path], tmp_path / "whole", unit_bytes=int(0.2 * 2**20))
    whole, out = content(tmp_path / "whole"), content(tmp_path / "out")
    del whole["manifest.json"], out["manifest.json"]  # they name different sources
    assert whole == out


def test_a_folder_of_other_inputs_is_not_touched(tmp_path: Path) -> None:
    first = jsonl(tmp_path / "a.jsonl", ["one"])
    second = jsonl(tmp_path / "b.jsonl", ["two"])
    run([first], tmp_path / "out")
    with pytest.raises(DataError, match=r"holds source s of other inputs.*--overwrite"):
        run([second], tmp_path / "out")
    prepare([second], output=tmp_path / "out", name="s", options=PrepareOptions(), overwrite=True)
    assert texts(tmp_path / "out") == ["two"]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("precious")
    with pytest.raises(DataError, match="holds files, but no prepared source"):
        run([first], tmp_path / "mine")


def test_empty_sources_are_errors(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="no files in there"):
        run([tmp_path / "empty"], tmp_path / "out")
    with pytest.raises(DataError, match="no such file or folder"):
        run([tmp_path / "nowhere"], tmp_path / "out")
    blank = tmp_path / "blank.txt"
    blank.write_text("")
    with pytest.raises(DataError, match="no text for it in any input"):
        run([blank], tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


def test_broken_documents_stop_with_their_place_or_are_skipped(tmp_path: Path) -> None:
    good = b'{"text": "good"}\n'
    cases = {
        "json": (good + b"{oops\n" + good, f"offset {len(good)}: no JSON"),
        "utf8": (good + b'{"text": "\xff"}\n' + good, f"offset {len(good) + 10}: no UTF-8"),
        "key": (good + b'{"body": "x"}\n' + good, "no text under 'text'.*body.*--field"),
        "list": (good + b"[1]\n" + good, "no text under 'text'"),
    }
    for name, (raw, message) in cases.items():
        path = tmp_path / f"{name}.jsonl"
        path.write_bytes(raw)
        with pytest.raises(DataError, match=rf"{name}\.jsonl, {message}|{message}"):
            run([path], tmp_path / name)
        # another option is another output: it asks before it takes the folder over
        manifest = prepare(
            [path],
            output=tmp_path / name,
            name="s",
            options=PrepareOptions(on_error=OnError.skip),
            overwrite=True,
        )
        assert (manifest.documents, manifest.skipped) == (2, 1)


def test_truncated_archives_and_wrong_columns_are_errors(tmp_path: Path) -> None:
    for make in (as_gzip, as_zstd):
        path = make(tmp_path)
        path.write_bytes(path.read_bytes()[:-12])
        with pytest.raises(DataError, match="damaged or truncated at offset"):
            run([path], tmp_path / path.suffix[1:])
    path = as_parquet(tmp_path)
    with pytest.raises(DataError, match=r"no column 'body' \(there is: \['text', 'id'\]\)"):
        run([path], tmp_path / "column", field="body")
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(DataError, match="no parquet, or truncated"):
        run([path], tmp_path / "parquet")


def test_patterns_choose_files_and_units_cover_them(tmp_path: Path) -> None:
    for name in ("a.py", "b.md", "c/d.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x" * 50)
    files = expand([tmp_path], patterns=["*.py"])
    assert [path.name for path in files] == ["a.py", "d.py"]
    assert [len(unit) for unit in cut(files, unit_bytes=100)] == [2]
    assert [len(unit) for unit in cut(files, unit_bytes=60)] == [1, 1]


# --------------------------------------------------------------------------- command, sample, demo
def command(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "data" / "prepare.py"), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_the_command_prepares_quietly_and_says_how_to_go_on(tmp_path: Path) -> None:
    raw = ROOT / "data" / "sample" / "raw" / "code.jsonl"
    done = command(raw, "--output", tmp_path / "code", "--workers", 2, "--shard-mib", 0.05)
    assert done.returncode == 0, done.stderr
    assert done.stderr == "", "no progress bar where there is no terminal"
    assert "data.sources='[{name: code, path:" in done.stdout
    assert texts(tmp_path / "code") == texts(ROOT / "data" / "sample" / "code")
    failed = command(tmp_path / "nowhere", "--output", tmp_path / "x")
    assert failed.returncode == 30
    assert failed.stderr.startswith("error: ")
    assert "Traceback" not in failed.stderr


def test_the_sample_corpus_is_what_its_script_makes(tmp_path: Path) -> None:
    sample = ROOT / "data" / "sample"
    subprocess.run(
        [sys.executable, sample / "make_sample.py", "--output", tmp_path],
        check=True,
        timeout=120,
        capture_output=True,
    )
    for folder in ("raw", "prose", "code", "tables"):
        assert content(tmp_path / folder) == content(sample / folder)
    for text in texts(sample / "code"):
        ast.parse(text)
    assert sum(path.stat().st_size for path in sample.rglob("*") if path.is_file()) < 1_200_000


def test_the_demo_is_made_once_by_whoever_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = [path for path in library_sources() if path.parent.name == "json"]
    assert len(few) > 3
    monkeypatch.setattr("megatron_ext.data.demo.library_sources", lambda: few)
    made: list[object] = []

    def counted(*arguments: object, **options: object) -> Manifest:
        made.append(arguments)
        return prepare(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr("megatron_ext.data.demo.prepare", counted)
    options = DataOptions(demo=True, cache_dir=str(tmp_path / "cache"))
    found: list[object] = []
    threads = [
        threading.Thread(target=lambda: found.append(ensure_demo(options))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1
    assert len(found) == 4
    assert all(source == found[0] for source in found)
    assert sorted(texts(Path(found[0].path))) == sorted(  # type: ignore[attr-defined]
        path.read_text(encoding="utf-8") for path in few if path.stat().st_size
    )
    stream = open_corpus(options, seed=1, tokenizer=load_tokenizer("byte"), split="train")
    assert stream.sources == ("python-stdlib",)


def test_a_cache_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    options = DataOptions(demo=True, cache_dir=str(tmp_path / "file" / "cache"))
    with pytest.raises(DataError, match=r"cannot be written.*data\.cache_dir"):
        ensure_demo(options)
