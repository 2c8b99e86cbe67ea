"""What the pictures of a study show: its rows by model, text and temperature, and the drafts worth showing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from selfspec.tools.studies.drafts import skip_set
from selfspec.tools.studies.points import Result
from selfspec.tools.studies.run import Finding
from selfspec.tools.studies.table import Row, pareto_front

_PLACE = ("model", "workload", "temperature", "seed")


@dataclass(frozen=True)
class Panel:
    """One model on one text at one temperature.

    Attributes:
        model: what it is called.
        workload: the text's.
        temperature: 0: greedy.
        seed: of the text.
        rows: of the table.
        tokens: the texts as shown, token by token.
        right: by draft, for each text a digit for each token: 1 where the draft would have been right.
    """

    model: str
    workload: str
    temperature: float
    seed: int
    rows: Sequence[Row]
    tokens: Sequence[Sequence[str]]
    right: Mapping[str, Sequence[str]]

    @property
    def title(self) -> str:
        """The title of its pictures."""
        how = "greedy" if not self.temperature else f"temperature {self.temperature:g}"
        return f"{self.model}, {self.workload}, {how}" + (f", seed {self.seed}" if self.seed else "")

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
        return [
            {**row, "layer": int(row["draft"].removeprefix("exit:"))}
            for row in self.rows
            if row["kind"] == "exit" and row.get("predicted_speedup") is not None
        ]

    @property
    def front(self) -> list[Row]:
        """Drafts that no other beats in both acceptance and cost, cheapest first."""
        return pareto_front(self.best, lambda row: (row["c"], row["alpha"]))

    @property
    def confirmed(self) -> list[Row]:
        """Rows that were both estimated and measured."""
        both = ("measured_acceptance_rate", "acceptance_rate")
        return [row for row in self.rows if all(row.get(name) is not None for name in both)]

    def promising(self, count: int) -> list[Row]:
        """Return the most promising drafts of each kind in turns, at their best draft lengths; cheapest first."""
        by_kind: dict[str, list[Row]] = {}
        for row in self.best:
            by_kind.setdefault(row["kind"], []).append(row)
        mixed = [rows[turn] for turn in range(count) for rows in by_kind.values() if turn < len(rows)]
        return sorted(mixed[:count], key=lambda row: row["c"])

    def longest(self, count: int) -> list[Row]:
        """Return the same drafts at the longest draft length, which shows the most positions."""
        last = {row["draft"]: row for row in self.rows if row.get("acceptance_by_position")}
        return [last[row["draft"]] for row in self.promising(count)]

    def cheapest_right(self, drafts: Sequence[str], text: int) -> list[int | None]:
        """Return, for each token of a text, the first of some drafts that would have been right; None: none."""
        digits = zip(*(self.right[draft][text] for draft in drafts), strict=True)
        return [each.index("1") if "1" in each else None for each in digits]


def panels(finding: Finding) -> list[Panel]:
    """Return all panels of a study, in its order."""
    texts: dict[tuple[Any, ...], Result] = {}
    right: dict[tuple[Any, ...], dict[str, Sequence[str]]] = {}
    for result in finding.results.values():
        if result.point.kind == "estimate" and result.error is None:
            place = tuple(result.point.place[name] for name in _PLACE)
            texts[place] = finding.results[result.point.content["texts"]]
            right.setdefault(place, {})[result.point.place["draft"]] = result.found["right"]
    return [
        Panel(
            **dict(zip(_PLACE, place, strict=True)),
            rows=list(rows),
            tokens=texts[place].found["tokens"],
            right=right[place],
        )
        for place, rows in groupby(finding.table, lambda row: tuple(row[name] for name in _PLACE))
        if place in texts
    ]
