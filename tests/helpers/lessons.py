"""Lessons of draft heads: learning from one block of text, and what each unrolled step says of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import selfspec
from helpers import reference_heads
from selfspec.model.identity import fingerprint
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


def assert_learns_and_drafts(
    lesson: HeadLesson,
    text: Blocks,
    draft: str,
    folder: Path,
    proposer: Any,
    figures: Sequence[str],
    monkeypatch: pytest.MonkeyPatch,
    steps: int = 60,
    draft_length: Any = 3,
) -> Any:
    """Let a head learn a text of its base's, so that figures rise, and draft it; return the drafts it made."""
    model, before = lesson._base, lesson.measure()
    base = fingerprint(model)
    learnt(lesson, text, steps)
    after = lesson.measure()
    for name in figures:
        assert after[name] > before[name] + 0.1, name
    assert fingerprint(model) == base
    folder.mkdir(exist_ok=True)
    lesson.save(folder, torch.float64, after)
    found = reference_heads.recorded_drafts(monkeypatch, proposer)
    options: dict[str, Any] = {"max_new_tokens": 13, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    out = selfspec.wrap(model, f"{draft}:{folder}", draft_length=draft_length).generate(text.ids[:1, :3], **options)
    assert torch.equal(out.sequences, text.ids[:1])
    assert out.stats.accepted > 0
    return found
