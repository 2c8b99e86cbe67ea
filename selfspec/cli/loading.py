"""Load the model of a command and wrap it: whole, or within a budget."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from selfspec.cli.options import Budget, ModelOptions, load_within, read_draft
from selfspec.errors import UnsupportedOptionError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from selfspec.api import SelfSpeculative
    from selfspec.control import Control
    from selfspec.control.profile import Profile
    from selfspec.draft import Drafter

# What drafts where nothing is named: each command says which.
BEST = "auto"
NOTHING = "none"


@dataclass(frozen=True)
class Loaded:
    """A wrapped model and its tokenizer. How to sample is what a command's options say, and nothing else."""

    spec: SelfSpeculative
    tokenizer: PreTrainedTokenizerBase


@dataclass(frozen=True)
class DraftOption:
    """A draft as the command line names it, read before any weight is.

    Attributes:
        name: as given; None: nothing was.
        drafter: as `selfspec.wrap` takes it.
        within_budget: what `selfspec.load` takes in its place: True chooses what promises most.
    """

    name: str | None
    drafter: Drafter | Profile | str | None
    within_budget: Drafter | Profile | str | bool | None


def draft_option(name: str | None, default: str) -> DraftOption:
    """Read --draft.

    Args:
        name: None: the default, and within a budget what promises most there.
        default: `NOTHING` or `BEST`; where it is `BEST`, `auto` within a budget means what promises most there.
    """
    drafter = read_draft(name or default)
    best = name is None or (default == BEST and name.strip() == BEST)
    return DraftOption(name, drafter, True if best else drafter)


def check_draft(model: ModelOptions, draft: DraftOption, budget: Budget, nodes: int | None) -> None:
    """Check device, configuration and draft, since weights may take minutes to load."""
    from selfspec.draft import Drafter

    if nodes is not None and draft.drafter is None and (draft.name is not None or budget.memory is None):
        raise UnsupportedOptionError("--nodes has no effect on plain decoding; name a draft, or drop it")
    depth = model.prepare()
    if isinstance(draft.drafter, Drafter):
        draft.drafter.check(depth)


def load_drafting(model: ModelOptions, draft: DraftOption, budget: Budget, control: Control | None = None) -> Loaded:
    """Load a model and wrap it.

    Args:
        model: from a folder or the hub.
        draft: what drafts.
        budget: of memory.
        control: how long drafts are; None: the default.
    """
    from selfspec.api import wrap
    from selfspec.measure.stock import bare
    from selfspec.model.checkpoint import load_tokenizer

    if budget.memory is None:
        checkpoint = model.load()
        spec = wrap(bare(checkpoint.model), draft=draft.drafter, draft_length=control)
        return Loaded(spec, checkpoint.tokenizer)
    tokenizer = load_tokenizer(model.place)
    spec = load_within(model, budget, draft.within_budget)
    if control is not None:
        spec = spec.drafting(spec.draft, draft_length=control)
    spec.model.generation_config = bare(spec.model).generation_config
    return Loaded(spec, tokenizer)
