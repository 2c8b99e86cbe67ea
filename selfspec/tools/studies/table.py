"""A study as a table: one row for each draft, workload, temperature, seed, draft length and rule."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from selfspec.control.costs import Costs
from selfspec.control.forecast import Forecast, speedup
from selfspec.measure.estimate import Estimate
from selfspec.tools.studies.drafts import draft_kind, draft_of, skip_set
from selfspec.tools.studies.points import Point, Result
from selfspec.tools.studies.prices import Prices, best_length

Row = dict[str, Any]
"""One row; what is not known is None."""

T = TypeVar("T")


def promised(estimated: Result, prices: Prices) -> Forecast:
    """Return the best draft length of an estimated draft, and the speed-up it promises."""
    lengths = estimated.found["lengths"]
    tokens = {int(length): each["mean_accepted_length"]["value"] for length, each in lengths.items()}
    return best_length(tokens, costs_of(estimated.point, prices))


def costs_of(point: Point, prices: Prices) -> Costs:
    """Return the costs of the draft of a point."""
    name = point.content["draft"]
    return prices.costs(draft_of(name).path(prices.depth), name)


def pareto_front(drafts: Iterable[T], cost_and_alpha: Callable[[T], tuple[float, float]]) -> list[T]:
    """Return those that no other beats in both cost and acceptance, cheapest first."""
    front: list[T] = []
    highest = -1.0
    for each in sorted(drafts, key=lambda each: (cost_and_alpha(each)[0], -cost_and_alpha(each)[1])):
        if cost_and_alpha(each)[1] > highest:
            highest = cost_and_alpha(each)[1]
            front.append(each)
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
            table += rows_of(result, prices.get(base), measured.get((draft, texts), []))
    return table


def rows_of(estimated: Result, prices: Prices | None, confirmed: Sequence[Result] = ()) -> Iterator[Row]:
    """Return the rows of one draft on one text.

    Args:
        estimated: what teacher forcing says of it.
        prices: of the model; None: not known.
        confirmed: what generations said of it.
    """
    draft = estimated.point.content["draft"]
    place: Row = {
        **{name: estimated.point.place[name] for name in ("model", "workload", "temperature", "seed", "draft")},
        "kind": draft_kind(draft),
        "skipped": len(skip_set(draft)) if draft_kind(draft) in ("skip", "skip-file") else None,
    }
    if estimated.error is not None:
        yield {**place, "error": estimated.error}
        return
    found = estimated.found
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
            **_accepted("", replay),
            **(_priced(estimated, int(length), prices) if prices else {}),
            **(_measured(own) if own else {}),
        }
    for (length, rule), each in by_rule.items():
        yield {**place, "draft_length": length, "rule": rule, **_measured(each)}


def _priced(estimated: Result, length: int, prices: Prices) -> Row:
    found, costs = estimated.found, costs_of(estimated.point, prices)
    predicted = found["lengths"][str(length)]["mean_accepted_length"]["value"] / costs.of_round(length, length)
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
        **_accepted("measured_", found),
        **{f"measured_{name}": found[name] for name in names},
        "exact": found["exact"],
        "lossless": found["lossless"],
    }


def _accepted(prefix: str, found: Mapping[str, Any]) -> Row:
    """Return the acceptance rate, the mean accepted length and the acceptance by position, with their intervals."""
    accepted, judged = found["accepted"], found["judged"]
    shares = [Estimate.of_share(*counts) for counts in zip(accepted, judged, strict=True)]
    return {
        **_spread(f"{prefix}acceptance_rate", Estimate.of_share(sum(accepted), sum(judged))),
        **_spread(f"{prefix}mean_accepted_length", Estimate(**found["mean_accepted_length"])),
        f"{prefix}judged_by_position": list(judged),
        f"{prefix}acceptance_by_position": [each and each.value for each in shares],
        f"{prefix}acceptance_by_position_low": [each and each.low for each in shares],
        f"{prefix}acceptance_by_position_high": [each and each.high for each in shares],
    }


def _spread(name: str, estimate: Estimate | None) -> Row:
    value, low, high = (None, None, None) if estimate is None else (estimate.value, estimate.low, estimate.high)
    return {name: value, f"{name}_low": low, f"{name}_high": high}
