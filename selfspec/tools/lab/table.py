"""The lab's table: rows of texts summed up with intervals, a line for each draft under each set of conditions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from selfspec.measure.estimate import Estimate, holm_rejects
from selfspec.measure.spare_cores import SpareCores
from selfspec.tools.lab.drafts import columns_of
from selfspec.tools.lab.runs import Row

if TYPE_CHECKING:
    from pandas import DataFrame

CONDITIONS = ("model", "workload", "temperature", "batch", "context", "chat", "max_new_tokens")
"""Columns of what drafts are compared under."""

ARM = ("arm", "draft", "draft_length", "nodes", "accept", "runtime", "measured")
"""Columns that tell drafts apart."""

# What else must be the same for a comparison, and how that was measured.
_ALSO = ("weights", "setting", "dtype", "prompts", "texts", "device", "threads", "selfspec", "commit", "turns")
_HOW = ("decoder", "content", "reach", "lossless")
FEW = 10
"""Of fewer texts an interval says little."""

# Texts that repeat a larger share of themselves flatter any draft; level of tests of quality; rounds of which fewer
# than this share had a draft; draft tokens judged at a position, below which it is not drawn.
_REPEATING, _LEVEL, _RARELY, _ENOUGH = 0.1, 0.05, 0.05, 10


def summarise(rows: Iterable[Row]) -> DataFrame:
    """Return one line for each arm under each set of conditions; docs/columns.md defines the columns.

    A figure has its interval in two columns more, `_low` and `_high`; `n` is the number of texts (of batches: calls).
    """
    import pandas

    frame = pandas.DataFrame(list(rows))
    found: list[Row] = []
    if not frame.empty:
        by = [name for name in (*CONDITIONS, *_ALSO) if name in frame]
        arms = [name for name in (*ARM, *_HOW) if name in frame]
        for place, here in frame.groupby(by, dropna=False, sort=False):
            own = dict(zip(by, place, strict=True))
            each = [
                (dict(zip(arms, arm, strict=True)), _calls(texts))
                for arm, texts in here.groupby(arms, dropna=False, sort=False)
            ]
            found += _compared([({**own, **arm, **columns_of(arm.get("draft"))}, calls) for arm, calls in each])
    table = pandas.DataFrame([{name: value for name, value in row.items() if not _is_missing(value)} for row in found])
    return _with_best(_named(table))


def _is_missing(value: Any) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))


def _calls(texts: DataFrame) -> DataFrame:
    """Return one line for each call of each repeat: rows of a batch share what its call took and counted."""
    named = texts.reindex(columns=[*dict.fromkeys([*texts.columns, "repeat", "call", "nats", "equal"])])
    keys = [named["repeat"].fillna(0), named["call"].fillna(0)]
    grouped = named.groupby(keys, sort=False)
    calls = grouped.first()
    for name in ("new_tokens", "nats"):
        if name in texts:
            calls[name] = grouped[name].sum(min_count=1)
    if "equal" in texts:
        calls["equal"] = named["equal"].astype(float).groupby(keys, sort=False).mean()
    return calls


def _compared(arms: Sequence[tuple[Row, DataFrame]]) -> list[Row]:
    """Return the figures of arms beside `model.generate` and plain decoding under the same conditions."""
    beside = {place["decoder"]: calls for place, calls in arms if place.get("decoder") in ("generate", "plain")}
    found = [{**place, **_figures(calls, beside)} for place, calls in arms]
    tested = [row for row in found if row.get("perplexity_p") is not None]
    for row, differs in zip(tested, holm_rejects([row["perplexity_p"] for row in tested], _LEVEL), strict=True):
        row["quality_differs"] = differs
    return found


def _figures(calls: DataFrame, beside: dict[str, DataFrame]) -> Row:
    for name in ("error", "absence"):
        if name in calls and calls[name].notna().any():
            return {name: calls[name].dropna().iloc[0], **_first(calls, "refused")}
    texts = calls.groupby(level="call", sort=False)
    figures: Row = {"n": len(texts)}
    if "rounds" in calls:
        # Repeats of a text are no further texts.
        tokens, rounds = texts["new_tokens"].mean(), texts["rounds"].mean()
        figures |= lengths(tokens.tolist(), rounds.tolist())
    if "judged" in calls:
        figures |= _acceptance(calls)
    if "predicted_cost" in calls and calls["predicted_cost"].notna().all():
        by_end = [Estimate.of_ratio(tokens.tolist(), texts[f"predicted_cost{end}"].mean().tolist()) for end in _COST]
        value, least, most = by_end
        figures |= spread("predicted_speedup", Estimate(value.value, most.low, least.high, value.confidence, value.n))
        figures |= _first(calls, "c", "c_low", "c_high", "V", "widening", "o")
    if "seconds" in calls and calls["seconds"].notna().all():
        figures |= _speeds(calls, beside)
    if "nats" in calls and calls["nats"].notna().any():
        figures |= _quality(calls, beside.get("plain"))
    if "equal" in calls and calls["equal"].notna().any():
        figures["equal"] = float(calls["equal"].mean())
    if "repeated_share" in calls:
        figures["repeated_share"] = float(calls["repeated_share"].mean())
    figures |= _first(calls, "refused", "cache_bytes", "cores", "free", "evaluation", "search")
    return figures


_COST = ("", "_low", "_high")


def _first(calls: DataFrame, *names: str) -> Row:
    return {name: value for name in names if name in calls and not _is_missing(value := _plain(calls[name].iloc[0]))}


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


def lengths(tokens: Sequence[float], rounds: Sequence[float]) -> Row:
    """Return the columns of the tokens and rounds of texts."""
    found = spread("mean_accepted_length", Estimate.of_ratio(tokens, rounds))
    return {"n": len(tokens), **found, "new_tokens": float(sum(tokens)), "rounds": float(sum(rounds))}


def rates(judged: Sequence[Sequence[float]], accepted: Sequence[Sequence[float]]) -> Row:
    """Return the columns of acceptance, from the counts of each text by position."""
    found: Row = {"judged_by_position": _summed(judged), "accepted_by_position": _summed(accepted)}
    found |= spread("acceptance_rate", Estimate.of_rate([*map(sum, accepted)], [*map(sum, judged)]))
    firsts = ([sum(each[:1]) for each in side] for side in (accepted, judged))
    return {**found, **spread("alpha", Estimate.of_rate(*firsts))}


def _acceptance(calls: DataFrame) -> Row:
    drafting = calls[calls["judged"].map(lambda each: isinstance(each, list))]
    if drafting.empty:
        return {}
    texts = drafting.groupby(level="call", sort=False)
    judged, accepted = (texts[name].apply(_mean_counts).tolist() for name in ("judged", "accepted"))
    found = rates(judged, accepted)
    # Teacher forcing judges every token as the first of a draft.
    for name, counted in (("alpha", "first_accepted"), ("agreement", "agreed")):
        if {counted, "first_judged"} <= {*drafting} and drafting[counted].notna().all():
            each, of = (texts[column].mean().tolist() for column in (counted, "first_judged"))
            found |= spread(name, Estimate.of_rate(each, of))
    shapes = [shape for each in drafting["shapes"] for shape in each]
    rounds = sum(number for *_, number in shapes)
    if rounds:
        drafted, steps = (sum(shape[place] * shape[2] for shape in shapes) for place in (0, 1))
        found |= {
            "drafting_share": sum(number for drafted, _, number in shapes if drafted) / rounds,
            "drafted_per_round": drafted / rounds,
            "steps_per_round": steps / rounds,
        }
    return found


def _mean_counts(repeats: Sequence[Sequence[float]]) -> list[float]:
    return [each / len(repeats) for each in _summed(repeats)]


def _summed(lists: Iterable[Sequence[float]]) -> list[float]:
    every = [*lists]
    longest = max(map(len, every), default=0)
    return [float(sum(each[place] for each in every if place < len(each))) for place in range(longest)]


def _speeds(calls: DataFrame, beside: dict[str, DataFrame]) -> Row:
    """Return speeds, all of one kind: seconds a token of each text are the median of its repeats, and are summed up.

    Prefill and the round after it are left out, but of whole calls.
    """
    own = _seconds_a_token(calls)
    texts = own.groupby(level="call").median()
    found = spread("tokens_per_second", Estimate.of_ratio([1.0] * len(texts), texts.tolist()))
    found["first_token_seconds"] = float(calls["first_seconds"].median())
    if (steps := calls.get("draft_seconds")) is not None and steps.notna().all():
        rounds = calls["passes"].sum()
        found |= {name: float(calls[name].sum() / rounds) for name in ("draft_seconds", "verify_seconds")}
    for name, decoder in (("speedup", "plain"), ("speedup_over_generate", "generate")):
        if (other := beside.get(decoder)) is not None and "seconds" in other and other["seconds"].notna().all():
            found |= spread(name, _ratio(_seconds_a_token(other), own))
            if decoder == "generate":
                whole = [each["seconds"] / each["new_tokens"] for each in (other, calls)]
                found |= spread("whole_speedup_over_generate", _ratio(*whole))
    return found


def _seconds_a_token(calls: DataFrame) -> Any:
    """Return seconds a token behind the first tokens; of a call that has no others, of all."""
    tokens, seconds = calls["new_tokens"] - calls["first_tokens"], calls["seconds"] - calls["first_seconds"]
    return (seconds / tokens).where(tokens > 0, calls["seconds"] / calls["new_tokens"])


def _ratio(other: Any, own: Any) -> Estimate:
    """Return how many times as fast an arm is, in the turns that it took part in."""
    sides = ([*each[own.index].groupby(level="call").apply(list)] for each in (other, own))
    return Estimate.of_speedup(*sides)


def _quality(calls: DataFrame, plain: DataFrame | None) -> Row:
    """Return the perplexity of texts under the model, and the ratio to that of plain decoding's texts."""
    nats, tokens = _by_text(calls)
    found = spread("perplexity", Estimate.of_mean(nats.tolist(), tokens.tolist()).exp())
    if plain is None or plain is calls or "nats" not in plain:
        return found
    # Of each text a mean over tokens, since texts of two arms end at different places.
    others = _by_text(plain)
    pairs = (nats / tokens - others[0] / others[1]).tolist()
    ratio = Estimate.of_mean(pairs, [1.0] * len(pairs)).exp()
    return {**found, **spread("perplexity_ratio", ratio), "perplexity_p": p_value(pairs)}


def _by_text(calls: DataFrame) -> list[Any]:
    scored = calls[calls["nats"].notna()]
    return [scored[name].groupby(level="call", sort=False).sum() for name in ("nats", "new_tokens")]


def p_value(pairs: Sequence[float], draws: int = 9_999) -> float:
    """Return the chance of a mean as far from 0 if either sign of each difference were as likely (Fisher, 1935)."""
    from scipy.stats import permutation_test

    if len(pairs) < 2:
        return 1.0
    how: dict[str, Any] = {"permutation_type": "samples", "n_resamples": draws, "rng": np.random.default_rng(0)}
    return float(permutation_test((np.array(pairs),), np.mean, **how).pvalue)


def spread(name: str, estimate: Estimate | None) -> Row:
    """Return the columns of a figure: its value, and the ends of its interval where it has one."""
    if estimate is None:
        return {}
    if not estimate.confidence:
        return {name: estimate.value}
    return {name: estimate.value, f"{name}_low": estimate.low, f"{name}_high": estimate.high}


def estimate_in(row: Row, name: str) -> Estimate | None:
    """Return a figure of a line with its interval; None where it has none of that name."""
    value, low, high = (row.get(f"{name}{end}") for end in _COST)
    if value is None or _is_missing(value):
        return None
    if low is None or high is None or _is_missing(low):
        return Estimate(value, value, value)
    return Estimate(value, low, high, 0.95)


_RATES = ("acceptance_rate", "alpha", "agreement")


def shown(row: Row, name: str) -> str:
    """Return a figure as reports show it: with its interval, or as it is."""
    value = row.get(name)
    if value is None or _is_missing(value):
        return ""
    found = estimate_in(row, name) if isinstance(value, float) else None
    if found is None:
        return str(value)
    # A rate of .998 is not 1.
    return found.shown(3 if name in _RATES else 2 if abs(value) < 100 else 0)


def _named(table: DataFrame) -> DataFrame:
    """Name conditions in words; models of one name, and measurements of one title, are told apart by what differs."""
    if table.empty:
        return table
    several = table.groupby("model")["weights"].transform("nunique") > 1
    table.loc[several, "model"] = table["model"] + " " + table["weights"].str[:8]
    table["conditions"] = [_title(row) for row in records(table)]
    for name, words in (("max_new_tokens", "{:g} new"), ("dtype", "{}"), ("setting", "setting {:.6}")):
        if name in table:
            several = table.groupby("conditions")[name].transform("nunique") > 1
            table.loc[several, "conditions"] += ", " + table[name].map(words.format)
    return table


def _title(row: Row) -> str:
    how = f"temperature {row['temperature']:g}" if row.get("temperature") else "greedy"
    batch = f", batch {row['batch']:g}" if row.get("batch", 1) > 1 else ""
    context = f", {row['context']:g} tokens of prompt" if row.get("context") else ""
    chat = " as chat" if row.get("chat") else ""
    return f"{row['model']}, {row['workload']}{chat}, {how}{batch}{context}"


def _with_best(table: DataFrame) -> DataFrame:
    """Mark the draft length of each draft that promises most, and say what a search had found by then."""
    if "predicted_speedup" in table:
        same = (*CONDITIONS, "setting", "texts", "turns", "draft", "accept", "measured")
        by = [name for name in same if name in table]
        most = table.groupby(by, dropna=False)["predicted_speedup"].transform("max")
        table["best_length"] = table["predicted_speedup"] == most
    if "evaluation" in table:
        in_order = table[table["best_length"]].sort_values("evaluation")
        table["best_so_far"] = in_order.groupby(["conditions", "search"])["predicted_speedup"].cummax()
    return table


def records(table: DataFrame) -> list[Row]:
    """Return the lines of a table, each with the columns that it has a value for."""
    return [
        {name: _plain(value) for name, value in row.items() if isinstance(value, list) or not _is_missing(value)}
        for row in table.astype(object).to_dict("records")
    ]


def positions(table: DataFrame) -> DataFrame:
    """Return a line for each position of each draft at which enough tokens were judged: the share accepted there."""
    import pandas

    found = []
    for row in records(table):
        pairs = zip(row.get("accepted_by_position", ()), row.get("judged_by_position", ()), strict=True)
        for position, (accepted, judged) in enumerate(pairs, 1):
            if judged >= _ENOUGH:
                found.append({**row, "position": position, **spread("accepted", Estimate.of_share(accepted, judged))})
    return pandas.DataFrame(found)


def by_conditions(table: DataFrame) -> Iterator[tuple[str, DataFrame]]:
    """Yield the lines of each set of conditions, with its name."""
    for name in [] if table.empty else table["conditions"].unique():
        yield str(name), table[table["conditions"] == name]


def doubts(table: DataFrame) -> list[str]:
    """Say which figures cannot be, or say less than they seem to."""
    found = []
    for name, lines in by_conditions(table):
        every = [row for row in records(lines) if "n" in row]
        least = min((row["n"] for row in every), default=FEW)
        if least < FEW:
            texts = "1 text, so there are no intervals over texts" if least == 1 else f"{least:g} texts"
            found.append(f"{name}: {texts}; give at least {FEW}, since intervals over fewer say little")
        named = [row for row in every if row.get("draft") and row.get("decoder") != "other"]
        undrafted = [row["arm"] for row in named if row.get("drafting_share", 1.0) < _RARELY]
        if undrafted:
            found.append(f"{name}: hardly a round had a draft, so there is nothing to judge ({'; '.join(undrafted)})")
        looping = [row["arm"] for row in every if row.get("repeated_share", 0.0) > _REPEATING]
        if looping:
            found.append(f"{name}: texts repeat themselves, which flatters drafts ({'; '.join(looping)})")
        for row in every:
            speed, tokens = estimate_in(row, "speedup"), row.get("mean_accepted_length", 1.0)
            if speed is not None and row.get("draft") and (doubt := speed.doubt(tokens)):
                found.append(f"{name}, {row['arm']}: {doubt}")
        timed = [row for row in every if "tokens_per_second" in row and row.get("device") == "cpu" and "cores" in row]
        if timed:
            busiest = min(timed, key=lambda row: row.get("free", math.inf))
            busy = SpareCores(int(busiest["cores"]), busiest.get("free")).doubt(int(busiest.get("threads", 1)))
            found += [f"{name}: {busy}"] if busy else []
        differing = [row["arm"] for row in every if row.get("quality_differs")]
        if differing:
            found.append(
                f"{name}: texts more or less likely than plain decoding's, by more than chance: {'; '.join(differing)}"
            )
    return found
