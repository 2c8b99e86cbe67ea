"""The gptj architecture: attention and MLP in parallel."""

from selfspec.architecture import Adapter
from selfspec.compat import RENAMED_CACHE

# Rewritten in 5.24, its layers return the bare tensor.
_RETURNS = 1 if RENAMED_CACHE else 2

ADAPTER = Adapter(model_types=("gptj", "codegen"), layers="transformer.h", attention="attn", layer_returns=_RETURNS)
