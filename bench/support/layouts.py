"""What `bench/scaling.py` measures: named sets of layouts, by overrides of pretrain.py."""

from __future__ import annotations

from dataclasses import dataclass, replace

COMMON = (
    "data=sample",
    "run.dir=bench-scaling-unused",
    "run.timeout_seconds=240",  # a rank that waits in vain ends, and the others with it
    "optim.schedule=constant",
    "optim.lr=1e-4",
    "optim.warmup_tokens=0",
)
OVERLAP = ("parallel.overlap_grad_reduce=true", "parallel.overlap_param_gather=true")
SETS = ("weak", "k3_30b", "context", "resume", "custom")


@dataclass(frozen=True)
class Layout:
    """One row of the table.

    Attributes:
        ranks: processes, one a GPU.
        words: overrides; those of `COMMON` come before.
        baseline: name of the layout whose speed a rank counts as 100 %; empty: there is none.
        balanced: every expert gets as many tokens, whatever the router says.
        checkpoint: saves twice in the background while it trains.
        resumes: name of the layout whose last checkpoint this one goes on from; instead of being
            timed it makes one step.
    """

    name: str
    ranks: int
    words: tuple[str, ...]
    baseline: str = ""
    balanced: bool = False
    checkpoint: bool = False
    resumes: str = ""


def layouts(chosen: str, *, ranks: int, large: bool) -> list[Layout]:
    """A set at a number of ranks.

    Args:
        chosen: one of `SETS`.
        large: sizes for GPUs in bf16; else `nano` in fp32.

    Raises:
        ValueError: the set cannot be had with so many ranks; says with how many.
    """
    if chosen == "weak":
        return _weak(ranks, large=large)
    if chosen == "k3_30b":
        return _thirty(ranks, large=large)
    if chosen == "context":
        return _context(ranks, large=large)
    if chosen == "resume":
        return _resume(ranks, large=large)
    words = _model(large) if large else (*_model(large), *_tokens(64, ranks * 256, 2))
    return [Layout("custom", ranks, words)]


def _model(large: bool) -> tuple[str, ...]:
    if large:
        return ("model=mini", "run.precision=bf16")
    return ("model=nano", "run.precision=fp32")


def _tokens(length: int, batch: int, micro_batch: int) -> tuple[str, ...]:
    return (
        f"data.sequence_length={length}",
        f"train.batch_tokens={batch}",
        f"train.micro_batch_size={micro_batch}",
    )


def _weak(ranks: int, *, large: bool) -> list[Layout]:
    """As many tokens a rank and as many a micro-batch and rank, over data, expert, context ranks.

    Under context parallelism sequences stay as long: more of them are in a micro-batch, and each
    is cut. So the work of a token is the same in all of these.
    """
    length, batch, micro = (4096, 65536, 4) if large else (64, 256, 2)
    words = (*_model(large), *OVERLAP)
    plain = (*words, *_tokens(length, ranks * batch, micro))
    found = [
        Layout("one", 1, (*words, *_tokens(length, batch, micro))),
        Layout("one balanced", 1, (*words, *_tokens(length, batch, micro)), balanced=True),
    ]
    if ranks == 1:
        return found
    expert = (*plain, f"parallel.expert={ranks}")
    cut = (*words, *_tokens(length, ranks * batch, ranks * micro), f"parallel.context={ranks}")
    return [
        *found,
        Layout(f"dp{ranks}", ranks, plain, baseline="one"),
        Layout(f"ep{ranks}", ranks, expert, baseline="one"),
        Layout(f"ep{ranks} balanced", ranks, expert, baseline="one balanced", balanced=True),
        Layout(f"cp{ranks}", ranks, cut, baseline="one"),
    ]


def _thirty(ranks: int, *, large: bool) -> list[Layout]:
    """The 30 B model on the GPUs of one host; on CPUs `nano` in the same layouts."""
    needed = 8 if large else 4
    if ranks != needed:
        raise ValueError(f"the layouts of this set are for {needed} ranks")
    half = ranks // 2
    if large:
        words = ("model=k3_30b", "residual=block", "residual.block_size=4", "run.precision=bf16")
        words += ("train.recompute=selective", *_tokens(8192, 262144, 1), *OVERLAP)
    else:
        words = (*_model(large), "residual=block", "residual.block_size=2", *_tokens(64, 1024, 1))
    split = (*words, "parallel.tensor=2", f"parallel.expert={half}")
    # Gradients travel while the backward pass runs; gathering weights early is for one chunk only.
    stages = tuple(word for word in words if word != OVERLAP[1])
    stages = (*stages, "parallel.pipeline=2", "parallel.virtual_pipeline=2")
    stages = (*stages, f"parallel.expert={half}")
    return [
        Layout(f"ep{ranks}", ranks, (*words, f"parallel.expert={ranks}")),
        Layout(f"ep{ranks} balanced", ranks, (*words, f"parallel.expert={ranks}"), balanced=True),
        Layout(f"tp2 ep{half}", ranks, split),
        Layout(f"pp2 vpp2 ep{half}, cached", ranks, (*stages, "residual.cache_sources=true")),
        Layout(f"pp2 vpp2 ep{half}, full", ranks, (*stages, "residual.cache_sources=false")),
    ]


def _context(ranks: int, *, large: bool) -> list[Layout]:
    """131,072 tokens a rank in one sequence (a million on eight), against 64K on one."""
    one, each = (65536, 131072) if large else (64, 128)
    words = (*_model(large), "train.recompute=full")
    long = (*words, *_tokens(ranks * each, ranks * each, 1), f"parallel.context={ranks}")
    return [
        Layout("64K on one" if large else "short on one", 1, (*words, *_tokens(one, one, 1))),
        Layout(
            f"{ranks * each:,} tokens, cp{ranks}",
            ranks,
            long,
            baseline="64K on one" if large else "short on one",
        ),
    ]


def _resume(ranks: int, *, large: bool) -> list[Layout]:
    """Saving in the background under expert parallelism, and going on with half of the ranks."""
    if ranks < 2 or ranks % 2:
        raise ValueError("half of the ranks go on: an even number is needed")
    saved = next(x for x in _weak(ranks, large=large) if x.name == f"ep{ranks}")
    half = ranks // 2
    words = tuple(w for w in saved.words if not w.startswith("parallel.expert="))
    return [
        replace(saved, baseline="", checkpoint=True),
        Layout(f"ep{half} goes on", half, (*words, f"parallel.expert={half}"), resumes=saved.name),
    ]
