"""The drafters, one a file: each turns the state of a generation into a Draft."""

from selfspec.draft.assistant import Assistant
from selfspec.draft.cascade import Cascade
from selfspec.draft.draft import Budget, Draft, Resume
from selfspec.draft.draft_state import DraftState
from selfspec.draft.drafter import Drafter
from selfspec.draft.early_exit import EarlyExit
from selfspec.draft.exit_head import ExitHead
from selfspec.draft.layer_skip import LayerSkip
from selfspec.draft.low_precision import LowPrecision
from selfspec.draft.prompt_lookup import PromptLookup
from selfspec.draft.recycling import Recycling
from selfspec.draft.reduced_vocabulary import ReducedVocabulary
from selfspec.draft.skip_file import SkipFile
from selfspec.draft.suffixes import Suffixes
from selfspec.draft.union import Union

__all__ = [
    "Assistant",
    "Budget",
    "Cascade",
    "Draft",
    "DraftState",
    "Drafter",
    "EarlyExit",
    "ExitHead",
    "LayerSkip",
    "LowPrecision",
    "PromptLookup",
    "Recycling",
    "ReducedVocabulary",
    "Resume",
    "SkipFile",
    "Suffixes",
    "Union",
]
