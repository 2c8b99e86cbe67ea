"""selfspec: self-speculative decoding. One language model drafts for itself; the output is exactly its own."""

from importlib import import_module
from typing import TYPE_CHECKING

from selfspec.version import __version__

if TYPE_CHECKING:
    from selfspec import accept as rules
    from selfspec import draft as drafts
    from selfspec import errors, runtime
    from selfspec.api import SelfSpeculative, load, wrap
    from selfspec.architecture import Adapter
    from selfspec.control import CostAware, FixedLength
    from selfspec.control.costs import BatchCosts, Costs
    from selfspec.control.profile import Profile
    from selfspec.decode.output import GenerateOutput
    from selfspec.measure import embedded as demo
    from selfspec.placement.pack import pack
    from selfspec.serve.engine import Engine
    from selfspec.tools.calibrate.calibration import calibrate
    from selfspec.tools.lab.inline import ablate, bench

__all__ = [
    "Adapter",
    "BatchCosts",
    "CostAware",
    "Costs",
    "Engine",
    "FixedLength",
    "GenerateOutput",
    "Profile",
    "SelfSpeculative",
    "__version__",
    "ablate",
    "bench",
    "calibrate",
    "demo",
    "drafts",
    "errors",
    "load",
    "pack",
    "rules",
    "runtime",
    "wrap",
]

# Imported when first asked for: torch and transformers take seconds, and `selfspec --help` needs neither.
_HOMES = {
    "tools.lab.inline": ["ablate", "bench"],
    "tools.calibrate.calibration": ["calibrate"],
    "architecture": ["Adapter"],
    "control.profile": ["Profile"],
    "control": ["CostAware", "FixedLength"],
    "control.costs": ["BatchCosts", "Costs"],
    "decode.output": ["GenerateOutput"],
    "serve.engine": ["Engine"],
    "placement.pack": ["pack"],
    "api": ["SelfSpeculative", "load", "wrap"],
}
_MODULES = {"demo": "measure.embedded", "drafts": "draft", "errors": "errors", "rules": "accept", "runtime": "runtime"}


def __getattr__(name: str) -> object:
    """Return a public name from the module where it lives."""
    if name in _MODULES:
        return import_module(f"selfspec.{_MODULES[name]}")
    for module, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"selfspec.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
