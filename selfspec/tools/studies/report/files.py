"""The data of a study as files, with environment, versions and seeds."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from selfspec.files.writing import whole
from selfspec.tools.studies.run import Finding

KEPT = "the study itself is kept: repeat the command once there is room"
"""The end of messages about a report that cannot be written."""

_DATA = "points.parquet"


def write_data(finding: Finding, folder: Path) -> list[Path]:
    """Write the table of a study, and what it was made with."""
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
