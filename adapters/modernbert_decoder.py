"""The modernbert-decoder architecture."""

from selfspec.architecture import Adapter

ADAPTER = Adapter(model_types=("modernbert-decoder",), attention="attn")
