"""Each replacement is needed, does what it says, is put back, and stays away from GPUs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import mappings
from megatron.core.tensor_parallel import random as tracker_module
from megatron.core.transformer.moe import token_dispatcher

from megatron_ext.parallel import cpu_support
from tests.support.threads import run_ranks

CPU = torch.device("cpu")
NAMES = [replacement.__name__ for replacement in cpu_support.REPLACEMENTS]


@pytest.fixture(autouse=True)
def nothing_installed() -> Iterator[None]:
    before = cpu_support.installed_device()
    cpu_support.uninstall()
    yield
    cpu_support.uninstall()
    if before is not None:
        cpu_support.install(before)


def current_device() -> bool:
    return torch.empty(1, device=torch.cuda.current_device()).device == CPU


def device_literals() -> bool:
    made = torch.zeros(1, device="cuda")
    moved = torch.zeros(1).to("cuda:0")
    return made.device == CPU and moved.device == CPU


def tensor_type() -> bool:
    half = torch.zeros(1, dtype=torch.bfloat16)
    return (torch.zeros(1).type(), half.type()) == (
        "torch.cuda.FloatTensor",
        "torch.cuda.BFloat16Tensor",
    )


def tensor_cuda() -> bool:
    tensor = torch.zeros(1)
    return tensor.cuda() is tensor


def pin_memory() -> bool:
    tensor = torch.zeros(1)
    return torch.tensor([1], pin_memory=True).device == CPU and tensor.pin_memory() is tensor


def random_state() -> bool:
    """Two trackers with the same seed draw the same, and the outer stream does not notice."""
    draws = []
    torch.manual_seed(3)
    outer = torch.get_rng_state()
    for _ in range(2):
        tracker = tracker_module.CudaRNGStatesTracker()
        tracker.add("mine", 7)
        with tracker.fork("mine"):
            draws.append(torch.rand(4))
    return torch.equal(*draws) and torch.equal(outer, torch.get_rng_state())


def random_state_warning() -> bool:
    """One message of one logger is dropped; others pass."""
    logger = logging.getLogger("megatron.core.tensor_parallel.random")
    record = logger.makeRecord(logger.name, logging.WARNING, "", 0, "other", (), None)
    noise = logger.makeRecord(
        logger.name,
        logging.WARNING,
        "",
        0,
        "CPU RNG state changed within GPU RNG context",
        (),
        None,
    )
    return bool(logger.filter(record)) and not logger.filter(noise)


def synchronize() -> bool:
    torch.cuda.synchronize()
    return True


def streams() -> bool:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    event = torch.cuda.Event()
    event.record()
    with torch.cuda.stream(stream):
        torch.zeros(1).record_stream(stream)
    return event.query()


def all_to_all_splits() -> bool:
    move = token_dispatcher.maybe_move_tensor_to_cpu
    splits = torch.tensor([1, 2])
    moved = move(splits, as_numpy=True)
    return moved.tolist() == [1, 2] and not torch.is_tensor(moved) and move(splits) is splits


def uneven_pieces() -> bool:
    """Rank r has r + 1 rows of its number; the gradient of a row is the sum over ranks."""

    def rank(group: dist.ProcessGroup) -> list[float]:
        rows = torch.full((group.rank() + 1, 1), float(group.rank()), requires_grad=True)
        # The function around it loses a group that torch does not know.
        gathered = mappings._GatherFromSequenceParallelRegion.apply(
            rows, group, True, [1, 2], False
        )
        gathered.backward(torch.tensor([[1.0], [2.0], [3.0]]))
        assert rows.grad is not None
        return [*gathered.flatten().tolist(), *rows.grad.flatten().tolist()]

    return run_ranks(2, rank) == [[0.0, 1.0, 1.0, 2.0], [0.0, 1.0, 1.0, 4.0, 6.0]]


def eager() -> bool:
    def compiler(graph: object, inputs: object) -> Callable[..., object]:
        raise AssertionError("compiled")

    return bool(torch.compile(lambda x: x + 1, backend=compiler)(torch.zeros(1)) == 1)


PROBES = [
    current_device,
    device_literals,
    tensor_type,
    tensor_cuda,
    pin_memory,
    random_state,
    random_state_warning,
    synchronize,
    streams,
    all_to_all_splits,
    uneven_pieces,
    eager,
]


def works(probe: Callable[[], bool]) -> bool:
    try:
        return probe()
    except Exception:  # what a missing GPU raises differs from call to call
        return False


def test_every_replacement_has_a_probe_and_a_reason() -> None:
    assert [probe.__name__ for probe in PROBES] == NAMES
    assert all("ithout" in (one.__doc__ or "") for one in cpu_support.REPLACEMENTS)


@pytest.mark.parametrize("probe", PROBES, ids=NAMES)
def test_a_replacement_works_and_megatron_fails_without_it(
    probe: Callable[[], bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu_support.install(CPU)
    assert probe()
    cpu_support.uninstall()
    if torch.cuda.is_available() and probe is not random_state_warning:
        pytest.skip("with a GPU the originals work")
    others = tuple(one for one in cpu_support.REPLACEMENTS if one.__name__ != probe.__name__)
    monkeypatch.setattr(cpu_support, "REPLACEMENTS", others)
    cpu_support.install(CPU)
    assert not works(probe)


def replaced_names() -> dict[str, object]:
    owners = {
        torch.cuda: (
            "current_device manual_seed get_rng_state set_rng_state synchronize Stream Event "
            "current_stream default_stream stream"
        ),
        torch.cuda.random: "manual_seed get_rng_state set_rng_state",
        torch.Tensor: "record_stream type cuda pin_memory",
        tracker_module: "_get_cuda_rng_state _set_cuda_rng_state",
        token_dispatcher: "maybe_move_tensor_to_cpu",
        mappings: "_gather_along_first_dim _reduce_scatter_along_first_dim",
    }
    return {
        f"{owner.__name__}.{name}": getattr(owner, name)
        for owner, names in owners.items()
        for name in names.split()
    }


def test_nothing_is_installed_for_a_cuda_device() -> None:
    before = replaced_names()
    stack = list(torch.overrides._get_current_function_mode_stack())
    assert cpu_support.install(torch.device("cuda", 0)) == []
    assert replaced_names() == before
    assert torch.overrides._get_current_function_mode_stack() == stack
    assert cpu_support.installed_device() is None


def test_uninstalling_puts_every_name_back() -> None:
    before = replaced_names()
    assert cpu_support.install(CPU) == NAMES
    assert replaced_names() != before
    cpu_support.uninstall()
    after = replaced_names()
    assert [name for name in before if after[name] is not before[name]] == []
    assert torch.zeros(1).type() == "torch.FloatTensor"


def test_installing_twice_changes_the_device_only() -> None:
    cpu_support.install(CPU)
    first = replaced_names()
    modes = len(torch.overrides._get_current_function_mode_stack())
    assert cpu_support.install(torch.device("meta")) == NAMES
    second = replaced_names()
    assert all(second[name] is first[name] for name in first)
    assert len(torch.overrides._get_current_function_mode_stack()) == modes
    assert torch.empty(1, device=torch.cuda.current_device()).device.type == "meta"
    assert torch.empty(1, device="cuda").device.type == "meta"
    assert torch.empty(1, device="meta").type() == "torch.cuda.FloatTensor"
