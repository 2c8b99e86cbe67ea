"""The deepseek_v3 architecture: keys and values of different widths, made from latent vectors."""

from selfspec.model.adapter import Adapter

ADAPTER = Adapter(model_types=("deepseek_v3",))
