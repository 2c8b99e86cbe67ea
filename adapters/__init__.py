"""The architectures selfspec knows, found by `config.model_type`."""

from selfspec.adapters.declared import DECLARED as DECLARED
from selfspec.adapters.mtp import LAYOUTS as LAYOUTS
from selfspec.adapters.refused import REFUSED as REFUSED
from selfspec.architecture import Adapter

ADAPTERS: dict[str, Adapter] = {
    model_type: adapter for adapter in DECLARED for model_type in adapter.model_types if model_type not in REFUSED
}
"""Every declared adapter by the `model_type` it serves."""
