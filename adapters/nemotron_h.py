"""Nemotron-H: one mixer in each layer, which may be Mamba, attention or an MLP."""

from selfspec.adapter import Adapter

ADAPTER = Adapter(model_types=("nemotron_h",), attention="mixer", recurrent=("mixer",), mlp=())
