"""The header of a run: versions, hardware, layout, parameters, data - printed once."""

from __future__ import annotations

import platform

import torch

from megatron_ext.config.layout import draw, expert_layers
from megatron_ext.config.residual import mixes
from megatron_ext.config.schema import ExpertFp8, Precision
from megatron_ext.model.count import count_parameters, flops_per_token
from megatron_ext.observe.console import human_count
from megatron_ext.observe.run_files import versions
from megatron_ext.ops.attn_res import resolve_backend as mix_backend
from megatron_ext.ops.grouped_mlp import resolve_backend as expert_backend
from megatron_ext.ops.situ import resolve_backend as situ_backend
from megatron_ext.optim.build import group_table
from megatron_ext.parallel.mesh import describe
from megatron_ext.train.accuracy import kda_backend
from megatron_ext.train.run_folder import Found
from megatron_ext.train.state import TrainState


def backends(state: TrainState) -> dict[str, str]:
    """Which implementation each operator takes on this device."""
    model, device = state.config.model, state.runtime.device
    bf16 = state.config.run.precision is Precision.bf16
    situ = situ_backend(
        model.kernels.backend,
        device,
        torch.bfloat16 if bf16 else torch.float32,
        model.feed_forward_size // state.config.parallel.tensor,
    )
    named = {"kda": kda_backend(state.config, device).value, "situ": situ.value}
    if expert_layers(model):
        experts, ranks = model.experts, state.config.parallel.expert_tensor
        named["experts"] = expert_backend(
            experts.backend,
            device,
            dtype=state.tc.params_dtype,
            widths=(experts.latent_size or model.hidden_size, experts.feed_forward_size // ranks),
            precision=experts.fp8,
            require=experts.require,
        ).value
        if experts.fp8 is not ExpertFp8.none:
            named["experts"] += f" fp8 {experts.fp8.value}"
    residual = state.config.residual
    if mixes(residual):
        dtype = torch.bfloat16 if bf16 and not residual.fp32 else torch.float32
        mix = mix_backend(residual.backend, device, dtype=dtype, width=model.hidden_size)
        named["attention residuals"] = mix.value
    return {**named, "communication": state.runtime.backend}


def header_lines(state: TrainState, found: Found, *, restored: str) -> list[str]:
    """Lines for the console, each within 120 columns where names allow it. Collective-free."""
    config, runtime = state.config, state.runtime
    known = versions()
    counts = count_parameters(config, state.vocab_size)
    length = config.data.sequence_length
    flops = flops_per_token(config.model, vocab_size=state.vocab_size, sequence_length=length)
    batch = config.train.batch_tokens
    lines = [
        "megatron-ext {} | megatron-core {} | torch {} | python {}".format(
            known.get("megatron-ext", "?"),
            known.get("megatron-core", "?"),
            torch.__version__,
            platform.python_version(),
        ),
        f"run          {state.run_id} in {found.folder}",
        f"             {restored}",
    ]
    if found.moved:
        lines.append(f"             the old run was moved to {found.moved}")
    lines += [
        f"device       {_hardware(runtime.device)}, {config.run.precision.value}, "
        + ", ".join(f"{name} {value}" for name, value in backends(state).items()),
        "layout       " + draw(config, runtime.world_size).replace("\n", "\n" + " " * 13),
    ]
    if runtime.world_size > 1:
        lines.append(describe(config.parallel, runtime.world_size))
    lines += [
        f"parameters   {human_count(counts.total)} total, {human_count(counts.active)} active, "
        f"{human_count(flops)}FLOP a token",
        "optimizer    " + group_table(state.chunks).replace("\n", "\n" + " " * 13),
        f"data         {human_count(sum(state.train_data.tokens_per_epoch.values()))} tokens to "
        f"train on, {human_count(sum(state.held_out_data.tokens_per_epoch.values()))} held out: "
        + ", ".join(state.sources),
        f"steps        {config.train.steps} x {human_count(batch)} tokens = {batch // length} "
        f"sequences of {length}",
    ]
    return lines


def damaged_text(found: Found) -> str:
    """That newer checkpoints than the one to go on from cannot be used, and where they are."""
    lines = "".join(f"\n  {line}" for line in found.damaged)
    return (
        f"damaged checkpoints, so the run goes back to step {found.step}, the newest sound one:"
        f"{lines}\nThe steps since are trained again. The damaged ones are kept beside it, named "
        "step_*.damaged: delete them, or stop the run, put their files back from a copy, take "
        "`.damaged` off the name and write it into `latest`"
    )


def _hardware(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU, {torch.get_num_threads()} thread(s) a rank"
