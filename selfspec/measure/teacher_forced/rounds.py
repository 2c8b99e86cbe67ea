"""What a generation of given draft length would do on a text that the model wrote: rounds, judged and accepted drafts.

Given the committed tokens, whether each of them was drafted and accepted is a separate chance: min(1, q/p) under
rejection sampling token by token, 0 or 1 greedily. So expected counts follow exactly from the text, round by round,
without drawing anything.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from selfspec.measure.teacher_forced.figures import TeacherForcedFigures

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class ExpectedRounds:
    """Expected counts of a generation.

    Attributes:
        judged: draft tokens that the target judges, by depth in the draft.
        accepted: of them, by depth.
        rounds: of each text.
        tokens: that each text commits.
    """

    judged: tuple[float, ...]
    accepted: tuple[float, ...]
    rounds: tuple[float, ...]
    tokens: int


def expected_rounds(figures: TeacherForcedFigures, draft_length: int) -> ExpectedRounds:
    """Replay a text, in rounds of up to `draft_length` tokens, at least 1."""
    chance: Floats = figures.chance.double().cpu().numpy()
    credit: Floats = figures.overlap.double().cpu().numpy()
    reach, texts, tokens = chance.shape
    begins = np.zeros((texts, tokens + 1))
    begins[:, 0] = 1.0
    judged, accepted = np.zeros(draft_length), np.zeros(draft_length)
    for start in range(tokens):
        # Of what is still wanted one token is the target's own, as in the loop.
        length = min(draft_length, tokens - start - 1)
        alive = begins[:, start]
        for position in range(length):
            copy = min(position, reach - 1)
            stands = chance[copy, :, start + position]
            judged[position] += alive.sum()
            accepted[position] += (alive * credit[copy, :, start + position]).sum()
            begins[:, start + position + 1] += alive * (1 - stands)
            alive = alive * stands
        begins[:, start + length + 1] += alive
    counted: Any = begins[:, :tokens].sum(1)
    return ExpectedRounds(tuple(judged.tolist()), tuple(accepted.tolist()), tuple(counted.tolist()), tokens)
