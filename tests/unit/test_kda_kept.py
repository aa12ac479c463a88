"""`train.kda_recompute=false`: what is kept is what would be computed again.

Functions of fla and kernels are stood in for by plain ones of the same arguments and shapes, each a
mixture of all that it is given: whatever reaches the wrong place changes a gradient.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_ext.config.compose import compose
from megatron_ext.config.schema import Gate, KdaBackend
from megatron_ext.errors import ConfigError
from megatron_ext.ops.kda import fla, kda, own, own_fit, own_sweep
from megatron_ext.ops.kda.check import Problem, errors
from megatron_ext.train.accuracy import kda_backend, problem_of

META, HALF = torch.device("meta"), torch.bfloat16
WIDTH, CHUNK = 128, 64


def mix(shape: tuple[int, ...], dtype: torch.dtype, *given: Tensor | None) -> Tensor:
    """A tensor that depends on every one of those given, and on their order."""
    out = torch.linspace(-1, 1, 97, dtype=torch.float64).repeat(-(-torch.Size(shape).numel() // 97))
    out = out[: torch.Size(shape).numel()].view(shape)
    for number, x in enumerate(given, 1):
        if x is not None:
            flat = x.double().flatten()
            waves = torch.linspace(number, 9, len(flat), dtype=torch.float64).cos()
            out = out * (1 + 0.5 * (flat * waves).sum().sin())
    return out.to(dtype)


class Fla:
    """The functions of fla that `own` calls, by name; `called` are those that were, in order."""

    def __init__(self) -> None:
        self.called: list[str] = []

    def __call__(self, name: str) -> Any:
        self.called.append(name)
        return getattr(self, name)

    def fused_beta_sigmoid_fwd(self, logits: Tensor) -> Tensor:
        return logits.float().sigmoid()

    def prepare_chunk_indices(self, offsets: Tensor, size: int) -> Tensor:
        counts = (offsets.diff() + size - 1) // size
        return torch.tensor([(n, i) for n, count in enumerate(counts) for i in range(count)])

    def kda_gate_chunk_cumsum(self, *, g, A_log, dt_bias, lower_bound, **rest):  # noqa: N803  (fla's name)
        return mix(g.shape, torch.float32, g, A_log, dt_bias) * lower_bound

    def recompute_w_u_fwd(self, *, q, k, v, beta, A, gk, **rest):  # noqa: N803  (fla's name)
        factors = [mix(k.shape, k.dtype, *given) for given in ((k, beta, A, gk), (q, gk), (gk, k))]
        return factors[0], mix(v.shape, v.dtype, v, beta, A), *factors[1:]

    def chunk_kda_fwd_intra(self, *, q, k, v, gk, beta, disable_recompute, **rest):
        qk = mix((*q.shape[:3], CHUNK), q.dtype, q, k, gk)
        inverse = mix(qk.shape, q.dtype, k, beta, gk)
        w, u, since, last = self.recompute_w_u_fwd(q=q, k=k, v=v, beta=beta, A=inverse, gk=gk)
        return w, u, since if disable_recompute else None, last, qk, inverse

    def chunk_gated_delta_rule_fwd_h(self, *, k, w, u, gk, initial_state, **rest):
        offsets, indices = rest.get("cu_seqlens"), rest.get("chunk_indices")
        rows = len(k) if offsets is None else len(offsets) - 1
        chunks = -(-k.shape[1] // CHUNK) if indices is None else len(indices)
        given = (k, w, u, gk, initial_state)
        states = mix((len(k), chunks, k.shape[2], WIDTH, WIDTH), k.dtype, *given)
        final = mix((rows, k.shape[2], WIDTH, WIDTH), torch.float32, *given)
        new = mix(u.shape, u.dtype, *given) if rest.get("save_new_value", True) else None
        return states, new, final if rest["output_final_state"] else None

    def chunk_gla_fwd_o_gk(self, *, q, v, g, A, h, **rest):  # noqa: N803  (fla's name)
        return mix(v.shape, v.dtype, q, v, g, A, h)

    def chunk_gated_delta_rule_bwd_dhu(self, *, q, k, w, gk, h0, dht, do, dv, **rest):
        chunks = -(-k.shape[1] // CHUNK) if rest["chunk_indices"] is None else None
        chunks = chunks or len(rest["chunk_indices"])
        given = (q, k, w, gk, h0, dht, do, dv)
        d_states = mix((len(k), chunks, k.shape[2], WIDTH, WIDTH), k.dtype, *given)
        return d_states, mix(h0.shape, torch.float32, *given), mix(dv.shape, dv.dtype, *given)


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> Fla:
    def unit_rows(q, k):
        of = [mix(x.shape[:3], torch.float32, x) for x in (q, k)]
        return mix(q.shape, q.dtype, q), mix(k.shape, k.dtype, k), *of

    def chunk_backward(*given, scale, **where):
        query, _, _, strength = given[:4]
        rows = [(query.shape, torch.float32)] * 4 + [(strength.shape, torch.float32)]
        found = [
            mix(shape, dtype, *given, torch.tensor(i)) for i, (shape, dtype) in enumerate(rows)
        ]
        found[2] = found[2].to(HALF)
        return found

    def kda_inputs_backward(inputs, grads, lower_bound, *, inverses):
        return [None if x is None else mix(x.shape, x.dtype, *grads, *inverses, x) for x in inputs]

    made = {
        "own_kernels": {
            "unit_rows": unit_rows,
            "values_backward": lambda qk, d_out, **where: mix(d_out.shape, d_out.dtype, qk, d_out),
        },
        "own_backward": {"chunk_backward": chunk_backward},
        "triton": {"kda_inputs_backward": kda_inputs_backward},
    }
    for name, functions in made.items():
        module = ModuleType(name)
        vars(module).update(functions)
        monkeypatch.setitem(sys.modules, f"megatron_ext.ops.kda.{name}", module)
    found = Fla()
    monkeypatch.setattr(own, "_fla", found)
    monkeypatch.setattr(own_fit, "misfits", lambda device, dtype, **options: [])
    return found


def inputs(device: str, tokens: int, rows: int, documents: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int, dtype: torch.dtype = HALF) -> Tensor:
        made = torch.randn(*shape, generator=generator).to(device, dtype)
        return made.requires_grad_()

    row = (rows, tokens, 2, WIDTH)
    gate = [draw(2, dtype=torch.float32), draw(2, WIDTH, dtype=torch.float32)]
    state = draw(documents, 2, WIDTH, WIDTH, dtype=torch.float32)
    return [*(draw(*row) for _ in range(4)), draw(*row[:3]), *gate, state]


def run(
    leaves: list[Tensor], *, recompute: bool, offsets: Tensor | None, backend: KdaBackend
) -> tuple[list[Tensor], list[Tensor]]:
    """Output and state, and what autograd keeps of it, each tensor once."""
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        found = kda(
            *leaves[:7],
            gate=Gate.bounded,
            lower_bound=-5.0,
            cu_seqlens=offsets,
            initial_state=leaves[7],
            output_final_state=True,
            backend=backend,
            recompute=recompute,
        )
    return [x for x in found if x is not None], kept


# Tokens, rows, ends of documents, whether a row is swept in segments.
SHAPES = [(130, 2, None, False), (130, 1, (0, 1, 64, 130), False), (300, 1, None, True)]


@pytest.mark.parametrize(("tokens", "rows", "ends", "cut"), SHAPES)
def test_gradients_are_the_same_bits_and_nothing_is_computed_again(
    stand_ins, monkeypatch, tokens, rows, ends, cut
) -> None:
    if cut:
        monkeypatch.setattr(own_sweep, "SHORTEST", 64)
    offsets = None if ends is None else torch.tensor(ends)
    documents = rows if ends is None else len(ends) - 1
    results, again = [], []
    for recompute in (True, False):
        leaves = inputs("cpu", tokens, rows, documents)
        out, _ = run(leaves, recompute=recompute, offsets=offsets, backend=KdaBackend.triton)
        upstream = [torch.full_like(out[0], 0.5), torch.full_like(out[1], 0.25)]
        stand_ins.called.clear()
        results.append([*out, *torch.autograd.grad(out, leaves, upstream)])
        again.append(list(stand_ins.called))
    assert all(x.isfinite().all() and x.any() for x in results[0])
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))
    sweep = "chunk_gated_delta_rule_bwd_dhu"
    assert again[1] == [sweep]
    first = ["kda_gate_chunk_cumsum", "recompute_w_u_fwd", "chunk_gated_delta_rule_fwd_h"]
    assert again[0] == [*first, sweep]


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize(("tokens", "rows", "ends"), [shape[:3] for shape in SHAPES[:2]])
def test_a_plan_counts_the_bytes_that_are_kept(stand_ins, recompute, tokens, rows, ends) -> None:
    documents = rows if ends is None else len(ends) - 1
    sizes = []
    for device in ("cpu", "meta"):
        leaves = inputs(device, tokens, rows, documents)
        offsets = None if ends is None else torch.tensor(ends, device=device)
        options = {"recompute": recompute, "offsets": offsets}
        _, kept = run(leaves, **options, backend=KdaBackend.triton)
        sizes.append(sum(x.nbytes for x in kept if x.ndim > 2))
    got, planned = sizes
    # Write strengths are kept before and after their sigmoid, 4 bytes a token and head; documents
    # are planned with at most one chunk more, of 128 x 128.
    got -= 4 * tokens * rows * 2
    assert 0 <= planned - got <= (documents - rows) * 2 * 2 * WIDTH**2 * (not recompute)


@pytest.mark.parametrize(("backend", "units"), [(KdaBackend.triton, 7), (KdaBackend.fla, 9)])
def test_what_is_kept_more_is_seven_or_nine_vectors_a_token_and_head(backend, units) -> None:
    tokens, sizes = 256, []
    for recompute in (True, False):
        _, kept = run(
            inputs("meta", tokens, 1, 1), recompute=recompute, offsets=None, backend=backend
        )
        sizes.append(sum(x.nbytes for x in kept))
    # w, q_since, k_last, new values; decay in float32 and states count twice. Of ours the values
    # go, of fla those before the states are taken off come.
    assert sizes[1] - sizes[0] == units * tokens * 2 * WIDTH * 2


def test_nothing_is_kept_where_no_gradients_are_wanted(stand_ins) -> None:
    asked: list[bool] = []
    intra = stand_ins.chunk_kda_fwd_intra

    def watch(*, disable_recompute: bool, **given: Any) -> Any:
        asked.append(disable_recompute)
        return intra(disable_recompute=disable_recompute, **given)

    stand_ins.chunk_kda_fwd_intra = watch
    options = {"recompute": False, "offsets": None, "backend": KdaBackend.triton}
    run(inputs("cpu", 64, 1, 1), **options)
    with torch.no_grad():
        run(inputs("cpu", 64, 1, 1), **options)
    assert asked == [True, False]


def test_fla_is_told_and_one_that_would_not_listen_is_refused(monkeypatch) -> None:
    told: list[dict[str, object]] = []

    def hears(*, disable_recompute: bool = False, **given: object) -> tuple[None, None]:
        told.append({"disable_recompute": disable_recompute})
        return None, None

    def deaf(**given: object) -> tuple[None, None]:
        told.append(given)
        return None, None

    monkeypatch.setattr(fla, "_check", lambda x: None)
    leaves = inputs("cpu", 8, 1, 1)[:7]
    for function in (hears, deaf):
        module = ModuleType("fla.ops.kda")
        module.chunk_kda = function  # type: ignore[attr-defined]  # made here
        for name in ("fla", "fla.ops"):
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
        monkeypatch.setitem(sys.modules, "fla.ops.kda", module)
        fla.fla_kda(*leaves, gate=Gate.bounded, lower_bound=-5.0)
        if function is hears:
            fla.fla_kda(*leaves, gate=Gate.bounded, lower_bound=-5.0, recompute=False)
            continue
        with pytest.raises(ConfigError, match="kda_recompute=false: the fla-core installed has no"):
            fla.fla_kda(*leaves, gate=Gate.bounded, lower_bound=-5.0, recompute=False)
    assert [x.get("disable_recompute") for x in told] == [False, True, None]


@pytest.mark.parametrize("asked", [KdaBackend.auto, KdaBackend.fla, KdaBackend.dense])
def test_a_backend_without_the_choice_is_refused_where_it_would_run(asked) -> None:
    words = ["model=nano", "data=demo", "train.kda_recompute=false", "run.device=auto"]
    config = compose(words, world_size=1)
    config.model.kda.backend = asked
    with pytest.raises(ConfigError) as caught:
        kda_backend(config, torch.device("cpu"))
    assert f"train.kda_recompute=false: model.kda.backend={asked.value} is dense" in str(
        caught.value
    )
    options = {"device": torch.device("cpu"), "dtype": torch.float32, "backend": asked}
    with pytest.raises(ConfigError, match="kda_recompute"):
        errors(Problem(heads=1, tokens=4, width=16, recompute=False), **options)


def test_a_pass_without_gradients_keeps_nothing_and_may_run_anywhere() -> None:
    q, k, v, z = torch.randn(4, 1, 5, 1, 8)
    arguments = (q, k, v, z, torch.zeros(1, 5, 1), None, torch.zeros(1, 8))
    options: dict[str, Any] = {"gate": Gate.bounded_plain, "lower_bound": -5.0, "recompute": False}
    with pytest.raises(ConfigError, match="kda_recompute"):
        kda(*arguments, **options)
    with torch.no_grad():
        out, _ = kda(*arguments, **options)
    assert out.shape == v.shape


def test_the_check_at_the_start_runs_what_training_runs() -> None:
    words = ["model=nano", "data=demo", "train.kda_recompute=false"]
    assert not problem_of(compose(words)).recompute
    assert problem_of(compose(words[:2])).recompute


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], None),
        (["train.kda_segment_tokens=64", "train.recompute=full", "parallel.context=2"], None),
        (["model.kda.backend=fla"], None),
        (["run.device=cpu"], "cannot be had with run.device=cpu, where model.kda.backend=auto is"),
        (["model.kda.backend=dense"], "cannot be had with model.kda.backend=dense: it keeps all"),
        (["model.kda.backend=reference"], "cannot be had with model.kda.backend=reference: it"),
        (
            ["model.kda.backend=cudnn", "model.kda.head_dim=128", "model.kda.value_dim=128",
             "run.precision=bf16"],
            "cannot be had with model.kda.backend=cudnn: its kernels hand nothing over",
        ),
        (["run.deterministic=true"], "cannot be had with run.deterministic=true, where model"),
        (["model.attention=mla"], "there are no layers of linear attention to keep anything of"),
    ],
)  # fmt: skip
def test_a_configuration_is_refused_where_nothing_can_be_kept(words, said) -> None:
    words = ["model=nano", "data=demo", "train.kda_recompute=false", *words]
    if said is None:
        assert not compose(words).train.kda_recompute
        return
    with pytest.raises(ConfigError) as caught:
        compose(words)
    assert "1 problem in the configuration" in str(caught.value)
    assert f"train.kda_recompute=false: {said}" in str(caught.value)
