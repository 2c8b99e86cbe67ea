"""A search for the skip set that promises the highest speed.

Skip sets by similarity first, then by small changes of the best ones known. Sets are estimated as in a study:
acceptance by teacher forcing, cost by price, speed by both.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

from selfspec.draft import LayerSkip
from selfspec.draft.named import parse_draft
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
# Neighbours evaluated at once, best sets that they are near, and how many are two changes away rather than one.
_BATCH, _BEST, _TWICE = 8, 4, 0.3
# Neighbours drawn for a batch, and batches without a new set before the search counts as exhausted.
_TRIES, _PATIENCE = 128, 8


def evaluate(board: Board, study: Study, studied: StudiedModel, sets: Sequence[SkipSet]) -> list[Row]:
    """Estimate skip sets as a study does; return their rows of its table at their best draft lengths."""
    found = _found(board, study, studied, sets)
    best = {skip_set(row["draft"]): row for row in rows(found) if row["best_length"]}
    return [best[each] for each in sets]


def _found(board: Board, study: Study, studied: StudiedModel, sets: Sequence[SkipSet]) -> Mapping[str, Result]:
    found = find_out(board, study, studied, dict.fromkeys(map(skip_name, sets), ""))
    for result in found.values():
        if result.error is not None:
            raise StudyError(f"{result.error}; this is kept: repeat the search in another place once it is mended")
    return found


def search(
    studied: StudiedModel,
    study: Study,
    space: Space,
    evaluations: int,
    seed: int = 0,
    place: str | Path | None = None,
    told: Callable[[int, int], None] = lambda done, known: None,
) -> list[Row]:
    """Search for the skip set of a model that promises the highest speed on texts that it writes itself.

    Repeated in the same place it takes the same way, and does only what is not known yet.

    Args:
        studied: the model and its prompts; those of the first workload are used.
        study: texts, temperature and seed (one of each), draft lengths, reach and pricing.
        space: sets that may be chosen.
        evaluations: skip sets to evaluate, in all.
        seed: of small changes.
        place: folder where the search is kept, to be continued or joined by others; None: nowhere.
        told: how many sets have been evaluated, of how many.

    Returns:
        All sets evaluated, in order: their rows of a study's table at their best draft lengths, with the `method` that
        proposed each.

    Raises:
        StorageError: the folder cannot be used; what was evaluated is kept there.
        StudyError: a set cannot be judged.
    """
    study = replace(study, confirm=0)
    studied = replace(studied, prompts=dict([next(iter(studied.prompts.items()))]))
    draws = Random(seed)
    scores: dict[SkipSet, Row] = {}

    def add(method: str, sets: Sequence[SkipSet]) -> None:
        new = sets[: evaluations - len(scores)]
        for skipped, row in zip(new, evaluate(board, study, studied, new), strict=True):
            scores[skipped] = {**row, "method": method}
        told(len(scores), evaluations)

    with tempfile.TemporaryDirectory() as nowhere:
        board = Board(place or nowhere)
        add("similarity", _by_similarity(board, study, studied, space)[: max(1, evaluations // 2)])
        in_vain = 0
        while len(scores) < evaluations and in_vain < _PATIENCE:
            new = _neighbours(scores, space, draws, _BEST * (1 + in_vain))
            in_vain = 0 if new else in_vain + 1
            add("neighbour", new)
    return list(scores.values())


def save(best: Row, studied: StudiedModel, file: Path, about: Mapping[str, Any]) -> None:
    """Write a set that was found, bound to the model's weights, and how it was found."""
    skip = parse_draft(best["draft"])
    assert isinstance(skip, LayerSkip)
    known = {"promises": best, "found": dict(about), "environment": environment(studied.model.device)}
    write_skip_file(skip, fingerprint(studied.model), file, known)


def speed(row: Row) -> float:
    """Return the speed-up that a set promises."""
    return float(row["predicted_speedup"])


def _by_similarity(board: Board, study: Study, studied: StudiedModel, space: Space) -> list[SkipSet]:
    """Find sets by dynamic programming: the best one of each size first, then the second best ones."""
    known = {result.point.kind: result for result in _found(board, study, studied, []).values()}
    texts, prices = texts_of(known["texts"], studied.model.device), Prices.of(known["costs"])
    text = TeacherForcedText(studied.views, texts.ids[:_TEXTS, : texts.first + _TOKENS], texts.first)
    by_size: dict[int, list[SkipSet]] = {}
    for each in sets_by_similarity(text, space, prices, _WIDTH):
        by_size.setdefault(len(each), []).append(each)
    ranks = range(max(map(len, by_size.values()), default=0))
    return [by_size[size][rank] for rank in ranks for size in sorted(by_size) if rank < len(by_size[size])]


def _neighbours(scores: Mapping[SkipSet, Row], space: Space, draws: Random, count: int) -> list[SkipSet]:
    """Draw new sets, each one or two changes away from one of the best ones."""
    best = sorted(scores, key=lambda skipped: -speed(scores[skipped]))[:count]
    found: dict[SkipSet, None] = {}
    for _ in range(_TRIES):
        near = space.near(draws.choice(best), draws) if best else next(space.random(draws.getrandbits(32)))
        if draws.random() < _TWICE:
            near = space.near(near, draws)
        if near not in scores and len(found) < _BATCH:
            found[near] = None
    return list(found)
