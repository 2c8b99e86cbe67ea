"""The gpt2 architecture."""

from selfspec.adapter import Adapter

ADAPTER = Adapter(model_types=("gpt2",), layers="transformer.h", attention="attn")
