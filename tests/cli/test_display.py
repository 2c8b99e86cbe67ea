"""What the display of drafts writes of a round."""

from __future__ import annotations

import io
from typing import cast

from selfspec.cli.generate import DraftDisplay
from selfspec.decode.output import RowRound
from selfspec.decode.text_stream import TextStream


class _Letters:
    def push(self, tokens: tuple[int, ...]) -> str:
        return "".join(map(chr, tokens))

    foresee = push


def test_of_a_tree_the_first_branch_is_shown_and_the_other_nodes_are_counted() -> None:
    out = io.StringIO()
    display = DraftDisplay(cast(TextStream, _Letters()), out)
    out.truncate(out.seek(0))
    # Of five nodes "a" was accepted; "b" and "c" followed it.
    display.show(RowRound((97, 120), (97, 100, 98, 101, 99), 1, (98, 99)))
    display.show(RowRound((97, 120), (97, 98), 1, (98,)))
    assert out.getvalue() == "abc(+2)xabx"
