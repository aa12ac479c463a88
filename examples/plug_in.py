"""Kimi Delta Attention in a plain megatron-core script: stock GPTModel, stock layer spec.

torchrun --standalone --nproc-per-node 2 examples/plug_in.py      (tensor parallel over all ranks)
"""

import os

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer import ModuleSpec, TransformerConfig

from megatron_ext.config.schema import KdaOptions
from megatron_ext.layers.kda import KimiDeltaAttention
from megatron_ext.model.init import initialize
from megatron_ext.parallel import cpu_support

gpu = torch.cuda.is_available()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
if gpu:
    torch.cuda.set_device(device)
cpu_support.install(device)  # does nothing with CUDA
dist.init_process_group("nccl" if gpu else "gloo")
tp = dist.get_world_size()
parallel_state.initialize_model_parallel(tp, create_gloo_process_groups=False)
model_parallel_cuda_manual_seed(1)

config = TransformerConfig(
    num_layers=2,
    hidden_size=64,
    num_attention_heads=4,
    tensor_model_parallel_size=tp,
    normalization="RMSNorm",
    add_bias_linear=False,
    hidden_dropout=0.0,
    perform_initialization=False,
)
layer = get_gpt_layer_local_spec(normalization="RMSNorm")
options = KdaOptions(num_heads=4, head_dim=16, value_dim=16)
layer.submodules.self_attention = ModuleSpec(KimiDeltaAttention, params={"options": options})
model = GPTModel(
    config, layer, vocab_size=128, max_sequence_length=64, position_embedding_type="none"
)
initialize([model], seed=0)  # the same weights for any number of ranks

optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
text = ((torch.arange(4 * 65, device=device) ** 2) % 97).view(4, 65)
for step in range(10):
    loss = model(text[:, :-1], None, None, labels=text[:, 1:]).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if dist.get_rank() == 0:
        print(f"step {step} loss {loss.item():.6f}", flush=True)
dist.destroy_process_group()
