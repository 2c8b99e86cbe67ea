"""Drafting out of predictions: what the caller expects of a text, from the place on that the text has reached in it."""

from __future__ import annotations

from dataclasses import dataclass

from selfspec.draft.draft import Budget, Draft
from selfspec.draft.drafter import PREDICTED, Drafter, FreeProposer
from selfspec.draft.prediction import LONGEST
from selfspec.draft.rows_view import RowsView, chains


@dataclass(frozen=True)
class Predicted(Drafter):
    """Drafts chains out of rows' predictions, as in OpenAI's predicted outputs; rows without one have no draft.

    Nothing is drawn, so q is one-hot. `generate(..., prediction=...)` puts it before the drafters of the wrapper. Its
    drafts may be longer than others, up to 64 tokens where the control lets them and the cache has slots.
    """

    def begin(self, rows: RowsView) -> PredictionProposer:
        return PredictionProposer()


class PredictionProposer(FreeProposer):
    """Copies from predictions, which learn from a round by themselves: a batch may have several such proposers."""

    def look_up(self, rows: RowsView, budget: Budget) -> Draft:
        """Propose a chain; none if no unfinished row is in its prediction, or too few rows are for it to pay."""
        found: list[list[int]] = []
        for row in rows.running:
            prediction = rows.prediction(row) if row in rows.unfinished else None
            found.append([] if prediction is None else prediction.following(rows.remaining(row) - 1))
        if not any(found):
            return rows.no_draft()
        numbered = list(zip(rows.running, found, strict=True))
        paced = [bool(tokens) for row, tokens in numbered if row in rows.pacing]
        most = rows.controller.predicted_length(sum(paced) / len(paced), min(LONGEST, rows.draft_slots))
        for row, tokens in numbered:
            del tokens[most:]
            prediction = rows.prediction(row)
            if prediction is not None:
                prediction.propose(tokens)
        return chains(rows, found, match_length=PREDICTED)
