"""`selfspec search`: the skip set that promises the highest speed."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from selfspec.cli.ablate import PRINTED, SHOWN, DraftLengths, TextsAndCosts, given, prepare_quietly
from selfspec.cli.options import MachineOptions, Model, Output, Seed
from selfspec.cli.terminal import print_tables, progress_bar
from selfspec.errors import DraftConfigError

_DRAFT_LENGTHS = [1, 2, 3, 4, 5, 6, 8]
_SIZES = re.compile(r"(\d{1,18})(?:-(\d{1,18}))?", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class Searched:
    """`selfspec search`.

    Attributes:
        sublayers: the fewest and the most that sets leave out.
        doubts: which figures say less than they seem to.
        files: tables, pictures and report, where the search is kept.
    """

    best: dict[str, Any]
    scores: list[dict[str, Any]]
    file: str
    study: dict[str, Any]
    by: str
    sublayers: list[int | None]
    evaluations: int
    doubts: list[str]
    files: list[str]


def search(
    model: Model,
    texts: TextsAndCosts,
    machine: MachineOptions,
    to: Annotated[Path, typer.Option(help="The JSON file to write, for `--draft skip-file:FILE`.")],
    evaluations: Annotated[int, typer.Option(min=1, help="Evaluate at most N skip sets.")] = 100,
    sublayers: Annotated[
        str | None, typer.Option(metavar="N|MIN-MAX", help="Sublayers to leave out; default: up to half of them.")
    ] = None,
    layers: Annotated[bool, typer.Option("--layers", help="Leave out layers whole, attention and MLP.")] = False,
    by: Annotated[
        Literal["similarity", "bayes", "greedy"],
        typer.Option(
            help="`similarity` of hidden states, by dynamic programming as in CLaSp and KnapSpec; `bayes`, Bayesian "
            "optimisation as in Draft & Verify; `greedy`, one more at a time, from one on."
        ),
    ] = "similarity",
    workload: Annotated[
        str, typer.Option(metavar="NAME=FILE", help="Prompts, as of `selfspec bench`; or `demo`.")
    ] = "demo",
    temperature: Annotated[float, typer.Option(help="Temperature of the texts; 0: greedy.")] = 1.0,
    draft_lengths: DraftLengths = None,
    reach: Annotated[int, typer.Option(min=1, help="Positions of a draft to tell apart.")] = 1,
    seed: Seed = 0,
    keep: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Keep the search there, to resume it, and write a report.")
    ] = None,
    output: Output = "text",
) -> Searched:
    """Search for the skip set that promises the highest speed, by measured costs and the model's own text."""
    fewest, most = _sizes(sublayers)

    from selfspec.files.writing import check_output_file
    from selfspec.tools.lab import search as searching
    from selfspec.tools.lab.drafts import Space
    from selfspec.tools.lab.report import require_packages, write_report
    from selfspec.tools.lab.runs import Runs
    from selfspec.tools.lab.study import Study, check_inputs, load
    from selfspec.tools.lab.table import doubts

    prepare_quietly(machine.threads)
    require_packages()
    declared = {"models": model, "workloads": workload, "temperatures": temperature, "seed": seed, "reach": reach}
    declared |= {**given(asdict(texts)), "draft_lengths": draft_lengths or _DRAFT_LENGTHS}
    study = Study.of(declared, "the command line")
    check_output_file(to)
    runs = Runs(keep)
    check_inputs(study)
    studied = load(model, study, machine.device)
    space = Space.of(studied.model, studied.adapter, fewest, most)
    space = space.of_layers if layers else space
    with progress_bar("searching") as bar:
        finding = searching.search(studied, study, space, evaluations, runs, bar, by)
    scores = searching.scored(finding)
    best = max(scores, key=lambda row: row["predicted_speedup"])
    about: dict[str, Any] = {
        "study": asdict(study),
        "sublayers": [space.fewest, space.most],
        "by": by,
        "evaluations": len(scores),
    }
    searching.save(best, studied, to, about)
    files = [] if keep is None else write_report("Search for a skip set", finding.judged, about, keep)
    found = doubts(finding.table)
    if output == "text":
        print_tables(finding.table, PRINTED, SHOWN)
        print(*verdict(model, best["draft"], best["predicted_speedup"], len(scores), to), *found, sep="\n")
    return Searched(best=best, scores=scores, file=str(to), doubts=found, files=[*map(str, files)], **about)


def verdict(model: str, draft: str, promised: float, sets: int, file: Path) -> tuple[str, str]:
    """Say what a search found and saved in a file, and what to do next; `promised` is in times plain decoding."""
    counted = f"{sets} set{'s' * (sets != 1)} evaluated"
    if promised <= 1:
        return (
            f"No skip set is predicted to beat plain decoding here; of {counted} {draft} loses least, predicted "
            f"{promised:.2f} times plain decoding. It is in {file}.",
            f"What may be faster: selfspec calibrate {model}, which tries look-ups and other drafts; or train an exit.",
        )
    return (
        f"{counted}; {draft} is predicted {promised:.2f} times plain decoding. It is in {file}.",
        f"Measure it before you rely on it: selfspec bench {model} --draft skip-file:{file}",
    )


def _sizes(text: str | None) -> tuple[int, int | None]:
    if text is None:
        return 1, None
    found = _SIZES.fullmatch(text.strip())
    if found is None:
        raise DraftConfigError(f"--sublayers {text!r} is not understood; write a number, or a range such as 2-6")
    return int(found[1]), int(found[2] or found[1])
