"""The results of all stages in one page of Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from device.results import CaseRecord, StageRecord
from device.stage import Stage

_SHOWN = ("device", "driver", "cuda", "torch", "transformers", "selfspec", "commit", "python", "processor", "dtype")

# That are named with a reason.
_MOST_PLACES = 3


def summary(stages: Sequence[Stage], records: Mapping[str, StageRecord]) -> str:
    """Return a page: what it ran on, a table for each stage, and what did not work.

    Args:
        stages: all there are.
        records: of those that have results.
    """
    cases = [case for record in records.values() for case in record.cases.values()]
    lines = ["# On a device", "", *_environments(cases)]
    if any(record.settings.miniature for record in records.values()):
        lines += ["", "In miniature: that it runs is all that these figures show."]
    lines += ["", "Medians, with their intervals in brackets. `selfspec.measure` says what c, V and o are."]
    for stage in stages:
        record = records.get(stage.name)
        lines += ["", f"## {stage.name}", "", f"{stage.about}."]
        if record is None:
            lines += ["", "Not run."]
            continue
        left = sorted(record.begun.keys() - record.cases.keys())
        if left:
            lines += ["", f"Not ended: {', '.join(left)}."]
        lines += ["", *_table(record)]
    lines += ["", "## What did not work", "", *(list(_reasons(records)) or ["Nothing."])]
    return "\n".join(lines) + "\n"


def _environments(cases: Sequence[CaseRecord]) -> Iterator[str]:
    distinct = {tuple((name, case.environment.get(name)) for name in _SHOWN) for case in cases}
    for environment in sorted(distinct, key=str):
        yield "- " + ", ".join(f"{name} {value}" for name, value in environment if value is not None)


def _table(record: StageRecord) -> Iterator[str]:
    rows = {
        (f"{case}: {row}" if row else case): figures
        for case, found in record.cases.items()
        for row, figures in (found.rows or {"": {}}).items()
    }
    columns = list(dict.fromkeys(name for figures in rows.values() for name in figures))
    yield f"| case | {' | '.join(columns)} |"
    yield "|---" * (len(columns) + 1) + "|"
    for row, figures in rows.items():
        cells = [figures[name].shown if name in figures else "" for name in columns]
        yield f"| {' | '.join(map(_escaped, (row, *cells)))} |"


def _reasons(records: Mapping[str, StageRecord]) -> Iterator[str]:
    """Return each reason once for a stage, with the first places that have it; failures first."""
    places: dict[tuple[bool, str, str], list[str]] = {}
    for stage, record in records.items():
        for case, found in record.cases.items():
            named = {} if found.reason is None else {case: found.reason}
            for row, figures in found.rows.items():
                named |= {", ".join(filter(None, (case, row, name))): each for name, each in figures.items()}
            for place, figure in named.items():
                if figure.failed is not None or figure.cannot is not None:
                    key = figure.failed is None, stage, figure.failed or figure.cannot or ""
                    places.setdefault(key, []).append(place)
    for (cannot, stage, reason), where in sorted(places.items(), key=lambda item: item[0][0]):
        more = f"; and {len(where) - _MOST_PLACES} more" if len(where) > _MOST_PLACES else ""
        yield f"- {'cannot' if cannot else '**failed**'}: {stage}: {reason} ({'; '.join(where[:_MOST_PLACES])}{more})"


def _escaped(text: str) -> str:
    return text.replace("|", "\\|")
