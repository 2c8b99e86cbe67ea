"""What a generation of given draft length would do on a text that the model wrote: rounds, judged and accepted drafts.

Given the committed tokens, whether each of them was drafted and accepted is a separate chance: min(1, q/p) under
rejection sampling token by token, 0 or 1 greedily. So expected counts follow exactly from the text, round by round,
without drawing anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from selfspec.measure.teacher_forced.figures import TeacherForcedFigures


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
    tokens: tuple[int, ...]


def expected_rounds(texts: Sequence[TeacherForcedFigures], draft_length: int) -> ExpectedRounds:
    """Replay texts, in rounds of up to `draft_length` tokens, at least 1."""
    judged, accepted = [0.0] * draft_length, [0.0] * draft_length
    rounds, counted = [], []
    for figures in texts:
        chance, credit = figures.chance.tolist(), figures.overlap.tolist()
        tokens = len(chance[0])
        begins = [1.0] + [0.0] * tokens
        for start in range(tokens):
            # Of what is still wanted one token is the target's own, as in the loop.
            length, alive = min(draft_length, tokens - start - 1), begins[start]
            for position in range(length):
                copy, place = min(position, len(chance) - 1), start + position
                judged[position] += alive
                accepted[position] += alive * credit[copy][place]
                begins[place + 1] += alive * (1 - chance[copy][place])
                alive *= chance[copy][place]
            begins[start + length + 1] += alive
        rounds.append(sum(begins[:tokens]))
        counted.append(tokens)
    return ExpectedRounds(tuple(judged), tuple(accepted), tuple(rounds), tuple(counted))
