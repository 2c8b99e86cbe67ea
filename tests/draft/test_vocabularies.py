"""Models whose head writes fewer ids than they read, or whose vocabulary was resized: their own text, or a refusal."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

import selfspec
from helpers import tiny
from helpers.drafting import assert_alike
from helpers.joints import assert_rows_are_stock
from helpers.serving import Asked, Stepped, alone
from invariants.examples import EXAMPLES
from selfspec.control import FixedLength
from selfspec.draft import (
    Cascade,
    Drafter,
    EarlyExit,
    LowPrecision,
    PromptLookup,
    Recycling,
    ReducedVocabulary,
    Suffixes,
)
from selfspec.errors import DraftConfigError, UnsupportedOptionError
from selfspec.serve.engine import Engine
from selfspec.serve.row_request import OccurrencePenalty, RowRequest

SMALL = 24
GREEDY: dict[str, Any] = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
LEARN: dict[str, Drafter] = {
    "suffixes": Suffixes(),
    "recycling": Recycling(),
    "cascade": Cascade(Suffixes(), Cascade(Recycling(), EarlyExit(2))),
}
REMEMBER_NOTHING: dict[str, Drafter | None] = {
    "none": None,
    "look-up": PromptLookup(),
    "exit": EarlyExit(2),
    "8 bits": LowPrecision(8),
    "reduced": ReducedVocabulary(EarlyExit(2), (1, 2, 3)),
}
DRAFTS = LEARN | REMEMBER_NOTHING


def resized(model: PreTrainedModel, tokens: int) -> None:
    torch.manual_seed(0)
    model.resize_token_embeddings(tokens, mean_resizing=False)


def prompt(seed: int = 0, rows: int = 1) -> dict[str, Any]:
    ids = tiny.prompt(9, rows, seed, vocabulary=SMALL)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def check(spec: selfspec.SelfSpeculative, seed: int) -> None:
    """Its text is the model's, in two calls that teach each other."""
    assert_alike(spec, **prompt(seed, 2), **GREEDY)


@pytest.mark.parametrize("tokens", [SMALL, 70])
@pytest.mark.parametrize("draft", DRAFTS)
def test_what_was_learnt_of_others_is_dropped_with_a_word(draft: str, tokens: int, llama: PreTrainedModel) -> None:
    spec = selfspec.wrap(llama, DRAFTS[draft], draft_length=4)
    check(spec, 0)
    resized(llama, tokens)
    if draft in LEARN:
        with pytest.warns(UserWarning, match=f"the model has {tokens} tokens, and had 50"):
            spec.generate(**prompt(), **GREEDY)
    check(spec, 1)


_BOUND = ReducedVocabulary(EarlyExit(2), (1, 2, 40))


@pytest.mark.parametrize("draft", [_BOUND, Cascade(PromptLookup(), Cascade(Suffixes(), _BOUND))], ids=repr)
def test_a_draft_of_other_tokens_is_refused_before_any_pass_until_they_are_there_again(
    draft: Drafter, llama: PreTrainedModel
) -> None:
    spec = selfspec.wrap(llama, draft, draft_length=4)
    resized(llama, SMALL)
    for _ in range(2):
        with pytest.raises(DraftConfigError):
            spec.generate(**prompt(), **GREEDY)
        with pytest.raises(DraftConfigError):
            spec.joining_rows()
    resized(llama, 50)
    check(spec, 1)


def test_an_engine_that_rests_follows_the_model(llama: PreTrainedModel) -> None:
    asked = RowRequest(tuple(prompt()["input_ids"][0].tolist()), 12, {"do_sample": False})
    with Engine(selfspec.wrap(llama, "suffix+recycle", draft_length=4)) as engine:
        engine.submit(asked).tokens(60)
        while engine._decoder._runner is not None:
            time.sleep(0.001)
        resized(llama, SMALL)
        with pytest.warns(UserWarning, match="is dropped"):
            found = engine.submit(asked).tokens(60)
    wanted = llama.generate(**prompt(), **{**GREEDY, "max_new_tokens": 12})[0, 9:]
    assert found == wanted.tolist()


HEAD = 40
# Ids from 40 on stand for pictures. What ends a prompt has come before, and a picture has followed.
PICTURE = [41, 45, 49]
PROMPTS = [[3, 7, *PICTURE, 9, 3, 7, *PICTURE, 9, 3, 7], [5, 44, 5, 44, 5, 44, 5, 44], [8, *PICTURE, 8, *PICTURE]]


def narrow(model: PreTrainedModel) -> PreTrainedModel:
    """The model with the first rows of its head alone."""
    head = model.get_output_embeddings()
    fewer = nn.Linear(head.in_features, HEAD, bias=False, dtype=head.weight.dtype)
    fewer.weight.data = head.weight.data[:HEAD].clone()
    model.set_output_embeddings(fewer)
    model.config.get_text_config().vocab_size = HEAD
    return model


FROM_TEXT = ("lookup", "recycle", "suffix")
# The heads of the models that `queries` is for are their embeddings.
CASES = [
    pytest.param(name, marks=() if name.startswith(FROM_TEXT) else pytest.mark.contract)
    for name in EXAMPLES
    if name != "queries"
]
CONTROLS = (FixedLength(3, nodes=7), FixedLength(4))
# Draws with one possible outcome.
DRAWN = {"do_sample": True, "top_k": 1}


def made(name: str, folder: Path) -> tuple[PreTrainedModel, Any]:
    """A model with a narrow head, and a draft for it."""
    example = EXAMPLES[name]
    whole = example.build(folder, tiny.VOCABULARY) if example.build else tiny.llama(num_hidden_layers=6)
    model = narrow(whole)
    return model, example.made_for(model, folder)


@pytest.mark.parametrize("name", CASES)
def test_greedy_text_is_stock_text(name: str, tmp_path: Path) -> None:
    model, draft = made(name, tmp_path)
    prompts = [torch.tensor([prompt]) for prompt in PROMPTS]
    for control in CONTROLS:
        spec = selfspec.wrap(model, draft, draft_length=control)
        assert_rows_are_stock(model, spec, prompts, max_new_tokens=16, eos_token_id=None)
        assert_rows_are_stock(model, spec, prompts, max_new_tokens=16, eos_token_id=None, **DRAWN)


@pytest.mark.parametrize("name", CASES)
def test_rows_of_an_engine_are_what_they_are_alone(name: str, tmp_path: Path) -> None:
    model, draft = made(name, tmp_path)
    drawn = {"do_sample": True, "temperature": 0.9, "top_k": 0}
    asked = [
        Asked(RowRequest(tuple(prompt), 12, options, 3), (partial(OccurrencePenalty, len(prompt), 0.5, 0.0),))
        for prompt in PROMPTS
        for options in ({"do_sample": False}, drawn)
    ]
    engine = Stepped(selfspec.wrap(model, draft, draft_length=FixedLength(3, nodes=7)))
    seen = [engine.submit(each.fresh()) for each in asked]
    engine.run()
    for each, request in zip(seen, asked, strict=True):
        assert each.end.error is None
        assert each.tokens == alone(model, request)


# Options that name ids 41 and 45, which are read and never written, or that look for scores of the text's ids.
HONOURED: dict[str, Any] = {
    "suppress_tokens": [7, 41],
    "begin_suppress_tokens": [41],
    "eos_token_id": [41, 12],
    "pad_token_id": 41,
    "no_repeat_ngram_size": 2,
    "encoder_no_repeat_ngram_size": 2,
    "repetition_penalty": 1.3,
    "encoder_repetition_penalty": 1.3,
    "min_new_tokens": 3,
}
REFUSED: dict[str, Any] = {
    "bad_words_ids": [[7], [41]],
    "sequence_bias": {(41,): 2.0},
    "forced_bos_token_id": 41,
    "forced_eos_token_id": [41],
    "exponential_decay_length_penalty": (2, 1.5),
}


@pytest.mark.parametrize("draft", [None, "lookup+suffix+recycle", "exit:2"])
@pytest.mark.parametrize("name", HONOURED)
def test_options_mean_what_they_mean_for_a_head_that_never_writes_these_ids(name: str, draft: str | None) -> None:
    whole, ids = tiny.llama(num_hidden_layers=6), torch.tensor(PROMPTS[:1])
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": 16, "pad_token_id": 0, "eos_token_id": [45]}
    options |= {name: HONOURED[name], "attention_mask": torch.ones_like(ids)}
    never = [*range(HEAD, tiny.VOCABULARY), *options.get("suppress_tokens", [])]
    expected = whole.generate(ids, **{**options, "suppress_tokens": never})
    found = selfspec.wrap(narrow(whole), draft).generate(ids, **options)
    assert torch.equal(found.sequences, expected)


@pytest.mark.parametrize("name", REFUSED)
def test_options_that_need_what_the_head_lacks_are_refused_by_name(name: str) -> None:
    spec, ids = selfspec.wrap(narrow(tiny.llama()), None), torch.tensor(PROMPTS[:1])
    with pytest.raises(UnsupportedOptionError, match=name):
        spec.generate(ids, **{"eos_token_id": 45, "max_new_tokens": 4, "do_sample": False, name: REFUSED[name]})


def test_an_engine_takes_what_is_read_and_refuses_what_is_not_written() -> None:
    model = narrow(tiny.llama())
    engine, greedy = Stepped(selfspec.wrap(model, None)), {"do_sample": False}
    request = RowRequest(tuple(PROMPTS[0]), 5, {**greedy, "eos_token_id": [41]}, logprobs=HEAD)
    seen = engine.submit(request)
    engine.run()
    assert seen.tokens == alone(model, Asked(request))
    for refused in (41, HEAD):
        with pytest.raises(UnsupportedOptionError, match="sequence_bias"):
            engine.submit(replace(request, options={"sequence_bias": {(refused,): 1.0}}))
    with pytest.raises(UnsupportedOptionError, match=f"logprobs must be an integer in 0..{HEAD}"):
        engine.submit(replace(request, logprobs=HEAD + 1))
