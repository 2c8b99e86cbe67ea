"""The gpt2 architecture."""

from selfspec.architecture import Adapter

ADAPTER = Adapter(model_types=("gpt2", "gpt-sw3", "gpt_bigcode"), layers="transformer.h", attention="attn")
