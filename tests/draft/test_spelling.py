"""What is said of drafts that are not understood: short, with the kind that was probably meant."""

from __future__ import annotations

import pytest

from selfspec.draft.named import parse_draft
from selfspec.draft.spelling import misread
from selfspec.errors import DraftConfigError


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("exti:4", "exit:4"),
        ("exit4", "exit:4"),
        ("Exit-4", "exit:4"),
        ("int-8", "int8"),
        ("INT4", "int4"),
        ("look-up", "lookup"),
        ("lokup+exit4", "lookup+exit:4"),
        ("recycling", "recycle"),
        ("skipp:layers=3", "skip:layers=3"),
        ("heads:FOLDER", "head:FOLDER"),
    ],
)
def test_the_nearest_draft_is_named(text: str, meant: str) -> None:
    with pytest.raises(DraftConfigError, match=rf"did you mean {meant.replace('+', '.')}\?"):
        parse_draft(text)


@pytest.mark.parametrize(
    ("text", "how"),
    [
        ("exit:", "write exit:E with a layer"),
        ("skip:3", "write skip:PART=LAYERS"),
        ("lookup+exit:x", "write lookup, alone or before .*; exit:E"),
        ("rm -rf", "write exit:E, int8"),
        ("int3", "int4"),
        ("", "write exit:E, int8"),
    ],
)
def test_else_it_says_how_to_write_it(text: str, how: str) -> None:
    with pytest.raises(DraftConfigError, match=how):
        parse_draft(text)


@pytest.mark.parametrize("text", [None, 4, "x" * 10_000, "exit:" + "9" * 5000, "zzz"])
def test_a_message_is_no_essay(text: object) -> None:
    message = str(misread(text))
    assert len(message.split()) < 40
    assert len(message) < 500
