"""The data of a study as files, with environment, versions and seeds; and two studies side by side."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from selfspec.errors import StudyError
from selfspec.files.writing import whole
from selfspec.tools.studies.run import Finding
from selfspec.tools.studies.table import SPEEDS, Row

KEPT = "the study itself is kept: repeat the command once there is room"
"""The end of messages about a report that cannot be written."""

_DATA = "points.parquet"
_SAME = ["workload", "temperature", "seed", "draft", "rule"]
_FIGURES = ["draft_length", "alpha", "acceptance_rate", "mean_accepted_length", "c", *SPEEDS]


def write_data(finding: Finding, folder: Path) -> list[Path]:
    """Write the table of a study, and what it was made with.

    Raises:
        StorageError: they cannot be written; what was there before is whole.
    """
    import pandas
    import pyarrow
    from pyarrow import parquet

    table, about = finding.table, json.dumps(described(finding), indent=1)
    frame = pandas.DataFrame(table)
    lists_as_json = frame.map(lambda value: json.dumps(value) if isinstance(value, list) else value)
    texts = {
        "points.csv": lists_as_json.to_csv(index=False, float_format="%.6g", lineterminator="\n"),
        "points.jsonl": "".join(json.dumps(row, allow_nan=False) + "\n" for row in table),
        "study.json": about + "\n",
    }
    for name, text in texts.items():
        with whole(folder / name, KEPT) as draft:
            draft.write_text(text, encoding="utf-8", newline="")
    data = pyarrow.Table.from_pandas(frame, preserve_index=False).replace_schema_metadata({"selfspec": about})
    with whole(folder / _DATA, KEPT) as draft:
        parquet.write_table(data, draft)
    return [folder / name for name in (*texts, _DATA)]


def described(finding: Finding) -> dict[str, Any]:
    """Describe a study, ready for JSON: how it was declared, with what it was made, and what failed."""
    results = finding.results.values()
    environments = {json.dumps(dict(result.environment), sort_keys=True) for result in results if result.environment}
    costs = [result for result in results if result.point.kind == "costs" and result.error is None]
    declared = asdict(finding.study)
    # Where files lie is nobody's concern.
    declared["models"] = [Path(model).name for model in declared["models"]]
    workloads = [each.partition("=") for each in declared["workloads"]]
    declared["workloads"] = [name + named + place.rpartition("/")[2] for name, named, place in workloads]
    return {
        "study": declared,
        "environments": [json.loads(each) for each in sorted(environments)],
        "prices": {result.point.place["model"]: result.found["prices"] for result in costs},
        "points": len(results),
        "seconds": sum(result.seconds for result in results),
        "failed": [{"point": asdict(result.point), "error": result.error} for result in finding.failed],
    }


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
    rows = shared.astype(object).where(shared.notna(), None).to_dict("records")
    return SideBySide((first.name, second.name), tuple(rows), (len(a) - len(shared), len(b) - len(shared)))


def _best(folder: Path) -> Any:
    import pandas

    try:
        table = pandas.read_parquet(folder / _DATA)
        best = table[table["best_length"].eq(True)].astype({"draft_length": int})
        return best.reindex(columns=["model", *_SAME, *_FIGURES])
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise StudyError(
            f"{folder / _DATA} cannot be read as a study ({' '.join(str(error).split())}); give two folders that "
            "selfspec ablate wrote"
        ) from error
