"""Options that commands share, each written once, and groups of options as dataclasses."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass, replace
from functools import cached_property, wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, cast, get_args, get_origin, get_type_hints

import typer
from typer.models import OptionInfo

from selfspec.cli.outcome import Result, print_json
from selfspec.errors import CheckpointError, DraftConfigError, PromptError, SelfSpecError, UnsupportedOptionError
from selfspec.measure.embedded import DEMO, model_place

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from selfspec.api import SelfSpeculative
    from selfspec.control import Control
    from selfspec.control.profile import Profile
    from selfspec.draft import Drafter
    from selfspec.measure.checkpoint import Checkpoint, Use

_BEST = "auto"
# What help calls the value of an option.
_METAVARS = {int: "N", float: "X", Path: "FILE", Literal: "NAME", str: "TEXT"}

OutputFormat = Literal["text", "json"]
DtypeOption = Literal["auto", "float32", "float64", "bfloat16", "float16"]

Output = Annotated[
    OutputFormat, typer.Option(metavar="FORMAT", help="`text`, or `json`: one object on stdout, all else on stderr.")
]
Model = Annotated[
    str, typer.Argument(metavar="MODEL", help=f"A checkpoint folder, a hub name, or `{DEMO}` for the embedded model.")
]
Dtype = Annotated[
    DtypeOption,
    typer.Option(
        metavar="DTYPE",
        help="Compute in `float32`, `float64`, `bfloat16` or `float16`; `auto`: as the checkpoint says.",
    ),
]
WeightFormat = Annotated[
    str | None,
    typer.Option(
        metavar="FORMAT",
        help="`planes` keeps weights packed, without changing a bit; by default as in the folder.",
    ),
]
Device = Annotated[
    str, typer.Option(metavar="DEVICE", help="`cpu`, `cuda`, `cuda:1`, ...; `auto`: a CUDA GPU if there is one.")
]
Threads = Annotated[int | None, typer.Option(min=1, help="CPU threads; by default torch chooses.")]
Draft = Annotated[str, typer.Option(metavar="DRAFT", help="What drafts; `selfspec drafts` lists every kind.")]
DraftLength = Annotated[
    int | None, typer.Option(min=1, help="Draft N tokens a round; by default as many as pay, or none.")
]
Nodes = Annotated[
    int | None,
    typer.Option(min=1, help="Draft trees of at most N tokens, siblings included; by default chains."),
]
Seed = Annotated[int, typer.Option(help="Seed of all random draws.")]
Runtime = Annotated[
    Literal["eager", "native", "graphs", "batch-invariant"] | None,
    typer.Option(
        metavar="RUNTIME",
        help="How selfspec runs passes: `eager`, by the stock modules; `native`, by programs of the CPU kernels "
        "where there are some; `graphs`, on a CUDA device only; `batch-invariant`, by kernels that give tokens the "
        "same bits whatever is read with it. Default: `graphs` on a CUDA device, else `native`.",
    ),
]
Repeats = Annotated[int, typer.Option(min=1, help="Repeat every timing N times.")]
PromptFile = Annotated[
    Path | None,
    typer.Option(help="Prompts: one a line, or JSONL with `prompt`, `turns`, `messages` or `text`. Default: built-in."),
]
Chat = Annotated[
    bool,
    typer.Option("--chat", help="Write prompts by the checkpoint's chat template; the model answers turns before."),
]


@dataclass(frozen=True, kw_only=True)
class MemoryOptions:
    """Memory."""

    memory: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Take at most `6GiB`, say: stream from the disk what does not fit."),
    ] = None
    context: Annotated[
        int | None,
        typer.Option(
            min=1, help="With --memory: room for N tokens of prompt and text; by default 4096, or as many as fit."
        ),
    ] = None

    def __post_init__(self) -> None:
        if self.memory is None and self.context is not None:
            raise UnsupportedOptionError("--context says what a budget has room for; add --memory, or drop it")


@dataclass(frozen=True, kw_only=True)
class MachineOptions:
    """Device."""

    device: Device = "auto"
    threads: Threads = None


@dataclass(frozen=True, kw_only=True)
class ModelOptions(MachineOptions):
    """Device and weights."""

    model: Model
    dtype: Dtype = "auto"
    weights: WeightFormat = None

    @property
    def place(self) -> str:
        """The folder or hub name."""
        return model_place(self.model)

    @property
    def is_demo(self) -> bool:
        """Whether it is the embedded model, by name or by folder."""
        return Path(self.place).resolve() == Path(model_place(DEMO)).resolve()

    def prepare(self) -> int:
        """Check device and configuration, since weights may take minutes to load; return the number of layers."""
        from selfspec.model.checkpoint import find_device, read_config

        prepare_process(self.threads)
        find_device(self.device)
        depth: int = read_config(self.place).get_text_config(decoder=True).num_hidden_layers
        return depth

    def load(self, use: Use | None = None) -> Checkpoint:
        """Load the model and its tokenizer, whole."""
        from selfspec.measure.checkpoint import load_checkpoint

        return load_checkpoint(self.place, self.dtype, self.device, self.weights, use)


def load_within(
    model: ModelOptions, budget: MemoryOptions, drafts: Sequence[Drafter | Profile | str | None] | None
) -> SelfSpeculative:
    """Load a model from a folder within a budget, so that all of these drafts, as `read_draft` gives them, can draft.

    None: it drafts with what promises most for what is streamed. A DraftConfigError: one is a profile, or two need
    copies in different formats.
    """
    from selfspec.api import load
    from selfspec.draft import Drafter
    from selfspec.placement.drafts import format_of

    named = [draft for draft in drafts or () if isinstance(draft, Drafter)]
    if len(named) < sum(draft is not None for draft in drafts or ()):
        raise DraftConfigError("a profile is for a model that is whole in memory; with --memory, name another --draft")
    in_formats = {name: draft for draft in named if (name := format_of(draft)) is not None}
    if len(in_formats) > 1:
        raise DraftConfigError(
            "within a budget rounded copies are made once: name drafts in one format, not in "
            f"{' and '.join(in_formats)}"
        )
    return load(
        model.place,
        budget.memory,
        weights=model.weights,
        device=None if model.device == "auto" else model.device,
        dtype=model.dtype,
        draft=drafts is None or next(iter([*in_formats.values(), *named]), False),
        context=budget.context,
    )


def prepare_process(threads: int | None) -> None:
    """Quiet `transformers`, and set the number of threads.

    Raises:
        UnsupportedOptionError: there are more than cores, where each waits for all others.
    """
    import torch
    from transformers.utils import logging

    logging.set_verbosity_error()
    if threads is not None:
        if threads > (cores := os.cpu_count() or threads):
            raise UnsupportedOptionError(f"--threads {threads}: this machine has {cores} cores; give at most as many")
        torch.set_num_threads(threads)


def read_draft(text: str) -> Drafter | Profile | str | None:
    """The draft that `text` names, as `selfspec.wrap` takes it; None for plain decoding.

    `auto` stays a name: which profile fits is known once there is a model.
    """
    from selfspec.draft.registry import AUTO, parse_draft

    name = text.strip()
    if name == AUTO:
        return AUTO
    if name.startswith(AUTO + ":"):
        from selfspec.control.profile import Profile

        return Profile.load(name.removeprefix(AUTO + ":"))
    try:
        return parse_draft(text)
    except DraftConfigError as error:
        raise DraftConfigError(re.sub("^draft ", "--draft ", str(error))) from error


def grouped(command: Callable[..., Result | None]) -> Callable[..., None]:
    """Turn a command's dataclasses into options, and print what it returns.

    Each field becomes an option of its name, in a panel of the help that the first line of the dataclass's docstring
    titles. The command gets the dataclasses. Its other parameters are annotated as typer's options and arguments. A
    value that has no metavar is called by its type.

    What a command returns is printed as JSON, where that is asked for. One that takes no `output` gets the option all
    the same, and what it returns is its text; any other prints its text itself.
    """
    # The dataclass that it returns may be known to type checkers alone.
    taken = {name: hint for name, hint in command.__annotations__.items() if name != "return"}
    hints = get_type_hints(SimpleNamespace(__annotations__=taken), command.__globals__, include_extras=True)
    groups: dict[str, type[Any]] = {
        name: hint for name, hint in hints.items() if isinstance(hint, type) and is_dataclass(hint)
    }
    parameters: list[Parameter] = []
    for parameter in signature(command).parameters.values():
        group = groups.get(parameter.name)
        if group is None:
            parameters.append(_option(parameter.name, hints[parameter.name], parameter.default, None))
        else:
            title = (group.__doc__ or "").partition("\n")[0].removesuffix(".")
            types = get_type_hints(group, include_extras=True)
            parameters += [_option(each.name, types[each.name], _default(each), title) for each in fields(group)]

    tells = "output" in {parameter.name for parameter in parameters}
    if not tells:
        parameters.append(_option("output", Output, "text", None))

    @wraps(command)
    def run(**given: Any) -> None:
        output = given["output"] if tells else given.pop("output")
        made = {
            name: group(**{field.name: given.pop(field.name) for field in fields(group)})
            for name, group in groups.items()
        }
        result = command(**made, **given)
        if result is None:
            return
        if output == "json":
            print_json(result)
        elif not tells:
            print(result)

    run.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _option(name: str, hint: Any, default: Any, panel: str | None) -> Parameter:
    info = copy(hint.__metadata__[0])
    if isinstance(info, OptionInfo):
        kinds = _kinds(hint.__origin__)
        info.rich_help_panel = panel
        info.metavar = info.metavar or next((short for kind, short in _METAVARS.items() if kind in kinds), None)
    # typer reads the type of an option even where a parser makes its value.
    kind = Any if getattr(info, "parser", None) else hint.__origin__
    annotation = cast(Any, Annotated)[kind, info]
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _kinds(hint: Any) -> set[Any]:
    """A type, and the types it is made of."""
    return {hint, get_origin(hint)}.union(*map(_kinds, get_args(hint)))


def _default(field: Field[Any]) -> Any:
    if field.default_factory is not MISSING:
        return field.default_factory()
    return Parameter.empty if field.default is MISSING else field.default


@dataclass(frozen=True)
class Loaded:
    """A wrapped model and its tokenizer. How to sample is what a command's options say, and nothing else."""

    spec: SelfSpeculative
    tokenizer: PreTrainedTokenizerBase


@dataclass(frozen=True, kw_only=True)
class DraftingOptions:
    """Draft."""

    draft: Annotated[
        str | None,
        typer.Option(
            metavar="DRAFT",
            help="What drafts; `selfspec drafts` lists every kind. Default: `auto`, and with --memory "
            "look-ups and rounded copies of what is streamed.",
        ),
    ] = None
    draft_length: DraftLength = None
    nodes: Nodes = None

    by_default: ClassVar[str] = _BEST

    def __post_init__(self) -> None:
        # What names no draft is refused before anything else is read.
        _ = self.drafter

    @cached_property
    def drafter(self) -> Drafter | Profile | str | None:
        """The draft as `selfspec.wrap` takes it, read before any weight is."""
        return read_draft(self.draft or self.by_default)

    def control(self) -> Control | None:
        """Return how long drafts are; None: the default."""
        from selfspec.tools.lab.arms import control_of

        return None if self.draft_length is None and self.nodes is None else control_of(self.draft_length, self.nodes)

    def check(self, model: ModelOptions, budget: MemoryOptions) -> None:
        """Check device, configuration and draft, since weights may take minutes to load."""
        from selfspec.draft import Drafter

        if self.nodes is not None and self.drafter is None and (self.draft is not None or budget.memory is None):
            raise UnsupportedOptionError("--nodes has no effect on plain decoding; name a draft, or drop it")
        depth = model.prepare()
        if isinstance(self.drafter, Drafter):
            self.drafter.check(depth)

    def load(
        self,
        model: ModelOptions,
        budget: MemoryOptions,
        control: Control | None = None,
        text: str = "",
        new_tokens: int | None = None,
    ) -> Loaded:
        """Load a model and wrap it, to read a text and write new tokens, as far as these are known.

        Within a budget the default draft is what promises most there.
        """
        from selfspec.api import wrap
        from selfspec.decode.generation import has_own_generate
        from selfspec.draft import Drafter
        from selfspec.measure.checkpoint import Use
        from selfspec.measure.stock import bare
        from selfspec.model.checkpoint import load_tokenizer

        if budget.memory is None:
            use = Use(self.drafter if isinstance(self.drafter, Drafter) else None, text)
            checkpoint = model.load(use if new_tokens is None else replace(use, new_tokens=new_tokens))
            # A `generate` of the model's own reads how it transcribes out of its defaults.
            given = checkpoint.model if has_own_generate(checkpoint.model) else bare(checkpoint.model)
            spec = wrap(given, draft=self.drafter, draft_length=control)
            return Loaded(spec, checkpoint.tokenizer)
        tokenizer = load_tokenizer(model.place)
        best = self.draft is None or self.draft.strip() == self.by_default == _BEST
        spec = load_within(model, budget, None if best else [self.drafter])
        if control is not None:
            spec = spec.drafting(spec.draft, draft_length=control)
        spec.model.generation_config = bare(spec.model).generation_config
        return Loaded(spec, tokenizer)


Template = Annotated[
    Path | None, typer.Option(help="File with a chat template in Jinja, in place of the checkpoint's own.")
]


def read_template(file: Path | None) -> str | None:
    """Read the file of a chat template, where there is one."""
    return None if file is None else read_text(f"--template {file}", file.read_bytes, CheckpointError)


def read_text(source: str, read: Callable[[], bytes], kind: type[SelfSpecError] = PromptError) -> str:
    """Read a text in UTF-8; where that cannot be, an error of a kind names the source."""
    try:
        return read().decode("utf-8")
    except UnicodeError as error:
        raise kind(f"{source} is not UTF-8 text ({error}); convert it first") from error
    except OSError as error:
        raise kind(f"{source} cannot be read: {error.strerror or error}") from error
