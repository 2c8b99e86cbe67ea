"""What `--draft` means."""

from __future__ import annotations

import pytest

from selfspec import DraftConfigError, Drafter, EarlyExit, LayerSkip
from selfspec.cli.draft_option import parse_draft


@pytest.mark.parametrize(
    ("text", "drafter"),
    [
        ("none", None),
        ("exit:4", EarlyExit(layer=4)),
        (" exit:12 ", EarlyExit(layer=12)),
        ("skip:attn=3,5;mlp=4;layers=2", LayerSkip(attention=[3, 5], mlp=[4], layers=[2])),
        ("skip:layers=3-5", LayerSkip(layers=[3, 4, 5])),
        ("skip: mlp=1, 7-8 ; attn=0", LayerSkip(attention=[0], mlp=[1, 7, 8])),
    ],
)
def test_grammar(text: str, drafter: Drafter | None) -> None:
    assert parse_draft(text) == drafter


@pytest.mark.parametrize(
    "text",
    [
        "",
        "None",
        "exit",
        "exit:",
        "exit:-1",
        "exit:4.0",
        "exit:4,5",
        "exit:٣",
        "skip",
        "skip:",
        "skip:3",
        "skip:attn",
        "skip:attn=",
        "skip:attn=1,",
        "skip:attn=5-3",
        "skip:attn=1--3",
        "skip:attn=0-99999999999",
        "skip:heads=1",
        "skip:attn=1;attn=2",
        "skip:attn=1;",
        "automatic",
    ],
)
def test_anything_else_is_refused_with_the_grammar(text: str) -> None:
    with pytest.raises(DraftConfigError, match=r"--draft .* is not understood; write exit:E"):
        parse_draft(text)
