"""Tokenizers: bytes built in, Hugging Face ``tokenizer.json`` and tiktoken rank files by path."""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from megatron_ext.errors import DataError

# The split of cl100k_base; a rank file does not hold its own, and `FILE.json` may give another.
TIKTOKEN_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
KNOWN_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[EOS]", "<|im_end|>")


class Tokenizer(Protocol):
    """What the project needs of a tokenizer.

    Attributes:
        name: for messages. fingerprint: equal if and only if ids mean the same.
        vocab_size: ids are in [0, vocab_size). eod: the id that ends a document.
    """

    name: str
    fingerprint: str
    vocab_size: int
    eod: int

    def encode(self, text: str) -> list[int]:
        """Ids of the text, without eod. Text that looks like a special token stays text."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of the ids; eod is left out, bytes that are no UTF-8 become U+FFFD."""
        ...


def load_tokenizer(spec: str) -> Tokenizer:
    """``byte``, or the path of a ``tokenizer.json`` or of a tiktoken rank file.

    Raises:
        DataError: no such file, or a file that is neither.
    """
    if spec == "byte":
        return ByteTokenizer()
    path = Path(spec).expanduser()
    if path.is_dir():
        path = path / "tokenizer.json"
    if not path.is_file():
        raise DataError(
            f"{path}: no such tokenizer. Allowed: byte, the path of a tokenizer.json, the path of "
            "a tiktoken rank file"
        )
    return HuggingFaceTokenizer(path) if path.suffix == ".json" else TiktokenTokenizer(path)


class ByteTokenizer:
    """UTF-8 bytes 0 to 255, and 256 for the end of a document."""

    name = "byte"
    fingerprint = "byte-257"
    vocab_size = 257
    eod = 256

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8", errors="surrogatepass"))

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(t for t in tokens if t < 256).decode("utf-8", errors="replace")


class HuggingFaceTokenizer:
    """A ``tokenizer.json``.

    Its eod is the ``eos_token`` of a ``tokenizer_config.json`` beside it, else the first of the
    usual names that it knows, else a new id after its last.
    """

    def __init__(self, path: Path) -> None:
        from tokenizers import Tokenizer as Backend

        raw = path.read_bytes()
        try:
            self._backend = Backend.from_str(raw.decode("utf-8"))
        except Exception as error:  # the library raises bare Exception
            raise DataError(
                f"{path}: no Hugging Face tokenizer ({error}). Give the tokenizer.json file"
            ) from error
        self._backend.encode_special_tokens = True  # text never turns into control tokens
        known = self._backend.get_vocab_size(with_added_tokens=True)
        self.eod, how = self._find_end(path, known)
        self.vocab_size = max(known, self.eod + 1)
        self.name = path.name
        self.fingerprint = f"hf-{_digest(raw, how)}"

    def _find_end(self, path: Path, known: int) -> tuple[int, str]:
        names = list(KNOWN_ENDS)
        config = path.with_name("tokenizer_config.json")
        if config.is_file():
            given = json.loads(config.read_text(encoding="utf-8")).get("eos_token")
            name = given.get("content") if isinstance(given, dict) else given
            if name is not None:
                names.insert(0, str(name))
        for name in names:
            token = self._backend.token_to_id(name)
            if token is not None:
                return int(token), name
        return known, "new"

    def encode(self, text: str) -> list[int]:
        return list(self._backend.encode(text, add_special_tokens=False).ids)

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self._backend.decode([t for t in tokens if t != self.eod]))


class TiktokenTokenizer:
    """A tiktoken rank file (lines ``base64 rank``); eod is the first id after the ranks.

    ``FILE.json`` beside it may give ``{"pattern": ...}``, the split before byte pairs are merged;
    default: that of cl100k_base. The file is read here: tiktoken's own loader keeps a copy by path
    in a temporary folder and would go on using it after the file changed.
    """

    def __init__(self, path: Path) -> None:
        import tiktoken

        raw = path.read_bytes()
        ranks: dict[bytes, int] = {}
        for number, line in enumerate(raw.splitlines(), 1):
            if not line.strip():
                continue
            try:
                piece, rank = line.split()
                ranks[base64.b64decode(piece, validate=True)] = int(rank)
            except (ValueError, binascii.Error) as error:
                raise DataError(
                    f"{path}, line {number}: no tiktoken rank ({error}). Lines are `base64 rank`; "
                    "a Hugging Face tokenizer's file ends in .json"
                ) from error
        if not ranks:
            raise DataError(f"{path}: an empty rank file. Copy it again")
        options: dict[str, Any] = {}
        beside = path.with_name(path.name + ".json")
        if beside.is_file():
            options = json.loads(beside.read_text(encoding="utf-8"))
        pattern = str(options.get("pattern", TIKTOKEN_PATTERN))
        self.eod = max(ranks.values()) + 1
        self.vocab_size = self.eod + 1
        self.name = path.name
        self.fingerprint = f"tiktoken-{_digest(raw, pattern)}"
        try:
            self._backend = tiktoken.Encoding(
                path.name, pat_str=pattern, mergeable_ranks=ranks, special_tokens={}
            )
        except Exception as error:  # raised by the compiled part, of several kinds
            raise DataError(f"{path}: tiktoken refuses these ranks ({error})") from error

    def encode(self, text: str) -> list[int]:
        return self._backend.encode_ordinary(text)

    def decode(self, tokens: Sequence[int]) -> str:
        return self._backend.decode([t for t in tokens if t != self.eod])


def _digest(raw: bytes, extra: str) -> str:
    return hashlib.blake2b(raw + b"\0" + extra.encode(), digest_size=8).hexdigest()
