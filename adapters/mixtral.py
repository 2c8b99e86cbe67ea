"""The mixtral architecture: a mixture of experts stands where the MLP does."""

from selfspec.model.adapter import Adapter

ADAPTER = Adapter(model_types=("mixtral",))
