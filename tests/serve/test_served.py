"""Tokens as text and bytes, how likely those of a prompt are, answers as they grow, and stop strings."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from helpers import tiny
from helpers.saved_folders import checkpoint_folder
from helpers.shrunken import shrunken
from helpers.tokenizers import KINDS
from selfspec.decode.text_stream import continuation
from selfspec.serve.choice import Choice, Counts, StopStrings
from selfspec.serve.events import Committed, Finished
from selfspec.serve.logprobs import TokenLogprobs
from selfspec.serve.served import TokenTexts, prompt_logprobs, prompt_text

TEXTS = st.text("on ce,\n\u00eb\N{PARTY POPPER}END", max_size=8)


@pytest.mark.parametrize("length", [1, 2, 140])
@pytest.mark.parametrize("name", ["jamba", "llama"])
def test_long_prompts_are_scored_as_a_whole(name: str, length: int) -> None:
    model = shrunken(name, vocab_size=64, max_position_embeddings=512)
    ids = tiny.prompt(length, vocabulary=64)
    found = prompt_logprobs(model, ids[0].tolist(), 2)
    with torch.no_grad():
        scores = model(ids, use_cache=False).logits[0, :-1].float().log_softmax(-1)
    expected = scores.gather(1, ids[0, 1:, None])[:, 0].tolist()
    assert [each.logprob for each in found] == pytest.approx(expected, abs=1e-4)
    assert [each.top[0][0] for each in found] == scores.argmax(-1).tolist()
    assert all(len(each.top) == 2 for each in found)


@pytest.mark.parametrize("kind", ["byte fallback", "byte level"])
def test_bytes_of_tokens_make_the_text(kind: str) -> None:
    tokenizer = tiny.tokenizer() if kind == "byte level" else AutoTokenizer.from_pretrained(checkpoint_folder())
    texts = TokenTexts(tokenizer)
    for text in ("Once upon a time", "naïve 日本 🎉", "a\n b"):
        ids = tokenizer(text, add_special_tokens=False).input_ids
        assert b"".join(map(texts.raw, ids)).decode().lstrip() == text
    assert texts.text(ids[0]) == texts.raw(ids[0]).decode()


@given(kind=st.sampled_from(sorted(KINDS)), data=st.data())
def test_a_prompt_is_what_its_tokens_wrote(kind: str, data: st.DataObject) -> None:
    tokenizer = KINDS[kind]()
    special = st.sampled_from(["", *tokenizer.all_special_tokens])
    text = data.draw(TEXTS) + data.draw(special) + data.draw(TEXTS)
    ids = tokenizer(text).input_ids
    shown = prompt_text(tokenizer, text)
    assert shown.text == text
    assert len(shown.pieces) == len(ids)
    # What a tokenizer does not read behind the last token is nobody's.
    assert text.removeprefix("".join(shown.pieces)).strip() == ""
    by_ids = prompt_text(tokenizer, ids)
    assert by_ids.text == "".join(by_ids.pieces) == tokenizer.decode(ids, skip_special_tokens=False)
    assert len(by_ids.pieces) == len(ids)


def test_a_prompts_pieces() -> None:
    pieces = {
        kind: [each for each in prompt_text(made(), "on \u00eb\N{PARTY POPPER} on").pieces if each]
        for kind, made in KINDS.items()
    }
    assert pieces["byte_fallback"] == pieces["metaspace"] == ["on", " ", "\u00eb", "\N{PARTY POPPER}", " on"]
    assert pieces["byte_level"] == ["on", " ", "\u00eb", "\N{PARTY POPPER}", " on"]
    # Its vocabulary has no emoji: the word is unknown.
    assert pieces["word_piece"] == ["on", " \u00eb\N{PARTY POPPER}", " on"]
    # The first of its tokens has the space before it too.
    assert prompt_text(KINDS["byte_level"](), "on \N{PARTY POPPER}").pieces == ("on", " ", "", "\N{PARTY POPPER}")


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


NOTHING = TokenLogprobs(-1.0, ())


@given(data=st.data(), kind=st.sampled_from(sorted(KINDS)))
def test_an_answer_ends_with_the_token_that_finishes_a_stop_string(data: st.DataObject, kind: str) -> None:
    """Whatever its tokens are; and what each of them wrote is where its offset says."""
    tokenizer = KINDS[kind]()
    ids = st.lists(st.integers(0, len(tokenizer) - 1), max_size=10)
    prompt = data.draw(ids | TEXTS.map(lambda text: tokenizer(text).input_ids))
    tokens = data.draw(ids | TEXTS.map(lambda text: tokenizer(text, add_special_tokens=False).input_ids))
    stops = data.draw(st.lists(st.text("on \n\u00eb\N{PARTY POPPER}EN", min_size=1, max_size=2), max_size=2))
    choice, pieces, at = Choice(tokenizer, prompt, stops), [], 0
    while at < len(tokens) and choice.finish_reason is None:
        part = tuple(tokens[at : at + data.draw(st.integers(1, 3))])
        pieces.append(choice.take(Committed(part, (NOTHING,) * len(part), len(part), len(part))))
        at += len(part)
    if choice.finish_reason is None:
        pieces.append(choice.end(Finished("length", None, len(prompt), len(tokens), 0, 0)))
    wholes = [continuation(tokenizer, prompt, tokens[:count]) for count in range(len(tokens) + 1)]
    ended = [count for count, whole in enumerate(wholes) if any(stop in whole for stop in stops)]
    if ended:
        places = [wholes[ended[0]].find(stop) for stop in stops]
        assert choice.text == wholes[ended[0]][: min(place for place in places if place >= 0)]
        # What a round commits behind a stop string counts for nobody.
        assert (choice.counts, choice.finish_reason) == (Counts(ended[0], at, ended[0]), "stop")
    else:
        assert choice.text == wholes[-1]
        assert (choice.counts, choice.finish_reason) == (Counts(at, at, at), "length")
    assert "".join(piece.text for piece in pieces) == choice.text
    assert [each for piece in pieces for each in piece.scored] == choice.scored
    assert [each.token for each in choice.scored] == tokens[: choice.counts.tokens]
    assert "".join(each.text for each in choice.scored) == choice.text
    assert all(choice.text[each.offset :].startswith(each.text) for each in choice.scored)
    sent = ""
    for piece in pieces:
        sent += piece.text
        assert all(each.offset + len(each.text) <= len(sent) for each in piece.scored)
