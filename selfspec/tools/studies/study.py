"""What a study declares: models, drafts, workloads and the rest, from a TOML or YAML file or from options, checked."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, get_args

from selfspec.accept import find_rule
from selfspec.errors import SelfSpecError, StudyError

Pricing = Literal["measured", "weights"]
"""Where costs come from: timed on this machine, or the weights that a step reads."""

WORK = ("scipy", "sqlalchemy")
REPORT = ("matplotlib", "pandas", "plotly", "pyarrow")
"""Packages that studies need and decoding does not: to work, and to report."""

_DTYPES = ("auto", "float32", "float64", "bfloat16", "float16")


@dataclass(frozen=True)
class Study:
    """A declared study. Every combination of the lists is a point.

    Attributes:
        models: checkpoint folders or hub names; "demo" is the embedded one.
        drafts: names as of `--draft`, or `exits`, `layers`, `sublayers`, `random:SIZExCOUNT`, `heads:FOLDER`.
        workloads: `demo`, or `NAME=FILE` as of `selfspec bench`: prompts that each model writes on from.
        temperatures: 0 decodes greedily.
        accept: acceptance rules, for points confirmed by generation; estimates are of rejection sampling by tokens.
        draft_lengths: those to choose from.
        seeds: of sampled texts.
        texts: texts of a workload.
        prompt_tokens: tokens of each prompt.
        max_new_tokens: tokens that the model adds to each.
        reach: positions of a draft that estimates tell apart; further ones are taken to be like the last.
        confirm: drafts of each model, workload, temperature and seed that are confirmed by real generation: half of
            them those that promise most, half at random.
        pricing: where costs come from.
        dtype: what to compute in.
        name: what reports call it.

    Raises:
        StudyError: naming what cannot be.
    """

    models: tuple[str, ...]
    drafts: tuple[str, ...] = ("exits", "sublayers")
    workloads: tuple[str, ...] = ("demo",)
    temperatures: tuple[float, ...] = (0.0, 1.0)
    accept: tuple[str, ...] = ("token",)
    draft_lengths: tuple[int, ...] = (1, 2, 3, 4, 6, 8)
    seeds: tuple[int, ...] = (0,)
    texts: int = 8
    prompt_tokens: int = 32
    max_new_tokens: int = 64
    reach: int = 2
    confirm: int = 6
    pricing: Pricing = "measured"
    dtype: str = "float32"
    name: str = "study"

    def __post_init__(self) -> None:
        for name in _LISTS:
            values = getattr(self, name)
            if not values:
                raise StudyError(f"{name} is empty; name at least one")
            if len(set(values)) < len(values):
                raise StudyError(f"{name} = {list(values)} names something twice")
        for name, least in {
            "texts": 1,
            "prompt_tokens": 1,
            "max_new_tokens": 2,
            "reach": 1,
            "confirm": 0,
        }.items():
            if getattr(self, name) < least:
                raise StudyError(f"{name} = {getattr(self, name)} is too small, give at least {least}")
        if min(self.draft_lengths) < 1:
            raise StudyError(f"draft_lengths = {list(self.draft_lengths)}: a draft has at least 1 token")
        if min(self.temperatures) < 0:
            raise StudyError(f"temperatures = {list(self.temperatures)}: a temperature is not negative")
        if self.pricing not in get_args(Pricing):
            raise StudyError(f"pricing = {self.pricing!r} is not known; choose {' or '.join(get_args(Pricing))}")
        if self.dtype not in _DTYPES:
            raise StudyError(f"dtype = {self.dtype!r} is not known; choose one of {', '.join(_DTYPES)}")
        for rule in self.accept:
            try:
                find_rule(rule)
            except SelfSpecError as error:
                raise StudyError(f"accept: {error}") from error

    @classmethod
    def of(cls, declared: Mapping[str, Any], where: str = "the study") -> Study:
        """Check what a file or options declare.

        Args:
            declared: values by name; one value may stand for a list of one.
            where: what messages call it.

        Raises:
            StudyError: a name is not known, or a value cannot be.
        """
        types = {each.name: str(each.type) for each in fields(cls)}
        values: dict[str, Any] = {}
        for key, value in declared.items():
            if key not in types:
                near = difflib.get_close_matches(key, types, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(types)}"
                raise StudyError(f"{where} has an unknown key {key!r}; {hint}")
            values[key] = _checked(where, key, types[key], value)
        if "models" not in values:
            raise StudyError(f'{where} names no models; add e.g. models = ["demo"]')
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """Return everything, ready for JSON."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}


_LISTS = ("models", "drafts", "workloads", "temperatures", "accept", "draft_lengths", "seeds")


def read_study(file: Path, changes: Mapping[str, Any] | None = None) -> Study:
    """Read a study from a TOML or YAML file.

    Args:
        file: declares it.
        changes: values that replace the file's.

    Raises:
        StudyError: the file cannot be read, is malformed, or declares what cannot be.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise StudyError(f"the study {file} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    declared = _parsed(file, text)
    if not isinstance(declared, dict):
        raise StudyError(f'{file} declares no keys and values; begin with e.g. models = ["demo"]')
    return Study.of({"name": file.stem, **declared, **(changes or {})}, str(file))


def _parsed(file: Path, text: str) -> Any:
    import yaml

    if file.suffix not in (".toml", ".yaml", ".yml"):
        raise StudyError(f"{file} ends in neither .toml, .yaml nor .yml; name it by what it is")
    try:
        return tomllib.loads(text) if file.suffix == ".toml" else yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        kind = "TOML" if file.suffix == ".toml" else "YAML"
        raise StudyError(f"{file} is not {kind}: {' '.join(str(error).split())}") from error


_KINDS: dict[str, tuple[type, ...]] = {"int": (int,), "float": (int, float), "str": (str,)}


def _checked(where: str, key: str, kind: str, value: Any) -> Any:
    """Check a value and return it as the study keeps it."""
    for number in value if isinstance(value, list | tuple) else [value]:
        if isinstance(number, int | float) and not -(2**63) <= number < 2**63:
            raise StudyError(f"{where}: {key} holds a number out of range")
    if not kind.startswith("tuple"):
        wanted = int if kind == "int" else str
        if isinstance(value, bool) or not isinstance(value, wanted):
            raise StudyError(f"{where}: {key} = {value!r} is not {'a whole number' if wanted is int else 'a text'}")
        return value
    items = list(value) if isinstance(value, list | tuple) else [value]
    of = kind.removeprefix("tuple[").split(",")[0]
    for item in items:
        if isinstance(item, bool) or not isinstance(item, _KINDS[of]):
            raise StudyError(f"{where}: {key} holds {item!r}, which is no {of}")
    return tuple(float(item) if of == "float" else item for item in items)


def require_packages(packages: Sequence[str] = WORK) -> None:
    """Refuse, before work starts, what needs a package that is missing.

    Raises:
        StudyError: naming the package and how to get it.
    """
    for package in packages:
        if find_spec(package) is None:
            raise StudyError(f"studies need {package}; pip install 'selfspec[ablate]'")
