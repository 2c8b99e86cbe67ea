"""`selfspec verify`: check on your own checkpoint that drafting does not change what the model says."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from selfspec.cli.options import (
    Chat,
    MemoryOptions,
    ModelOptions,
    Output,
    PromptFile,
    load_within,
    read_draft,
)
from selfspec.cli.outcome import FAILED, print_json
from selfspec.cli.terminal import console, figures_table, progress_bar
from selfspec.errors import DraftConfigError
from selfspec.tools.verify.settings import Settings

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

    from selfspec.control.profile import Profile
    from selfspec.draft import Drafter
    from selfspec.measure.checkpoint import Checkpoint
    from selfspec.measure.rounding import Bound
    from selfspec.tools.verify.report import Comparison, Divergence, VerifyReport

_STYLES = {"EXACT": "bold green", "EXACT WITHIN ROUNDING": "bold yellow", "NOT EXACT": "bold red"}
_WRONG = "bold red"


@dataclass(frozen=True, kw_only=True)
class Verified:
    """Result of `selfspec verify`.

    Attributes:
        bound: largest differences that rounding explains.
        verdict: `EXACT`, `EXACT WITHIN ROUNDING`, `NOT EXACT`, or `NOT LOSSLESS` for relaxed rules.
    """

    checkpoint: str
    model: dict[str, Any]
    settings: dict[str, Any]
    bound: dict[str, Any]
    drafts: list[dict[str, Any]]
    divergences: list[dict[str, Any]]
    smallest_p_value: float | None
    lossless: bool
    exact: bool
    verdict: str
    sentence: str
    failures: list[str]
    seconds: float


def verify(
    model: ModelOptions,
    settings: Settings,
    budget: MemoryOptions,
    draft: Annotated[
        list[str] | None,
        typer.Option(
            metavar="DRAFT",
            help="A draft to verify; may be repeated. Default: exits and skip sets at several depths; with --memory "
            "also the draft that `generate` would choose.",
        ),
    ] = None,
    prompt_file: PromptFile = None,
    chat: Chat = False,
    output: Output = "text",
) -> Verified:
    """Check that self-speculation leaves the output of this model as it is: its tokens, and what it samples from.

    Greedy texts are compared with those of `model.generate`, and read once more through the passes that verify
    drafts. Sampled texts are compared with plain decoding at the same seed, and tested against the model's own
    distribution. What rounding does to the logits is measured, and only what it explains is excused.

    Exit status 0: EXACT, or EXACT WITHIN ROUNDING. 1: NOT EXACT.
    """
    named = None if draft is None else [each for each in map(read_draft, draft) if each is not None]
    if named is not None and len(named) < len(draft or ()):
        raise DraftConfigError("plain decoding is always verified; give --draft exit:E or --draft skip:...")

    import torch

    from selfspec.draft import Drafter
    from selfspec.measure.checkpoint import Checkpoint
    from selfspec.measure.prompts import beginnings, check_reads_text, read_prompts
    from selfspec.model.checkpoint import load_tokenizer
    from selfspec.placement.drafts import placement_of
    from selfspec.tools.lab.arms import prompt_writer
    from selfspec.tools.verify.verification import default_drafts
    from selfspec.tools.verify.verification import verify as run

    workload = beginnings() if prompt_file is None else read_prompts(prompt_file)
    depth = model.prepare()
    drafts = default_drafts(depth) if named is None else named
    for each in drafts:
        if isinstance(each, Drafter):
            each.check(depth)
    if budget.memory is None:
        checkpoint = model.load()
        check_reads_text(checkpoint.model)
    else:
        tokenizer = load_tokenizer(model.place)
        spec = load_within(model, budget, named and drafts)
        checkpoint = Checkpoint(spec.model, tokenizer)
        if named is None and isinstance(spec.draft, Drafter):
            drafts = [spec.draft, *drafts]
    drafters = _drafters(checkpoint, drafts)
    writer, device = prompt_writer(checkpoint, chat, settings.max_new_tokens), checkpoint.model.device
    prompts = [prompt.to(device) for prompt in workload.whole_prompts(writer)]
    started = time.perf_counter()
    with progress_bar("verifying") as progress:
        report = run(checkpoint.model, prompts, drafters, settings, watch=progress)
    seconds = time.perf_counter() - started
    found, placement = report.to_dict(), placement_of(checkpoint.model)
    used = {
        **found["settings"],
        "prompts": [text.prompt for text in workload.texts],
        "chat": chat,
        "threads": torch.get_num_threads(),
    }
    used |= {"memory": budget.memory, "context": None if placement is None else placement.context}
    found |= {"checkpoint": model.model, "settings": used, "seconds": seconds}
    result = Verified(**found)
    if output == "text":
        _print_report(model.model, report, seconds)
    if not report.exact:
        if output == "json":
            print_json(result)
        raise typer.Exit(FAILED)
    return result


def _drafters(checkpoint: Checkpoint, drafts: Sequence[Drafter | Profile | str]) -> list[Drafter]:
    """The drafts, and in place of a profile those that it chooses."""
    from selfspec.control.profile import Profile, Setting, named_draft

    found: list[Drafter] = []
    for each in drafts:
        draft = named_draft(checkpoint.model, each) if isinstance(each, str) else each
        if isinstance(draft, Profile):
            draft.check_setting(Setting.of(checkpoint.model))
            # Greedy decoding and sampling may have the same draft.
            chosen = dict.fromkeys(draft.choose_draft(greedy).draft for greedy in (True, False))
            found += [choice for choice in chosen if choice is not None]
        elif draft is not None:
            found.append(draft)
    if not found:
        raise DraftConfigError("the profile chose plain decoding, which is always verified; name a draft")
    return found


def _print_report(name: str, report: VerifyReport, seconds: float) -> None:
    """Print the tables, the verdict last."""
    from rich.text import Text

    from selfspec.tools.verify.report import LEVEL

    out, settings, bound = console(), report.settings, report.bound
    measured = bound.to_dict()
    out.print(
        f"{name}: {report.model} with {report.depth} layers, {report.dtype}, {report.device}; {report.prompts} "
        f"prompts, {settings.max_new_tokens} new tokens, draft length {settings.draft_length}, seed {settings.seed}; "
        f"{seconds:.0f} s"
    )
    out.print("", _drafts(report), sep="\n")
    out.print(
        f"Greedy texts beside those of model.generate, sampled ones beside plain decoding's. Each p, under "
        f"{', '.join(settings.rules)} in turn, is of {settings.samples} texts of 3 tokens against the model's own "
        f"distribution, all of them together at level {LEVEL:g} (Holm); coupled tokens do not depend on the "
        f"draft, so one test serves all.\n"
        f"Rounding: passes of the model itself over 1 and over {' or '.join(map(str, bound.widths))} tokens differ by "
        f"up to {bound.largest:.1e} in a logit and {bound.gap_largest:.1e} in the gap between the top two (99% of "
        f"positions: {measured['logits_quantile_99']:.1e} and {measured['gap_change_quantile_99']:.1e}). A gap of up "
        f"to {bound.near_tie:.1e} is a near-tie; {bound.close_calls} of {len(bound.gaps)} are.",
        style="dim",
    )
    out.print()
    if report.divergences:
        out.print(f"--output json lists each of {len(report.divergences)} divergences", style="dim")
    for failure in report.failures:
        out.print(Text(f"- {failure}", style="red"))
    out.print(Text(report.sentence, style=_STYLES[str(report.exactness)]))


def _drafts(report: VerifyReport) -> Table:
    from rich.table import Column
    from rich.text import Text

    from selfspec.tools.verify.report import Check

    bound, rejected, rules = report.bound, report.rejected, report.settings.rules
    columns = ("greedy texts", "as plain", "forced tokens", "logits off by", "tokens a pass", "coupled texts")
    table = figures_table("What is equal, by draft", [Column("draft", no_wrap=True)], columns)
    table.add_column("p, by rule", justify="right", no_wrap=True)
    for draft in report.drafts:
        (forced,), fits = draft.of(Check.TEACHER_FORCED), {fit.rule: fit for fit in draft.fits}
        p_values = [
            Text(f"{fits[rule].p_value:.2g}", style=_WRONG if fits[rule] in rejected else "")
            if rule in fits
            else Text("-")
            for rule in rules
        ]
        table.add_row(
            draft.name,
            _equal_texts(draft.of(Check.FREE_RUNNING), bound),
            _equal_texts(draft.of(Check.PLAIN), bound),
            _share(forced.equal_tokens, forced.tokens, forced.divergences, bound),
            Text(f"{draft.logits_off:.1e}", style=_WRONG if draft.logits_off > bound.most_off else ""),
            f"{draft.stats.mean_accepted_length:.2f}",
            _equal_texts(draft.of(Check.COUPLED), bound),
            Text(", ").join(p_values),
        )
    return table


def _equal_texts(compared: Sequence[Comparison], bound: Bound) -> Text:
    divergences = [divergence for each in compared for divergence in each.divergences]
    return _share(sum(each.equal_texts for each in compared), sum(each.texts for each in compared), divergences, bound)


def _share(equal: int, total: int, divergences: Sequence[Divergence], bound: Bound) -> Text:
    from rich.text import Text

    if not total:
        return Text("-")
    wrong = any(not divergence.is_near_tie(bound) for divergence in divergences)
    return Text(f"{equal}/{total}", style=_WRONG if wrong else "yellow" if divergences else "")
