"""Tokens as text and bytes; what those of a prompt wrote, and how likely they are."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedModel

from helpers import tiny
from helpers.shrunken import shrunken
from helpers.stories import checkpoint_folder
from helpers.tokenizers import KINDS
from selfspec.serve.served import TokenTexts, prompt_logprobs, prompt_text

TEXTS = st.text("on ce,\n\u00eb\N{PARTY POPPER}END", max_size=8)


def _longrope() -> PreTrainedModel:
    factors = {"short_factor": [1.0] * 4, "long_factor": [8.0] * 4, "original_max_position_embeddings": 130}
    parameters = {"rope_type": "longrope", "rope_theta": 10000.0, **factors}
    return tiny.llama(vocab_size=64, max_position_embeddings=512, rope_parameters=parameters)


@pytest.mark.parametrize("length", [1, 2, 129, 140])
@pytest.mark.parametrize("name", ["falcon_mamba", "jamba", "longrope", "llama"])
def test_long_prompts_are_scored_as_a_whole(name: str, length: int) -> None:
    model = _longrope() if name == "longrope" else shrunken(name, vocab_size=64, max_position_embeddings=512)
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
