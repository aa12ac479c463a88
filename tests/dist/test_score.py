"""`run.mode=score` as a user starts it: every layout gives the numbers of one rank.

In float64, where rounding decides no routing: the choice of experts is free in all layouts.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_ext.checkpoint.hf.exporting import Export, export
from megatron_ext.checkpoint.hf.importing import import_folder
from tests.support import hf_configs
from tests.support.reference_files import write_random_folder
from tests.support.reference_model import ReferenceModel
from tests.support.runs import Launcher

# Heads, widths and experts that two ranks divide; six layers in blocks of two, so that sums of
# attention residuals finish inside and between stages.
FIELDS = hf_configs.kimi_k3(
    vocab_size=256,
    num_hidden_layers=6,
    num_attention_heads=4,
    num_key_value_heads=4,
    num_experts=8,
    moe_intermediate_size=12,
    linear_attn_config={"num_heads": 6, "kda_layers": [1, 2, 4, 5], "full_attn_layers": [3, 6]},
)
# Five rows, which neither two data ranks nor two stages in turns divide, of lengths that neither
# two nor four ranks do; documents end inside every rank's part.
DOCUMENTS = [[23], [9, 1, 14, 3], [2, 5], [1, 1, 17, 7, 4], [11, 2]]
TENSOR, PIPELINE, CONTEXT, EXPERT = (
    f"parallel.{kind}=2" for kind in ("tensor", "pipeline", "context", "expert")
)
LAYOUTS = {
    "dp2": (2, []),
    "tp2_sp": (2, [TENSOR]),
    "tp2": (2, [TENSOR, "parallel.sequence=false", "train.loss_chunk_tokens=7"]),
    "ep2": (2, [EXPERT]),
    "etp2": (2, ["parallel.expert_tensor=2"]),
    "cp2": (2, [CONTEXT]),
    "pp2": (2, [PIPELINE, "parallel.stage_layers=[5,1]"]),
    "pp2_vpp3": (2, [PIPELINE, "parallel.virtual_pipeline=3"]),
    "tp2_sp_cp2": (4, [TENSOR, CONTEXT]),
    "pp2_vpp3_dp2_ep2": (4, [PIPELINE, "parallel.virtual_pipeline=3", EXPERT]),
    "tp2_pp2_ep2": (4, [TENSOR, "parallel.sequence=false", PIPELINE, EXPERT]),
}
# Sums in another order, through six layers, in float64.
EXACT = 1e-9


class Scorer:
    """Scores the same rows again and again, into other files."""

    def __init__(self, launcher: Launcher, folder: Path) -> None:
        self._launcher, self.folder = launcher, folder
        write_random_folder(folder / "hf", FIELDS, 3)
        number = iter(range(10**6))
        rows = [[next(number) * 37 % 256 for _ in range(sum(row))] for row in DOCUMENTS]
        self.write("in", {"tokens": rows, "documents": DOCUMENTS})

    def write(self, name: str, content: dict[str, Any]) -> Path:
        path = self.folder / f"{name}.json"
        path.write_text(json.dumps(content))
        return path

    def __call__(
        self, name: str, *words: str, model: Sequence[str] = (), ranks: int = 1, code: int = 0
    ) -> dict[str, Any]:
        output = self.folder / f"{name}.json"
        hf = self.folder / "hf"
        words = (
            *(model or (f"model={hf}/config.json", f"checkpoint.load={hf}")),
            "run.mode=score",
            "run.device=cpu",
            f"score.tokens={self.folder}/in.json",
            f"score.output={output}",
            "score.float64=true",
            *words,
        )
        self.command(name, *words, ranks=ranks, code=code)
        return dict(json.loads(output.read_text())) if output.exists() else {}

    def command(self, name: str, *words: str, ranks: int = 1, code: int = 0) -> None:
        log = self.folder / f"{name}.log"
        if ranks == 1:
            runs = [self._launcher.start(words, output=log)]
        else:
            runs = self._launcher.start_ranks(words, ranks=ranks, output=log)
        codes = [run.wait() for run in runs]
        self.text = "\n".join(run.text for run in runs)
        assert codes == [code] * ranks, self.text


@pytest.fixture(scope="module")
def score(launcher: Launcher, tmp_path_factory: pytest.TempPathFactory) -> Scorer:
    return Scorer(launcher, tmp_path_factory.mktemp("score"))


@pytest.fixture(scope="module")
def one(score: Scorer) -> dict[str, Any]:
    return score("one")


def differences(ours: dict[str, Any], truth: dict[str, Any]) -> tuple[float, float]:
    """The largest ones of a log-probability and of a margin; infinite where one is missing."""
    largest = [0.0, 0.0]
    for i, row in enumerate(truth["log_probabilities"]):
        pairs = [(0, (ours["log_probabilities"][i], row))]
        assert ours["margins"][i].keys() == truth["margins"][i].keys()
        pairs += [(1, (ours["margins"][i][layer], x)) for layer, x in truth["margins"][i].items()]
        for kind, both in pairs:
            for a, b in zip(*both, strict=True):
                if (a is None) != (b is None):
                    return math.inf, math.inf
                largest[kind] = max(largest[kind], 0.0 if b is None else abs(a - b))
    return largest[0], largest[1]


def test_the_first_token_of_a_document_has_no_likelihood(one: dict[str, Any]) -> None:
    for row, lengths in zip(one["log_probabilities"], DOCUMENTS, strict=True):
        firsts = [sum(lengths[:i]) for i in range(len(lengths))]
        assert [i for i, value in enumerate(row) if value is None] == firsts
    assert one["documents"] == DOCUMENTS
    assert [list(row) for row in one["experts"]] == [["1", "2", "3", "4", "5"]] * 5
    assert {len(chosen) for row in one["experts"] for x in row.values() for chosen in x} == {3}
    assert (one["step"], one["precision"]) == (0, "float64")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_scores_as_one_rank(score: Scorer, one: dict[str, Any], layout: str) -> None:
    ranks, words = LAYOUTS[layout]
    ours = score(layout, *words, ranks=ranks)
    assert ours["experts"] == one["experts"]
    assert max(differences(ours, one)) <= EXACT


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_checkpoint_of_ours_scores_as_the_folder(
    score: Scorer, one: dict[str, Any], dtype: str
) -> None:
    ours = score.folder / dtype
    import_folder(score.folder / "hf", ours, dtype=getattr(torch, dtype), workers=1)
    found = score(f"from_{dtype}", f"checkpoint.load={ours}", TENSOR, ranks=2)
    distance = max(differences(found, one))
    # Weights in bfloat16 are other weights.
    assert distance <= EXACT if dtype == "float32" else 1e-3 < distance < math.inf


@pytest.mark.parametrize("residual", ["standard", "block"])
def test_a_trained_and_exported_nano_is_the_published_model(score: Scorer, residual: str) -> None:
    """Two steps of training, so that biases and queries are what training makes of them; our
    checkpoint at two ranks, its export in the reference model."""
    run = score.folder / f"nano_{residual}"
    model = ("model=nano", f"residual={residual}", f"run.dir={run}", "run.device=cpu")
    small = ("data=sample", "data.sequence_length=64", "train.batch_tokens=512", "train.steps=2")
    score.command(f"train_{residual}", *model, *small, "evaluate.tokens=128", "model.init_std=0.1")
    ours = score(f"nano_{residual}_scores", TENSOR, EXPERT, model=model, ranks=2)
    export(Export(run / "checkpoints" / "step_00000002", torch.float32), run / "hf", workers=1)
    reference = ReferenceModel(run / "hf")
    biases = [t for n, t in reference.tensors.items() if n.endswith("e_score_correction_bias")]
    assert all(bias.any() for bias in biases)
    truth = reference(ours["tokens"], ours["documents"])
    for mine, theirs in zip(ours["log_probabilities"], truth.log_probabilities, strict=True):
        got = torch.tensor([math.nan if x is None else x for x in mine], dtype=torch.float64)
        torch.testing.assert_close(got, theirs.detach(), atol=EXACT, rtol=0, equal_nan=True)
    for routes, by_layer in zip(truth.routes, ours["experts"], strict=True):
        assert by_layer == {str(layer): route.experts.tolist() for layer, route in routes.items()}


def test_given_experts_are_used_and_an_earlier_output_changes_nothing(
    score: Scorer, one: dict[str, Any]
) -> None:
    again = score("again", f"score.routing={score.folder}/one.json", CONTEXT, ranks=2)
    assert again["experts"] == one["experts"]
    assert max(differences(again, one)) <= EXACT
    assert " 0 choices" in score.text
    other = [
        {layer: [[(e + 1) % 8 for e in token] for token in x] for layer, x in row.items()}
        for row in one["experts"]
    ]
    given = score.write("other", {"experts": other})
    truth = score("replayed", f"score.routing={given}")
    for layout in ("dp2", "tp2", "tp2_sp"):
        ranks, words = LAYOUTS[layout]
        replayed = score(f"replayed_{layout}", f"score.routing={given}", *words, ranks=ranks)
        as_sets = [{k: [sorted(t) for t in x] for k, x in row.items()} for row in other]
        assert replayed["experts"] == as_sets
        assert "would have been others" in score.text
        assert max(differences(replayed, truth)) <= EXACT
    assert differences(truth, one)[0] > 0.1
    # The first layer of experts reads the same as before: its own choice was as near.
    for row, its in zip(truth["margins"], one["margins"], strict=True):
        assert row["1"] == pytest.approx(its["1"], abs=EXACT)


def test_what_is_wrong_with_the_files_is_told_before_anything_is_written(
    score: Scorer, one: dict[str, Any]
) -> None:
    wrong = score.write("wrong", {"tokens": [[1, 256], [3]], "documents": [[1, 1], [2]], "x": 1})
    words = [f"score.tokens={wrong}", f"score.output={score.folder}/none/out.json"]
    assert score("refused", *words, code=30) == {}
    for line in (
        "4 in what is to be scored",
        f"score.output: the folder {score.folder}/none does not exist",
        "no such fields: ['x']",
        "tokens[0][1]=256: must be a whole number from 0 to 255",
        "documents[1]=[2]: must be whole numbers above 0 that add up to the 1 tokens",
    ):
        assert line in score.text
