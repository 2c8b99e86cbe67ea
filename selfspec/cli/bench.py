"""`selfspec bench`: ways to decode side by side on a checkpoint of one's own, and a report."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from selfspec.cli.options import Device, DraftLength, Dtype, Output, Threads
from selfspec.errors import PromptError, UnsupportedOptionError


class ArmChoice(StrEnum):
    """What `--arms` takes."""

    STATIC = "static"
    LOOK_UP = "lookup"
    EARLY_EXIT = "early-exit"
    DRAFT = "draft"


class RuntimeChoice(StrEnum):
    """What `--runtime` takes."""

    EAGER = "eager"
    TRACED = "traced"
    COMPILED = "compiled"
    GRAPHS = "graphs"


def bench(
    model: Annotated[
        str | None,
        typer.Argument(help="A folder with config.json, weights and tokenizer, or a hub name; default: the demo's."),
    ] = None,
    draft: Annotated[
        list[str] | None,
        typer.Option(
            "--draft",
            metavar="DRAFT",
            help="What drafts, e.g. `exit:4`, `lookup+exit:4` or `auto`; may be given several times. Default: "
            "look-ups, an exit at a third of the depth, and both.",
        ),
    ] = None,
    draft_length: DraftLength = None,
    accept: Annotated[
        list[str] | None,
        typer.Option(
            "--accept",
            metavar="RULE",
            help="Acceptance rule of the drafts; may be given several times. Default: selfspec's.",
        ),
    ] = None,
    arms: Annotated[
        list[ArmChoice] | None,
        typer.Option(
            "--arms",
            help="Arms besides `model.generate` and selfspec plain; may be given several times. `static`: "
            "model.generate compiled with a static cache; `lookup`: its prompt look-up; `early-exit`: its own early "
            "exit, and selfspec's of the same exit and length; `draft`: each --draft. Default: all, but `static` on a "
            "GPU only, since on a CPU it compiles for minutes.",
        ),
    ] = None,
    workload: Annotated[
        list[str] | None,
        typer.Option(
            "--workload",
            metavar="NAME=FILE",
            help="Prompts: JSONL with `prompt`, `turns` or `text`; may be given several times. `NAME=FILE#FIELD=VALUE` "
            "takes only lines that say so, `NAME=FILE#FIELD` makes a workload of each value. Default: the demo's.",
        ),
    ] = None,
    temperature: Annotated[
        list[float] | None, typer.Option("--temperature", help="May be given several times. Default: 0 and 0.8.")
    ] = None,
    batch: Annotated[
        list[int] | None, typer.Option("--batch", min=1, help="Rows of a call; several times. Default: 1.")
    ] = None,
    context: Annotated[
        list[int] | None,
        typer.Option("--context", min=2, help="Tokens of every prompt; may be given several times. Default: 64."),
    ] = None,
    exit_layer: Annotated[
        int | None,
        typer.Option("--exit", min=1, help="Exit layer of the arm `early-exit`; default: a third of the depth."),
    ] = None,
    exit_length: Annotated[int, typer.Option("--exit-length", min=1, help="Tokens it drafts each round.")] = 3,
    prompts: Annotated[int, typer.Option("--prompts", min=1, help="Prompts of each workload.")] = 4,
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", min=16, help="Length of each text, in tokens.")
    ] = 64,
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="How often each arm is timed in a cell.")] = 5,
    warm_up: Annotated[
        int, typer.Option("--warm-up", min=1, help="How often each arm decodes all prompts before it is timed.")
    ] = 3,
    memory: Annotated[
        bool, typer.Option(help="Measure peak memory, each arm in a process of its own, once per batch and context.")
    ] = True,
    costs: Annotated[
        bool,
        typer.Option(help="Time the parts of a round by themselves in each cell; predict speed-ups from them."),
    ] = True,
    plots: Annotated[bool, typer.Option(help="Draw plots, as PNG files.")] = True,
    to: Annotated[
        Path, typer.Option("--to", metavar="FOLDER", help="Where results and report go. Cells in there are not rerun.")
    ] = Path("bench"),
    only_report: Annotated[
        Path | None,
        typer.Option("--report", metavar="FOLDER", help="Make the report of that folder's results anew; run nothing."),
    ] = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    threads: Threads = None,
    packed: Annotated[
        bool,
        typer.Option("--packed", help="Let selfspec's arms run packed weights; model.generate runs the plain ones."),
    ] = False,
    runtime: Annotated[
        RuntimeChoice,
        typer.Option(
            "--runtime",
            help="How selfspec's arms run passes: `eager`, `traced`, `compiled` (give a larger --warm-up: each kind of "
            "pass is compiled once, for some ten seconds) or `graphs`, on a CUDA device only.",
        ),
    ] = RuntimeChoice.TRACED,
    output: Output = "text",
) -> None:
    """Measure ways to decode side by side: `model.generate` with its own helps, and selfspec with each draft.

    Each combination of workload, temperature, batch and context is a cell, in which the arms take turns. Results go to
    `results.jsonl`, from which `report.md` and the plots are made. Interrupted, the same command goes on where it was.

    Exit status 1 if any arm was refused because its greedy tokens differ from those of `model.generate`.
    """
    if only_report is not None:
        from selfspec.cli.bench_report import make_report

        make_report(only_report, plots, output)
        return
    temperatures = [0.0, 0.8] if temperature is None else temperature
    if any(not 0 <= each <= 100 for each in temperatures):
        raise UnsupportedOptionError("--temperature is 0 for greedy decoding or above 0, e.g. 0.8")

    from selfspec.cli.bench_run import Job, run
    from selfspec.measure.prompts import built_in, parse_workloads
    from selfspec.tools.bench.session import Plan

    workloads = [built_in()] if workload is None else [each for given in workload for each in parse_workloads(given)]
    names = [each.name for each in workloads]
    if len(set(names)) < len(names):
        raise PromptError("two workloads have one name; give each --workload a NAME of its own")
    run(
        Job(
            model=model,
            drafts=draft,
            draft_length=draft_length,
            rules=accept or [None],
            arms=None if arms is None else [each.value for each in arms],
            workloads=workloads,
            temperatures=temperatures,
            batches=batch or [1],
            contexts=context or [64],
            exit_layer=exit_layer,
            exit_length=exit_length,
            prompts=prompts,
            max_new_tokens=max_new_tokens,
            plan=Plan(repeats, warm_up, memory, costs),
            plots=plots,
            folder=to,
            dtype=dtype,
            device=device,
            threads=threads,
            packed=packed,
            runtime=runtime.value,
            output=output,
        )
    )
