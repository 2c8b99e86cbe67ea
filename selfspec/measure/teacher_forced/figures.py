"""How often a draft would be right, token by token of a text, at every position of a draft."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from selfspec.measure.teacher_forced.passes import LayerViews, TeacherForcedText
from selfspec.measure.teacher_forced.paths import DraftPath, readings

# Tokens of one pass, copies included.
_MOST_TOKENS = 4096


@dataclass(frozen=True)
class TeacherForcedFigures:
    """One draft over some texts. All tensors are `[reach, texts, tokens]`: token n as the k-th of its draft.

    Attributes:
        agreed: whether draft and target have the same likeliest token.
        overlap: 1 - TV(p, q), the chance that rejection sampling accepts a token drawn there.
        chance: min(1, q / p) at the text's own token x: the chance that x, being what was committed, had been drafted
            and accepted. Greedily all three are `agreed`.
    """

    agreed: Tensor
    overlap: Tensor
    chance: Tensor

    @property
    def reach(self) -> int:
        """Positions of a draft that are told apart."""
        return self.agreed.shape[0]

    @property
    def agreement(self) -> float:
        """Top-1 agreement at the first position of a draft."""
        return float(self.agreed[0].mean())

    @property
    def alpha(self) -> float:
        """Mean of 1 - TV at the first position of a draft (Leviathan et al., 2023); greedily, the agreement."""
        return float(self.overlap[0].mean())

    @classmethod
    def together(cls, parts: Sequence[TeacherForcedFigures]) -> TeacherForcedFigures:
        """Join several texts into one."""
        return cls(*(torch.cat([getattr(part, each.name) for part in parts], 1) for each in fields(cls)))


@dataclass(frozen=True)
class WrittenTexts:
    """Texts that a model wrote itself, on which its drafts are judged.

    Attributes:
        ids: `[texts, tokens]`.
        first: the first token that is drafted.
        temperature: at which they were written, and at which p and q are compared; 0: greedily.
    """

    ids: Tensor
    first: int
    temperature: float


def teacher_forced_figures(
    views: LayerViews, texts: WrittenTexts, paths: Sequence[DraftPath], reach: int = 1
) -> list[TeacherForcedFigures]:
    """Judge many draft paths by teacher forcing, without generating anything.

    On text that the model wrote itself, what a generation would accept follows exactly: see `rounds` beside this.
    `reach` positions of a draft are told apart; further ones are taken to be like the last of them.

    Raises:
        UnsupportedModelError: this architecture cannot be read so.
    """
    rows = max(1, _MOST_TOKENS // (reach * texts.ids.shape[1]))
    parts: list[list[TeacherForcedFigures]] = [[] for _ in paths]
    for number, ids in enumerate(texts.ids.split(rows)):
        text = TeacherForcedText(views, ids, texts.first, reach)
        if number == 0:
            text.check()
        judge = _Judge(text.logits, ids[:, texts.first :], texts.temperature)
        for path, logits in readings(text, paths):
            parts[path].append(judge.figures(logits))
    return [TeacherForcedFigures.together(each) for each in parts]


class _Judge:
    """Compares drafts with the target's logits, `[texts, tokens, vocab]`, on some texts, `[texts, tokens]`."""

    def __init__(self, logits: Tensor, tokens: Tensor, temperature: float) -> None:
        self._likeliest = logits.argmax(-1)
        self._temperature = temperature
        self._tokens = tokens[..., None]
        self._p = (logits.float() / temperature).softmax(-1) if temperature else None

    def figures(self, logits: Tensor) -> TeacherForcedFigures:
        """Compare a draft's logits, `[reach, texts, tokens, vocab]`."""
        agreed = (logits.argmax(-1) == self._likeliest).float()
        if self._p is None:
            return TeacherForcedFigures(agreed, agreed, agreed)
        q = (logits.float() / self._temperature).softmax(-1)
        overlap = torch.stack([torch.minimum(self._p, each).sum(-1) for each in q])
        p_there = self._p.gather(-1, self._tokens)[..., 0]
        q_there = torch.stack([each.gather(-1, self._tokens)[..., 0] for each in q])
        return TeacherForcedFigures(agreed, overlap, (q_there / p_there).clamp(max=1.0))
