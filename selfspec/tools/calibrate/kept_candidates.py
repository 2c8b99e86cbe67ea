"""Keeping what recycling learns from the prompts of a calibration, in a file that the profile names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from selfspec.api import wrap
from selfspec.control.profile import Chosen, Profile
from selfspec.draft import Recycling
from selfspec.draft.registry import draft_name

_NAME, _TOKENS = draft_name(Recycling()), 64


def with_candidates(profile: Profile, model: PreTrainedModel, prompts: Sequence[Tensor], file: Path) -> Profile:
    """Return the profile with recycling that begins with what it learns from some prompts.

    Where it chose no recycling nothing is written, and the profile stays as it is.

    Args:
        profile: of the model.
        model: the stock model.
        prompts: token ids, each `[1, prompt]`, which the model continues greedily.
        file: where the candidates go.

    Raises:
        StorageError: it cannot be written.
    """
    if not any(_NAME in _sources(chosen) for chosen in (profile.greedy, profile.sampled)):
        return profile
    spec = wrap(model, Recycling())
    for prompt in prompts:
        # All of it is text, whatever the padding token.
        spec.generate(prompt, torch.ones_like(prompt), max_new_tokens=_TOKENS, do_sample=False, eos_token_id=None)
    spec.save_memory(file)
    return replace(profile, greedy=_kept(profile.greedy, file), sampled=_kept(profile.sampled, file))


def _sources(chosen: Chosen) -> list[str]:
    """The names of the sources of a draft; a union's first one comes behind a colon."""
    return chosen.draft.removeprefix("union:").split("+")


def _kept(chosen: Chosen, file: Path) -> Chosen:
    union = "union:" if chosen.draft.startswith("union:") else ""
    named = (f"{_NAME}:{file}" if name == _NAME else name for name in _sources(chosen))
    return replace(chosen, draft=union + "+".join(named))
