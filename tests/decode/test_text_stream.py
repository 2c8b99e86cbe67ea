"""Text that comes piece by piece is the text of the whole."""

from __future__ import annotations

import random
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from helpers import tiny
from helpers.stories import checkpoint_folder
from helpers.tokenizers import KINDS
from selfspec.decode.text_stream import TextStream, continuation

PROMPTS = ("", "Once upon", "é 日本 🎉", "a\n")


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    found: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(checkpoint_folder())
    return found


@pytest.fixture(params=["byte fallback", "byte level"])
def any_tokenizer(request: pytest.FixtureRequest, tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """Two ways to write what is not in the vocabulary: bytes as tokens of their own kind, or bytes throughout."""
    if request.param == "byte fallback":
        return tokenizer
    return tiny.tokenizer()


def streamed(tokenizer: PreTrainedTokenizerBase, prompt: list[int], tokens: list[int], chance: random.Random) -> str:
    stream = TextStream(tokenizer, prompt)
    text, start = "", 0
    while start < len(tokens):
        end = start + chance.randrange(4)
        text += stream.push(tokens[start:end])
        start = end
    return text + stream.finish()


@pytest.mark.parametrize("text", [" there was", "\n\n  two  spaces ", "naïve 日本語 🎉🎉 ok", "tab\tand\x07bell"])
def test_text_comes_whole(any_tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    for seed, prompt_text in enumerate(PROMPTS):
        prompt = any_tokenizer(prompt_text).input_ids
        whole = any_tokenizer(prompt_text + text).input_ids
        if whole[: len(prompt)] == prompt:
            assert streamed(any_tokenizer, prompt, whole[len(prompt) :], random.Random(seed)) == text


def test_random_tokens_come_as_the_whole_decodes(any_tokenizer: PreTrainedTokenizerBase) -> None:
    """Among them special tokens, and bytes that make no character."""
    for seed in range(400):
        chance = random.Random(seed)
        prompt = any_tokenizer(chance.choice(PROMPTS)).input_ids
        # Bytes have the lowest ids, and half of the cases are rich in them.
        ids = range(len(any_tokenizer) if seed % 2 else min(len(any_tokenizer), 262))
        tokens = chance.choices(ids, k=chance.randrange(1, 30))
        expected = continuation(any_tokenizer, prompt, tokens)
        assert streamed(any_tokenizer, prompt, tokens, chance) == expected


def test_a_character_comes_with_its_last_token(any_tokenizer: PreTrainedTokenizerBase) -> None:
    letters = any_tokenizer("a🎉b").input_ids
    stream = TextStream(any_tokenizer, any_tokenizer("").input_ids)
    pieces = [stream.push([token]) for token in letters[len(any_tokenizer("").input_ids) :]]
    assert "".join([*pieces, stream.finish()]).endswith("a🎉b")
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)


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
    stream, texts, at = TextStream(tokenizer, prompt, special), [], 0
    while at < len(tokens):
        size = data.draw(st.integers(1, 4))
        texts += stream.push_apart(tokens[at : at + size])
        at += size
    texts += stream.finish_apart()
    assert len(texts) == len(tokens)
    assert "".join(texts) == continuation(tokenizer, prompt, tokens, special)
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
