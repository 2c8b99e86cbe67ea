"""Drafts by name for a given model: `auto`, `auto:FILE`, or any drafter's name."""

from __future__ import annotations

from transformers import PreTrainedModel

from selfspec.control.profile import Profile
from selfspec.control.profile_place import find_profile
from selfspec.control.setting import Setting
from selfspec.draft import Drafter
from selfspec.draft.named import AUTO, parse_draft


def named_draft(model: PreTrainedModel, name: str) -> Drafter | Profile | None:
    """Find the drafter of a name; the profile that fits the model for `auto`; None for plain decoding.

    Raises:
        DraftConfigError: the name is not of the grammar.
        ProfileError: no profile fits.
        ExitHeadError: a file that the name points to cannot be used.
    """
    given = name.strip()
    if given == AUTO:
        return find_profile(Setting.of(model))
    if given.startswith(AUTO + ":"):
        return Profile.load(given.removeprefix(AUTO + ":"))
    return parse_draft(given)
