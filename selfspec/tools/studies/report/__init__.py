"""The report of a study: data files, pictures for print, and one HTML page."""

from __future__ import annotations

from pathlib import Path

from selfspec.tools.studies.report.files import write_data
from selfspec.tools.studies.report.page import write_page
from selfspec.tools.studies.report.panels import panels
from selfspec.tools.studies.report.pictures import draw_all
from selfspec.tools.studies.run import Finding


def write_report(finding: Finding, folder: Path) -> list[Path]:
    """Write everything there is to see of a study into a folder, and return the files.

    Raises:
        StorageError: there is no room, or no right to write; the study itself is kept.
    """
    shown = panels(finding)
    data, pictures = write_data(finding, folder), draw_all(shown, folder)
    return [*data, *pictures, write_page(finding, shown, pictures, folder / "report.html")]
