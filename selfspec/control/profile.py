"""Calibration profiles, JSON files bound to the setting where they were measured, and the draft of `auto`."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from transformers import PreTrainedModel

from selfspec.arguments import checked_path
from selfspec.control import Control, CostAware
from selfspec.control.controller import MOST_NODES
from selfspec.control.costs import BatchCosts, Costs, CostsByRows, forecast
from selfspec.device import device_name
from selfspec.draft import Cascade, Drafter, LowPrecision, PromptLookup
from selfspec.draft.registry import AUTO, parse_draft
from selfspec.errors import DraftConfigError, ProfileError
from selfspec.files.json_text import FiniteFloat, PositiveInt, parse_json, read_json
from selfspec.files.writing import write_sealed
from selfspec.kernels import native
from selfspec.model.identity import fingerprint, first_away
from selfspec.model.registry import find_adapter
from selfspec.model.sizes import widening
from selfspec.process import cache_folder
from selfspec.version import __version__


@dataclass(frozen=True)
class DraftChoice:
    """Says which draft serves a generation, if any, and how; batches above `most_rows` rows have none."""

    draft: Drafter | None
    control: Control = field(default_factory=CostAware)
    costs: CostsByRows | None = None
    most_rows: int | None = None

    def in_batch(self, rows: int) -> DraftChoice:
        """Return the choice for a batch of `rows` rows."""
        return self if self.most_rows is None or rows <= self.most_rows else DraftChoice(None)


@dataclass(frozen=True)
class Setting:
    """Identifies where costs and acceptance rates were measured; in other settings they differ."""

    model: str
    fingerprint: str  # of the weights
    device: str  # the device's own name
    dtype: str
    threads: int  # of the CPU; 0 on other devices, where threads hardly matter
    kernels: bool  # True if the CPU kernels run
    selfspec: str
    torch: str
    transformers: str

    @classmethod
    def of(cls, model: PreTrainedModel) -> Setting:
        """Return the setting that a model would run in now; refuse a model whose weights are offloaded."""
        away = first_away(model)
        if away is not None:
            raise ProfileError(
                f"a calibration profile is bound to the weights, and {away} is not in memory; load the model whole, or "
                "name a draft"
            )
        device = model.device
        return cls(
            model=type(model).__name__,
            fingerprint=fingerprint(model),
            device=device_name(device),
            dtype=str(model.dtype).removeprefix("torch."),
            threads=torch.get_num_threads() if device.type == "cpu" else 0,
            kernels=device.type == "cpu" and native.available(),
            selfspec=__version__,
            torch=str(torch.__version__),
            transformers=transformers.__version__,
        )

    def differences(self, other: Setting) -> dict[str, tuple[str | int, str | int]]:
        """Return the values that differ, by name: this setting's and the other's."""
        mine, others = asdict(self), asdict(other)
        return {name: (mine[name], others[name]) for name in mine if mine[name] != others[name]}


_WHAT_DIFFERS = {
    "fingerprint": "weights",
    "model": "model class",
    "threads": "CPU threads",
    "kernels": "CPU kernels",
    "selfspec": "selfspec version",
    "torch": "torch version",
    "transformers": "transformers version",
}


@dataclass(frozen=True)
class Chosen:
    """Holds the draft that was the fastest for one kind of decoding."""

    draft: str  # its name, as on the command line; `none` if plain decoding was the fastest
    longest: PositiveInt  # the most tokens of a draft, or levels of a tree; each draft's length follows from the costs
    costs: BatchCosts | None  # of its rounds, measured in batches of some sizes; None for plain decoding
    temperature: FiniteFloat
    speedup: tuple[FiniteFloat, FiniteFloat, FiniteFloat]  # confirmed speed-up over plain decoding: median, low, high
    most_rows: PositiveInt | None = None  # most rows at which it beat plain decoding; None: in all batches tried it did
    nodes: PositiveInt | None = None  # the most tokens of a tree, siblings included; None: chains were as fast


@dataclass(frozen=True)
class _Content:
    """Holds the content of a profile's file."""

    format: Literal[8]
    setting: Setting
    greedy: Chosen
    sampled: Chosen
    report: Mapping[str, Any]


@dataclass(frozen=True)
class Profile:
    """Chooses drafts in the setting where it was measured: one for greedy decoding, one for sampling.

    Attributes:
        report: all measurements, for people and other programs; not needed here.
        source: file that it was read from, for messages.
    """

    setting: Setting
    greedy: Chosen
    sampled: Chosen
    report: Mapping[str, Any] = field(default_factory=dict, compare=False)
    source: str = field(default="this profile", compare=False)

    @classmethod
    def load(cls, file: str | Path) -> Profile:
        """Read a profile that `selfspec calibrate` wrote.

        Raises:
            ProfileError: it is missing, truncated, corrupt, no profile or of another format.
        """
        checked_path("file", file, ProfileError)
        remedy = f"write it with selfspec calibrate MODEL --to {file}"
        content = read_json(file, _Content, ProfileError, remedy)
        raw = parse_json(Path(file).read_text(encoding="utf-8"))
        for name, chosen in (("greedy", content.greedy), ("sampled", content.sampled)):
            try:
                drafts = parse_draft(chosen.draft) is not None
            except DraftConfigError as error:
                raise ProfileError(f"{file}: {name}.draft is not understood ({error})") from error
            if chosen.nodes is not None and not chosen.longest <= chosen.nodes <= MOST_NODES:
                raise ProfileError(
                    f"{file}: {name}.nodes are {chosen.nodes}, which no tree of its levels has; {remedy}"
                )
            measured = raw[name]["costs"]["measured"] if chosen.costs else []
            # Costs have defaults, but a profile must have measured them all.
            if drafts != bool(measured) or any(Costs.__dataclass_fields__.keys() - each.keys() for each in measured):
                raise ProfileError(f"{file} is incomplete ({name}.costs); {remedy}")
        return cls(content.setting, content.greedy, content.sampled, content.report, source=str(file))

    def save(self, file: str | Path) -> None:
        """Write the profile: the whole file or none of it."""
        place = checked_path("file", file, ProfileError)
        write_sealed(place, asdict(_Content(8, self.setting, self.greedy, self.sampled, self.report)))

    def choose_draft(self, greedy: bool) -> DraftChoice:
        """Choose the draft of a generation that decodes greedily, or samples."""
        chosen = self.greedy if greedy else self.sampled
        control = CostAware(chosen.longest, nodes=chosen.nodes)
        return DraftChoice(parse_draft(chosen.draft), control, chosen.costs, chosen.most_rows)

    def check_setting(self, setting: Setting) -> None:
        """Refuse another setting than the one it was measured in; the message says how to calibrate here."""
        differing = self.setting.differences(setting)
        if differing:
            raise ProfileError(
                f"{self.source} was measured elsewhere: {described(differing)}. Write one for here: {remedy(setting)}"
            )


def described(differences: Mapping[str, tuple[str | int, str | int]]) -> str:
    """Describe differences in words: name, the profile's value, the value here."""
    return "; ".join(
        f"{_WHAT_DIFFERS.get(name, name)} {_short(theirs)} there, {_short(here)} here"
        for name, (theirs, here) in differences.items()
    )


def remedy(setting: Setting) -> str:
    """Return the command that calibrates for a setting."""
    threads = f" --threads {setting.threads}" if setting.threads else ""
    return f"selfspec calibrate MODEL --dtype {setting.dtype}{threads}"


def _short(value: str | int) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    text = str(value)
    return text[:12] if len(text) == 64 else text


VARIABLE = "SELFSPEC_PROFILES"
"""Environment variable that names another folder of profiles."""


def folder() -> Path:
    """Return the folder of profiles: `SELFSPEC_PROFILES` if set, else one in the user's cache."""
    named = os.environ.get(VARIABLE)
    return Path(named) if named else cache_folder() / "profiles"


def default_file(setting: Setting) -> Path:
    """Return the file of a setting's profile; without versions in its name, a new profile replaces an old one."""
    device = re.sub(r"[^A-Za-z0-9]+", "-", setting.device).strip("-")
    threads = f"_{setting.threads}-threads" if setting.threads else ""
    kernels = "_kernels" if setting.kernels else ""
    return folder() / f"{setting.fingerprint[:16]}_{device}_{setting.dtype}{threads}{kernels}.json"


def find_profile(setting: Setting) -> Profile | None:
    """Return the profile of a setting, or None if the weights have none; refuse weights calibrated only elsewhere."""
    file = default_file(setting)
    if file.exists():
        profile = Profile.load(file)
        profile.check_setting(setting)
        return profile
    near = []
    for other in sorted(file.parent.glob(f"{setting.fingerprint[:16]}_*.json")):
        with suppress(ProfileError):
            near.append(f"{other} ({described(Profile.load(other).setting.differences(setting))})")
    if not near:
        return None
    raise ProfileError(
        f"draft='auto' needs a calibration profile for here, and {file.parent} has none of these weights that fits: "
        f"{'; '.join(near)}. Write one: {remedy(setting)}"
    )


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
