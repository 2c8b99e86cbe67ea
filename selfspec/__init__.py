"""selfspec: self-speculative decoding. One language model drafts for itself; the output is exactly its own."""

from selfspec.adapter import Adapter
from selfspec.draft import Draft, Drafter, EarlyExit, LayerSkip
from selfspec.errors import (
    CheckpointError,
    ClosedError,
    DraftConfigError,
    NonFiniteLogitsError,
    PromptError,
    SelfSpecError,
    UnsupportedModelError,
    UnsupportedOptionError,
)
from selfspec.generation import Generation
from selfspec.output import GenerateOutput, Round, RowRound
from selfspec.stats import Stats
from selfspec.wrapped import SelfSpeculative, wrap

__version__ = "0.1.0"

__all__ = [
    "Adapter",
    "CheckpointError",
    "ClosedError",
    "Draft",
    "DraftConfigError",
    "Drafter",
    "EarlyExit",
    "GenerateOutput",
    "Generation",
    "LayerSkip",
    "NonFiniteLogitsError",
    "PromptError",
    "Round",
    "RowRound",
    "SelfSpecError",
    "SelfSpeculative",
    "Stats",
    "UnsupportedModelError",
    "UnsupportedOptionError",
    "__version__",
    "wrap",
]
