"""Lessons of draft heads: learning from one block of text, and what each unrolled step says of it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from selfspec.tools.train.corpus import Blocks
from selfspec.tools.train.heads.lesson import HeadLesson


def learnt(lesson: HeadLesson, text: Blocks, steps: int) -> list[float]:
    """Let a head learn the same text again and again; return the loss of each step."""
    optimizer = torch.optim.Adam(lesson.model.parameters(), 1e-2)
    losses = []
    for step in range(steps):
        loss = lesson.loss(lesson.model, text, step, steps)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def assert_steps_are(
    lesson: HeadLesson,
    text: Blocks,
    depth: int,
    logits: Callable[[list[int], list[int]], Tensor],
    rtol: float | None = None,
    atol: float | None = None,
) -> None:
    """Hold each unrolled step of a head to the logits, `[ids it can draft]`, after a text and tokens drafted behind."""
    ids = text.ids[0].tolist()
    with torch.no_grad():
        seen, _ = lesson._read(text.chosen(slice(0, 1)))
        found = lesson.model(seen, depth)
    for step, said in enumerate(found):
        # The pair of tokens p and p + 1, of which the last `step` were drafted.
        for pair, given in enumerate(said, step):
            expected = logits(ids[: pair + 2 - step], ids[pair + 2 - step : pair + 2])
            torch.testing.assert_close(given, expected, rtol=rtol, atol=atol)
