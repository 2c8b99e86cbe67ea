"""Many drafts judged on one workload at once, by teacher forcing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple
from typing import Any

from selfspec.measure.forced_figures import ForcedFigures, Texts, forced_figures
from selfspec.measure.prefix_tree import Candidate
from selfspec.measure.rounds import expected_rounds
from selfspec.tools.studies.drafts import NamedDraft, draft_of
from selfspec.tools.studies.intervals import ratio
from selfspec.tools.studies.point import Point
from selfspec.tools.studies.subject import Subject


def estimate_point(draft: NamedDraft, texts: Point, lengths: Sequence[int], reach: int) -> Point:
    """The point of judging one draft on some texts."""
    content = {
        "draft": draft.name,
        "draft_content": draft.content,
        "texts": texts.key,
        "draft_lengths": list(lengths),
        "reach": min(reach, max(lengths)),
    }
    place = {**texts.place, "temperature": texts.content["temperature"], "draft": draft.name}
    return Point("estimate", content, place)


def estimate(subject: Subject, texts: Texts, points: Sequence[Point]) -> list[dict[str, Any]]:
    """What each of some drafts would do on the same texts.

    Raises:
        SelfSpecError: a draft does not fit, or this architecture cannot be judged so.
    """
    drafters = [draft_of(point.content["draft"]) for point in points]
    candidates = [Candidate(drafter.path(subject.depth), drafter.head) for drafter in drafters]
    reach = max(point.content["reach"] for point in points)
    judged = forced_figures(subject.views, texts, candidates, reach)
    return [_found(figures, point.content["draft_lengths"]) for point, figures in zip(points, judged, strict=True)]


def _found(figures: ForcedFigures, lengths: Sequence[int]) -> dict[str, Any]:
    replays = {length: expected_rounds(figures, length) for length in lengths}
    tokens = figures.agreed[0].numel()
    return {
        "tokens": tokens,
        "agreement": figures.agreement,
        "alpha": figures.alpha,
        "lengths": {
            str(length): {
                "judged": list(replay.judged),
                "accepted": list(replay.accepted),
                "acceptance_rate": replay.acceptance_rate,
                "mean_accepted_length": list(
                    astuple(ratio([float(replay.tokens)] * len(replay.rounds), replay.rounds))
                ),
            }
            for length, replay in replays.items()
        },
        # Whether each token's draft would have been its target's likeliest, at the first position of a draft.
        "right": ["".join("1" if each else "0" for each in row) for row in figures.agreed[0].tolist()],
    }
