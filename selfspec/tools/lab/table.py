"""A study as a table: one row for each draft, workload, temperature and draft length."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from selfspec.control.forecast import speedup
from selfspec.measure.estimate import Estimate
from selfspec.tools.lab.drafts import draft_kind, skip_set
from selfspec.tools.lab.prices import Prices
from selfspec.tools.lab.runs import Run

Row = dict[str, Any]
"""One row; what is not known is None."""

# As of `Costs.of_round`: no round takes less than a plain one.
_LEAST = 1.0
_BY_TEXT = ("judged_by_text", "accepted_by_text", "tokens_by_text", "rounds_by_text")
_ENDS = {"": "value", "_low": "low", "_high": "high"}


def speedups(estimated: Run, prices: Prices) -> dict[int, Estimate]:
    """Return the speed-up that an estimated draft promises, by draft length: tokens per round by cost per round.

    After Leviathan et al. (2023), whose (1 - alpha^(gamma+1)) / (1 - alpha) tokens are here counted rather than derived
    from a single alpha. Intervals have tokens at one end and c at the other.
    """
    costs, c = prices.of_draft(estimated), prices.draft(estimated)
    found = {}
    for length in sorted(map(int, estimated.found["lengths"])):
        at = estimated.found["lengths"][str(length)]
        tokens = Estimate(**at["mean_accepted_length"])
        # Of teacher forcing every round drafts as much as it may; generations have counted what theirs did.
        shapes = at.get("rounds") or [[length, length, 1]]
        rounds = sum(number for *_, number in shapes)
        steps = sum(steps * number for _, steps, number in shapes) / rounds
        # A round without a draft is a plain one.
        more = sum(number * (costs.of_round(0, drafted) if drafted else 1.0) for drafted, _, number in shapes) / rounds
        found[length] = Estimate(
            tokens.value / max(steps * c.value + more, _LEAST),
            tokens.low / max(steps * c.high + more, _LEAST),
            tokens.high / max(steps * c.low + more, _LEAST),
            c.confidence,
        )
    return found


def best_length(promised: Mapping[int, Estimate]) -> int:
    """Return the draft length that promises most."""
    return max(promised, key=lambda length: promised[length].value)


def pareto_front(drafts: Iterable[Row]) -> list[Row]:
    """Return the drafts that no other beats in both acceptance and cost, cheapest first."""
    front: list[Row] = []
    for row in sorted(drafts, key=lambda row: (row["c"], -row["alpha"])):
        if not front or row["alpha"] > front[-1]["alpha"]:
            front.append(row)
    return front


def alpha(found: Mapping[str, Any], what: str = "overlap") -> Estimate | None:
    """Return the acceptance at the first position of a draft, or the agreement there, with an interval over texts.

    None where there was no draft, or that is not known.
    """
    pairs = [pair for pair in zip(found.get(what, ()), found["tokens"], strict=False) if pair[1]]
    return Estimate.of_ratio([part for part, _ in pairs], [whole for _, whole in pairs]) if pairs else None


def rows(runs: Sequence[Run]) -> list[Row]:
    """Return the table of a study from everything that was found."""
    prices: dict[str, Prices] = {}
    texts: dict[str, Run] = {}
    measured: dict[str, list[Run]] = {}
    for run in runs:
        under = run.asked.under
        if run.asked.kind == "costs" and run.error is None:
            prices[under["setting"]] = Prices.of(run)
        elif run.asked.kind == "texts":
            texts[run.asked.key] = run
        elif run.asked.kind == "confirm":
            measured.setdefault(under["draft"] + under["texts"], []).append(run)
    table: list[Row] = []
    for run in runs:
        if run.asked.kind == "estimate":
            under = run.asked.under
            setting = texts[under["texts"]].asked.under["setting"]
            table += _rows_of(run, prices.get(setting), measured.get(under["draft"] + under["texts"], []))
    return table


def _rows_of(estimated: Run, prices: Prices | None, confirmed: Sequence[Run]) -> Iterator[Row]:
    """Return the rows of one draft on one text; without prices nothing is promised."""
    found, draft = estimated.found, estimated.asked.under["draft"]
    kind = draft_kind(draft)
    place: Row = {
        **{name: estimated.asked.place[name] for name in ("model", "weights", "workload", "temperature", "draft")},
        "kind": kind,
        "judged_by": estimated.asked.under["by"],
        "skipped": len(skip_set(draft)) if kind in ("skip", "skip-file") else None,
    }
    if estimated.error is not None:
        yield {**place, "error": estimated.error}
        return
    promised = {} if prices is None else speedups(estimated, prices)
    best = best_length(promised) if promised else None
    by_length = {each.asked.under["draft_length"]: each for each in confirmed}
    rate, agreement = alpha(found), alpha(found, "agreed")
    for length in map(int, found["lengths"]):
        yield {
            **place,
            "draft_length": length,
            "best_length": None if best is None else length == best,
            **_spread("agreement", agreement),
            **_spread("alpha", rate),
            "first_judged_by_text": found["tokens"],
            "first_accepted_by_text": found["overlap"],
            **_shares(found["lengths"][str(length)]),
            **_accepted("", found["lengths"][str(length)]),
            **({} if prices is None else _priced(estimated, length, rate, promised[length], prices)),
            **(_measured(by_length[length]) if length in by_length else {}),
        }


def _shares(found: Mapping[str, Any]) -> Row:
    """Return the share of rounds that had a draft, and of draft tokens that took a step: of teacher forcing all."""
    shapes = found.get("rounds", [[1, 1, 1]])
    drafted, steps = (sum(shape[place] * shape[2] for shape in shapes) for place in (0, 1))
    return {
        "drafting_share": sum(shape[2] for shape in shapes if shape[0]) / sum(shape[2] for shape in shapes),
        "stepped_share": steps / drafted if drafted else 0.0,
    }


def _priced(estimated: Run, length: int, rate: Estimate | None, promised: Estimate, prices: Prices) -> Row:
    costs = prices.of_draft(estimated)
    return {
        **_spread("c", prices.draft(estimated)),
        "V": costs.verify + length * costs.widening,
        "o": costs.overhead,
        **_spread("predicted_speedup", promised),
        "predicted_tokens_per_second": None if prices.step_seconds is None else promised.value / prices.step_seconds,
        "formula_speedup": None if rate is None else speedup(rate.value, length, costs),
    }


def _measured(confirmed: Run) -> Row:
    if confirmed.error is not None:
        return {"error": confirmed.error}
    found = confirmed.found
    names = ["speedup_median", "tokens_per_second", "cache_bytes"]
    return {
        **_accepted("measured_", found),
        **_spread("measured_speedup", Estimate(**found["speedup"])),
        **{f"measured_{name}": found[name] for name in names},
        "exact": found["exact"],
    }


def _accepted(prefix: str, found: Mapping[str, Any]) -> Row:
    """Return the acceptance rate, the mean accepted length and the counts by position and by text."""
    accepted, judged = found["accepted"], found["judged"]
    counted = [name for name in found if name in _BY_TEXT]
    return {
        **{prefix + name: list(found[name]) for name in counted},
        **_spread(f"{prefix}acceptance_rate", Estimate.of_share(sum(accepted), sum(judged))),
        **_spread(f"{prefix}mean_accepted_length", Estimate(**found["mean_accepted_length"])),
        f"{prefix}judged_by_position": list(judged),
        f"{prefix}accepted_by_position": list(accepted),
    }


def estimate_in(row: Row, name: str) -> Estimate:
    """Return a figure of a row with its interval."""
    return Estimate(*(float(row[f"{name}{end}"]) for end in _ENDS))


def _spread(name: str, estimate: Estimate | None) -> Row:
    return {name + end: estimate and getattr(estimate, part) for end, part in _ENDS.items()}
