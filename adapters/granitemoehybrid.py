"""Granite 4: layers of attention between layers of Mamba, a mixture of experts and a shared MLP in each."""

from selfspec.architecture import Adapter

ADAPTER = Adapter(
    model_types=("granitemoehybrid",),
    attention=("self_attn", "mamba"),
    recurrent=("mamba",),
    mlp=("block_sparse_moe", "shared_mlp"),
)
