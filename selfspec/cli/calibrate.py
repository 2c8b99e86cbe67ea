"""`selfspec calibrate`: find the draft that decodes fastest here, for `draft="auto"`."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from selfspec.cli.options import Chat, ModelOptions, Output, PromptFile, read_draft
from selfspec.cli.terminal import console, figures_table, progress_bar
from selfspec.tools.calibrate.measurements import Measurements

if TYPE_CHECKING:
    from rich.table import Table

    from selfspec.control.profile import Chosen, Profile


@dataclass(frozen=True, kw_only=True)
class Calibrated:
    """`selfspec calibrate`: the profile, and where it is.

    Attributes:
        setting: where the profile holds.
        greedy: what to draft with: `draft`, its lengths and `costs`.
        report: all that was measured.
    """

    checkpoint: str
    setting: dict[str, Any]
    greedy: dict[str, Any]
    sampled: dict[str, Any]
    report: dict[str, Any]
    profile: str
    seconds: float


def calibrate(
    model: ModelOptions,
    measurements: Measurements,
    draft: Annotated[
        list[str] | None,
        typer.Option(
            metavar="DRAFT",
            help="What to consider in place of exits: `head:FOLDER`, `skip:layers=7-9`, `module:Class`, ...; may be "
            "repeated. Always considered are 8 and 4 bits, look-ups alone and before a path, trees along the best, and "
            "plain decoding.",
        ),
    ] = None,
    prompt_file: PromptFile = None,
    chat: Chat = False,
    prompts: Annotated[int, typer.Option(min=1, help="Use N prompts, spread evenly over the file.")] = 4,
    to: Annotated[
        Path | None,
        typer.Option(
            help="Where the profile goes, for `--draft auto:FILE`. Default: where `--draft auto` looks, the folder "
            "in SELFSPEC_PROFILES or one in the user's cache."
        ),
    ] = None,
    keep: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Keep the generations there, with a report, as `selfspec bench` does."),
    ] = None,
    output: Output = "text",
) -> Calibrated:
    """Measure which draft decodes fastest on this machine, greedily and sampling, and write a profile for `auto`.

    Measures what a draft step from each exit, a pass over several tokens and the rest of a round cost, and how often
    the model accepts each exit on its own text. The best candidates then generate in turns with plain decoding. The
    profile holds for these weights, this device, dtype, number of threads and these versions.
    """
    # Those that are no draft are refused once the depth is known.
    drafters: Any = None if draft is None else [read_draft(text) for text in draft]

    from selfspec.control import profile as profiles
    from selfspec.files.writing import check_output_file, check_output_folder
    from selfspec.measure.prompts import beginnings, built_in, check_reads_text, read_prompts
    from selfspec.tools.calibrate.calibration import calibrate as run
    from selfspec.tools.calibrate.candidates import considered
    from selfspec.tools.lab.arms import prompt_writer
    from selfspec.tools.lab.runs import Runs

    # The embedded model writes nothing but code.
    usual = built_in if model.is_demo else beginnings
    workload = usual() if prompt_file is None else read_prompts(prompt_file)
    # Drafts that do not fit are refused before weights are loaded.
    considered(model.prepare(), drafters)
    if to is None:
        check_output_folder(profiles.folder())
    else:
        check_output_file(to)
    # Refuses a folder of something else.
    Runs(keep)
    checkpoint = model.load()
    check_reads_text(checkpoint.model)
    writer, device = prompt_writer(checkpoint, chat, measurements.max_new_tokens), checkpoint.model.device
    ids = [prompt.to(device) for prompt in workload.whole_prompts(writer, prompts)]
    started = time.perf_counter()
    with progress_bar("calibrating") as progress:
        profile = run(
            checkpoint.model,
            ids,
            drafters,
            measurements,
            keep=keep,
            watch=progress,
        )
    seconds = time.perf_counter() - started
    file = to or profiles.default_file(profile.setting)
    profile.save(file)
    if output == "text":
        _print(model.model, profile, seconds, file)
        for doubt in profile.report["doubts"]:
            console().print("", doubt, sep="\n", soft_wrap=True)
        auto = "auto" if to is None else f"auto:{file}"
        use = f'--draft {auto}, or selfspec.wrap(model, draft="{auto}")'
        console().print("", f"Profile: {file}. Use it: {use}.", sep="\n", soft_wrap=True)
    found = asdict(profile)
    del found["source"]
    return Calibrated(**found, checkpoint=model.model, profile=str(file), seconds=seconds)


def _print(model: str, profile: Profile, seconds: float, file: Path) -> None:
    # Files beside the profile go by their names.
    out, setting, beside = console(), profile.setting, f"{file.parent}{os.sep}"
    threads = f", {setting.threads} threads" if setting.threads else ""
    costs = profile.report["costs"]
    step = f"{costs['step_seconds']['value'] * 1000:.2f} ms a plain step"
    out.print(f"{model}: {setting.device}, {setting.dtype}{threads}; {step}; {seconds:.0f} s", "", sep="\n")
    out.print(
        "c: a draft step, in plain steps; the profile has all costs. alpha: acceptance rate, teacher-forced on the "
        "model's own text. predicted: by the formula, at the best draft length. speed-up: measured, in turns with "
        "plain decoding. tokens: of a target pass.",
        style="dim",
    )
    for kind, chosen in ((profile.report["greedy"], profile.greedy), (profile.report["sampled"], profile.sampled)):
        out.print("", _found(kind, costs["draft"], beside), _sentence(chosen), sep="\n")


def _found(kind: Mapping[str, Any], steps: Mapping[str, Any], beside: str) -> Table:
    """What the formula promises of every draft, and what the candidates were worth."""
    from rich.table import Column

    from selfspec.measure.estimate import Estimate

    title = f"temperature {kind['temperature']:g}" if kind["temperature"] else "greedy"
    columns = ("c", "alpha", "predicted", "speed-up", "accepted", "tokens")
    table = figures_table(None, [Column(title, no_wrap=True)], columns)
    confirmed = {each["name"]: each for each in kind["confirmed"]}
    confirmed |= {f"chosen, {rows} rows": each for rows, each in kind["in_batches"].items()}
    for name in dict.fromkeys([*confirmed, *kind["predictions"]]):
        cells = ["", "", ""]
        if best := kind["predictions"].get(name):
            cells = [
                f"{steps[name]['value']:.3f}",
                f"{kind['acceptance'][name]['value']:.2f}",
                f"{best['speedup']:.2f} at {best['draft_length']}",
            ]
        if each := confirmed.get(name):
            speedup, rate = each["speedup"], each["acceptance_rate"]
            cells.append(Estimate(**speedup).shown(2))
            cells += ["-" if rate is None else f"{rate:.2f}", f"{each['mean_accepted_length']:.2f}"]
        table.add_row(name.replace(beside, ""), *cells)
    return table


def _sentence(chosen: Chosen) -> str:
    if chosen.costs is None:
        return (
            "No draft beat plain decoding here, so auto decodes without one. `selfspec doctor` says what is slow; "
            "exits can be trained by selfspec train."
        )
    limit = "" if chosen.most_rows is None else f" Batches of more than {chosen.most_rows} are decoded without a draft."
    trees = "" if chosen.nodes is None else f" in trees of up to {chosen.nodes} nodes"
    return f"Chosen: {chosen.draft}{trees}, {chosen.speedup[0]:.2f} times as fast as plain decoding.{limit}"
