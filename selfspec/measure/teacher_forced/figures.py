"""How often many drafts would be right, token by token of a text: what their paths begin alike is computed once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import groupby

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from selfspec.errors import UnsupportedOptionError
from selfspec.measure.own_text import Continuation
from selfspec.measure.teacher_forced.passes import WHOLE, LayerViews, Parts, TeacherForcedText, parts_run
from selfspec.model.early_head import DraftHead
from selfspec.model.layer_path import LayerPath, Part

# Tokens of one pass, copies included.
_MOST_TOKENS = 4096


@dataclass(frozen=True)
class TeacherForcedFigures:
    """One draft over one text. All tensors are `[reach, tokens]`: token n as the k-th of its draft.

    Attributes:
        agreed: whether draft and target have the same likeliest token.
        overlap: 1 - TV(p, q), the chance that rejection sampling accepts a token drawn there.
        chance: min(1, q / p) at the text's own token x: the chance that x, being what was committed, had been drafted
            and accepted. Greedily all three are `agreed`.
    """

    agreed: Tensor
    overlap: Tensor
    chance: Tensor

    def of_text(self, row: int, tokens: int) -> TeacherForcedFigures:
        """Take one text out of figures of several, `[reach, texts, tokens]`, as far as its own tokens go."""
        return TeacherForcedFigures(*(getattr(self, each.name)[:, row, :tokens].cpu() for each in fields(self)))


@dataclass(frozen=True)
class DraftPath:
    """A draft path.

    Attributes:
        path: what a draft step runs, from tokens.
        head: what reads its last states; None: the model's own norm and head.

    Raises:
        UnsupportedOptionError: some of it runs in fewer bits, which teacher forcing does not read.
    """

    path: LayerPath
    head: DraftHead | None = None

    def __post_init__(self) -> None:
        if self.path.precision is not None:
            raise UnsupportedOptionError(
                "drafts in fewer bits cannot be teacher-forced; leave them out, or measure them with selfspec bench"
            )


def teacher_forced_figures(
    views: LayerViews,
    texts: Sequence[Continuation],
    paths: Sequence[DraftPath],
    reach: int = 1,
    temperature: float = 0.0,
) -> list[list[TeacherForcedFigures]]:
    """Judge many draft paths by teacher forcing, without generating anything.

    On text that the model wrote itself, what a generation would accept follows exactly: see `rounds` beside this.

    Args:
        views: of the model.
        texts: that the model wrote itself, on its device.
        paths: what drafts.
        reach: positions of a draft that are counted one by one; further ones count as the last.
        temperature: at which texts were written, and at which p and q are compared; 0: greedily.

    Returns:
        For each path the figures of each text.

    Raises:
        UnsupportedModelError: this architecture cannot be read so.
    """
    found: list[dict[int, TeacherForcedFigures]] = [{} for _ in paths]
    checked = False
    for numbers in _read_together(texts, reach):
        some = [texts[number] for number in numbers]
        # What is to the right of a text changes nothing of it.
        ids = pad_sequence([each.ids[0] for each in some], batch_first=True)
        first = some[0].prompt
        text = TeacherForcedText(views, ids, first, reach)
        if not checked:
            text.check()
            checked = True
        judge = _Judge(text.logits, ids[:, first:], temperature)
        for path, logits in readings(text, paths):
            figures = judge.figures(logits)
            for row, (number, each) in enumerate(zip(numbers, some, strict=True)):
                found[path][number] = figures.of_text(row, each.ids.shape[1] - first)
    return [[each[number] for number in range(len(texts))] for each in found]


def _read_together(texts: Sequence[Continuation], reach: int) -> Iterator[list[int]]:
    """Split texts into what one pass reads: prompts of one length, and no more tokens than fit."""
    ordered = sorted(range(len(texts)), key=lambda number: texts[number].prompt)
    for _, alike in groupby(ordered, lambda number: texts[number].prompt):
        numbers = list(alike)
        longest = max(texts[number].ids.shape[1] for number in numbers)
        rows = max(1, _MOST_TOKENS // (reach * longest))
        yield from (numbers[start : start + rows] for start in range(0, len(numbers), rows))


def readings(text: TeacherForcedText, paths: Sequence[DraftPath]) -> Iterator[tuple[int, Tensor]]:
    """Read a text along many draft paths, in an order that shares the most work.

    Layers before a path's first missing sublayer are the full model's own, and are not run at all. Paths that go the
    same way after that share every layer up to where they part.

    Yields:
        The number of a path, and its logits of every drafted token as `TeacherForcedText.read` gives them.
    """
    ways = sorted((tuple(map(sorted, parts_run(each.path))), number) for number, each in enumerate(paths))
    yield from _visit(text, paths, ways, 0, None)


def _visit(
    text: TeacherForcedText,
    paths: Sequence[DraftPath],
    ways: Sequence[tuple[tuple[list[Part], ...], int]],
    layer: int,
    hidden: Tensor | None,
) -> Iterator[tuple[int, Tensor]]:
    """Continue from states that enter a layer; None: they are exact so far."""
    if layer == paths[ways[0][1]].path.depth:
        last = text.exact(layer) if hidden is None else hidden
        for _, number in ways:
            # An exit head reads behind the last layer that runs; nothing after that changed the states.
            yield number, text.read(last, paths[number].head)
        return
    for way, group in groupby(ways, key=lambda each: each[0][layer]):
        parts: Parts = frozenset(way)
        states = None
        if hidden is not None or parts != WHOLE:
            states = text.run(layer, parts, text.exact(layer) if hidden is None else hidden)
        yield from _visit(text, paths, list(group), layer + 1, states)


class _Judge:
    """Compares drafts with the target's logits, `[texts, tokens, vocab]`, on some texts, `[texts, tokens]`."""

    def __init__(self, logits: Tensor, tokens: Tensor, temperature: float) -> None:
        self._likeliest = logits.argmax(-1)
        self._temperature = temperature
        self._tokens = tokens[..., None]
        self._p = (logits.float() / temperature).softmax(-1) if temperature else None

    def figures(self, logits: Tensor) -> TeacherForcedFigures:
        """Compare a draft's logits, `[reach, texts, tokens, vocab]`: the figures of all texts at once."""
        agreed = (logits.argmax(-1) == self._likeliest).float()
        if self._p is None:
            return TeacherForcedFigures(agreed, agreed, agreed)
        q = (logits.float() / self._temperature).softmax(-1)
        overlap = torch.stack([torch.minimum(self._p, each).sum(-1) for each in q])
        p_there = self._p.gather(-1, self._tokens)[..., 0]
        q_there = torch.stack([each.gather(-1, self._tokens)[..., 0] for each in q])
        return TeacherForcedFigures(agreed, overlap, (q_there / p_there).clamp(max=1.0))
