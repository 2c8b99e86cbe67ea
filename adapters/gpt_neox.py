"""The gpt_neox architecture: attention and MLP in parallel."""

from selfspec.architecture import Adapter

ADAPTER = Adapter(model_types=("gpt_neox",), layers="gpt_neox.layers", attention="attention")
