"""Two studies side by side: what both have judged, matched by draft, text and settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from selfspec.errors import StudyError
from selfspec.files.json_text import parse_json
from selfspec.tools.studies.table import Row

DATA = "points.jsonl"
_SAME = ("workload", "temperature", "seed", "draft", "rule")
_FIGURES = (
    "draft_length",
    "alpha",
    "acceptance_rate",
    "mean_accepted_length",
    "c",
    "predicted_speedup",
    "measured_speedup_median",
)


@dataclass(frozen=True)
class Comparison:
    """Two studies.

    Attributes:
        names: of both.
        rows: of what both have, each with its figures in both.
        alone: how many rows each has alone.
    """

    names: tuple[str, str]
    rows: tuple[Row, ...]
    alone: tuple[int, int]

    def to_dict(self) -> dict[str, Any]:
        """Return everything, ready for JSON."""
        return {"studies": list(self.names), "rows": list(self.rows), "alone": list(self.alone)}


def compare(first: Path, second: Path) -> Comparison:
    """Compare two reported studies, each draft at its own best draft length.

    Several models of a study are kept apart where both have several; one model of each is compared with one.

    Args:
        first: folder of a study.
        second: folder of another.

    Raises:
        StudyError: a folder holds no study, or they have nothing in common.
    """
    tables = _best(first), _best(second)
    one_model = all(len({row["model"] for row in table}) == 1 for table in tables)
    names = _SAME if one_model else ("model", *_SAME)
    one, other = ({tuple(row[name] for name in names): row for row in table} for table in tables)
    shared = [key for key in one if key in other]
    if not shared:
        raise StudyError(f"{first} and {second} have no draft, workload, temperature and seed in common")
    rows = tuple(_side_by_side(dict(zip(names, key, strict=True)), one[key], other[key]) for key in shared)
    return Comparison((first.name, second.name), rows, (len(one) - len(shared), len(other) - len(shared)))


def _side_by_side(place: Row, one: Mapping[str, Any], other: Mapping[str, Any]) -> Row:
    sides = {"a": one, "b": other}
    return {**place, **{f"{name}_{side}": row.get(name) for name in _FIGURES for side, row in sides.items()}}


def _best(folder: Path) -> list[Row]:
    file = folder / DATA
    try:
        rows = [parse_json(line) for line in file.read_text(encoding="utf-8").splitlines()]
        return [row for row in rows if row.get("best_length")]
    except (OSError, ValueError, AttributeError) as error:
        raise StudyError(
            f"{file} cannot be read as a study ({error}); give two folders that selfspec ablate wrote"
        ) from error
