"""Experts in FP8: what is given to Transformer Engine, with a stand-in that rounds as it does."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from megatron_ext.config.schema import ExpertBackend, ExpertFp8
from megatron_ext.errors import ConfigError
from megatron_ext.ops.grouped_mlp import (
    engine,
    fp8,
    grouped_mlp,
    grouped_mlp_reference,
    resolve_backend,
)
from tests.unit.test_grouped_mlp import BOUNDS, grouped_gemm

FORMS = {"E4M3": torch.float8_e4m3fn, "E5M2": torch.float8_e5m2}
LATENT, WIDTH = 32, 48
ASKED = {"backend": ExpertBackend.transformer_engine}


class Quantised:
    """A matrix in FP8 and its transpose, either of which may be missing."""

    def __init__(self, x: torch.Tensor, quantiser: SimpleNamespace) -> None:
        form, scale = FORMS[quantiser.fp8_dtype], quantiser.scale
        self.scale = 1 / scale
        self.rows = (x.float() * scale).to(form)
        self.columns = self.rows.clone() if quantiser.columnwise else None

    def update_usage(self, *, rowwise_usage: bool, columnwise_usage: bool) -> None:
        self.rows = self.rows if rowwise_usage else None
        assert self.columns is not None or not columnwise_usage

    def value(self, *, transposed: bool) -> torch.Tensor:
        data = self.columns if transposed else self.rows
        assert data is not None, "this form of the matrix was thrown away"
        return data.double() * self.scale


def by_blocks(*, fp8_dtype, rowwise, columnwise, block_scaling_dim):
    return SimpleNamespace(
        fp8_dtype=fp8_dtype, columnwise=columnwise, scale=torch.ones(1), dims=block_scaling_dim
    )


def split_quantize(x, sizes, quantisers):
    assert all(size % 16 == 0 and size for size in sizes)
    assert x.shape[1] % 16 == 0
    assert all(one.internal for one in quantisers)
    return [Quantised(a, b) for a, b in zip(x.split(sizes), quantisers, strict=True)]


def product(a, b, out, *, layout, use_split_accumulator, **options):
    a = [x.value(transposed=layout[0] == "N").bfloat16() for x in a]
    b = [x.value(transposed=layout[1] == "T").bfloat16() for x in b]
    grouped_gemm(a, b, out, layout=layout, **options)


def prepare_for_saving(*found):
    tensors = [x for one in found for x in (one.rows, one.columns, one.scale)]
    for one in found:
        one.rows = one.columns = one.scale = None
    return tensors, list(found)


def restore_from_saved(objects, tensors):
    for number, one in enumerate(objects):
        one.rows, one.columns, one.scale = tensors[3 * number : 3 * number + 3]
    return objects


class Moved:
    """Its modules that add rows of zeros and take them away."""

    def __init__(self, groups: int, align: int, *, add: bool) -> None:
        self.groups, self.align, self.add = groups, align, add

    def __call__(self, x, sizes):
        assert len(sizes) == self.groups
        assert all(sizes)
        wide = [-(-size // self.align) * self.align for size in sizes]
        if not self.add:
            parts = zip(x.split(wide), sizes, strict=True)
            return torch.cat([part[:size] for part, size in parts])
        parts = zip(x.split(sizes), wide, strict=True)
        zeros = torch.nn.functional.pad
        return torch.cat([zeros(part, (0, 0, 0, w - len(part))) for part, w in parts]), wide


@pytest.fixture
def library(monkeypatch):
    pytorch = SimpleNamespace(
        Float8Quantizer=lambda **given: SimpleNamespace(**given),
        Float8BlockQuantizer=by_blocks,
        Fp8Padding=lambda *given: Moved(*given, add=True),
        Fp8Unpadding=lambda *given: Moved(*given, add=False),
        prepare_for_saving=prepare_for_saving,
        restore_from_saved=restore_from_saved,
    )
    kernels = SimpleNamespace(
        DType=SimpleNamespace(kFloat8E4M3="E4M3", kFloat8E5M2="E5M2"),
        split_quantize=split_quantize,
    )
    used = fp8.Library(pytorch, kernels, product)
    monkeypatch.setattr(fp8, "library", lambda: used)
    monkeypatch.setattr(fp8, "misfit", lambda *_: None)
    return used


def inputs(counts: list[int]) -> list[torch.Tensor]:
    torch.manual_seed(0)
    rows, experts = sum(counts), len(counts)
    x = torch.randn(rows, LATENT).bfloat16()
    fc1 = (torch.randn(experts, 2, WIDTH, LATENT) * LATENT**-0.5).bfloat16()
    fc2 = (torch.randn(experts, LATENT, WIDTH) * WIDTH**-0.5).bfloat16()
    leaves = [leaf.requires_grad_() for leaf in (x, torch.rand(rows), fc1, fc2)]
    return [leaves[0], torch.tensor(counts), *leaves[1:]]


def run(function, given, **options):
    leaves = [x for x in given if x.requires_grad]
    out = function(*given, **BOUNDS, **options)
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).bfloat16().to(out)
    return [out, *torch.autograd.grad(out, leaves, upstream)]


def errors(counts, precision):
    given = inputs(counts)
    exact = [x.detach().double().requires_grad_() if x.requires_grad else x for x in given]
    # What the allocator hands out next was full of NaN: an unset gradient would show.
    for _ in range(8):
        torch.full_like(given[3], float("nan"))
    found, wanted = (
        run(grouped_mlp, given, precision=precision, **ASKED),
        run(grouped_mlp_reference, exact),
    )
    for got, want, leaf in zip(found[1:], wanted[1:], (given[0], *given[2:]), strict=True):
        assert got.shape == want.shape
        assert got.dtype is leaf.dtype
    return [float((a - b).norm() / b.norm()) for a, b in zip(found, wanted, strict=True)], found


@pytest.mark.parametrize("precision", [ExpertFp8.current, ExpertFp8.blockwise])
@pytest.mark.parametrize("counts", [[32, 16, 48], [3, 0, 40, 17], [0, 0, 0, 2], [1, 16]])
def test_rows_of_any_number_are_the_formula_up_to_fp8(counts, precision, library) -> None:
    sizes, found = errors(counts, precision)
    # E4M3 rounds to 4 bits, about 2.6 % of each factor of a product, E5M2 gradients to 3, 5 %: with
    # an activation between two products some percent. Of few rows; weights of rows (the third) sum
    # up numbers of both signs.
    assert max(sizes) < 0.2
    assert min(sizes) > 0.01  # all of it was rounded
    for weight_gradient in found[3:]:
        for expert, count in enumerate(counts):
            assert bool(weight_gradient[expert].any()) == bool(count)


def test_a_scale_takes_the_largest_number_to_the_largest_of_the_form(library) -> None:
    x = torch.tensor([[0.5, -3.0], [0.25, 0.0]])
    for form, largest in (("E4M3", 448.0), ("E5M2", 57344.0)):
        assert torch.finfo(FORMS[form]).max == largest
        (one,) = fp8._scaled(library, x.abs().max().view(1), form)
        assert float(one.scale * 3) == pytest.approx(largest)
    (zeros,) = fp8._scaled(library, torch.zeros(1), "E5M2")
    assert bool(zeros.scale.isfinite())
    (broken,) = fp8._scaled(library, torch.tensor([float("nan")]), "E4M3")
    assert not bool(broken.scale.isfinite())


def test_scales_are_of_each_expert_for_weights_and_of_all_rows(library) -> None:
    weight = torch.ones(3, 16, 16) * torch.tensor([1.0, 4.0, 7.0]).view(3, 1, 1)
    of = {"recipe": ExpertFp8.current}
    found = fp8._quantised_weights(library, weight, [16, 0, 16], transposed=True, **of)
    assert [float(one.scale) * 448 for one in found] == pytest.approx([1, 7])
    found = fp8._quantised_rows(
        library, weight[:2].flatten(0, 1), [16, 16], gradient=False, kept=True, **of
    )
    assert [float(one.scale) * 448 for one in found] == pytest.approx([4, 4])


def test_rows_keep_one_byte_a_number_until_the_backward_pass(library) -> None:
    given = inputs([16, 32])
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        fp8.Fp8Linear.apply(given[0], given[3].flatten(1, 2), [16, 32], ExpertFp8.current)
    own = [x for x in kept if x.numel() > 1 and x.data_ptr() != given[3].data_ptr()]
    assert sum(x.nbytes for x in own) == 48 * LATENT


def test_a_graph_can_be_walked_twice(library) -> None:
    given = inputs([16, 5])
    out = grouped_mlp(*given, **BOUNDS, precision=ExpertFp8.current, **ASKED)
    first = torch.autograd.grad(out.sum(), given[3], retain_graph=True)
    assert torch.equal(first[0], torch.autograd.grad(out.sum(), given[3])[0])


def test_fp8_is_never_replaced(monkeypatch) -> None:
    cuda = torch.device("cuda")
    options = {"dtype": torch.bfloat16, "widths": (32, 48), "precision": ExpertFp8.blockwise}
    with pytest.raises(ConfigError, match=r"needs model\.experts\.backend=tr"):
        resolve_backend(ExpertBackend.auto, cuda, **options)
    asked = ExpertBackend.transformer_engine
    with pytest.raises(ConfigError, match="Transformer Engine is not installed"):
        resolve_backend(asked, cuda, **options)
    with pytest.raises(ConfigError, match=r"widths must be multiples of 16, they are 32, 24"):
        resolve_backend(asked, cuda, **options | {"widths": iter((32, 24))})
    with pytest.raises(ConfigError, match="bfloat16 only"):
        resolve_backend(asked, cuda, **options | {"dtype": torch.float32})
    assert resolve_backend(asked, torch.device("meta"), **options) is asked
    monkeypatch.setattr(engine, "misfit", lambda *_: None)
    for capability, reason in (
        ((8, 9), "needs Hopper or newer"),
        ((10, 0), "blockwise needs Hopper"),
    ):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, c=capability: c)
        with pytest.raises(ConfigError, match=reason):
            resolve_backend(asked, cuda, **options)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    old = fp8.Library(SimpleNamespace(Fp8Padding=None), SimpleNamespace(), None)
    monkeypatch.setattr(fp8, "library", lambda: old)
    with pytest.raises(ConfigError, match=r"has no Float8Quantizer, .*split_quantize"):
        resolve_backend(asked, cuda, **options)
