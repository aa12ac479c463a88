"""Rules of attention residuals, for `validate`: what is wrong, and what works. No torch."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_ext.config.layout import LayerKind, chunk_sizes, layer_kinds
from megatron_ext.config.problem import Problem
from megatron_ext.config.residual import mixes
from megatron_ext.config.schema import (
    AttentionPattern,
    AttentionResidualBackend,
    Device,
    ResidualKind,
    RunConfig,
)


def residual_problems(config: RunConfig) -> Iterator[Problem]:
    """All that is wrong with `residual` and its place in the model and the layout."""
    options = config.residual
    if options.fp32 and not mixes(options):
        yield Problem(
            f"residual.fp32=true: is for residual.kind=block and full, whose sums are kept apart, "
            f"got {options.kind.name} (nearest residual.fp32=false)",
            ("residual.fp32", "residual.kind"),
        )
    if mixes(options):
        yield from _kernel(config)
    if options.kind is ResidualKind.shared:
        yield from _shared(config)


def _kernel(config: RunConfig) -> Iterator[Problem]:
    run, options = config.run, config.residual
    fla = AttentionResidualBackend.fla
    if run.deterministic and options.backend is fla:
        yield Problem(
            "residual.backend=fla: is not deterministic, since it tries variants of its kernels, "
            "and run.deterministic=true was given (allowed reference, dense, auto; or "
            "run.deterministic=false)",
            ("run.deterministic", "residual.backend"),
        )
    if run.deterministic and options.require and options.backend is AttentionResidualBackend.auto:
        yield Problem(
            "residual.require=true: forbids that residual.backend=auto leaves out fla, and "
            "run.deterministic=true does (nearest residual.backend=dense)",
            ("residual.require", "residual.backend", "run.deterministic"),
        )
    fused = (fla, AttentionResidualBackend.triton)
    if run.device is Device.cpu and options.backend in fused:
        yield Problem(
            f"residual.backend={options.backend.name}: needs a GPU, and run.device=cpu was given "
            "(allowed reference, dense, auto; or run.device=auto)",
            ("run.device", "residual.backend"),
        )


def _shared(config: RunConfig) -> Iterator[Problem]:
    """What layers share must have one width, and a block must lie in one stage."""
    model, size = config.model, config.residual.block_size
    if model.attention is AttentionPattern.gated:
        yield Problem(
            "residual.kind=shared: shares what an attention hands to its output projection, and "
            "model.attention=gated has two of them a layer (allowed interleaved, kda, mla; or "
            "another residual)",
            ("residual.kind", "model.attention"),
        )
        return
    kda, mla = model.kda, model.mla
    widths = {
        LayerKind.kda: kda.num_heads * kda.value_dim,
        LayerKind.mla: mla.num_heads * mla.v_head_dim,
    }
    here = [widths[kind] for kind in layer_kinds(model)]
    blocks = [here[start : start + size] for start in range(0, len(here), size)]
    if any(len(set(block)) > 1 for block in blocks):
        yield Problem(
            "residual.kind=shared: the layers of a block must agree in heads x value width, got "
            f"{kda.num_heads} x {kda.value_dim} = {widths[LayerKind.kda]} in KDA and "
            f"{mla.num_heads} x {mla.v_head_dim} = {widths[LayerKind.mla]} in gated MLA "
            f"(nearest model.mla.v_head_dim={max(1, widths[LayerKind.kda] // mla.num_heads)} with "
            "as many heads; or another residual)",
            (
                "residual.kind",
                "model.kda.num_heads",
                "model.kda.value_dim",
                "model.mla.num_heads",
                "model.mla.v_head_dim",
            ),
        )
    cuts, end = [], 0
    for chunk in chunk_sizes(config.parallel, model.num_layers):
        end += chunk
        cuts.append(end)
    wrong = sorted({cut for cut in cuts if cut % size and cut < model.num_layers})
    if wrong:
        yield Problem(
            f"residual.block_size={size}: with residual.kind=shared stages must be cut between "
            f"blocks, got cuts after {', '.join(map(str, wrong))} layers (allowed "
            f"parallel.stage_layers in multiples of {size}, but for the last layers; nearest "
            f"{_whole_blocks(config, size)})",
            (
                "residual.block_size",
                "residual.kind",
                "model.num_layers",
                "parallel.pipeline",
                "parallel.virtual_pipeline",
                "parallel.stage_layers",
            ),
        )


def _whole_blocks(config: RunConfig, size: int) -> str:
    """Layers of each chunk when blocks are spread as evenly as possible, as a key and value."""
    parallel, layers = config.parallel, config.model.num_layers
    chunks, blocks = parallel.pipeline * parallel.virtual_pipeline, -(-layers // size)
    sizes, left = [], layers
    for chunk in range(chunks):
        share = (blocks * (chunk + 1) // chunks - blocks * chunk // chunks) * size
        sizes.append(min(share, left))
        left -= sizes[-1]
    return f"parallel.stage_layers=[{','.join(map(str, sizes))}]"
