"""Drafts by name for a given model: `auto`, `auto:FILE`, or any drafter's name."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from selfspec.control.costs import Costs, forecast
from selfspec.control.profile import Profile, Setting, find_profile
from selfspec.draft import Cascade, Drafter, LowPrecision, PromptLookup
from selfspec.draft.registry import AUTO, parse_draft
from selfspec.errors import DraftConfigError
from selfspec.model.registry import find_adapter
from selfspec.model.summary import widening

UNCALIBRATED = Cascade(PromptLookup(), LowPrecision())
"""Default draft where nothing was measured: look-ups before a draft in 8 bits."""

# Lowest acceptance rate of a draft in 8 bits on the checkpoints measured, and the speed-up that counts as clear.
_ACCEPTED, _CLEAR_GAIN = 0.95, 1.2


def named_draft(model: PreTrainedModel, name: str) -> Drafter | Profile | None:
    """Find the drafter of a name; None for plain decoding.

    `auto` is the profile that fits the model, or without one `uncalibrated_draft`.
    """
    given = name.strip()
    if given == AUTO:
        return find_profile(Setting.of(model)) or uncalibrated_draft(model)
    if given.startswith(AUTO + ":"):
        return Profile.load(given.removeprefix(AUTO + ":"))
    return parse_draft(given)


def uncalibrated_draft(model: PreTrainedModel) -> Drafter | None:
    """Return `UNCALIBRATED` if the estimated gain of its draft is clear; else None: plain decoding.

    The control ends drafts that do not pay.
    """
    draft, adapter = LowPrecision(), find_adapter(model)
    try:
        draft.check_model(model, adapter)
    except DraftConfigError:
        return None
    gains = clear_gain(draft.cost(model, adapter), model.device, widening(model, adapter)) is not None
    return UNCALIBRATED if gains else None


def clear_gain(cost: float, device: torch.device, widening: float) -> float | None:
    """Estimate the speed-up of a draft in 8 bits, whose step costs c; None: it is not clear.

    Estimates were made on CPUs only, so on other devices no gain is clear. `widening` is as in `Costs.assumed`.
    """
    gain = forecast(_ACCEPTED, Costs.assumed(cost, device, widening)).speedup
    return gain if device.type == "cpu" and gain >= _CLEAR_GAIN else None
