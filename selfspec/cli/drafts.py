"""`selfspec drafts`: what can draft, by name."""

from __future__ import annotations

from selfspec.cli.options import Output
from selfspec.cli.outcome import print_json
from selfspec.cli.terminal import console

_RUNS = {"nothing": "nothing", "layers": "layers of the model", "model": "another model", "drafts": ""}


def drafts(output: Output = "text") -> None:
    """List what can draft: how it is written, what a draft step runs, and what it does.

    Drafts of other packages are listed too: those in the entry point group `selfspec.drafts`.
    """
    from rich.table import Table

    from selfspec.draft.registry import AUTO, PLAIN, declarations, kinds

    found = [
        {
            "name": each.name,
            "written": each.form,
            "example": each.example,
            "runs": kinds()[each.name].runs if each.written == "alone" else "drafts",
            "help": each.help,
            "module": kinds()[each.name].__module__,
        }
        for each in declarations()
    ]
    if output == "json":
        print_json({"drafts": found})
        return
    table = Table("draft", "runs", "what it does", box=None, pad_edge=False)
    for each in found:
        table.add_row(each["written"], _RUNS[each["runs"]], each["help"])
    table.add_row("draft+draft", "", "the first that has one which promises more, as in lookup+recycle+int8")
    table.add_row("module:Class", "", "a drafter of your own (docs/your_own_drafter.md)")
    table.add_row(f"{AUTO}, {AUTO}:FILE", "", "the fastest one here, by `selfspec calibrate`")
    table.add_row(PLAIN, "", "plain decoding")
    console().print(table)
