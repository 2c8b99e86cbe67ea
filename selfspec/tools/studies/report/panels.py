"""What the pictures of a study show: its rows by model, text and temperature, and the drafts worth showing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from selfspec.model.layer_path import Part, Sublayer
from selfspec.tools.studies.drafts import skip_set
from selfspec.tools.studies.points import Result
from selfspec.tools.studies.run import Finding
from selfspec.tools.studies.skip_sets import SkipSet
from selfspec.tools.studies.table import Row


@dataclass(frozen=True)
class Panel:
    """One model on one text at one temperature.

    Attributes:
        model: what it is called.
        workload: the text's.
        temperature: 0: greedily.
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
        """Every draft at its best draft length, as far as that is known."""
        return [row for row in self.rows if row.get("best_length")]

    @property
    def single(self) -> dict[Sublayer, float]:
        """Acceptance with one sublayer left out, by sublayer."""
        return {next(iter(skipped)): alpha for skipped, alpha in self._skip_sets().items() if len(skipped) == 1}

    @property
    def whole_layers(self) -> dict[int, float]:
        """Acceptance with one layer left out whole, by layer."""
        return {
            next(iter(skipped)).layer: alpha
            for skipped, alpha in self._skip_sets().items()
            if len(skipped) == len(Part) and len({each.layer for each in skipped}) == 1
        }

    @property
    def exits(self) -> dict[tuple[int, int], Row]:
        """Rows of plain exits, by exit layer and draft length."""
        return {
            (int(row["draft"].partition(":")[2]), row["draft_length"]): row
            for row in self.rows
            if row["kind"] == "exit" and row.get("predicted_speedup") is not None
        }

    @property
    def front(self) -> list[Row]:
        """Drafts that no other beats in both acceptance and cost, cheapest first."""
        front: list[Row] = []
        for row in sorted(self.best, key=lambda row: (row["c"], -row["alpha"])):
            if not front or row["alpha"] > front[-1]["alpha"]:
                front.append(row)
        return front

    @property
    def confirmed(self) -> list[Row]:
        """Rows that were both estimated and measured."""
        return [
            row
            for row in self.rows
            if row.get("measured_acceptance_rate") is not None and row.get("acceptance_rate") is not None
        ]

    def promising(self, count: int) -> list[Row]:
        """Return the most promising drafts of each kind in turns, at their best draft lengths; cheapest first."""
        by_kind: dict[str, list[Row]] = {}
        for row in sorted(self.best, key=lambda row: -row["predicted_speedup"]):
            by_kind.setdefault(row["kind"], []).append(row)
        mixed = [rows[turn] for turn in range(count) for rows in by_kind.values() if turn < len(rows)]
        return sorted(mixed[:count], key=lambda row: row["c"])

    def longest(self, count: int) -> list[Row]:
        """Return the same drafts at the longest draft length, which shows the most positions."""
        last = {row["draft"]: row for row in self.rows if row.get("acceptance_by_position")}
        return [last[row["draft"]] for row in self.promising(count)]

    def _skip_sets(self) -> dict[SkipSet, float]:
        """Return acceptance at the first position, by skip set."""
        return {skip_set(row["draft"]): row["alpha"] for row in self.rows if row["kind"] == "skip" and "alpha" in row}


def panels(finding: Finding) -> list[Panel]:
    """Return all panels of a study, in its order."""
    grouped: dict[tuple[Any, ...], list[Row]] = {}
    for row in finding.table:
        grouped.setdefault(tuple(row[name] for name in _PLACE), []).append(row)
    texts: dict[tuple[Any, ...], Result] = {}
    right: dict[tuple[Any, ...], dict[str, Sequence[str]]] = {}
    for result in finding.results.values():
        if result.point.kind == "estimate" and result.error is None:
            place = tuple(result.point.place[name] for name in _PLACE)
            texts[place] = finding.results[result.point.content["texts"]]
            right.setdefault(place, {})[result.point.place["draft"]] = result.found["right"]
    return [
        Panel(
            **dict(zip(_PLACE, place, strict=True)), rows=rows, tokens=texts[place].found["tokens"], right=right[place]
        )
        for place, rows in grouped.items()
        if place in texts
    ]


_PLACE = ("model", "workload", "temperature", "seed")


def cheapest_right(panel: Panel, drafts: Sequence[str], text: int) -> list[int | None]:
    """Return, for each token of a text, the first of some drafts that would have been right; None: none of them."""
    digits = zip(*(panel.right[draft][text] for draft in drafts), strict=True)
    return [each.index("1") if "1" in each else None for each in digits]
