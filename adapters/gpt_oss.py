"""The gpt_oss architecture: attention sinks, experts that hand their router scores out."""

from selfspec.model.adapter import Adapter

ADAPTER = Adapter(model_types=("gpt_oss",), mlp_returns=2)
