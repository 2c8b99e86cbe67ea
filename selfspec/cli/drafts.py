"""`selfspec drafts`: what can draft, by name."""

from __future__ import annotations

from dataclasses import dataclass

from selfspec.cli.options import Output
from selfspec.cli.terminal import console

_RUNS = {"nothing": "nothing", "layers": "layers of the model", "model": "another model", "drafts": ""}


@dataclass(frozen=True)
class ListedDraft:
    """A kind of draft.

    Attributes:
        written: how it is written, with names for what varies.
        runs: what a draft step runs: `nothing`, `layers` of the model, another `model`, or other `drafts`.
        help: what it does.
        module: that declares it.
    """

    name: str
    written: str
    example: str
    runs: str
    help: str
    module: str


@dataclass(frozen=True)
class ListedDrafts:
    """`selfspec drafts`."""

    drafts: list[ListedDraft]


def drafts(output: Output = "text") -> ListedDrafts:
    """List what can draft: how it is written, what a draft step runs, and what it does.

    Drafts of other packages are listed too: those in the entry point group `selfspec.drafts`.
    """
    from selfspec.draft.registry import AUTO, PLAIN, declarations, kinds

    found = []
    for each in declarations():
        kind = kinds()[each.name]
        runs = kind.runs if each.written == "alone" else "drafts"
        found.append(ListedDraft(each.name, each.form, each.example, runs, each.help, kind.__module__))
    if output == "text":
        from rich.table import Table

        table = Table("draft", "runs", "what it does", box=None, pad_edge=False)
        for draft in found:
            table.add_row(draft.written, _RUNS[draft.runs], draft.help)
        table.add_row("draft+draft", "", "the first that has one which promises more, as in lookup+recycle+int8")
        table.add_row("module:Class", "", "a drafter of your own (docs/your_own_drafter.md)")
        table.add_row(f"{AUTO}, {AUTO}:FILE", "", "the fastest one here, by `selfspec calibrate`")
        table.add_row(PLAIN, "", "plain decoding")
        console().print(table)
    return ListedDrafts(found)
