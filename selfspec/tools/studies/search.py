"""A search for the skip set that promises the highest speed.

Skip sets are proposed by similarity of hidden states, and estimated as in a study: acceptance by teacher forcing, cost
by price, speed by both.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from selfspec.draft import LayerSkip
from selfspec.draft.registry import parse_draft
from selfspec.draft.skip_file import write_skip_file
from selfspec.environment import environment
from selfspec.errors import StudyError
from selfspec.measure.teacher_forced.passes import TeacherForcedText
from selfspec.model.fingerprint import fingerprint
from selfspec.tools.studies.board import Board
from selfspec.tools.studies.drafts import SkipSet, Space, skip_name, skip_set
from selfspec.tools.studies.models import StudiedModel, texts_of
from selfspec.tools.studies.points import Result
from selfspec.tools.studies.prices import Prices
from selfspec.tools.studies.run import find_out
from selfspec.tools.studies.similarity import sets_by_similarity
from selfspec.tools.studies.study import Study
from selfspec.tools.studies.table import Row, rows

# Ways that dynamic programming keeps for each amount of cost saved.
_WIDTH = 6
# Texts, and drafted tokens of each, that states are compared on; a few tell as much as many.
_TEXTS, _TOKENS = 2, 32


def evaluate(
    board: Board,
    study: Study,
    studied: StudiedModel,
    sets: Sequence[SkipSet],
    progress: Callable[[int, int], None] = lambda done, known: None,
) -> list[Row]:
    """Estimate skip sets as a study does; return their rows of its table at their best draft lengths."""
    found = _found(board, study, studied, sets, progress)
    best = {skip_set(row["draft"]): row for row in rows(found) if row["best_length"]}
    return [best[each] for each in sets]


def _found(
    board: Board, study: Study, studied: StudiedModel, sets: Sequence[SkipSet], progress: Callable[[int, int], None]
) -> Mapping[str, Result]:
    found = find_out(board, study, studied, dict.fromkeys(map(skip_name, sets), ""), progress)
    for result in found.values():
        if result.error is not None:
            raise StudyError(f"{result.error}; this is kept: repeat the search in another place once it is mended")
    return found


def search(
    studied: StudiedModel,
    study: Study,
    space: Space,
    evaluations: int,
    place: str | Path | None = None,
    progress: Callable[[int, int], None] = lambda done, known: None,
) -> list[Row]:
    """Search for the skip set of a model that promises the highest speed on texts that it writes itself.

    Repeated in the same place it does only what is not known yet. Prompts are those of the first workload; the study
    has one temperature and seed.

    Args:
        studied: the model and its prompts.
        study: texts, draft lengths, reach and pricing.
        space: sets that may be chosen.
        evaluations: the most skip sets to evaluate.
        place: folder where the search is kept, to be continued or joined by others; None: nowhere.
        progress: called with the points done, and all points.

    Returns:
        All sets evaluated, in order: their rows of a study's table at their best draft lengths.
    """
    study = replace(study, confirm=0)
    studied = replace(studied, prompts=dict([next(iter(studied.prompts.items()))]))
    with tempfile.TemporaryDirectory() as nowhere:
        board = Board(place or nowhere)
        known = {each.point.kind: each for each in _found(board, study, studied, [], progress).values()}
        texts, prices = texts_of(known["texts"], studied.model.device), Prices.of(known["costs"])
        text = TeacherForcedText(studied.views, texts.ids[:_TEXTS, : texts.first + _TOKENS], texts.first)
        sets = sets_by_similarity(text, space, prices, _WIDTH)
        return evaluate(board, study, studied, _each_size_in_turn(sets)[:evaluations], progress)


def save(best: Row, studied: StudiedModel, file: Path, about: Mapping[str, Any]) -> None:
    """Write a set that was found, bound to the model's weights, and how it was found."""
    skip = parse_draft(best["draft"])
    assert isinstance(skip, LayerSkip)
    known = {"promises": best, "found": dict(about), "environment": environment(studied.model.device)}
    write_skip_file(skip, fingerprint(studied.model), file, known)


def speed(row: Row) -> float:
    """Return the speed-up that a set promises."""
    return float(row["predicted_speedup"])


def _each_size_in_turn(sets: Sequence[SkipSet]) -> list[SkipSet]:
    """Order sets, the best of their size first, as the best ones of each size, then the second best ones, and so on."""
    by_size: dict[int, list[SkipSet]] = {}
    for each in sets:
        by_size.setdefault(len(each), []).append(each)
    ranks = range(max(map(len, by_size.values()), default=0))
    return [by_size[size][rank] for rank in ranks for size in sorted(by_size) if rank < len(by_size[size])]
