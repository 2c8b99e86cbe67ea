"""`selfspec drafts` and `quantize`: list drafts and rules, and write the file that drafts in fewer bits read."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from selfspec.cli.options import ModelOptions, Output, PromptFile, Seed
from selfspec.cli.terminal import console, counting_bar
from selfspec.errors import DraftConfigError

if TYPE_CHECKING:
    from torch import Tensor

    from selfspec.draft import LowPrecision
    from selfspec.measure.checkpoint import Checkpoint
    from selfspec.measure.prompts import Workload

_RUNS = {"nothing": "nothing", "layers": "layers of the model", "model": "a head", "drafts": ""}
# Texts that errors are compensated on, and tokens that each takes of a prompt.
_TEXTS, _PROMPT = 12, 16


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
    from selfspec.accept import declaration_of, rules, with_fields
    from selfspec.draft.registry import AUTO, PLAIN, declarations, kinds

    found = []
    for each in declarations():
        kind = kinds()[each.name]
        runs = kind.runs if each.written == "alone" else "drafts"
        found.append(ListedDraft(each.name, each.form, each.example, runs, each.help, kind.__module__))
    judges = []
    for name, rule in rules().items():
        declared = declaration_of(type(rule))
        help = "" if declared is None else declared.help
        judges.append(ListedRule(name, with_fields(name, rule), rule.lossless, help, type(rule).__module__))
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


@dataclass(frozen=True)
class Quantized:
    """`selfspec quantize`.

    Attributes:
        share: of the bytes of all weights.
    """

    file: str
    bytes: int
    share: float
    seconds: float
    bits: int
    format: str

    def __str__(self) -> str:
        return (
            f"{self.file}: {self.bytes:,} bytes, {self.share:.1%} of the weights, in {self.seconds:.1f} s; "
            f"use it with --draft {self.format}:{self.file}"
        )


def quantize(
    model: ModelOptions,
    to: Annotated[Path, typer.Option(metavar="FILE", help="Where the substitutes go: safetensors.")],
    bits: Annotated[int, typer.Option(help="Bits of a weight: 8 or 4.")] = 8,
    group_size: Annotated[int, typer.Option(help="Weights that share a scale, in 4 bits: 32, 64, 128 or 256.")] = 32,
    format: Annotated[
        str | None, typer.Option(help="Format of the weights, instead of --bits: see `selfspec drafts`.")
    ] = None,
    texts: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="In 4 bits, texts that the model writes and errors are compensated on; 0: scales alone are fitted, in "
            f"seconds. Default: {_TEXTS}.",
        ),
    ] = None,
    prompt_file: PromptFile = None,
    seed: Seed = 0,
) -> Quantized:
    """Write the weights in fewer bits to a file, for `--draft int8:FILE`: a draft then reads them instead of rounding.

    The model stays as it is. The file holds for these weights alone. In 4 bits the errors of each layer are compensated
    on text of the model's own (GPTQ), from random tokens or from prompts, which takes minutes.
    """
    from selfspec.draft import LowPrecision
    from selfspec.formats.format import formats
    from selfspec.measure.prompts import read_prompts
    from selfspec.tools.lab.outputs import check_output_file

    draft = LowPrecision(bits, group_size) if format is None else _named(format)
    bits = draft.format.bits
    if not draft.format.compensates and (texts or prompt_file):
        served = " and ".join(f"{each.bits}" for each in formats().values() if each.compensates)
        raise DraftConfigError(
            f"--texts and --prompt-file serve {served} bits: {bits} bits are rounded to nearest; leave them out"
        )
    number = texts if not draft.format.compensates or texts is not None else _TEXTS
    check_output_file(to)
    workload = None if prompt_file is None else read_prompts(prompt_file)
    model.prepare()
    checkpoint = model.load()
    began = time.perf_counter()
    written = _own_texts(checkpoint, workload, number, seed) if number else []
    with counting_bar("rounding") as count:
        draft.save(to, checkpoint.model, texts=written, progress=count)
    seconds = time.perf_counter() - began
    size, whole = to.stat().st_size, sum(weight.nbytes for weight in checkpoint.model.parameters())
    return Quantized(str(to), size, size / whole, seconds, bits, draft.format.name)


def _named(format: str) -> LowPrecision:
    from selfspec.draft import LowPrecision
    from selfspec.formats.format import copies

    if format not in copies():
        raise DraftConfigError(f"there is no format {format!r}; choose one of {', '.join(copies())}")
    return LowPrecision(format=copies()[format]())


def _own_texts(checkpoint: Checkpoint, workload: Workload | None, number: int, seed: int) -> list[Tensor]:
    """Texts of the model's own, from prompts or from random tokens."""
    import torch

    from selfspec.measure.own_text import own_texts, random_starts

    if workload is None:
        starts = random_starts(checkpoint.model, number, seed)
    else:
        # Of each prompt the first tokens.
        whole = replace(workload, texts=tuple(replace(text, whole=True) for text in workload.texts))
        starts = torch.cat(whole.prompts(checkpoint.tokenizer, number, 1, _PROMPT))
    with counting_bar("writing texts") as count:
        return own_texts(checkpoint.model, starts, seed, count)
