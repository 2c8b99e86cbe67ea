"""`selfspec demo`: plain decoding and self-speculation side by side on the embedded model, a preset of `bench`."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from selfspec.cli.options import (
    Device,
    Draft,
    DraftLength,
    Output,
    Repeats,
    Temperature,
    Threads,
    prepare_process,
    read_draft,
)
from selfspec.cli.outcome import FailedCheckError, FailedRunError, print_json
from selfspec.cli.terminal import StepBar, console, progress_bar
from selfspec.errors import DraftConfigError, UnsupportedOptionError
from selfspec.measure.embedded import DEMO, model_place


class TokensDifferError(FailedCheckError):
    """Self-speculation gave other tokens than plain decoding: a bug of selfspec."""


@dataclass(frozen=True, kw_only=True)
class Runs:
    """What is decoded and timed."""

    draft: Draft = "lookup+exit:4"
    draft_length: DraftLength = None
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Generate N tokens a text.")] = 64
    temperature: Temperature = 0.8
    repeats: Repeats = 3


def demo(runs: Runs, device: Device = "cpu", threads: Threads = None, output: Output = "text") -> None:
    """Continue four Python files with and without self-speculation: check that all tokens are the same, compare speed.

    Greedy first, then sampled. Exit status 1 if any greedy token differs. The embedded model has 10M parameters and was
    taught to exit early (see its MODEL_CARD.md).
    """
    if not 0 < runs.temperature < math.inf:
        raise UnsupportedOptionError(f"--temperature {runs.temperature:g} does not sample; give one above 0, e.g. 0.8")
    if read_draft(runs.draft) is None:
        raise DraftConfigError(
            "the demo compares drafting with plain decoding; give --draft exit:E or --draft skip:..."
        )

    import torch
    from rich.markdown import Markdown
    from rich.text import Text

    from selfspec.api import wrap
    from selfspec.environment import versions
    from selfspec.measure.embedded import PROMPTS
    from selfspec.measure.stock import bare
    from selfspec.model.checkpoint import load_checkpoint
    from selfspec.tools.bench.arms import ArmSpec
    from selfspec.tools.bench.cell import Cell
    from selfspec.tools.bench.report import overview
    from selfspec.tools.bench.results import ResultsFile
    from selfspec.tools.bench.session import Session

    prepare_process(threads)
    checkpoint = load_checkpoint(model_place(DEMO), "float32", device)
    prompts, draft = [checkpoint.encode(text) for text in PROMPTS], runs.draft.strip()
    specs = [ArmSpec("generate"), ArmSpec("plain"), ArmSpec("draft", draft, length=runs.draft_length)]
    session = Session(
        name=DEMO, place=None, model=checkpoint.model, specs=specs, repeats=runs.repeats, warm_up=1, costs=False
    )
    longest = max(prompt.shape[1] for prompt in prompts)
    cells = {Cell(DEMO, t, 1, longest, runs.max_new_tokens): prompts for t in (0.0, runs.temperature)}
    spec = wrap(bare(checkpoint.model), draft, draft_length=runs.draft_length)
    texts = []
    with TemporaryDirectory() as folder, progress_bar("measuring") as progress:
        for text, prompt in zip(PROMPTS, prompts, strict=True):
            out = spec.generate(prompt, do_sample=False, max_new_tokens=runs.max_new_tokens, eos_token_id=None)
            texts.append({"prompt": text, "text": checkpoint.tokenizer.decode(out.sequences[0])})
        found = session.measure(cells, ResultsFile(Path(folder)), StepBar(progress))
    compared = {record.arm.name: record.agreement for record in found[0].arms}
    differing = [name for name, each in compared.items() if each is None or each.equal < each.texts]
    result = {
        "settings": {**asdict(runs), "draft": draft},
        "texts": texts,
        "identical": not differing,
        "cells": [each.to_dict() for each in found],
        "versions": {**versions(), "threads": torch.get_num_threads()},
    }
    if output == "text":
        for each in texts:
            shown = Text.assemble((each["prompt"], "bold"), each["text"].removeprefix(each["prompt"]))
            console().print(shown, "", sep="\n")
        console().print("TOKENS DIFFER." if differing else "All tokens are identical.", style="bold")
        console().print(Markdown(overview(found)))
    if differing:
        message = f"greedy tokens of {', '.join(differing)} differ from the model's own; please report this as a bug"
        raise FailedRunError(TokensDifferError(message), result)
    if output == "json":
        print_json(result)
