"""Text that comes piece by piece is the text of the whole."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from helpers.tokenizers import KINDS
from selfspec.decode.text_stream import TextStream, continuation


def test_foreseeing_takes_nothing_in(tokenizer: PreTrainedTokenizerBase) -> None:
    stream = TextStream(tokenizer, tokenizer("Once upon").input_ids)
    tokens = tokenizer("Once upon a time").input_ids[len(tokenizer("Once upon").input_ids) :]
    assert stream.foresee(tokens) == " a time"
    assert stream.push(tokens) == " a time"


@given(data=st.data(), kind=st.sampled_from(sorted(KINDS)), special=st.booleans())
def test_what_each_token_wrote_makes_up_the_whole(data: st.DataObject, kind: str, special: bool) -> None:
    """Of any tokens, in any portions: bytes that make no character, spaces and special tokens among them."""
    tokenizer = KINDS[kind]()
    any_tokens = st.lists(st.integers(0, len(tokenizer) - 1), max_size=14) | st.text(max_size=6).map(
        lambda text: tokenizer(text).input_ids
    )
    prompt, tokens = data.draw(any_tokens), data.draw(any_tokens)
    apart, joined = (TextStream(tokenizer, prompt, special) for _ in range(2))
    texts, text, at = [], "", 0
    while at < len(tokens):
        size = data.draw(st.integers(1, 4))
        texts += apart.push_apart(tokens[at : at + size])
        text += joined.push(tokens[at : at + size])
        at += size
    texts += apart.finish_apart()
    assert len(texts) == len(tokens)
    assert "".join(texts) == text + joined.finish() == continuation(tokenizer, prompt, tokens, special)
    if not prompt:
        assert "".join(texts) == tokenizer.decode(tokens, skip_special_tokens=not special)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_parts_of_characters_in_any_order_come_as_the_whole_decodes(kind: str) -> None:
    tokenizer = KINDS[kind]()
    parts = sorted(set(tokenizer("\n\u00eb\N{PARTY POPPER} a").input_ids))
    for tokens in product(parts, repeat=3):
        stream = TextStream(tokenizer, ())
        texts = [text for token in tokens for text in stream.push_apart([token])] + stream.finish_apart()
        assert "".join(texts) == tokenizer.decode(tokens, skip_special_tokens=True)


@pytest.mark.parametrize("kind", ["byte_fallback", "metaspace", "byte_level"])
def test_a_character_is_its_last_tokens(kind: str) -> None:
    tokenizer = KINDS[kind]()
    tokens = tokenizer("on ë\n\n\N{PARTY POPPER} on", add_special_tokens=False).input_ids
    stream = TextStream(tokenizer, ())
    texts = [text for token in tokens for text in stream.push_apart([token])] + stream.finish_apart()
    assert [text for text in texts if text] in (
        ["on", " ", "ë", "\n", "\n", "\N{PARTY POPPER}", " on"],
        ["on", " ", "ë", "\n", "\n", "\N{PARTY POPPER}", " ", "on"],
    )


@pytest.mark.parametrize("kind", ["byte_fallback", "byte_level"])
def test_a_character_that_the_prompt_leaves_unfinished_is_written_whole(kind: str) -> None:
    tokenizer = KINDS[kind]()
    tokens = tokenizer("a\N{PARTY POPPER}bcd", add_special_tokens=False).input_ids
    stream = TextStream(tokenizer, tokens[:-5])
    assert stream.push(tokens[-5:]) == "\N{PARTY POPPER}bcd"
