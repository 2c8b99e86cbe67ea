"""The modernbert-decoder architecture."""

from selfspec.model.adapter import Adapter

ADAPTER = Adapter(model_types=("modernbert-decoder",), attention="attn")
