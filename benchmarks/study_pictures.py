"""Draws the pictures of kept studies again from their tables: `python benchmarks/study_pictures.py FOLDER...`."""

from __future__ import annotations

import argparse
import json
from itertools import groupby
from pathlib import Path
from typing import Any

from selfspec.tools.studies.report.panels import Panel
from selfspec.tools.studies.report.pictures import draw_all


def kept_panels(folder: Path) -> list[Panel]:
    """The panels of a study, without its texts, which are not kept."""
    import pandas

    frame = pandas.read_parquet(folder / "points.parquet")
    # By JSON: NaN, arrays and numbers of numpy become what a study has.
    table: list[dict[str, Any]] = json.loads(frame.to_json(orient="records"))
    rows = [{name: value for name, value in row.items() if value is not None} for row in table]
    found = []
    for (model, workload, temperature), here in groupby(
        rows, lambda row: (row["model"], row["workload"], row["temperature"])
    ):
        how = f"temperature {temperature:g}" if temperature else "greedy"
        found.append(Panel(f"{model}, {workload}, {how}", list(here), [], {}))
    return found


def main() -> None:
    """Draw the pictures of each folder into it."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("folders", nargs="+", type=Path)
    for folder in arguments.parse_args().folders:
        for file in draw_all(kept_panels(folder), folder):
            print(file)


if __name__ == "__main__":
    main()
