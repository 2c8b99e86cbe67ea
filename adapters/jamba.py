"""Jamba: layers of attention between layers of Mamba."""

from selfspec.architecture import Adapter

ADAPTER = Adapter(model_types=("jamba",), attention=("self_attn", "mamba"), recurrent=("mamba",), mlp="feed_forward")
