"""The smollm3 architecture: some layers do not rotate."""

from selfspec.model.adapter import Adapter

ADAPTER = Adapter(model_types=("smollm3",))
