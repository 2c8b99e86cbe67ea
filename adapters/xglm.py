"""Architectures like opt whose layers are not in a decoder of their own."""

from selfspec.architecture import Adapter

ADAPTER = Adapter(model_types=("xglm", "biogpt"), layers="{base}.layers", mlp=("fc1", "fc2"))
