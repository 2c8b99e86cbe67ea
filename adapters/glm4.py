"""The glm4 architecture: norms around each sublayer, half of each head rotates."""

from selfspec.model.adapter import Adapter

ADAPTER = Adapter(model_types=("glm4",))
