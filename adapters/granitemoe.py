"""Mixtures of granite experts, with or without an MLP beside them."""

from selfspec.architecture import Adapter

ADAPTER = Adapter(
    model_types=("granitemoe", "granitemoe_swa", "granitemoeshared"), mlp=("block_sparse_moe", "shared_mlp")
)
