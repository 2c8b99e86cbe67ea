"""A verification's report as tables on the terminal."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from selfspec.measure.rounding import Bound
from selfspec.tools.verify.divergence import Agreement, Divergence
from selfspec.tools.verify.fit import Fit
from selfspec.tools.verify.goodness import holm_rejects
from selfspec.tools.verify.report import DraftReport, Report
from selfspec.tools.verify.verdict import Exactness

_STYLES = {
    Exactness.EXACT: "bold green",
    Exactness.WITHIN_ROUNDING: "bold yellow",
    Exactness.NOT_EXACT: "bold red",
}
_FAILED = "bold red"
# More would drown the verdict; JSON has them all.
_MOST_LISTED = 20


def print_report(name: str, tokenizer: PreTrainedTokenizerBase, report: Report, seconds: float) -> None:
    """Print the tables on stdout, the verdict last."""
    console = Console(highlight=False, markup=False)
    settings = report.settings
    console.print(
        f"{name}: {report.model} with {report.depth} layers, {report.dtype}, {report.device}; {report.prompts} "
        f"prompts, {settings.max_new_tokens} new tokens, draft length {settings.draft_length}, seed {settings.seed}; "
        f"{seconds:.0f} s"
    )
    console.print()
    console.print(_greedy(report))
    console.print(_rounding(report.bound), style="dim")
    console.print()
    console.print(_sampled(report))
    console.print(
        f"Each p is of {settings.samples} texts of 3 tokens against the model's own distribution, all of them together "
        f"at level {settings.level:g} (Holm). Coupled tokens do not depend on the draft, so one test serves all.",
        style="dim",
    )
    console.print()
    if report.divergences:
        console.print(_divergences(tokenizer, report))
        if len(report.divergences) > _MOST_LISTED:
            console.print(f"and {len(report.divergences) - _MOST_LISTED} more; --output json lists all", style="dim")
        console.print()
    verdict = report.verdict
    for failure in verdict.failures:
        console.print(Text(f"- {failure}", style="red"))
    console.print(Text(verdict.sentence, style=_STYLES[verdict.exactness]))


def _greedy(report: Report) -> Table:
    table = Table(title="Greedy decoding, against model.generate", title_justify="left")
    table.add_column("draft")
    for column in ("equal texts", "equal tokens, teacher-forced", "logits off by", "mean accepted length"):
        table.add_column(column, justify="right")
    for draft in report.drafts:
        greedy, bound = draft.greedy, report.bound
        forced = greedy.forced
        table.add_row(
            draft.name,
            _equal_texts(list(greedy.free_running.values()), bound),
            _share(forced.positions - len(forced.divergences), forced.positions, forced.divergences, bound),
            Text(f"{forced.off:.1e}", style=_FAILED if forced.off > bound.most_off else ""),
            f"{greedy.acceptance.mean_accepted_length:.2f}",
        )
    return table


def _rounding(bound: Bound) -> str:
    return (
        f"Rounding: passes of the model itself over 1 and over {_listed(bound.widths)} tokens differ by up to "
        f"{bound.largest:.1e} in a logit and {bound.gap_largest:.1e} in the gap between the top two (99% of "
        f"positions: {bound.quantile:.1e} and {bound.gap_quantile:.1e}). A gap of up to {bound.near_tie:.1e} is a "
        f"near-tie; {bound.close_calls} of {len(bound.gaps)} are."
    )


def _sampled(report: Report) -> Table:
    rejects = holm_rejects([fit.test.p_value for fit in report.fits], report.settings.level)
    rejected = [fit for fit, reject in zip(report.fits, rejects, strict=True) if reject]
    table = Table(title="Sampling, against plain decoding and the model's own distribution", title_justify="left")
    table.add_column("draft")
    if report.settings.coupled_rules:
        table.add_column("equal texts, coupled", justify="right")
    for rule in report.settings.rules:
        table.add_column(f"p, {rule}", justify="right")
    for draft in report.drafts:
        cells: list[Text | str] = [draft.name]
        if report.settings.coupled_rules:
            cells.append(_equal_texts(list(draft.coupled.values()), report.bound) if draft.coupled else "-")
        table.add_row(*cells, *(_p_value(draft, rule, rejected) for rule in report.settings.rules))
    return table


def _p_value(draft: DraftReport, rule: str, rejected: list[Fit]) -> Text | str:
    fit = next((fit for fit in draft.fits if fit.rule == rule), None)
    return "-" if fit is None else Text(f"{fit.test.p_value:.2g}", style=_FAILED if fit in rejected else "")


def _divergences(tokenizer: PreTrainedTokenizerBase, report: Report) -> Table:
    table = Table(title="Divergences", title_justify="left")
    for column in ("draft", "check", "prompt", "token", "model's own", "found", "gap", "near-tie"):
        table.add_column(column, justify="right" if column in ("prompt", "token", "gap") else "left")
    # Those that rounding does not explain come first.
    listed = sorted(report.divergences, key=lambda divergence: divergence.is_near_tie(report.bound))
    for divergence in listed[:_MOST_LISTED]:
        near = divergence.is_near_tie(report.bound)
        table.add_row(
            divergence.draft,
            str(divergence.check),
            str(divergence.prompt + 1),
            str(divergence.position + 1),
            _token(tokenizer, divergence.expected),
            _token(tokenizer, divergence.found),
            "-" if divergence.gap is None else f"{divergence.gap:.2g}",
            "yes" if near else Text("NO", style=_FAILED),
        )
    return table


def _equal_texts(agreements: list[Agreement], bound: Bound) -> Text:
    together = Agreement.together(agreements)
    return _share(together.equal_texts, together.texts, together.divergences, bound)


def _share(equal: int, total: int, divergences: tuple[Divergence, ...], bound: Bound) -> Text:
    failed = any(not divergence.is_near_tie(bound) for divergence in divergences)
    return Text(f"{equal}/{total}", style=_FAILED if failed else "yellow" if divergences else "")


def _token(tokenizer: PreTrainedTokenizerBase, token: int | None) -> Text:
    if token is None:
        return Text("none", style="dim")
    return Text(f"{token} {tokenizer.decode([token])!r}")


def _listed(numbers: tuple[int, ...]) -> str:
    return " or ".join(map(str, numbers))
