"""Quantile balancing in a plain megatron-core script: stock GPTModel, stock MoELayer, our router.

torchrun --standalone --nproc-per-node 2 examples/plug_in_router.py  (expert parallel)
"""

import os
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig

from megatron_ext.config.schema import BalanceOptions, ExpertOptions
from megatron_ext.layers.balance import reduce
from megatron_ext.layers.router import BalancedRouter
from megatron_ext.model.init import initialize
from megatron_ext.parallel import cpu_support

gpu = torch.cuda.is_available()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
if gpu:
    torch.cuda.set_device(device)
cpu_support.install(device)  # does nothing with CUDA
dist.init_process_group("nccl" if gpu else "gloo")
ranks, rank = dist.get_world_size(), dist.get_rank()
parallel_state.initialize_model_parallel(
    expert_model_parallel_size=ranks, create_gloo_process_groups=False
)
model_parallel_cuda_manual_seed(1)

config = TransformerConfig(
    num_layers=2,
    hidden_size=64,
    num_attention_heads=4,
    num_moe_experts=8,
    moe_router_topk=2,
    moe_token_dispatcher_type="alltoall",
    expert_model_parallel_size=ranks,
    normalization="RMSNorm",
    add_bias_linear=False,
    hidden_dropout=0.0,
    attention_dropout=0.0,
    perform_initialization=False,
)
layer = get_gpt_layer_local_spec(num_experts=8, normalization="RMSNorm")
moe = layer.submodules.mlp  # functools.partial(MoELayer, submodules=...)
router = partial(
    BalancedRouter, options=ExpertOptions(num_experts=8, top_k=2), balance=BalanceOptions()
)
layer.submodules.mlp = partial(moe, submodules=replace(moe.keywords["submodules"], router=router))
model = GPTModel(
    config, layer, vocab_size=128, max_sequence_length=64, position_embedding_type="none"
)
initialize([model], seed=0)  # the same weights for any number of ranks
balancers = [module.balancer for module in model.modules() if isinstance(module, BalancedRouter)]

optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
text = ((torch.arange(4 * 65, device=device) ** 2) % 97).view(4, 65).chunk(ranks)[rank]
for step in range(10):
    loss = model(text[:, :-1], None, None, labels=text[:, 1:]).mean() / ranks
    optimizer.zero_grad()
    loss.backward()
    for name, parameter in model.named_parameters():
        if ".local_experts." not in name:  # an expert has had the tokens of all ranks
            dist.all_reduce(parameter.grad)
    optimizer.step()
    reduce(balancers, dist.group.WORLD if ranks > 1 else None)
    loads = [balancer.update(number) for number, balancer in enumerate(balancers)]
    dist.all_reduce(loss)
    if rank == 0:
        busiest = max(float(load.counts.max() / load.counts.double().mean()) for load in loads)
        print(f"step {step} loss {loss.item():.6f} imb {busiest:.2f}", flush=True)
dist.destroy_process_group()
