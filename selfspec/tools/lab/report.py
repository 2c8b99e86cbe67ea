"""One report for all that the lab measures: the same parts as a page of Markdown and as one of HTML, and as tables."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping, Sequence
from html import escape
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from selfspec.errors import BenchError
from selfspec.files.writing import whole

KEPT = "what was measured is kept: make room and repeat the command"
"""What messages say of a report that cannot be written."""

MARKDOWN, PAGE = "report.md", "report.html"

_SPECIAL = re.compile(r"[\\`*\[\]<>|~&#$]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])")
# What makes a list of a line that begins with it.
_BEGINNING = re.compile(r"^(\d*)([-+.)])(?= )")
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 1100px; padding: 0 1em; color: #222 }
table { border-collapse: collapse; font-size: 13px; margin: 1em 0 } th, td { padding: .2em .7em; text-align: right }
th:first-child, td:first-child { text-align: left } tr:nth-child(even) { background: #f4f4f4 } img { max-width: 100% }
pre.text { font: 13px/1.6 ui-monospace, monospace; white-space: pre-wrap; border: 1px solid #ddd; padding: .7em }
span.key { padding: .1em .5em; margin-right: .5em } h2 { margin-top: 2em }
"""


def require_packages() -> None:
    """Refuse before work starts what could not be reported."""
    missing = [name for name in ("matplotlib", "pandas", "pyarrow") if find_spec(name) is None]
    if missing:
        raise BenchError(f"reports need {' and '.join(missing)}; pip install 'selfspec[bench]'")


class Report:
    """A page, part by part. Texts are shown as they are, whatever they hold."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._markdown = [f"# {escaped(title)}"]
        self._html = [f"<h1>{escape(title)}</h1>"]

    def heading(self, text: str) -> None:
        """Begin a section."""
        self._add(f"## {escaped(text)}", f"<h2>{escape(text)}</h2>")

    def paragraph(self, text: str) -> None:
        """Add a sentence or several; none, if there are none."""
        if text:
            self._add(escaped(text), f"<p>{escape(text)}</p>")

    def points(self, lines: Sequence[str]) -> None:
        """Add a list; none of no lines."""
        if lines:
            items = "".join(f"<li>{escape(line)}</li>" for line in lines)
            self._add("\n".join(f"- {escaped(line)}" for line in lines), f"<ul>{items}</ul>")

    def table(self, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Add a table; none without rows."""
        if rows:
            cells = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
            names = "".join(f"<th>{escape(name)}</th>" for name in head)
            self._add(markdown_table(head, rows), f"<table><tr>{names}</tr>{cells}</table>")

    def picture(self, file: Path) -> None:
        """Add a picture that lies beside the page; the page of HTML holds it."""
        data = base64.b64encode(file.with_suffix(".svg").read_bytes()).decode()
        name = escape(file.stem.replace("_", " "))
        self._add(f"![{file.stem}]({file.name})", f'<img alt="{name}" src="data:image/svg+xml;base64,{data}">')

    def coloured(self, html: str) -> None:
        """Add what only HTML can show."""
        self._html.append(html)

    @property
    def markdown(self) -> str:
        """The page as Markdown."""
        return "\n\n".join(self._markdown) + "\n"

    @property
    def html(self) -> str:
        """The page as HTML, which needs nothing else."""
        head = f"<meta charset=utf-8><title>{escape(self._title)}</title><style>{_STYLE}</style>"
        return f"<!doctype html><html lang=en>{head}<body>{''.join(self._html)}</body></html>\n"

    def write(self, folder: Path) -> list[Path]:
        """Write both pages into a folder.

        Raises:
            StorageError: they cannot be written.
        """
        for name, text in ((MARKDOWN, self.markdown), (PAGE, self.html)):
            with whole(folder / name, KEPT) as draft:
                draft.write_text(text, encoding="utf-8")
        return [folder / MARKDOWN, folder / PAGE]

    def _add(self, markdown: str, html: str) -> None:
        self._markdown.append(markdown)
        self._html.append(html)


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table of texts as Markdown, whatever they hold."""
    lines = [list(map(escaped, head)), ["---"] * len(head), *(map(escaped, row) for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def escaped(text: str) -> str:
    """A text as Markdown that shows it, in one line: no markup, no HTML, no end of a table's cell."""
    line = "".join(letter if letter.isprintable() else "\ufffd" for letter in " ".join(text.split()))
    return _BEGINNING.sub(r"\1\\\2", _SPECIAL.sub(r"\\\g<0>", line))


def write_data(table: Sequence[Mapping[str, Any]], about: Mapping[str, Any], folder: Path, name: str) -> list[Path]:
    """Write rows as CSV and as Parquet, which holds what they were made with, too.

    Raises:
        StorageError: they cannot be written.
    """
    import pandas
    import pyarrow
    from pyarrow import parquet

    frame = pandas.DataFrame(list(table))
    lists_as_json = frame.map(lambda value: json.dumps(value) if isinstance(value, list) else value)
    with whole(folder / f"{name}.csv", KEPT) as draft:
        draft.write_text(lists_as_json.to_csv(index=False, float_format="%.6g", lineterminator="\n"), encoding="utf-8")
    data = pyarrow.Table.from_pandas(frame, preserve_index=False)
    with whole(folder / f"{name}.parquet", KEPT) as draft:
        parquet.write_table(data.replace_schema_metadata({"selfspec": json.dumps(about)}), draft)
    return [folder / f"{name}.csv", folder / f"{name}.parquet"]
