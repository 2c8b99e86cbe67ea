"""`selfspec verify`: whether what is generated is the model's own, in bfloat16."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from device.figure import REFUSALS, Figure, Rows, lacking
from device.stage import Bench, Case

from selfspec.api import wrap
from selfspec.draft import Drafter, LowPrecision
from selfspec.draft.registry import draft_name
from selfspec.measure.prompts import BEGINNINGS
from selfspec.measure.stock import bare
from selfspec.tools.verify.report import Report
from selfspec.tools.verify.run import default_drafts, verify
from selfspec.tools.verify.settings import Settings

_SMALL = "the small model"
_FEW = Settings(accept=["token"], max_new_tokens=6, draft_length=2, samples=100)


def verification_cases(bench: Bench) -> Iterator[Case]:
    """The small trained model as it is, and widened."""
    for name in (_SMALL, "1B"):
        yield Case(name, partial(_verified, bench, name))


def _verified(bench: Bench, name: str) -> Rows:
    checkpoint = bench.models.small() if name == _SMALL else bench.models.trained(name)
    model = checkpoint.model
    stock = bare(model)
    rows: dict[str, dict[str, Figure]] = {}
    drafts: list[Drafter] = []
    for drafter in (*default_drafts(model.config.num_hidden_layers), LowPrecision(8), LowPrecision(4)):
        try:
            wrap(stock, drafter)
        except REFUSALS as error:
            rows[draft_name(drafter)] = {"greedy texts equal": lacking(error)}
        else:
            drafts.append(drafter)
    drafts, texts = (drafts[-2:], BEGINNINGS[:1]) if bench.miniature else (drafts, BEGINNINGS)
    settings = _FEW if bench.miniature else Settings(samples=400 if name == _SMALL else 200)
    report = verify(stock, [checkpoint.encode(text) for text in texts], drafts, settings)
    return {**_rows(report), **rows}


def _rows(report: Report) -> Rows:
    said = Figure(report.sentence) if report.exact else Figure(failed=report.sentence)
    rows: dict[str, dict[str, Figure]] = {"all": {"verdict": said}}
    for draft in report.drafts:
        texts = draft.free_running.values()
        equal, number = sum(each.equal_texts for each in texts), sum(each.texts for each in texts)
        rows[draft.name] = {
            "greedy texts equal": Figure(f"{equal} of {number}"),
            "logits off by": Figure.number(draft.logits_off),
            "tokens a round": Figure.number(draft.stats.mean_accepted_length),
        }
    return rows
