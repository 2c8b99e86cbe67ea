"""The opt architecture: its MLP is two linears of the layer."""

from selfspec.architecture import Adapter

ADAPTER = Adapter(model_types=("opt",), layers="model.decoder.layers", mlp=("fc1", "fc2"))
