"""What drafts in a command that decodes, and the model wrapped for it: whole, or within a budget."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer

from selfspec.cli.options import DraftLength, MemoryOptions, ModelOptions, Nodes, load_within, read_draft
from selfspec.errors import UnsupportedOptionError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from selfspec.api import SelfSpeculative
    from selfspec.control import Control
    from selfspec.control.profile import Profile
    from selfspec.draft import Drafter

_BEST = "auto"


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
        from selfspec.control.fixed import control_of

        return None if self.draft_length is None and self.nodes is None else control_of(self.draft_length, self.nodes)

    def check(self, model: ModelOptions, budget: MemoryOptions) -> None:
        """Check device, configuration and draft, since weights may take minutes to load."""
        from selfspec.draft import Drafter

        if self.nodes is not None and self.drafter is None and (self.draft is not None or budget.memory is None):
            raise UnsupportedOptionError("--nodes has no effect on plain decoding; name a draft, or drop it")
        depth = model.prepare()
        if isinstance(self.drafter, Drafter):
            self.drafter.check(depth)

    def load(self, model: ModelOptions, budget: MemoryOptions, control: Control | None = None) -> Loaded:
        """Load a model and wrap it; within a budget the default draft is what promises most there."""
        from selfspec.api import wrap
        from selfspec.measure.stock import bare
        from selfspec.model.checkpoint import load_tokenizer

        if budget.memory is None:
            checkpoint = model.load()
            spec = wrap(bare(checkpoint.model), draft=self.drafter, draft_length=control)
            return Loaded(spec, checkpoint.tokenizer)
        tokenizer = load_tokenizer(model.place)
        best = self.draft is None or self.draft.strip() == self.by_default == _BEST
        spec = load_within(model, budget, True if best else self.drafter)
        if control is not None:
            spec = spec.drafting(spec.draft, draft_length=control)
        spec.model.generation_config = bare(spec.model).generation_config
        return Loaded(spec, tokenizer)


Template = Annotated[
    Path | None, typer.Option(help="File with a chat template in Jinja, in place of the checkpoint's own.")
]


def read_template(file: Path | None) -> str | None:
    """Read the file of a chat template, where there is one."""
    if file is None:
        return None
    from selfspec.serve.chat.template import read_template as read

    return read(file)
