"""`selfspec drafts`: list drafts and the rules that judge them."""

from __future__ import annotations

from dataclasses import dataclass

from selfspec.cli.options import Output
from selfspec.cli.terminal import console

_RUNS = {"nothing": "nothing", "layers": "layers of the model", "model": "a head", "drafts": ""}


@dataclass(frozen=True)
class ListedDraft:
    """A kind of draft.

    Attributes:
        written: how it is written, with names for what varies.
        runs: what a draft step runs: `nothing`, `layers` of the model, a head (`model`), or other `drafts`.
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
class ListedRule:
    """An acceptance rule.

    Attributes:
        written: its name, with its fields and their defaults.
        lossless: whether the tokens are distributed exactly as the full model's own.
        help: what it does.
        module: that declares it.
    """

    name: str
    written: str
    lossless: bool
    help: str
    module: str


@dataclass(frozen=True)
class ListedDrafts:
    """`selfspec drafts`."""

    drafts: list[ListedDraft]
    rules: list[ListedRule]


def drafts(output: Output = "text") -> ListedDrafts:
    """List what can draft (how it is written, what a draft step runs, what it does), and the rules that judge drafts.

    Those of other packages are listed too: the entry point groups are `selfspec.drafts` and `selfspec.rules`.
    """
    from selfspec.accept import rules, with_fields
    from selfspec.draft.registry import AUTO, PLAIN, declarations, kinds

    found = []
    for each in declarations():
        kind = kinds()[each.name]
        runs = kind.runs if each.written == "alone" else "drafts"
        found.append(ListedDraft(each.name, each.form, each.example, runs, each.help, kind.__module__))
    judges = []
    for name, rule in rules().items():
        written, help = with_fields(name, rule), getattr(rule, "help", "")
        judges.append(ListedRule(name, written, rule.lossless, help, type(rule).__module__))
    if output == "text":
        from rich.table import Column, Table

        table = Table("draft", "runs", "what it does", box=None, pad_edge=False)
        for draft in found:
            table.add_row(draft.written, _RUNS[draft.runs], draft.help)
        table.add_row("draft+draft", "", "the first that has one which promises more, as in lookup+recycle+int8")
        table.add_row("module:Class", "", "a drafter of your own (docs/your_own_drafter.md)")
        table.add_row(f"{AUTO}, {AUTO}:FILE", "", "the fastest one here, by `selfspec calibrate`")
        table.add_row(PLAIN, "", "plain decoding")
        console().print(table, end="\n\n")
        judging = Table(
            Column("rule (--accept)", overflow="fold"), "lossless", "what it does", box=None, pad_edge=False
        )
        for judge in judges:
            judging.add_row(judge.written, "yes" if judge.lossless else "no", judge.help)
        judging.add_row("module:Class", "", "a rule of your own (docs/your_own_drafter.md)")
        console().print(judging)
    return ListedDrafts(found, judges)
