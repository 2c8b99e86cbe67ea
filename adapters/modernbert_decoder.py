"""The modernbert-decoder architecture."""

from selfspec.adapter import Adapter

ADAPTER = Adapter(model_types=("modernbert-decoder",), attention="attn")
