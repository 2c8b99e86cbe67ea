"""A study as a table: one row for each draft, workload, temperature, seed, draft length and rule."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from selfspec.control.costs import Costs
from selfspec.control.forecast import Forecast, speedup
from selfspec.measure.estimate import Estimate
from selfspec.tools.studies.drafts import draft_of, skip_set
from selfspec.tools.studies.points import Point, Result
from selfspec.tools.studies.prices import Prices, best_length, prices_of

Row = dict[str, Any]
"""One row; what is not known is None."""


def promised(estimated: Result, prices: Prices) -> Forecast:
    """Return the best draft length of an estimated draft, and the speed-up it promises."""
    lengths = estimated.found["lengths"]
    tokens = {int(length): each["mean_accepted_length"]["value"] for length, each in lengths.items()}
    return best_length(tokens, _costs(estimated.point, prices))


def _costs(point: Point, prices: Prices) -> Costs:
    name = point.content["draft"]
    depth = 1 + max(each.layer for each in prices.sublayers)
    return prices.costs(draft_of(name).path(depth), name)


def rows(results: Mapping[str, Result]) -> list[Row]:
    """Return the table of a study.

    Args:
        results: everything that was found, by key.
    """
    prices: dict[str, Prices] = {}
    measured: dict[tuple[str, str], list[Result]] = {}
    for result in results.values():
        content = result.point.content
        if result.point.kind == "costs" and result.error is None:
            prices[content["base"]] = prices_of(result.found)
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
    place: Row = {
        **{name: estimated.point.place[name] for name in ("model", "workload", "temperature", "seed", "draft")},
        "kind": estimated.point.content["draft"].partition(":")[0],
        "skipped": _skipped(estimated.point.content["draft"]),
    }
    if estimated.error is not None:
        yield {**place, "error": estimated.error}
        return
    found = estimated.found
    costs = None if prices is None else _costs(estimated.point, prices)
    best = None if prices is None else promised(estimated, prices).draft_length
    by_rule = {(each.point.content["draft_length"], each.point.content["rule"]): each for each in confirmed}
    for length, replay in found["lengths"].items():
        # Estimates are of rejection sampling token by token, which greedily all lossless rules are.
        own = by_rule.pop((int(length), "token"), None)
        yield {
            **place,
            "draft_length": int(length),
            "best_length": None if best is None else int(length) == best,
            "rule": "token",
            **_spread("agreement", Estimate.of_share(found["agreement"] * found["tokens"], found["tokens"])),
            **_spread("alpha", Estimate.of_share(found["alpha"] * found["tokens"], found["tokens"])),
            **_spread("acceptance_rate", Estimate.of_share(sum(replay["accepted"]), sum(replay["judged"]))),
            **_spread("mean_accepted_length", Estimate(**replay["mean_accepted_length"])),
            **_by_position("", replay),
            **(_priced(found, replay, int(length), costs, prices) if costs and prices else {}),
            **(_measured(own) if own else {}),
        }
    for (length, rule), each in by_rule.items():
        yield {**place, "draft_length": length, "rule": rule, **_measured(each)}


def _priced(found: Mapping[str, Any], replay: Mapping[str, Any], length: int, costs: Costs, prices: Prices) -> Row:
    predicted = replay["mean_accepted_length"]["value"] / costs.of_round(length, length)
    return {
        "c": costs.draft,
        "V": costs.verify + length * costs.widening,
        "o": costs.overhead,
        "predicted_speedup": predicted,
        "predicted_tokens_per_second": None if prices.step_seconds is None else predicted / prices.step_seconds,
        "formula_speedup": speedup(found["alpha"], length, costs),
    }


def _measured(confirmed: Result) -> Row:
    if confirmed.error is not None:
        return {"error": confirmed.error}
    found = confirmed.found
    names = ("speedup", "speedup_median", "tokens_per_second", "peak_bytes", "cache_bytes")
    return {
        **_spread("measured_acceptance_rate", Estimate.of_share(sum(found["accepted"]), sum(found["judged"]))),
        **_spread("measured_mean_accepted_length", Estimate(**found["mean_accepted_length"])),
        **_by_position("measured_", found),
        **{f"measured_{name}": found[name] for name in names},
        "exact": found["exact"],
        "lossless": found["lossless"],
    }


def _by_position(prefix: str, counts: Mapping[str, Any]) -> Row:
    shares = [
        Estimate.of_share(accepted, judged)
        for accepted, judged in zip(counts["accepted"], counts["judged"], strict=True)
    ]
    return {
        f"{prefix}judged_by_position": list(counts["judged"]),
        f"{prefix}acceptance_by_position": [each and each.value for each in shares],
        f"{prefix}acceptance_by_position_low": [each and each.low for each in shares],
        f"{prefix}acceptance_by_position_high": [each and each.high for each in shares],
    }


def _spread(name: str, estimate: Estimate | None) -> Row:
    value, low, high = (None, None, None) if estimate is None else (estimate.value, estimate.low, estimate.high)
    return {name: value, f"{name}_low": low, f"{name}_high": high}


def _skipped(draft: str) -> int | None:
    """Return how many sublayers a skip set leaves out; None of other drafts."""
    return len(skip_set(draft)) if draft.startswith("skip") else None
