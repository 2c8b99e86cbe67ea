"""What the pictures of a study show: its rows by model, text and temperature, and the drafts worth showing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from selfspec.tools.studies.drafts import skip_set
from selfspec.tools.studies.run import Finding
from selfspec.tools.studies.table import Row


@dataclass(frozen=True)
class Panel:
    """One model on one text at one temperature.

    Attributes:
        tokens: the texts as shown, token by token.
        right: by draft, for each text a digit for each token: 1 where the draft would have been right.
    """

    title: str
    rows: Sequence[Row]
    tokens: Sequence[Sequence[str]]
    right: Mapping[str, Sequence[str]]

    @property
    def temperature(self) -> float:
        """Of the texts; 0: greedy."""
        return float(self.rows[0]["temperature"])

    @property
    def best(self) -> list[Row]:
        """Every draft at its best draft length, as far as that is known; the most promising first."""
        return sorted((row for row in self.rows if row.get("best_length")), key=lambda row: -row["predicted_speedup"])

    @property
    def importance(self) -> dict[str, dict[int, float]]:
        """Acceptance with one sublayer or one layer left out, by `attention`, `MLP` or `both`, and by layer."""
        found: dict[str, dict[int, float]] = {"attention": {}, "MLP": {}, "both": {}}
        for row in self.rows:
            skipped = sorted(skip_set(row["draft"])) if row["kind"] == "skip" and "alpha" in row else []
            if len({each.layer for each in skipped}) == 1:
                left_out = "both" if len(skipped) > 1 else ("attention", "MLP")[skipped[0].part]
                found[left_out][skipped[0].layer] = row["alpha"]
        return {left_out: layers for left_out, layers in found.items() if layers}

    @property
    def exits(self) -> list[Row]:
        """Rows of plain exits, with their `layer`."""
        rows = (row for row in self.rows if row["kind"] == "exit" and "predicted_speedup" in row)
        return [{**row, "layer": int(row["draft"].removeprefix("exit:"))} for row in rows]

    @property
    def confirmed(self) -> list[Row]:
        """Rows that were both estimated and measured."""
        both = ("measured_acceptance_rate", "acceptance_rate")
        return [row for row in self.rows if all(row.get(name) is not None for name in both)]

    @property
    def shapes(self) -> list[Row]:
        """Confirmed drafts that were also generated with in trees, each shape of them and of chains; fastest first."""
        trees = {row["draft"] for row in self.rows if row.get("nodes") is not None}
        rows = [row for row in self.rows if row["draft"] in trees and row.get("measured_speedup_median") is not None]
        return sorted(rows, key=lambda row: -row["measured_speedup_median"])

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


def panels(finding: Finding) -> list[Panel]:
    """Return all panels of a study, in its order."""
    estimates = [each for each in finding.results.values() if each.point.kind == "estimate" and each.error is None]
    found = []
    for (model, workload, temperature, seed), rows in groupby(
        finding.table, lambda row: (row["model"], row["workload"], row["temperature"], row["seed"])
    ):
        place = {"model": model, "workload": workload, "temperature": temperature, "seed": seed}
        here = [each for each in estimates if place.items() <= each.point.place.items()]
        if here:
            how = f"temperature {temperature:g}" if temperature else "greedy"
            title = f"{model}, {workload}, {how}" + (f", seed {seed}" if seed else "")
            tokens = finding.results[here[0].point.content["texts"]].found["tokens"]
            right = {each.point.place["draft"]: each.found["right"] for each in here}
            found.append(Panel(title, list(rows), tokens, right))
    return found
