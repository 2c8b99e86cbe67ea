"""selfspec: self-speculative decoding. One language model drafts for itself; the output is exactly its own."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from selfspec import accept as rules
    from selfspec import draft as drafts
    from selfspec.api import SelfSpeculative, load, wrap
    from selfspec.control import ConfidenceStop, CostAware, FixedLength
    from selfspec.control.costs import BatchCosts, Costs
    from selfspec.control.profile import Profile
    from selfspec.decode.generation import Generation
    from selfspec.decode.output import GenerateOutput, Round, RowRound
    from selfspec.decode.stats import Stats
    from selfspec.draft import (
        Assistant,
        Cascade,
        Draft,
        Drafter,
        EarlyExit,
        ExitHead,
        LayerSkip,
        LowPrecision,
        PromptLookup,
        Recycling,
        ReducedVocabulary,
        SkipFile,
        Suffixes,
        Union,
    )
    from selfspec.errors import (
        BenchError,
        CannotFitError,
        CheckpointError,
        ClosedError,
        CorpusError,
        DraftConfigError,
        EngineStoppedError,
        ExitHeadError,
        NonFiniteLogitsError,
        ProfileError,
        PromptError,
        QueueFullError,
        RowError,
        SelfSpecError,
        StorageError,
        StudyError,
        TrainingError,
        UnsupportedModelError,
        UnsupportedOptionError,
    )
    from selfspec.kernels.native import build_kernels
    from selfspec.measure import embedded as demo
    from selfspec.model.adapter import Adapter
    from selfspec.runtime import Compiled, CudaGraphs, Eager, Traced
    from selfspec.runtime.packed import pack, unpack
    from selfspec.serve.engine import Engine
    from selfspec.serve.row_request import RowRequest, RowSampling
    from selfspec.tools.lab.inline import ablate

__version__ = "0.1.0"

__all__ = [
    "Adapter",
    "Assistant",
    "BatchCosts",
    "BenchError",
    "CannotFitError",
    "Cascade",
    "CheckpointError",
    "ClosedError",
    "Compiled",
    "ConfidenceStop",
    "CorpusError",
    "CostAware",
    "Costs",
    "CudaGraphs",
    "Draft",
    "DraftConfigError",
    "Drafter",
    "Eager",
    "EarlyExit",
    "Engine",
    "EngineStoppedError",
    "ExitHead",
    "ExitHeadError",
    "FixedLength",
    "GenerateOutput",
    "Generation",
    "LayerSkip",
    "LowPrecision",
    "NonFiniteLogitsError",
    "Profile",
    "ProfileError",
    "PromptError",
    "PromptLookup",
    "QueueFullError",
    "Recycling",
    "ReducedVocabulary",
    "Round",
    "RowError",
    "RowRequest",
    "RowRound",
    "RowSampling",
    "SelfSpecError",
    "SelfSpeculative",
    "SkipFile",
    "Stats",
    "StorageError",
    "StudyError",
    "Suffixes",
    "Traced",
    "TrainingError",
    "Union",
    "UnsupportedModelError",
    "UnsupportedOptionError",
    "__version__",
    "ablate",
    "build_kernels",
    "demo",
    "drafts",
    "load",
    "pack",
    "rules",
    "unpack",
    "wrap",
]

# Imported when first asked for: torch and transformers take seconds, and `selfspec --help` needs neither.
_HOMES = {
    "tools.lab.inline": ["ablate"],
    "model.adapter": ["Adapter"],
    "control.profile": ["Profile"],
    "control": ["ConfidenceStop", "CostAware", "FixedLength"],
    "control.costs": ["BatchCosts", "Costs"],
    "draft": [
        "Assistant",
        "Cascade",
        "Draft",
        "Drafter",
        "EarlyExit",
        "ExitHead",
        "LayerSkip",
        "LowPrecision",
        "PromptLookup",
        "Recycling",
        "ReducedVocabulary",
        "SkipFile",
        "Suffixes",
        "Union",
    ],
    "errors": [name for name in __all__ if name.endswith("Error")],
    "decode.generation": ["Generation"],
    "decode.output": ["GenerateOutput", "Round", "RowRound"],
    "kernels.native": ["build_kernels"],
    "runtime.packed": ["pack", "unpack"],
    "runtime": ["Compiled", "CudaGraphs", "Eager", "Traced"],
    "decode.stats": ["Stats"],
    "serve.engine": ["Engine"],
    "serve.row_request": ["RowRequest", "RowSampling"],
    "api": ["SelfSpeculative", "load", "wrap"],
}


_MODULES = {"demo": "measure.embedded", "drafts": "draft", "rules": "accept"}


def __getattr__(name: str) -> object:
    """The public name, from the module it lives in."""
    if name in _MODULES:
        return import_module(f"selfspec.{_MODULES[name]}")
    for module, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"selfspec.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
