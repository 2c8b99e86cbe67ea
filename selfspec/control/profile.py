"""The profile that a calibration leaves: JSON, bound to where it was measured, checked as it is read."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from selfspec.control import CostAware
from selfspec.control.costs import BatchCosts, Costs
from selfspec.control.draft_policy import DraftChoice, DraftPolicy
from selfspec.control.setting import Setting
from selfspec.draft.named import parse_draft
from selfspec.errors import DraftConfigError, ProfileError
from selfspec.files.json_text import parse_json
from selfspec.files.writing import whole
from selfspec.model.adapter import Adapter

FORMAT = 5
_WHAT_DIFFERS = {
    "fingerprint": "weights",
    "model": "model class",
    "threads": "CPU threads",
    "packed": "packed weights",
    "kernels": "CPU kernels",
    "selfspec": "selfspec version",
    "torch": "torch version",
    "transformers": "transformers version",
}


@dataclass(frozen=True)
class Chosen:
    """The draft that was the fastest for one kind of decoding.

    Attributes:
        draft: its name, as on the command line; `none` where plain decoding was the fastest.
        longest: the most tokens of a draft; how many it is each time follows from the costs.
        costs: of its rounds, measured in batches of some sizes; None for plain decoding.
        temperature: it was chosen at.
        speedup: over plain decoding, as confirmed: median, low, high.
        most_rows: of a batch in which it was faster than plain decoding; None: it was so in all that were tried.
    """

    draft: str
    longest: int
    costs: BatchCosts | None
    temperature: float
    speedup: tuple[float, float, float]
    most_rows: int | None = None

    @property
    def choice(self) -> DraftChoice:
        """The draft, and the control with these costs.

        Raises:
            DraftConfigError: there is no such draft.
            ExitHeadError: what it names on disk cannot be used.
        """
        return DraftChoice(parse_draft(self.draft), CostAware(self.longest), self.costs, self.most_rows)


@dataclass(frozen=True)
class Profile(DraftPolicy):
    """What to draft with in one setting: one draft for greedy decoding, and one for sampling.

    Attributes:
        setting: where it was measured, and so where it is of use.
        greedy: for greedy decoding.
        sampled: for sampling.
        report: all that was measured, for people and other programs; nothing of it is needed.
        source: where it was read from, for messages.
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
            ProfileError: it is missing, truncated, corrupt, foreign or of another format.
        """
        try:
            content = parse_json(Path(file).read_text(encoding="utf-8"))
        except OSError as error:
            raise ProfileError(
                f"the profile {file} cannot be read ({error.strerror or error}); write one: selfspec calibrate MODEL "
                f"--to {file}"
            ) from error
        except (ValueError, RecursionError) as error:
            raise ProfileError(
                f"the profile {file} is truncated or no JSON ({error}); write it again: selfspec calibrate MODEL "
                f"--to {file}"
            ) from error
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise ProfileError(
                f"{file} is no profile of format {FORMAT}; it is foreign, or of another selfspec: write it again with "
                "selfspec calibrate"
            )
        reader = _Reader(str(file))
        return cls(
            setting=reader.setting(reader.part(content, "setting")),
            greedy=reader.chosen(reader.part(content, "greedy"), "greedy"),
            sampled=reader.chosen(reader.part(content, "sampled"), "sampled"),
            report=reader.part(content, "report"),
            source=str(file),
        )

    def save(self, file: Path) -> None:
        """Write it: the whole file or none of it.

        Raises:
            StorageError: it cannot be written there.
        """
        content = {
            "format": FORMAT,
            "setting": asdict(self.setting),
            "greedy": asdict(self.greedy),
            "sampled": asdict(self.sampled),
            "report": dict(self.report),
        }
        text = json.dumps(content, indent=1, allow_nan=False)
        with whole(file) as draft:
            draft.write_text(text + "\n", encoding="utf-8")

    def choose_draft(self, greedy: bool) -> DraftChoice:
        return (self.greedy if greedy else self.sampled).choice

    def check_model(self, model: PreTrainedModel, adapter: Adapter) -> None:
        self.check_setting(Setting.of(model))

    def check_setting(self, setting: Setting) -> None:
        """Refuse another setting than the one it was measured in.

        Raises:
            ProfileError: saying what differs and how to calibrate here.
        """
        differing = self.setting.differences(setting)
        if differing:
            raise ProfileError(
                f"{self.source} was measured elsewhere: {described(differing)}. Write one for here: {remedy(setting)}"
            )


def described(differences: Mapping[str, tuple[str | int, str | int]]) -> str:
    """In words: what differs, what the profile has, what is here."""
    return "; ".join(
        f"{_WHAT_DIFFERS.get(name, name)} {_short(theirs)} there, {_short(here)} here"
        for name, (theirs, here) in differences.items()
    )


def remedy(setting: Setting) -> str:
    """The command that calibrates for a setting."""
    threads = f" --threads {setting.threads}" if setting.threads else ""
    packed = " --packed" if setting.packed else ""
    return f"selfspec calibrate MODEL --dtype {setting.dtype}{threads}{packed}"


def _short(value: str | int) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    text = str(value)
    return text[:12] if len(text) == 64 else text


class _Reader:
    """Takes the parts of a profile, each of the kind it must be."""

    def __init__(self, file: str) -> None:
        self._file = file

    def part(self, content: Mapping[str, Any], name: str) -> dict[str, Any]:
        value = content.get(name)
        if not isinstance(value, dict):
            raise self._wrong(name)
        return value

    def setting(self, content: Mapping[str, Any]) -> Setting:
        kinds = {"str": str, "int": int, "bool": bool}
        for each in fields(Setting):
            if type(content.get(each.name)) is not kinds[str(each.type)]:
                raise self._wrong(f"setting.{each.name}")
        return Setting(**{each.name: content[each.name] for each in fields(Setting)})

    def chosen(self, content: Mapping[str, Any], name: str) -> Chosen:
        draft, longest, speedup = content.get("draft"), content.get("longest"), content.get("speedup")
        if not isinstance(draft, str):
            raise self._wrong(f"{name}.draft")
        if type(longest) is not int or longest < 1:
            raise self._wrong(f"{name}.longest")
        if not isinstance(speedup, list) or len(speedup) != 3:
            raise self._wrong(f"{name}.speedup")
        most_rows = content.get("most_rows")
        if most_rows is not None and (type(most_rows) is not int or most_rows < 1):
            raise self._wrong(f"{name}.most_rows")
        low, middle, high = (self._number(value, f"{name}.speedup") for value in speedup)
        costs = None
        if content.get("costs") is not None:
            costs = self._costs(self.part(content, "costs"), f"{name}.costs")
        temperature = self._number(content.get("temperature"), f"{name}.temperature")
        chosen = Chosen(draft, longest, costs, temperature, (low, middle, high), most_rows)
        try:
            parsed = parse_draft(draft)
        except DraftConfigError as error:
            raise ProfileError(f"{self._file}: {name}.draft is not understood ({error})") from error
        if (parsed is None) != (costs is None):
            raise self._wrong(f"{name}.costs")
        return chosen

    def _costs(self, content: Mapping[str, Any], name: str) -> BatchCosts:
        measured = content.get("measured")
        if not isinstance(measured, list):
            raise self._wrong(name)
        try:
            return BatchCosts(tuple(self._costs_of_size(each, name) for each in measured))
        except DraftConfigError:
            raise self._wrong(name) from None

    def _costs_of_size(self, content: object, name: str) -> Costs:
        if not isinstance(content, dict):
            raise self._wrong(name)
        numbers = {each.name: self._number(content.get(each.name), name) for each in fields(Costs)}
        return Costs(rows=int(numbers.pop("rows")), **numbers)

    def _number(self, value: object, name: str) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._wrong(name)
        try:
            number = float(value)
        except OverflowError:
            raise self._wrong(name) from None
        if not math.isfinite(number):
            raise self._wrong(name)
        return number

    def _wrong(self, name: str) -> ProfileError:
        return ProfileError(f"{self._file} is incomplete or corrupt ({name}); write it again with selfspec calibrate")
