"""LFM2: layers of attention between short convolutions."""

from selfspec.architecture import Adapter

ADAPTER = Adapter(
    model_types=("lfm2", "lfm2_moe"), attention=("self_attn", "conv"), recurrent=("conv",), mlp="feed_forward"
)
