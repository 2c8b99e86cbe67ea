"""The gemma3 architecture, text alone: five layers slide for each that does not."""

from selfspec.model.adapter import Adapter

ADAPTER = Adapter(model_types=("gemma3_text",))
