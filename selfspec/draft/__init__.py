"""The drafters, one in each file: each turns the state of a generation into a Draft."""

from selfspec.draft.assistant import Assistant
from selfspec.draft.cascade import Cascade
from selfspec.draft.declaration import drafter
from selfspec.draft.draft import Budget, Draft, Resume
from selfspec.draft.drafter import Drafter, FreeProposer, Proposer, Stateless
from selfspec.draft.early_exit import EarlyExit
from selfspec.draft.exit_head import ExitHead
from selfspec.draft.fewer_experts import FewerExperts
from selfspec.draft.heads.dflash import DFlash
from selfspec.draft.heads.eagle import Eagle
from selfspec.draft.heads.hydra import Hydra
from selfspec.draft.heads.medusa import Medusa
from selfspec.draft.heads.mtp import MultiTokenPrediction
from selfspec.draft.heads.peagle import ParallelEagle
from selfspec.draft.heads.queries import QueriesAssistant
from selfspec.draft.heads.uno import Uno
from selfspec.draft.layer_skip import LayerSkip
from selfspec.draft.less_of_cache import CacheInBits, CacheWindow, TopOfCache
from selfspec.draft.low_precision import LowPrecision
from selfspec.draft.offer import Offer
from selfspec.draft.path_choice import ChosenExit, ChosenSkips
from selfspec.draft.prompt_lookup import PromptLookup
from selfspec.draft.recycling import Recycling
from selfspec.draft.reduced_vocabulary import ReducedVocabulary
from selfspec.draft.rows_apart import chains
from selfspec.draft.rows_view import RowsView
from selfspec.draft.skip_file import SkipFile
from selfspec.draft.suffixes import Suffixes
from selfspec.draft.union import Union
from selfspec.draft.verdict import RowVerdict, Verdict

__all__ = [
    "Assistant",
    "Budget",
    "CacheInBits",
    "CacheWindow",
    "Cascade",
    "ChosenExit",
    "ChosenSkips",
    "DFlash",
    "Draft",
    "Drafter",
    "Eagle",
    "EarlyExit",
    "ExitHead",
    "FewerExperts",
    "FreeProposer",
    "Hydra",
    "LayerSkip",
    "LowPrecision",
    "Medusa",
    "MultiTokenPrediction",
    "Offer",
    "ParallelEagle",
    "PromptLookup",
    "Proposer",
    "QueriesAssistant",
    "Recycling",
    "ReducedVocabulary",
    "Resume",
    "RowVerdict",
    "RowsView",
    "SkipFile",
    "Stateless",
    "Suffixes",
    "TopOfCache",
    "Union",
    "Uno",
    "Verdict",
    "chains",
    "drafter",
]
