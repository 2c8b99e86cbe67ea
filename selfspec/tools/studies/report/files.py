"""The data of a study as files: CSV, JSONL and Parquet, with environment, versions and seeds."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

from selfspec.files.writing import whole
from selfspec.tools.studies.run import Finding
from selfspec.tools.studies.table import Row, columns

KEPT = "the study itself is kept: repeat the command once there is room"
"""The end of messages about a report that cannot be written."""


def write_data(finding: Finding, folder: Path) -> list[Path]:
    """Write the table of a study, and what it was made with.

    Args:
        finding: the study.
        folder: it is made.

    Returns:
        The files.

    Raises:
        StorageError: they cannot be written; what was there before is whole.
    """
    table = finding.table
    names = columns(table)
    about = described(finding)
    files = [
        _written(folder / "points.csv", lambda file: _csv(file, table, names)),
        _written(folder / "points.jsonl", lambda file: _jsonl(file, table)),
        _written(folder / "study.json", lambda file: file.write(json.dumps(about, indent=1) + "\n")),
    ]
    if table:
        files.append(_parquet(folder / "points.parquet", table, names, about))
    return files


def described(finding: Finding) -> dict[str, Any]:
    """Describe a study: how it was declared, with what it was made, and what failed."""
    environments = {json.dumps(dict(result.environment), sort_keys=True) for result in finding.results.values()}
    costs = [result for result in finding.results.values() if result.point.kind == "costs" and result.error is None]
    declared = finding.study.to_dict()
    # Where files lie is nobody's concern.
    declared["models"] = [Path(model).name for model in declared["models"]]
    declared["workloads"] = [_without_folder(workload) for workload in declared["workloads"]]
    return {
        "study": declared,
        "environments": [json.loads(each) for each in sorted(environments) if each != "{}"],
        "prices": {result.point.place["model"]: result.found["prices"] for result in costs},
        "points": len(finding.results),
        "seconds": sum(result.seconds for result in finding.results.values()),
        "failed": [{"point": asdict(result.point), "error": result.error} for result in finding.failed],
    }


def _without_folder(workload: str) -> str:
    name, named, place = workload.partition("=")
    return name + named + place.rpartition("/")[2]


def _written(file: Path, write: Callable[[TextIO], object]) -> Path:
    with whole(file, KEPT) as draft, draft.open("w", encoding="utf-8", newline="") as opened:
        write(opened)
    return file


def _csv(file: TextIO, table: Sequence[Row], names: Sequence[str]) -> None:
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(names)
    for row in table:
        writer.writerow(["" if (value := row.get(name)) is None else _cell(value) for name in names])


def _cell(value: Any) -> Any:
    if isinstance(value, float):
        return f"{value:.6g}"
    return (
        json.dumps([each if each is None else round(each, 6) for each in value]) if isinstance(value, list) else value
    )


def _jsonl(file: TextIO, table: Sequence[Row]) -> None:
    for row in table:
        file.write(json.dumps(row, allow_nan=False) + "\n")


def _parquet(file: Path, table: Sequence[Row], names: Sequence[str], about: dict[str, Any]) -> Path:
    import pyarrow
    from pyarrow import parquet

    data = pyarrow.Table.from_pylist([{name: row.get(name) for name in names} for row in table])
    data = data.replace_schema_metadata({"selfspec": json.dumps(about)})
    with whole(file, KEPT) as draft:
        parquet.write_table(data, draft)
    return file
