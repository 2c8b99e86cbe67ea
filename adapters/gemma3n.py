"""The gemma3n architecture, text alone: the last layers read keys and values of earlier ones."""

from selfspec.architecture import Adapter

ADAPTER = Adapter(model_types=("gemma3n_text",), publishes="store_full_length_kv")
