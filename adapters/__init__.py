"""The architectures selfspec knows, one declaration a file, found by `config.model_type`."""

from importlib import import_module
from pkgutil import iter_modules

from selfspec.adapters.mtp import LAYOUTS as LAYOUTS
from selfspec.adapters.refused import REFUSED as REFUSED
from selfspec.architecture import Adapter

_NO_DECLARATION = {"mtp", "refused"}

ADAPTERS: dict[str, Adapter] = {
    model_type: adapter
    for file in iter_modules(__path__)
    if file.name not in _NO_DECLARATION
    for adapter in (import_module(f"{__name__}.{file.name}").ADAPTER,)
    for model_type in adapter.model_types
    if model_type not in REFUSED
}
"""Every declared adapter by the `model_type` it serves."""
