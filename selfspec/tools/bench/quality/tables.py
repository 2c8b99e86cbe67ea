"""What reports say of quality: a table for each workload and temperature, and a sentence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from selfspec.tools.bench.arms import ArmSpec
from selfspec.tools.bench.quality.record import QualityRecord, QualitySetup, of_conditions, plain_of

NAMES = {
    "exact": "exact match",
    "bleu": "BLEU",
    "rouge_l": "ROUGE-L",
    "passed": "tests passed",
    "perplexity": "perplexity",
}
"""What reports call each score."""


_Comparison = tuple[ArmSpec, str]


@dataclass(frozen=True)
class QualityTable:
    """A table of texts, its title, and what it comes to."""

    title: str
    head: list[str]
    rows: list[list[str]]
    sentence: str


def tables(records: Sequence[QualityRecord]) -> list[QualityTable]:
    """Tables in the order of the records."""
    return [_table(setup, here) for setup, here in of_conditions(records).items()]


def sentence(records: Sequence[QualityRecord]) -> str:
    """Whether arms differ from plain decoding by more than chance, in words: at 5 % for all comparisons together."""
    plain = plain_of(records)
    if plain is None:
        return ""
    compared = {
        (record.arm, name): found.p_value
        for record in records
        if record.absence is None and record is not plain
        for name, found in record.differences(plain).items()
    }
    far = _significant(compared)
    said: dict[bool, list[str]] = {True: [], False: []}
    for record in records:
        names = [NAMES[name] for name in NAMES if (record.arm, name) in far]
        if names:
            said[record.lossless].append(f"{record.arm.name} ({', '.join(names)})")
    lossless = "No lossless arm differs from plain decoding by more than chance."
    if said[True]:
        lossless = f"Lossless arms that differ from plain decoding by more than chance: {'; '.join(said[True])}."
    if all(record.lossless for record in records):
        return lossless
    if said[False]:
        return f"{lossless} Relaxed rules that do: {'; '.join(said[False])}."
    return f"{lossless} Nor do the relaxed rules, on these prompts."


def _significant(p_values: Mapping[_Comparison, float], level: float = 0.05) -> set[_Comparison]:
    """Comparisons that chance does not explain, by Holm's step-down procedure (1979)."""
    ordered = sorted(p_values, key=lambda each: p_values[each])
    far: set[_Comparison] = set()
    for number, each in enumerate(ordered):
        if p_values[each] > level / (len(ordered) - number):
            break
        far.add(each)
    return far


def _table(setup: QualitySetup, records: Sequence[QualityRecord]) -> QualityTable:
    plain = plain_of(records)
    names = [name for name in NAMES if any(name in record.figures for record in records)]
    rows = []
    for record in records:
        if record.absence is not None:
            rows.append([record.arm.name, "", *([""] * (2 * len(names) - 1)), record.absence][: 2 * len(names) + 1])
            continue
        found = record.figures
        against = {} if plain is None else record.differences(plain)
        row = [record.arm.name + ("" if record.lossless else " (not lossless)")]
        for name in names:
            row.append(found[name].shown(2) if name in found else "")
            row.append(against[name].estimate.shown(2) if name in against and record is not plain else "")
        rows.append(row)
    beside = [text for name in names for text in (NAMES[name], "ratio" if name == "perplexity" else "less plain")]
    how = f"temperature {setup.temperature:g}" if setup.temperature else "greedy"
    number = max(len(record.tokens) for record in records)
    title = (
        f"Quality: {setup.workload}, {how}, {number} prompts, up to {setup.max_new_tokens} tokens, "
        f"against {records[0].against}"
    )
    return QualityTable(title, ["", *beside], rows, sentence(records))
