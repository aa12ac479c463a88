"""What `run.mode=score` reads: rows of token ids and routing, checked whole before any work.

Shapes: N tokens of all rows, one row after the other; E experts, k experts a token.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_ext.data.batches import MicroBatch

# Of the file that is written, which is valid input too.
FIELDS = (
    *("tokens", "documents", "log_probabilities", "experts", "margins"),
    *("checkpoint", "step", "precision"),
)


@dataclass(frozen=True)
class Rows:
    """Rows of token ids, each one or several documents that do not see each other.

    Attributes:
        tokens: ids by row.
        documents: lengths of the documents of each row, which add up to it.
    """

    tokens: list[list[int]]
    documents: list[list[int]]

    @property
    def starts(self) -> list[int]:
        """Where each row begins among all tokens, then N."""
        return [0, *accumulate(len(row) for row in self.tokens)]

    @property
    def firsts(self) -> list[int]:
        """Places of the first token of every document, which nothing says the likelihood of."""
        return [
            start + first
            for start, lengths in zip(self.starts, self.documents, strict=False)
            for first in accumulate([0, *lengths[:-1]])
        ]

    def batches(
        self, *, length: int, data_rank: int, data_size: int, rounds: int
    ) -> Iterator[MicroBatch]:
        """One row a micro-batch, padded to `length`: row `data_rank`, then every `data_size`-th.

        Beyond the last row there is nothing but padding.
        """
        for number in range(data_rank, rounds * data_size, data_size):
            there = number < len(self.tokens)
            row, documents = (self.tokens[number], self.documents[number]) if there else ([], [])
            tokens, labels = np.zeros(length, np.int64), np.full(length, -1, np.int64)
            tokens[: len(row)] = row
            labels[: max(0, len(row) - 1)] = row[1:]
            bounds = list(accumulate(documents))
            labels[[bound - 1 for bound in bounds]] = -1  # followed by another document
            ends = bounds if bounds and bounds[-1] == length else [*bounds, length]
            yield MicroBatch(
                tokens=tokens[None],
                labels=labels[None],
                loss_mask=(labels[None] >= 0).astype(np.float32),
                source=np.zeros((1, length), np.int16),
                cu_seqlens=np.array([0, *ends], np.int32),
                position=np.zeros((1, length), np.int32),  # groups of a mean that is not taken
                padding=np.arange(length)[None] >= len(row),
            )


def read_rows(path: Path, *, vocab_size: int, problems: list[str]) -> Rows | None:
    """The rows of a JSON file `{"tokens": [[...]], "documents": [[...]]}`.

    Args:
        vocab_size: token ids are below it.
        problems: gets a line for everything that is wrong; then there is no result.
    """
    content = _read(path, problems)
    if content is None:
        return None
    before = len(problems)
    tokens = content.get("tokens")
    if not isinstance(tokens, list) or not tokens:
        problems.append(f"{path}: tokens: must be a list of rows of token ids, at least one")
        return None
    for i, row in enumerate(tokens):
        where = f"{path}: tokens[{i}]"
        if not isinstance(row, list) or not row:
            problems.append(f"{where}: must be a list of token ids, at least one")
            continue
        wrong = [j for j, token in enumerate(row) if not _is_id(token, vocab_size)]
        if wrong:
            problems.append(
                f"{where}[{wrong[0]}]={json.dumps(row[wrong[0]])}: must be a whole number from 0 "
                f"to {vocab_size - 1}, as in the vocabulary ({len(wrong)} such in this row)"
            )
    documents = content.get("documents")
    if documents is None:
        documents = [[len(row)] if isinstance(row, list) else [] for row in tokens]
    elif not isinstance(documents, list) or len(documents) != len(tokens):
        problems.append(
            f"{path}: documents: must be a list of {len(tokens)}, the lengths of the documents of "
            "each row (or left out: every row is one document)"
        )
        documents = []
    for i, lengths in enumerate(documents):
        size = len(tokens[i]) if isinstance(tokens[i], list) else 0
        numbers = isinstance(lengths, list) and all(_is_id(n, size + 1) and n for n in lengths)
        if size and (not numbers or sum(lengths) != size):
            problems.append(
                f"{path}: documents[{i}]={json.dumps(lengths)}: must be whole numbers above 0 that "
                f"add up to the {size} tokens of the row"
            )
    return Rows(tokens, documents) if len(problems) == before else None


def read_routing(
    path: Path,
    rows: Rows,
    *,
    layers: Sequence[int],
    num_experts: int,
    top_k: int | None,
    problems: list[str],
) -> dict[int, npt.NDArray[np.int32]]:
    """The experts of a JSON file `{"experts": [{"LAYER": [[...]]}]}`: by row, layer, and token.

    Args:
        rows: that they are for; if the file has `tokens` or `documents` too, they are the same.
        layers: 0-based numbers of all layers with experts.
        num_experts: E.
        top_k: k; None: a token may have any number.
        problems: gets a line for everything that is wrong.

    Returns:
        By layer int32 [N, most experts of a token], filled up with -1.
    """
    content = _read(path, problems)
    if content is None:
        return {}
    for field, mine in (("tokens", rows.tokens), ("documents", rows.documents)):
        if content.get(field, mine) != mine:
            problems.append(
                f"{path}: {field}: not those of score.tokens, so this routing is of other text "
                "(experts for the same rows)"
            )
    by_row = content.get("experts")
    count = len(rows.tokens)
    if not isinstance(by_row, list) or len(by_row) != count:
        problems.append(f"{path}: experts: must be a list of {count}, one entry for each row")
        return {}
    names = [str(layer) for layer in layers]
    found: dict[int, list[list[list[int]]]] = {layer: [] for layer in layers}
    for i, given in enumerate(by_row):
        if not isinstance(given, dict) or given.keys() != set(names):
            have = sorted(given) if isinstance(given, dict) else json.dumps(given)[:40]
            problems.append(
                f"{path}: experts[{i}]: has the layers {have}, must have exactly {names}, those "
                "with experts (counted from 0)"
            )
            continue
        for layer, name in zip(layers, names, strict=True):
            wrong = _wrong_choice(
                given[name], tokens=len(rows.tokens[i]), num_experts=num_experts, top_k=top_k
            )
            if wrong:
                problems.append(f"{path}: experts[{i}][{json.dumps(name)}]{wrong}")
            found[layer].append(given[name])
    if problems:
        return {}
    return {layer: _table(list(chain(*parts))) for layer, parts in found.items()}


def _wrong_choice(value: Any, *, tokens: int, num_experts: int, top_k: int | None) -> str:
    """What is wrong with the experts of one row in one layer; empty when nothing is."""
    if not isinstance(value, list) or len(value) != tokens:
        return f": must be a list of {tokens}, the experts of each token"
    many = "any number of" if top_k is None else str(top_k)
    for j, chosen in enumerate(value):
        fits = isinstance(chosen, list) and all(_is_id(e, num_experts) for e in chosen)
        if not fits or len(set(chosen)) != len(chosen) or len(chosen) != (top_k or len(chosen)):
            return (
                f"[{j}]={json.dumps(chosen)[:80]}: must be {many} different experts from 0 to "
                f"{num_experts - 1}"
            )
    return ""


def _table(chosen: list[list[int]]) -> npt.NDArray[np.int32]:
    table = np.full((len(chosen), max(map(len, chosen))), -1, np.int32)
    for row, experts in zip(table, chosen, strict=True):
        row[: len(experts)] = experts
    return table


def _is_id(value: Any, count: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < count


def _read(path: Path, problems: list[str]) -> dict[str, Any] | None:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        problems.append(f"{path}: cannot be read as JSON ({error})")
        return None
    if not isinstance(content, dict):
        problems.append(f"{path}: must hold an object, got {type(content).__name__}")
        return None
    unknown = sorted(content.keys() - set(FIELDS))
    if unknown:
        problems.append(f"{path}: no such fields: {unknown} (allowed {', '.join(FIELDS)})")
    return content
