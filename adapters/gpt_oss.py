"""The gpt_oss architecture: attention sinks, experts that hand their router scores out."""

from selfspec.architecture import Adapter

ADAPTER = Adapter(model_types=("gpt_oss",), mlp_returns=2)
