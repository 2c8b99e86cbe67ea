"""The drafters, one in each file: each turns the state of a generation into a Draft."""

from selfspec.draft.cache_window import CacheWindow
from selfspec.draft.cascade import Cascade
from selfspec.draft.draft import Budget, Draft, Resume, RowVerdict, Verdict
from selfspec.draft.drafter import Drafter, FreeProposer, Proposer, Stateless, drafter
from selfspec.draft.early_exit import EarlyExit, ExitHead
from selfspec.draft.heads.dflash import DFlash
from selfspec.draft.heads.eagle import Eagle
from selfspec.draft.heads.hydra import Hydra
from selfspec.draft.heads.medusa import Medusa
from selfspec.draft.heads.mtp import MultiTokenPrediction
from selfspec.draft.heads.queries import QueriesAssistant
from selfspec.draft.layer_skip import LayerSkip
from selfspec.draft.low_precision import LowPrecision
from selfspec.draft.predicted import Predicted
from selfspec.draft.prompt_lookup import PromptLookup
from selfspec.draft.recycling import Recycling
from selfspec.draft.reduced_vocabulary import ReducedVocabulary
from selfspec.draft.rows_view import RowsView, chains
from selfspec.draft.suffixes import Suffixes

__all__ = [
    "Budget",
    "CacheWindow",
    "Cascade",
    "DFlash",
    "Draft",
    "Drafter",
    "Eagle",
    "EarlyExit",
    "ExitHead",
    "FreeProposer",
    "Hydra",
    "LayerSkip",
    "LowPrecision",
    "Medusa",
    "MultiTokenPrediction",
    "Predicted",
    "PromptLookup",
    "Proposer",
    "QueriesAssistant",
    "Recycling",
    "ReducedVocabulary",
    "Resume",
    "RowVerdict",
    "RowsView",
    "Stateless",
    "Suffixes",
    "Verdict",
    "chains",
    "drafter",
]
