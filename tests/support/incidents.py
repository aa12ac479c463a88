"""Misfortunes for `Launcher.start(before=...)`: each changes the process that it is called in."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from megatron_ext.data.stream import TokenStream
from megatron_ext.layers.gated_mla import GatedMLA
from megatron_ext.train import loop


def bad_data(position: str) -> None:
    """Full attention gives NaN for micro-batches that hold the token at `position`."""
    state = {"bad": False}
    read, forward = TokenStream.read, GatedMLA.forward

    def reading(self: TokenStream, start: int, count: int) -> Any:
        # Evaluation reads another stream, whose facts say so.
        state["bad"] = start <= int(position) < start + count - 1 and self.facts["split"] == "train"
        return read(self, start, count)

    def attending(self: GatedMLA, *args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
        output, bias = forward(self, *args, **kwargs)
        return (output * float("nan") if state["bad"] else output), bias

    TokenStream.read, GatedMLA.forward = reading, attending


def slow(seconds: str) -> None:
    """Every step takes at least so long, so that there is a time to signal in."""
    step = loop.train_step

    def slower(*args: Any) -> Any:
        time.sleep(float(seconds))
        return step(*args)

    loop.train_step = slower


def hang(rank: str) -> None:
    """One rank falls asleep before its third step."""
    step, done = loop.train_step, [0]

    def sleeping(state: Any, *args: Any) -> Any:
        done[0] += 1
        if done[0] == 3 and state.runtime.rank == int(rank):
            time.sleep(600)
        return step(state, *args)

    loop.train_step = sleeping


def stop_after_saving(step: str) -> None:
    """Somebody makes the file `stop` while the save of a step is under way."""
    save = loop.save

    def saving(state: Any, checkpointer: Any) -> None:
        save(state, checkpointer)
        if state.step == int(step):
            checkpointer.folder.with_name("stop").touch()

    loop.save = saving


def slow_rank(rank: str) -> None:
    """One rank takes 0.3 seconds longer for the forward passes of every step."""
    step, forward = loop.train_step, GatedMLA.forward
    left = [0.0]

    def training(state: Any, *args: Any) -> Any:
        left[0] = 0.3 if state.runtime.rank == int(rank) else 0.0
        return step(state, *args)

    def attending(self: GatedMLA, *args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
        seconds, left[0] = left[0], 0.0
        time.sleep(seconds)
        return forward(self, *args, **kwargs)

    loop.train_step, GatedMLA.forward = training, attending


def fail_last_evaluation(_: str) -> None:
    """The evaluation after the last step raises."""
    evaluate = loop.held_out_loss

    def failing(state: Any) -> Any:
        if state.step == state.config.train.steps:
            raise RuntimeError("no evaluation today")
        return evaluate(state)

    loop.held_out_loss = failing


def greedy(rank: str) -> None:
    """One rank asks for more memory than there can be, in its third step."""
    step = loop.train_step

    def asking(state: Any, *args: Any) -> Any:
        if state.step == 2 and state.runtime.rank == int(rank):
            torch.empty(1 << 55)
        return step(state, *args)

    loop.train_step = asking


def flip_bit(rank: str) -> None:
    """From the third step on, one rank's full attention gives one number with a flipped bit."""
    attend, step = GatedMLA.forward, loop.train_step
    state = {"faulty": False}

    def training(run: Any, *args: Any) -> Any:
        values = step(run, *args)
        state["faulty"] = run.runtime.rank == int(rank) and run.step >= 2
        return values

    def attending(self: GatedMLA, *args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
        output, bias = attend(self, *args, **kwargs)
        if state["faulty"]:
            output = output.clone()
            bits = output.detach().view(torch.int32)
            bits[0, 0, 0] ^= 1 << 20
        return output, bias

    loop.train_step, GatedMLA.forward = training, attending


def dear_saves(_: str) -> None:
    """By the loop's clock every save takes 7 seconds, and every look at a running one another."""
    offset = [0.0]
    clock, save, poll = loop.time.perf_counter, loop.save, loop.Checkpointer.poll

    def saving(state: Any, checkpointer: Any) -> None:
        save(state, checkpointer)
        offset[0] += 7

    def polling(self: Any) -> None:
        offset[0] += 1 if self._pending is not None else 0
        poll(self)

    loop.time = SimpleNamespace(perf_counter=lambda: clock() + offset[0])
    loop.save, loop.Checkpointer.poll = saving, polling
