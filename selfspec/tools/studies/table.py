"""A study as a table: one row for each draft, workload, temperature, seed, draft length, nodes and rule."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from selfspec.control.forecast import speedup
from selfspec.measure.estimate import Estimate
from selfspec.tools.studies.drafts import draft_kind, skip_set
from selfspec.tools.studies.points import Result
from selfspec.tools.studies.prices import Prices

Row = dict[str, Any]
"""One row; what is not known is None."""

SPEEDS = ("predicted_speedup", "measured_speedup_median")
"""What a draft promises, and what a generation made of it."""

# What is confirmed, besides the draft and its text.
_SHAPE = ("draft_length", "nodes", "rule")
_ENDS = {"": "value", "_low": "low", "_high": "high"}


def speedups(estimated: Result, prices: Prices) -> dict[int, float]:
    """Return the speed-up that an estimated draft promises, by draft length: tokens per round by cost per round.

    After Leviathan et al. (2023), whose (1 - alpha^(gamma+1)) / (1 - alpha) tokens are here counted rather than derived
    from a single alpha.
    """
    costs = prices.of_draft(estimated.point.content["draft"])
    tokens = {int(length): each["mean_accepted_length"]["value"] for length, each in estimated.found["lengths"].items()}
    return {length: tokens[length] / costs.of_round(length, length) for length in sorted(tokens)}


def pareto_front(drafts: Iterable[Row]) -> list[Row]:
    """Return the drafts that no other beats in both acceptance and cost, cheapest first."""
    front: list[Row] = []
    for row in sorted(drafts, key=lambda row: (row["c"], -row["alpha"])):
        if not front or row["alpha"] > front[-1]["alpha"]:
            front.append(row)
    return front


def rows(results: Mapping[str, Result]) -> list[Row]:
    """Return the table of a study from everything that was found, by key."""
    prices: dict[str, Prices] = {}
    measured: dict[tuple[str, str], list[Result]] = {}
    for result in results.values():
        content = result.point.content
        if result.point.kind == "costs" and result.error is None:
            prices[content["base"]] = Prices.of(result)
        elif result.point.kind == "measure":
            measured.setdefault((content["draft"], content["texts"]), []).append(result)
    table: list[Row] = []
    for result in results.values():
        if result.point.kind == "estimate":
            draft, texts = result.point.content["draft"], result.point.content["texts"]
            base = results[texts].point.content["base"]
            table += _rows_of(result, prices.get(base), measured.get((draft, texts), []))
    return table


def _rows_of(estimated: Result, prices: Prices | None, confirmed: Sequence[Result]) -> Iterator[Row]:
    """Return the rows of one draft on one text; without prices nothing is promised."""
    found, draft = estimated.found, estimated.point.content["draft"]
    kind = draft_kind(draft)
    place: Row = {
        **{name: estimated.point.place[name] for name in ("model", "workload", "temperature", "seed", "draft")},
        "kind": kind,
        "skipped": len(skip_set(draft)) if kind in ("skip", "skip-file") else None,
    }
    if estimated.error is not None:
        yield {**place, "error": estimated.error}
        return
    promised = {} if prices is None else speedups(estimated, prices)
    best = max(promised, key=promised.__getitem__, default=None)
    by_rule = {tuple(each.point.content[name] for name in _SHAPE): each for each in confirmed}
    for length, replay in ((int(length), each) for length, each in found["lengths"].items()):
        # Estimates are of rejection sampling token by token, which greedily all lossless rules are.
        own = by_rule.pop((length, None, "token"), None)
        yield {
            **place,
            "draft_length": length,
            "nodes": None,
            "best_length": None if best is None else length == best,
            "rule": "token",
            **_spread("agreement", Estimate.of_share(found["agreement"] * found["tokens"], found["tokens"])),
            **_spread("alpha", Estimate.of_share(found["alpha"] * found["tokens"], found["tokens"])),
            **_accepted("", replay),
            **({} if prices is None else _priced(draft, length, found["alpha"], promised[length], prices)),
            **({} if own is None else _measured(own)),
        }
    for shape, each in by_rule.items():
        yield {**place, **dict(zip(_SHAPE, shape, strict=True)), **_measured(each)}


def _priced(draft: str, length: int, alpha: float, promised: float, prices: Prices) -> Row:
    costs = prices.of_draft(draft)
    return {
        "c": costs.draft,
        "V": costs.verify + length * costs.widening,
        "o": costs.overhead,
        "predicted_speedup": promised,
        "predicted_tokens_per_second": None if prices.step_seconds is None else promised / prices.step_seconds,
        "formula_speedup": speedup(alpha, length, costs),
    }


def _measured(confirmed: Result) -> Row:
    if confirmed.error is not None:
        return {"error": confirmed.error}
    found = confirmed.found
    names = ("speedup", "speedup_median", "tokens_per_second", "peak_bytes", "cache_bytes")
    measured = {f"measured_{name}": found[name] for name in names}
    return {**_accepted("measured_", found), **measured, "exact": found["exact"], "lossless": found["lossless"]}


def _accepted(prefix: str, found: Mapping[str, Any]) -> Row:
    """Return the acceptance rate, the mean accepted length and the acceptance by position, with their intervals."""
    accepted, judged = found["accepted"], found["judged"]
    shares = [Estimate.of_share(*counts) for counts in zip(accepted, judged, strict=True)]
    return {
        **_spread(f"{prefix}acceptance_rate", Estimate.of_share(sum(accepted), sum(judged))),
        **_spread(f"{prefix}mean_accepted_length", Estimate(**found["mean_accepted_length"])),
        f"{prefix}judged_by_position": list(judged),
        **{
            f"{prefix}acceptance_by_position{end}": [each and getattr(each, part) for each in shares]
            for end, part in _ENDS.items()
        },
    }


def _spread(name: str, estimate: Estimate | None) -> Row:
    return {name + end: estimate and getattr(estimate, part) for end, part in _ENDS.items()}
