"""The ctrl architecture."""

from selfspec.architecture import Adapter

ADAPTER = Adapter(model_types=("ctrl",), layers="transformer.h", attention="multi_head_attention", mlp="ffn")
