"""A model whose vocabulary was resized after drafts were made or had learnt: its own text, or a refusal by name."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

import selfspec
from helpers import tiny
from selfspec.draft import (
    Assistant,
    Cascade,
    Drafter,
    EarlyExit,
    LowPrecision,
    PromptLookup,
    Recycling,
    ReducedVocabulary,
    Suffixes,
    Union,
)
from selfspec.draft.suffixes import write_corpus
from selfspec.errors import DraftConfigError
from selfspec.model.identity import Vocabulary
from selfspec.serve.engine import Engine
from selfspec.serve.row_request import RowRequest, SamplingParams

SMALL = 24
GREEDY: dict[str, Any] = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
LEARN: dict[str, Drafter] = {
    "suffixes": Suffixes(),
    "recycling": Recycling(),
    "union": Union(Suffixes(), Recycling(), EarlyExit(2)),
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
    """Its text is the model's, in calls that teach each other."""
    for _ in range(2):
        found = spec.generate(**prompt(seed, 2), **GREEDY).sequences
        assert torch.equal(found, spec.model.generate(**prompt(seed, 2), **GREEDY))


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


def corpus(model: PreTrainedModel, folder: Path) -> Suffixes:
    write_corpus(folder / "corpus", [[1, 2, 49, 3]], Vocabulary.of(model))
    return Suffixes(corpus=str(folder / "corpus"))


BOUND: dict[str, Any] = {
    "corpus": corpus,
    "reduced": lambda model, folder: ReducedVocabulary(EarlyExit(2), (1, 2, 40)),
    "assistant": lambda model, folder: Assistant(tiny.llama(num_hidden_layers=1)),
    "cascade": lambda model, folder: Cascade(PromptLookup(), Cascade(corpus(model, folder), EarlyExit(2))),
}


@pytest.mark.parametrize("draft", BOUND)
def test_a_draft_of_other_tokens_is_refused_before_any_pass_until_they_are_there_again(
    draft: str, llama: PreTrainedModel, tmp_path: Path
) -> None:
    spec = selfspec.wrap(llama, BOUND[draft](llama, tmp_path), draft_length=4)
    resized(llama, SMALL)
    for _ in range(2):
        with pytest.raises(DraftConfigError):
            spec.generate(**prompt(), **GREEDY)
        with pytest.raises(DraftConfigError):
            spec.row_decoder()
    resized(llama, 50)
    check(spec, 1)


def with_tokenizer(tokens: int, folder: Path) -> PreTrainedModel:
    """A model from a folder, with the tokenizer of all others of this test and a head of its own size."""
    model = tiny.llama(vocab_size=tokens)
    model.save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder).eval()


def test_a_corpus_of_one_tokenizer_may_hold_tokens_that_a_smaller_head_has_not(tmp_path: Path) -> None:
    large, small = (with_tokenizer(tokens, tmp_path / str(tokens)) for tokens in (600, 256))
    write_corpus(tmp_path / "corpus", [[token, 599, 598] for token in range(256)], Vocabulary.of(large))
    for model in (large, small):
        check(selfspec.wrap(model, Suffixes(corpus=str(tmp_path / "corpus")), draft_length=4), 0)


def test_an_engine_that_rests_follows_the_model(llama: PreTrainedModel) -> None:
    asked = RowRequest(tuple(prompt()["input_ids"][0].tolist()), 12, SamplingParams(temperature=0.0))
    with Engine(selfspec.wrap(llama, "suffix+recycle", draft_length=4)) as engine:
        engine.submit(asked).tokens(60)
        while engine._decoder._runner is not None:
            time.sleep(0.001)
        resized(llama, SMALL)
        with pytest.warns(UserWarning, match="is dropped"):
            found = engine.submit(asked).tokens(60)
    wanted = llama.generate(**prompt(), **{**GREEDY, "max_new_tokens": 12})[0, 9:]
    assert found == wanted.tolist()
