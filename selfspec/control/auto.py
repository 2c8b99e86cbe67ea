"""Find the draft of a name for a given model: `auto`, `auto:FILE`, or any drafter's name."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from selfspec.control.costs import Costs, forecast
from selfspec.control.profile import Profile, Setting, find_profile
from selfspec.draft import Cascade, Drafter, LowPrecision, PromptLookup
from selfspec.draft.registry import AUTO, parse_draft
from selfspec.errors import DraftConfigError
from selfspec.model.registry import find_adapter
from selfspec.model.sizes import widening

UNCALIBRATED = Cascade(PromptLookup(), LowPrecision())
"""Default draft where nothing was measured: look-ups before a draft in 8 bits."""

# Lowest acceptance rate of a draft in 8 bits on the checkpoints measured, and the speed-up that counts as clear.
_ACCEPTED, _CLEAR_GAIN = 0.95, 1.2


def named_draft(model: PreTrainedModel, name: str) -> Drafter | Profile | None:
    """Return the drafter of a name; None: plain decoding. `auto` is the model's profile, else `uncalibrated_draft`."""
    given = name.strip()
    if given == AUTO:
        return find_profile(Setting.of(model)) or uncalibrated_draft(model)
    if given.startswith(AUTO + ":"):
        return Profile.load(given.removeprefix(AUTO + ":"))
    return parse_draft(given)


def uncalibrated_draft(model: PreTrainedModel) -> Drafter | None:
    """Return `UNCALIBRATED` if its draft in 8 bits clearly gains by estimate; else None: plain decoding."""
    draft, adapter = LowPrecision(), find_adapter(model)
    try:
        draft.check_model(model, adapter)
    except DraftConfigError:
        return None
    gains = clear_gain(draft.cost(model, adapter), model.device, widening(model, adapter)) is not None
    return UNCALIBRATED if gains else None


def clear_gain(cost: float, device: torch.device, widening: float) -> float | None:
    """Estimate the speed-up of a draft in 8 bits, by its step cost c; None: not clear, as on any device but CPUs."""
    # Estimates were made on CPUs only.
    gain = forecast(_ACCEPTED, Costs.assumed(cost, device, widening)).speedup
    return gain if device.type == "cpu" and gain >= _CLEAR_GAIN else None
