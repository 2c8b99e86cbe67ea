"""The cohere2 architecture: attention and MLP in parallel, sliding layers that rotate and others that do not."""

from selfspec.model.adapter import Adapter

ADAPTER = Adapter(model_types=("cohere2",))
