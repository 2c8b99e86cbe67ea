"""What a study found of one model on one text at one temperature: what pages and pictures show."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from selfspec.measure.estimate import Estimate
from selfspec.tools.lab.ablation import Finding
from selfspec.tools.lab.drafts import skip_set
from selfspec.tools.lab.origin import told_apart
from selfspec.tools.lab.table import Row, estimate_in


@dataclass(frozen=True)
class TextFindings:
    """One model on one text at one temperature.

    Attributes:
        tokens: the texts as shown, token by token.
        right: by draft that was judged by teacher forcing, for each text a digit for each token: 1 where the draft
            would have been right.
    """

    title: str
    rows: Sequence[Row]
    tokens: Sequence[Sequence[str]]
    right: Mapping[str, Sequence[str]]

    @property
    def best(self) -> list[Row]:
        """Every draft at its best draft length, as far as that is known; the most promising first."""
        return sorted((row for row in self.rows if row.get("best_length")), key=lambda row: -row["predicted_speedup"])

    @property
    def stepping(self) -> list[Row]:
        """Return those of the best all of whose tokens take a step: acceptance and c say what these are worth."""
        return [row for row in self.best if row["stepped_share"] == 1 and row["alpha"] is not None]

    @property
    def importance(self) -> dict[str, dict[int, Estimate]]:
        """Acceptance with one sublayer or one layer left out, by `attention`, `MLP` or `both`, and by layer."""
        found: dict[str, dict[int, Estimate]] = {"attention": {}, "MLP": {}, "both": {}}
        for row in self.rows:
            skipped = sorted(skip_set(row["draft"])) if row["kind"] == "skip" and row.get("alpha") is not None else []
            if len({each.layer for each in skipped}) == 1:
                left_out = "both" if len(skipped) > 1 else ("attention", "MLP")[skipped[0].part]
                found[left_out][skipped[0].layer] = estimate_in(row, "alpha")
        return {left_out: layers for left_out, layers in found.items() if layers}

    @property
    def exits(self) -> dict[int, dict[int, Estimate]]:
        """Predicted speed-ups of plain exits, by draft length and layer."""
        found: dict[int, dict[int, Estimate]] = {}
        for row in self.rows:
            if row["kind"] == "exit" and "predicted_speedup" in row:
                layer = int(row["draft"].removeprefix("exit:"))
                found.setdefault(row["draft_length"], {})[layer] = estimate_in(row, "predicted_speedup")
        return found

    @property
    def confirmed(self) -> list[Row]:
        """Rows that were both estimated and measured."""
        both = ("measured_acceptance_rate", "acceptance_rate")
        return [row for row in self.rows if all(row.get(name) is not None for name in both)]

    @property
    def estimated_and_measured(self) -> list[Row]:
        """Return the rows whose estimates do not come from generations themselves."""
        return [row for row in self.confirmed if row["judged_by"] == "teacher forcing"]

    @property
    def doubts(self) -> list[str]:
        """Say which figures cannot be, or say less than they seem to."""
        found = []
        if self.tokens and len(self.tokens) == 1:
            found.append("there is one text, so acceptance has no interval; give more texts")
        for row in self.confirmed:
            doubt = estimate_in(row, "measured_speedup").doubt(row["measured_mean_accepted_length"])
            if doubt is not None:
                found.append(f"{_named(row)}: {doubt}")
        return found

    def promising(self, count: int) -> list[Row]:
        """Return the most promising drafts of each kind in turns, at their best draft lengths; cheapest first."""
        by_kind: dict[str, list[Row]] = {}
        for row in self.best:
            by_kind.setdefault(row["kind"], []).append(row)
        mixed = [rows[turn] for turn in range(count) for rows in by_kind.values() if turn < len(rows)]
        return sorted(mixed[:count], key=lambda row: row["c"])

    def cheapest_right(self, drafts: Sequence[str], text: int) -> list[int]:
        """Return, for each token of a text, the first of some drafts that would have been right; -1: none."""
        return ["".join(marks).find("1") for marks in zip(*(self.right[each][text] for each in drafts), strict=True)]

    def sentence(self) -> str:
        """Say what the best draft is worth: measured where drafts were confirmed, else predicted; there is a draft."""
        if self.confirmed:
            row = max(self.confirmed, key=lambda row: float(row["measured_speedup_median"]))
            speed, of = row["measured_speedup_median"], f"the fastest of {len(self.confirmed)} confirmed by generation"
            if speed <= 1:
                said = f"no draft beat plain decoding here; {_named(row)}, {of}, came to {speed:.2f}"
            else:
                said = f"{_named(row)}, {of}: measured {speed:.2f} and predicted {_predicted(row)} times plain decoding"
        elif self.best[0]["predicted_speedup"] > 1:
            row = self.best[0]
            said = f"{_named(row)} is predicted {_predicted(row)} times plain decoding"
        else:
            row = self.best[0]
            said = f"no draft is predicted to beat plain decoding; {_named(row)} comes to {_predicted(row)}"
        return f"{self.title}: {said}."


def _named(row: Row) -> str:
    length = row["draft_length"]
    return f"{row['draft']} with {length} draft token{'s' * (length != 1)}"


def _predicted(row: Row) -> str:
    return estimate_in(row, "predicted_speedup").shown(2)


def timing_doubts(finding: Finding) -> list[str]:
    """Say which times of a study were taken beside other work, a sentence for each kind."""
    kinds = {"confirm": "confirming drafts"}
    if finding.study.pricing == "measured":
        kinds = {"costs": "timing costs", **kinds}
    found = {}
    for kind, words in kinds.items():
        runs = [run for run in finding.runs if run.asked.kind == kind and run.doubt is not None]
        if runs:
            busiest = min(
                runs, key=lambda run: math.inf if run.load is None or run.load.free is None else run.load.free
            )
            found[words] = f"while {words} {busiest.doubt}"
    return list(found.values())


def names_of(table: Sequence[Row]) -> dict[tuple[str, str], str]:
    """Return what reports call the models of a table, by name and weights."""
    return told_apart((row["model"], row["weights"]) for row in table)


def findings(finding: Finding) -> list[TextFindings]:
    """Return what a study found of each model, text and temperature, in its order."""
    texts = {run.asked.key: run for run in finding.runs if run.asked.kind == "texts"}
    estimates = [run for run in finding.runs if run.asked.kind == "estimate" and run.error is None]
    called, found = names_of(finding.table), []
    for (model, workload, temperature), rows in groupby(
        finding.table, lambda row: ((row["model"], row["weights"]), row["workload"], row["temperature"])
    ):
        place: dict[str, Any] = {"weights": model[1], "workload": workload, "temperature": temperature}
        here = [each for each in estimates if place.items() <= each.asked.place.items()]
        if here:
            how = f"temperature {temperature:g}" if temperature else "greedy"
            tokens = texts[here[0].asked.under["texts"]].found["tokens"]
            right = {each.asked.place["draft"]: each.found["right"] for each in here if "right" in each.found}
            found.append(TextFindings(f"{called[model]}, {workload}, {how}", list(rows), tokens, right))
    return found
