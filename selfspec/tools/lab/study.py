"""Declare a study, in a TOML file or by options: models, drafts, workloads and so on; and load its models."""

from __future__ import annotations

import dataclasses
import difflib
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import field, fields
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import torch
from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic.dataclasses import dataclass
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from selfspec.architecture import Adapter
from selfspec.errors import StudyError
from selfspec.measure.checkpoint import load_checkpoint
from selfspec.measure.embedded import DEMO, model_place
from selfspec.measure.prompts import check_reads_text, read_workloads
from selfspec.measure.stock import Continuation, continued
from selfspec.measure.teacher_forced import LayerViews
from selfspec.model.checkpoint import DtypeName, read_config
from selfspec.model.registry import find_adapter
from selfspec.tools.lab.arms import Cell, with_prompts
from selfspec.tools.lab.drafts import Given
from selfspec.tools.lab.runs import Row, Run, digest_of, origin

Pricing = Literal["measured", "weights"]
"""Source of costs: timed on this machine, or the weights that a step reads."""

_LARGE = 2**63


def listed(value: Any) -> tuple[Any, ...]:
    """Let one value stand for a list of one."""
    return tuple(value) if isinstance(value, list | tuple) else (value,)


def _distinct(values: tuple[Any, ...]) -> tuple[Any, ...]:
    if not values:
        raise ValueError("this is empty; name at least one")
    if len(set(values)) < len(values):
        raise ValueError("this names something twice")
    return values


_Item = TypeVar("_Item")
_Several = Annotated[tuple[_Item, ...], BeforeValidator(listed), AfterValidator(_distinct)]
_Count = Annotated[int, Field(ge=1, lt=_LARGE)]


@dataclass(frozen=True, config=ConfigDict(strict=True))
class Study:
    """A declared study. Every combination of the lists is judged.

    Attributes:
        models: checkpoint folders or hub names; "demo" is the embedded one.
        drafts: names as of `--draft`, of any drafter; `exits`, `layers`, `pairs` of layers, `sublayers`,
            `random:SIZExCOUNT` or `heads:FOLDER` stand for many.
        workloads: `demo`, or `NAME=FILE` as of `selfspec bench`: prompts that each model continues.
        chat: whether prompts are written by the chat template.
        temperatures: 0 decodes greedily.
        texts: of a workload, to each of which the model adds up to `max_new_tokens`.
        prompt_tokens: tokens of each prompt, cut or joined to this length; None: prompts are whole.
        reach: positions of a draft that estimates tell apart; further ones are taken to be like the last. None: all,
            and then greedy estimates are what generations do.
        confirm: drafts of each model, workload and temperature that are confirmed by real generation: half of them
            those that promise most, half at random.
        runtime: how passes are run in generations and costs; None: as `selfspec bench` does on the device.
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
    reach: _Count | None = None
    confirm: Annotated[int, Field(ge=0, lt=_LARGE)] = 6
    pricing: Pricing = "measured"
    runtime: Literal["eager", "native", "graphs", "batch-invariant"] | None = None
    accept: str = "token"
    dtype: DtypeName = "float32"
    name: str = "study"

    @classmethod
    def of(cls, declared: Mapping[str, Any], where: str = "the study") -> Study:
        """Check the declarations of a file or of options; messages call them `where`."""
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
            first = wrong.errors(include_url=False, include_input=False)[0]
            place = ".".join(map(str, first["loc"]))
            said = ": ".join(filter(None, [place, first["msg"].removeprefix("Value error, ")]))
            raise StudyError(f"{where}: {said}") from None


def read_study(file: Path, changes: Mapping[str, Any] | None = None) -> Study:
    """Read a study from a TOML file, in which `changes` replace values; a StudyError names what is wrong."""
    try:
        declared = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise StudyError(f"the study {file} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    except (ValueError, RecursionError) as error:
        raise StudyError(f"{file} is not TOML: {' '.join(str(error).split())}") from error
    return Study.of({"name": file.stem, **declared, **(changes or {})}, str(file))


@dataclasses.dataclass
class StudiedModel:
    """A model and its prompts by workload, `[1, prompt]` each; without a tokenizer reports show token ids."""

    name: str
    model: PreTrainedModel
    adapter: Adapter
    prompts: Mapping[str, Sequence[Tensor]]
    tokenizer: PreTrainedTokenizerBase | None = None
    given: Given = field(default_factory=Given)

    @cached_property
    def origin(self) -> Row:
        return origin(self.model)

    @cached_property
    def views(self) -> LayerViews:
        return LayerViews(self.model, self.adapter)

    @property
    def depth(self) -> int:
        return len(self.adapter.decoder_layers(self.model))


def text_run(studied: StudiedModel, workload: str, temperature: float, study: Study) -> Run:
    """Return the run in which a model writes on from the prompts of a workload."""
    prompts = digest_of([prompt.tolist() for prompt in studied.prompts[workload]])
    # Greedy texts do not depend on a seed.
    how = {"temperature": temperature, "seed": study.seed if temperature else 0, "max_new_tokens": study.max_new_tokens}
    return Run("text", {**studied.origin, "prompts": prompts, **how}, {"model": studied.name, "workload": workload})


def write_texts(studied: StudiedModel, run: Run) -> list[Row]:
    """Let the stock model continue the prompts of a workload, each up to where it ends the text."""
    under, prompts = run.under, studied.prompts[run.labels["workload"]]
    texts = continued(studied.model, prompts, under["max_new_tokens"], under["temperature"], under["seed"])
    return [
        {"call": number, "token_ids": text.ids[0].tolist(), "prompt_tokens": text.prompt}
        for number, text in enumerate(texts)
    ]


def texts_of(rows: Sequence[Row], device: torch.device) -> list[Continuation]:
    """Return the texts of a run, on a device."""
    if "error" in rows[0]:
        raise StudyError(f"its texts could not be written: {rows[0]['error']}")
    return [Continuation(torch.tensor([row["token_ids"]], device=device), row["prompt_tokens"]) for row in rows]


def check_inputs(study: Study) -> None:
    """Refuse models and workloads that cannot be read, before any weights are loaded."""
    for model in study.models:
        read_config(model_place(model))
    read_workloads(study.workloads)


def load(name: str, study: Study, device: str) -> StudiedModel:
    """Load a model of a study and its prompts; a PromptError: there is no chat template, or no room in the context."""
    checkpoint = load_checkpoint(model_place(name), study.dtype, device)
    model, workloads = checkpoint.model, read_workloads(study.workloads)
    check_reads_text(model)
    cells = [Cell(each, 0.0, 1, study.prompt_tokens, study.max_new_tokens, study.chat) for each in workloads]
    made = with_prompts(cells, workloads, study.texts, checkpoint)
    prompts = {cell.workload: [call.ids for call in calls] for cell, calls in made.items()}
    called = name if name == DEMO else Path(name).name
    return StudiedModel(called, model, find_adapter(model), prompts, checkpoint.tokenizer)
