"""Stop strings over pieces of text, and tokens as bytes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from helpers import tiny
from helpers.stories import checkpoint_folder
from selfspec.serve.choice import Choice, Counts
from selfspec.serve.events import Committed
from selfspec.serve.stop_strings import StopStrings
from selfspec.serve.token_texts import TokenTexts

LETTERS = st.text("ab", max_size=30)


@given(text=LETTERS, stops=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3), cuts=st.data())
def test_what_is_let_through_is_before_the_first_stop(text: str, stops: list[str], cuts: st.DataObject) -> None:
    stop, given_out, at = StopStrings(stops), "", 0
    while at < len(text) and not stop.found:
        size = cuts.draw(st.integers(1, 3))
        given_out += stop.push(text[at : at + size])
        # Nothing that is sent can be part of a stop string.
        assert text.startswith(given_out)
        at += size
    given_out += stop.finish()
    # A string may be found only once its last letter came, and another one may have begun before it.
    places = [text[:at].find(each) for each in stops if each in text[:at]]
    assert given_out == (text[: min(places)] if places else text)


@given(text=LETTERS, stops=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3))
def test_letter_by_letter_the_stop_that_ends_first_counts(text: str, stops: list[str]) -> None:
    stop, given_out = StopStrings(stops), ""
    for letter in text:
        given_out += stop.push(letter)
    given_out += stop.finish()
    ends = [end for end in range(1, len(text) + 1) if any(text[:end].endswith(each) for each in stops)]
    if not ends:
        assert given_out == text
    else:
        first = [each for each in stops if text[: ends[0]].endswith(each)]
        assert given_out == text[: ends[0] - max(map(len, first))]


@pytest.mark.parametrize("kind", ["byte fallback", "byte level"])
def test_bytes_of_tokens_make_the_text(kind: str) -> None:
    tokenizer = tiny.tokenizer() if kind == "byte level" else AutoTokenizer.from_pretrained(checkpoint_folder())
    texts = TokenTexts(tokenizer)
    for text in ("Once upon a time", "naïve 日本 🎉", "a\n b"):
        ids = tokenizer(text, add_special_tokens=False).input_ids
        assert b"".join(map(texts.raw, ids)).decode().lstrip() == text
    assert texts.text(ids[0]) == texts.raw(ids[0]).decode()


def test_tokens_behind_a_stop_string_are_not_counted() -> None:
    """A round may commit some: what they are counts for nobody."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint_folder())
    ids = tokenizer("Once upon a time there was a cat").input_ids
    choice = Choice(tokenizer, ids[:1], ["time"])
    piece = choice.take(Committed(tuple(ids[1:]), None, len(ids) - 2, len(ids) - 2))
    until = next(count for count in range(len(ids)) if "time" in tokenizer.decode(ids[1 : 1 + count]))
    assert (piece.text, piece.finish_reason) == ("Once upon a ", "stop")
    assert choice.counts == Counts(until, len(ids) - 2, until)
    assert until < len(ids) - 2
