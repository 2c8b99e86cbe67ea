"""Many drafts judged on one model's texts at once, by teacher forcing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from selfspec.measure.estimate import Estimate
from selfspec.measure.teacher_forced.figures import (
    DraftPath,
    TeacherForcedFigures,
    WrittenTexts,
    teacher_forced_figures,
)
from selfspec.measure.teacher_forced.rounds import expected_rounds
from selfspec.tools.studies.drafts import NamedDraft, draft_of
from selfspec.tools.studies.models import StudiedModel
from selfspec.tools.studies.points import Point


def estimate_point(draft: NamedDraft, texts: Point, lengths: Sequence[int], reach: int) -> Point:
    """Return the point of judging one draft on some texts."""
    content = {
        "draft": draft.name,
        "draft_content": draft.content,
        "texts": texts.key,
        "draft_lengths": list(lengths),
        "reach": min(reach, max(lengths)),
    }
    return Point("estimate", content, {**texts.place, "draft": draft.name})


def estimate(studied: StudiedModel, texts: WrittenTexts, points: Sequence[Point]) -> list[dict[str, Any]]:
    """Estimate what each of some drafts would do on the same texts.

    Raises:
        SelfSpecError: a draft does not fit, or this architecture cannot be judged by teacher forcing.
    """
    drafters = [draft_of(point.content["draft"]) for point in points]
    paths = [DraftPath(drafter.path(studied.depth), drafter.head) for drafter in drafters]
    reach = max(point.content["reach"] for point in points)
    judged = teacher_forced_figures(studied.views, texts, paths, reach)
    return [_found(figures, point.content["draft_lengths"]) for point, figures in zip(points, judged, strict=True)]


def _found(figures: TeacherForcedFigures, lengths: Sequence[int]) -> dict[str, Any]:
    by_length = {}
    for length in lengths:
        expected = expected_rounds(figures, length)
        tokens = Estimate.of_ratio([float(expected.tokens)] * len(expected.rounds), expected.rounds)
        by_length[str(length)] = {
            "judged": list(expected.judged),
            "accepted": list(expected.accepted),
            "mean_accepted_length": tokens.to_dict(),
        }
    return {
        "tokens": figures.agreed[0].numel(),
        "agreement": figures.agreement,
        "alpha": figures.alpha,
        "lengths": by_length,
        # Whether each token's draft would have been its target's likeliest, at the first position of a draft.
        "right": ["".join("1" if each else "0" for each in row) for row in figures.agreed[0].tolist()],
    }
