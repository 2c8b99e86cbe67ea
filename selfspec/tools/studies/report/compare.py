"""Two studies side by side: what both have judged, matched by draft, text and settings."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from selfspec.errors import StudyError
from selfspec.tools.studies.table import Row

if TYPE_CHECKING:
    from pandas import DataFrame

DATA = "points.parquet"
_SAME = ["workload", "temperature", "seed", "draft", "rule"]
_FIGURES = [
    "draft_length",
    "alpha",
    "acceptance_rate",
    "mean_accepted_length",
    "c",
    "predicted_speedup",
    "measured_speedup_median",
]


@dataclass(frozen=True)
class SideBySide:
    """Two studies.

    Attributes:
        studies: names of both.
        rows: of what both have, each with its figures in both, as `alpha_a` and `alpha_b`.
        alone: how many rows each has alone.
    """

    studies: tuple[str, str]
    rows: tuple[Row, ...]
    alone: tuple[int, int]


def compare(first: Path, second: Path) -> SideBySide:
    """Compare two reported studies, each draft at its own best draft length.

    Several models of a study are kept apart where both have several; one model of each is compared with one.

    Raises:
        StudyError: a folder holds no study, or they have nothing in common.
    """
    a, b = _best(first), _best(second)
    one_model = a["model"].nunique() == b["model"].nunique() == 1
    same = _SAME if one_model else ["model", *_SAME]
    shared = a[[*same, *_FIGURES]].merge(b[[*same, *_FIGURES]], on=same, suffixes=("_a", "_b"))
    if shared.empty:
        raise StudyError(f"{first} and {second} have no draft, workload, temperature and seed in common")
    rows: Any = shared.astype(object).where(shared.notna(), None).to_dict("records")
    return SideBySide((first.name, second.name), tuple(rows), (len(a) - len(shared), len(b) - len(shared)))


def _best(folder: Path) -> DataFrame:
    import pandas

    try:
        table = pandas.read_parquet(folder / DATA)
        best = table[table["best_length"].eq(True)].astype({"draft_length": int})
        return best.reindex(columns=["model", *_SAME, *_FIGURES])
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise StudyError(
            f"{folder / DATA} cannot be read as a study ({' '.join(str(error).split())}); give two folders that "
            "selfspec ablate wrote"
        ) from error
