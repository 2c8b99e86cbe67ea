"""A real Whisper transcribes as `model.generate` does: text, timestamps, segments, long form and batches."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import cycle
from pathlib import Path
from shutil import which
from typing import Any

import pytest
import torch
from speech import RATE, features, read_texts, spoken
from torch import Tensor
from transformers import AutoProcessor, WhisperForConditionalGeneration

import selfspec

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(which("espeak-ng") is None, reason="espeak-ng, which reads the texts aloud, is not here"),
]

DRAFTS = ("none", "int8", "int4", "exit:3", "recycle", "lookup", "recycle+int8")
TEXTS = read_texts()


class Speech:
    """A Whisper in float32, its processor, and what it is given of clips."""

    def __init__(self, folder: Path) -> None:
        self.model: Any = WhisperForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
        self.processor = AutoProcessor.from_pretrained(folder)
        self.spec = cache(lambda draft: selfspec.wrap(self.model, draft))

    def inputs(self, *numbers: int) -> dict[str, Any]:
        """Features and options of clips of one language."""
        lines = [TEXTS[number] for number in numbers]
        sounds = [spoken(line["text"], line["language"]) for line in lines]
        assert all(2 * RATE <= len(sound) <= 61 * RATE for sound in sounds)
        return {**features(self.processor, sounds), "language": lines[0]["language"], "task": "transcribe"}

    def check(self, draft: str, inputs: dict[str, Any], **options: Any) -> None:
        options = {"do_sample": False, **options}
        wanted = self.model.generate(**inputs, **options, return_segments=True)
        found = self.spec(draft).generate(**inputs, **options, return_segments=True)
        assert torch.equal(found.sequences, wanted["sequences"])
        assert [list(map(_said, row)) for row in found.segments] == [
            list(map(_said, row)) for row in wanted["segments"]
        ]
        assert found.lossless


def _said(segment: dict[str, Any]) -> tuple[float, float, list[int]]:
    tokens: Tensor = segment["tokens"]
    return float(segment["start"]), float(segment["end"]), tokens.tolist()


@pytest.fixture(scope="session")
def speech(checkpoint: Callable[[str], Path]) -> Speech:
    return Speech(checkpoint("whisper"))


def _cases(rows: int) -> list[Any]:
    """Clips, a draft each in turns, with timestamps and without where they are of one piece."""
    turns, found = cycle(DRAFTS), []
    # All of one language stand together, multiples of four.
    for first in range(0, len(TEXTS), rows):
        numbers = tuple(range(first, first + rows))
        for timestamps in (False, True):
            draft = next(turns)
            name = f"{'-'.join(map(str, numbers))}-{'timestamps' if timestamps else 'text'}-{draft}"
            found.append(pytest.param(numbers, timestamps, draft, id=name))
    return found


@pytest.mark.parametrize(("numbers", "timestamps", "draft"), _cases(1) + _cases(4))
def test_a_transcript_is_that_of_generate(
    speech: Speech, numbers: tuple[int, ...], timestamps: bool, draft: str
) -> None:
    inputs = speech.inputs(*numbers)
    # One that is cut into pieces has timestamps in any case.
    whole = inputs["input_features"].shape[-1] > 3000
    more = {"condition_on_prev_tokens": True} if whole and not timestamps else {}
    speech.check(draft, inputs, return_timestamps=timestamps or whole, **more)
