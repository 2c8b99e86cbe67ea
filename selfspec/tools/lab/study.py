"""What a study declares: models, drafts, workloads and the rest, from a TOML file or from options, checked."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic.dataclasses import dataclass

from selfspec.errors import StudyError
from selfspec.files.json_text import first_error
from selfspec.model.checkpoint import DtypeName

Pricing = Literal["measured", "weights"]
"""Where costs come from: timed on this machine, or the weights that a step reads."""

_LARGE = 2**63


def _listed(value: Any) -> Any:
    """One value may stand for a list of one."""
    return tuple(value) if isinstance(value, list | tuple) else (value,)


def _distinct(values: tuple[Any, ...]) -> tuple[Any, ...]:
    if not values:
        raise ValueError("this is empty; name at least one")
    if len(set(values)) < len(values):
        raise ValueError("this names something twice")
    return values


_Item = TypeVar("_Item")
_Several = Annotated[tuple[_Item, ...], BeforeValidator(_listed), AfterValidator(_distinct)]
_Count = Annotated[int, Field(ge=1, lt=_LARGE)]


@dataclass(frozen=True, config=ConfigDict(strict=True))
class Study:
    """A declared study. Every combination of the lists is judged.

    Attributes:
        models: checkpoint folders or hub names; "demo" is the embedded one.
        drafts: names as of `--draft`, of any drafter; `exits`, `layers`, `sublayers`, `random:SIZExCOUNT` or
            `heads:FOLDER` stand for many.
        workloads: `demo`, or `NAME=FILE` as of `selfspec bench`: prompts that each model writes on from.
        chat: whether prompts are written by the chat template.
        temperatures: 0 decodes greedily.
        texts: of a workload, to each of which the model adds up to `max_new_tokens`.
        prompt_tokens: tokens of each prompt, cut or joined to this length; None: prompts are whole.
        reach: positions of a draft that estimates tell apart; further ones are taken to be like the last.
        confirm: drafts of each model, workload and temperature that are confirmed by real generation: half of them
            those that promise most, half at random.
        accept: acceptance rule of drafts that are judged by generation; teacher forcing judges token by token.
    """

    models: _Several[str]
    drafts: _Several[str] = ("exits", "sublayers")
    workloads: _Several[str] = ("demo",)
    chat: bool = False
    temperatures: _Several[Annotated[float, Field(ge=0, lt=_LARGE)]] = (0.0, 1.0)
    draft_lengths: _Several[_Count] = (1, 2, 3, 4, 6, 8)
    seed: Annotated[int, Field(ge=-_LARGE, lt=_LARGE)] = 0
    texts: _Count = 8
    prompt_tokens: _Count | None = None
    max_new_tokens: Annotated[_Count, Field(ge=2)] = 64
    reach: _Count = 2
    confirm: Annotated[int, Field(ge=0, lt=_LARGE)] = 6
    pricing: Pricing = "measured"
    accept: str = "token"
    dtype: DtypeName = "float32"
    name: str = "study"

    @classmethod
    def of(cls, declared: Mapping[str, Any], where: str = "the study") -> Study:
        """Check what a file or options declare; messages call it `where`."""
        names = [each.name for each in fields(cls)]
        for key in declared:
            if key not in names:
                near = difflib.get_close_matches(key, names, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(names)}"
                raise StudyError(f"{where} has an unknown key {key!r}; {hint}")
        if "models" not in declared:
            raise StudyError(f'{where} names no models; add e.g. models = ["demo"]')
        try:
            return cls(**declared)
        except ValidationError as wrong:
            raise StudyError(f"{where}: {first_error(wrong)}") from None


def read_study(file: Path, changes: Mapping[str, Any] | None = None) -> Study:
    """Read a study from a TOML file; `changes` replace values of the file.

    Raises:
        StudyError: the file cannot be read, is malformed, or declares what cannot be.
    """
    return Study.of({"name": file.stem, **declared_in(file), **(changes or {})}, str(file))


def declared_in(file: Path) -> dict[str, Any]:
    """Return what a TOML file declares, unchecked; errors as of `read_study`, as far as TOML goes."""
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise StudyError(f"the study {file} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    except (ValueError, RecursionError) as error:
        raise StudyError(f"{file} is not TOML: {' '.join(str(error).split())}") from error
