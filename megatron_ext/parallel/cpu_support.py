"""Lets megatron-core run where there is no GPU: on the CPU, or on the meta device for planning.

megatron-core names the CUDA device in a few hundred places. Each replacement below stands for one
of its habits and says what fails without it. They are installed for the process by `install`,
which does nothing for a CUDA device. Apart from torch's and megatron-core's names listed in
`REPLACEMENTS`, nothing is changed, and `uninstall` puts everything back.

Threads that torch starts (data loaders, checkpoint writers) do not see the tensor-level
replacements, since a function mode belongs to one thread: they must name their devices.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class DeviceMode(TorchFunctionMode):
    """Rewrites single torch calls: one mode for the process, some 10 microseconds a call.

    What it rewrites is switched on by name in `active`; with nothing active it passes all through.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        self.active: set[str] = set()
        self.undo: list[Callable[[], None]] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if "tensor_type" in self.active and func is torch.Tensor.type and len(args) == 1:
            # Inside the mode: an attribute Tensor.type would be called again by the mode.
            return "torch.cuda." + func(*args, **kwargs).rsplit(".", 1)[1]
        if "tensor_cuda" in self.active and func is torch.Tensor.cuda:
            return args[0]
        if "pin_memory" in self.active:
            if func is torch.Tensor.pin_memory:
                return args[0]
            if kwargs.get("pin_memory"):
                kwargs = {**kwargs, "pin_memory": False}
        if "device_literals" in self.active:
            if _is_cuda(kwargs.get("device")):
                kwargs = {**kwargs, "device": self.device}
            elif func is torch.Tensor.to and any(_is_cuda(argument) for argument in args[1:]):
                args = tuple(self.device if _is_cuda(argument) else argument for argument in args)
        return func(*args, **kwargs)


def _is_cuda(value: object) -> bool:
    if isinstance(value, str):
        return value.startswith("cuda")
    return isinstance(value, torch.device) and value.type == "cuda"


class NullStream:
    """Stands for a CUDA stream or event where everything happens at once and in order."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        pass

    def wait_stream(self, stream: Any) -> None:
        """Nothing to wait for."""

    def wait_event(self, event: Any) -> None:
        """Nothing to wait for."""

    def record_event(self, event: Any = None) -> Any:
        """The event given, or a new one."""
        return NullStream() if event is None else event

    def record(self, stream: Any = None) -> None:
        """Nothing to mark."""

    def wait(self, stream: Any = None) -> None:
        """Nothing to wait for."""

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def query(self) -> bool:
        """All work is done."""
        return True

    def elapsed_time(self, end: Any) -> float:
        """Milliseconds between two events; unknown here, so 0."""
        return 0.0

    def __enter__(self) -> NullStream:
        return self

    def __exit__(self, *exception: Any) -> None:
        return None


class _DropForkWarning(logging.Filter):
    """Drops one message of megatron-core's generator tracker and lets all others through."""

    def filter(self, record: logging.LogRecord) -> bool:
        return "CPU RNG state changed within GPU RNG context" not in record.getMessage()


def _replace(mode: DeviceMode, owner: Any, name: str, value: Any) -> None:
    missing = object()
    old = vars(owner).get(name, missing)
    setattr(owner, name, value)
    if old is missing:
        mode.undo.append(lambda: delattr(owner, name))
    else:
        mode.undo.append(lambda: setattr(owner, name, old))


def current_device(mode: DeviceMode) -> None:
    """`torch.cuda.current_device()` names our device: about 150 calls place weights and buffers
    with it (linear layers, mappings, DDP buffers, pipeline communication). All layouts fail
    without it."""
    _replace(mode, torch.cuda, "current_device", lambda: mode.device)


def device_literals(mode: DeviceMode) -> None:
    """`device="cuda"` in a torch call means our device: the schedules' token count, the optimizer's
    scale, the gradient norm and checkpoints say it literally. All layouts fail without it."""
    mode.active.add("device_literals")


def tensor_type(mode: DeviceMode) -> None:
    """`Tensor.type()` reports `torch.cuda.*`: the distributed optimizer groups parameters by that
    string and the gradient norm asserts it. All layouts fail without it."""
    mode.active.add("tensor_type")


def tensor_cuda(mode: DeviceMode) -> None:
    """`Tensor.cuda()` returns the tensor: context parallel slicing and the checkpoint exchange
    call it on every tensor. Context parallelism fails without it."""
    mode.active.add("tensor_cuda")


def pin_memory(mode: DeviceMode) -> None:
    """Page-locked memory needs a driver: context parallel slicing asks for it. Context
    parallelism fails without it."""
    mode.active.add("pin_memory")


def random_state(mode: DeviceMode) -> None:
    """The CUDA generator is the CPU one: the tracker that gives tensor parallel ranks their own
    dropout, and recomputation, save and restore its state. All layouts fail without it."""
    from megatron.core.tensor_parallel import random as tracker

    def get_state(device: Any = "cuda", clone: bool = False, graph_safe: bool = False) -> Any:
        return torch.get_rng_state()

    def set_state(new_state: torch.Tensor, device: Any = -1, graph_safe: bool = False) -> None:
        torch.set_rng_state(new_state)

    def manual_seed(seed: int) -> None:
        torch.manual_seed(seed)

    _replace(mode, tracker, "_get_cuda_rng_state", get_state)
    _replace(mode, tracker, "_set_cuda_rng_state", set_state)
    for module in (torch.cuda, torch.cuda.random):
        _replace(mode, module, "get_rng_state", get_state)
        _replace(mode, module, "set_rng_state", set_state)
        _replace(mode, module, "manual_seed", manual_seed)


def random_state_warning(mode: DeviceMode) -> None:
    """The tracker warns on every use that the CPU generator moved, which is now its purpose.
    Without it: noise only."""
    logger = logging.getLogger("megatron.core.tensor_parallel.random")
    drop = _DropForkWarning()
    logger.addFilter(drop)
    mode.undo.append(lambda: logger.removeFilter(drop))


def synchronize(mode: DeviceMode) -> None:
    """`torch.cuda.synchronize()` has nothing to wait for: pipeline communication and checkpoints
    call it. Pipeline parallelism fails without it."""
    _replace(mode, torch.cuda, "synchronize", lambda device=None: None)


def streams(mode: DeviceMode) -> None:
    """Streams and events become objects that do nothing: DDP and the expert dispatcher make them
    in their constructors. All layouts fail without it."""
    stream = NullStream()
    _replace(mode, torch.cuda, "Stream", NullStream)
    _replace(mode, torch.cuda, "Event", NullStream)
    _replace(mode, torch.cuda, "current_stream", lambda device=None: stream)
    _replace(mode, torch.cuda, "default_stream", lambda device=None: stream)
    _replace(mode, torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    _replace(mode, torch.Tensor, "record_stream", lambda tensor, stream: None)


def all_to_all_splits(mode: DeviceMode) -> None:
    """Split sizes of the expert all-to-all become arrays: megatron-core converts them only when it
    moves them off a GPU, and the collective takes no tensors. Expert parallelism fails without
    it."""
    from megatron.core.transformer.moe import token_dispatcher

    original = token_dispatcher.maybe_move_tensor_to_cpu

    def move(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        if isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu":
            return tensor.numpy() if as_numpy else tensor
        return original(tensor, as_numpy, record_stream)

    _replace(mode, token_dispatcher, "maybe_move_tensor_to_cpu", move)


def uneven_pieces(mode: DeviceMode) -> None:
    """Ranks with different numbers of rows gather them and scatter their sums: gloo's collectives
    take equal numbers only. Expert and expert tensor parallelism together fail without it."""
    from megatron.core.tensor_parallel import mappings

    even_gather = mappings._gather_along_first_dim
    even_scatter = mappings._reduce_scatter_along_first_dim

    def gather(x: Any, group: Any, sizes: Any = None, *rest: Any, **more: Any) -> Any:
        if sizes is None or len(set(sizes)) == 1:
            return even_gather(x, group, sizes, *rest, **more)
        padded = x.new_zeros(max(sizes), *x.shape[1:])
        padded[: len(x)] = x
        whole = x.new_empty(len(sizes) * len(padded), *x.shape[1:])
        torch.distributed.all_gather_into_tensor(whole, padded, group=group)
        parts = zip(whole.split(len(padded)), sizes, strict=True)
        return torch.cat([part[:size] for part, size in parts])

    def scatter(x: Any, group: Any, sizes: Any = None, *rest: Any, **more: Any) -> Any:
        if sizes is None or len(set(sizes)) == 1:
            return even_scatter(x, group, sizes, *rest, **more)
        total = x.clone()
        torch.distributed.all_reduce(total, group=group)
        return total.split(sizes)[group.rank()].contiguous()

    _replace(mode, mappings, "_gather_along_first_dim", gather)
    _replace(mode, mappings, "_reduce_scatter_along_first_dim", scatter)


def eager(mode: DeviceMode) -> None:
    """Functions that megatron-core compiles run as written: compiling them for a CPU takes half a
    minute in every process. Without it: slow only."""
    torch.compiler.set_stance("force_eager")
    mode.undo.append(lambda: torch.compiler.set_stance("default"))


REPLACEMENTS: tuple[Callable[[DeviceMode], None], ...] = (
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
)


def install(device: torch.device) -> list[str]:
    """Make megatron-core use `device` in this process. Installed already: only the device changes.

    Args:
        device: `cpu`, or `meta` to build modules without memory. A CUDA device installs nothing.

    Returns:
        The names of the replacements in force, in the order of `REPLACEMENTS`; empty on CUDA.
    """
    if device.type == "cuda":
        return []
    mode = _installed_mode()
    if mode is None:
        mode = DeviceMode(device)
        mode.__enter__()  # type: ignore[no-untyped-call]
    mode.device = device
    if not mode.undo:
        for replacement in REPLACEMENTS:
            replacement(mode)
    return [replacement.__name__ for replacement in REPLACEMENTS]


def installed_device() -> torch.device | None:
    """The device that `install` was given, or None when nothing is installed."""
    mode = _installed_mode()
    return mode.device if mode is not None and mode.undo else None


def uninstall() -> None:
    """Put every replaced name back. The mode itself stays and passes every call through."""
    mode = _installed_mode()
    if mode is None:
        return
    mode.active.clear()
    while mode.undo:
        mode.undo.pop()()


def _installed_mode() -> DeviceMode | None:
    # torch's own stack is where the mode lives, so no global of ours has to remember it.
    for mode in torch.overrides._get_current_function_mode_stack():  # type: ignore[no-untyped-call]
        if isinstance(mode, DeviceMode):
            return mode
    return None
