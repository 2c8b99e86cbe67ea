"""Grammars of real libraries over small tokenizers made here, each as fresh options of `generate`."""

from __future__ import annotations

import json
import string
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import llguidance
import llguidance.hf
import lmformatenforcer
import outlines
import transformers
import xgrammar
import xgrammar.contrib.hf
from outlines.backends import get_json_schema_logits_processor, get_regex_logits_processor
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import LogitsProcessor, PreTrainedModel, PreTrainedTokenizerFast, tokenization_utils

from helpers import tiny

# Its kernel makes torch import its compiler, which warns of parts of its own.
with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    import llguidance.torch

# lm-format-enforcer 0.11.3 looks for this class where transformers had it up to version 4.
if not hasattr(tokenization_utils, "PreTrainedTokenizerBase"):
    tokenization_utils.PreTrainedTokenizerBase = transformers.PreTrainedTokenizerBase

from lmformatenforcer.integrations.transformers import build_transformers_prefix_allowed_tokens_fn


@dataclass(frozen=True)
class Grammar:
    regex: str
    schema: str | None = None


@dataclass(frozen=True)
class Subject:
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerFast

    def prompts(self, texts: Sequence[str]) -> dict[str, Any]:
        """Ids and mask, `[batch, prompt]`, padded on the left."""
        found = self.tokenizer(list(texts), padding=True, return_tensors="pt")
        return {"input_ids": found.input_ids, "attention_mask": found.attention_mask}

    def text(self, row: Tensor) -> str:
        return str(self.tokenizer.decode(row, skip_special_tokens=True))


def writing() -> Subject:
    """A tiny llama over single characters, and pairs of them that JSON has."""
    pairs = ('{"', '"}', '":', '",', ' "', "10", "ab", "na", "am", "ag")
    characters = string.ascii_lowercase + string.digits + '{}[]":, '
    # Byte-level tokenizers write a space so.
    words = [word.replace(" ", "Ġ") for word in (*characters, *pairs)]
    vocabulary = {word: index for index, word in enumerate(("</s>", "<pad>", *words))}
    made = Tokenizer(models.BPE(vocabulary, [(word[0], word[1]) for word in words if len(word) == 2]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=made,
        eos_token="</s>",
        pad_token="<pad>",
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
    options = {"eos_token_id": 0, "pad_token_id": 1, "max_position_embeddings": 256}
    return Subject(tiny.llama(vocab_size=len(tokenizer), **options), tokenizer)


Fresh = Callable[[], dict[str, Any]]
"""Gives options of `generate` with a processor that was never called."""


def _xgrammar(subject: Subject, grammar: Grammar) -> Fresh:
    compiled = compiled_by_xgrammar(subject, grammar)
    return lambda: {"logits_processor": [xgrammar.contrib.hf.LogitsProcessor(compiled)]}


def compiled_by_xgrammar(subject: Subject, grammar: Grammar) -> Any:
    """The grammar as xgrammar's processor takes it."""
    size = subject.model.config.vocab_size
    compiler = xgrammar.GrammarCompiler(xgrammar.TokenizerInfo.from_huggingface(subject.tokenizer, vocab_size=size))
    if grammar.schema is None:
        return compiler.compile_regex(grammar.regex)
    return compiler.compile_json_schema(grammar.schema, any_whitespace=False)


def _outlines(backend: str, subject: Subject, grammar: Grammar) -> Fresh:
    model = outlines.from_transformers(subject.model, subject.tokenizer)
    if grammar.schema is None:
        return lambda: {"logits_processor": [get_regex_logits_processor(backend, model, grammar.regex)]}
    return lambda: {"logits_processor": [get_json_schema_logits_processor(backend, model, grammar.schema)]}


class Guided(LogitsProcessor):
    """llguidance as its users put it into `transformers`, for which it has no processor of its own."""

    def __init__(self, tokenizer: Any, grammar: str) -> None:
        self._tokenizer = tokenizer
        self._grammar = grammar
        self._matchers: list[Any] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if not self._matchers:
            self._matchers = [llguidance.LLMatcher(self._tokenizer, self._grammar) for _ in input_ids]
        else:
            for matcher, token in zip(self._matchers, input_ids[:, -1].tolist(), strict=True):
                if not matcher.is_stopped() and not matcher.consume_token(token):
                    raise RuntimeError(matcher.get_error())
        mask = llguidance.torch.allocate_token_bitmask(len(input_ids), scores.shape[1])
        for row, matcher in enumerate(self._matchers):
            llguidance.torch.fill_next_token_bitmask(matcher, mask, row)
        llguidance.torch.apply_token_bitmask_inplace(scores, mask)
        return scores


def _llguidance(subject: Subject, grammar: Grammar) -> Fresh:
    made = llguidance.hf.from_tokenizer(subject.tokenizer, n_vocab=subject.model.config.vocab_size)
    kind, spec = ("regex", grammar.regex) if grammar.schema is None else ("json_schema", grammar.schema)
    read = llguidance.grammar_from(kind, spec)
    return lambda: {"logits_processor": [Guided(made, read)]}


def _lm_format_enforcer(subject: Subject, grammar: Grammar) -> Fresh:
    def fresh() -> dict[str, Any]:
        parser = (
            lmformatenforcer.RegexParser(grammar.regex)
            if grammar.schema is None
            else lmformatenforcer.JsonSchemaParser(json.loads(grammar.schema))
        )
        return {"prefix_allowed_tokens_fn": build_transformers_prefix_allowed_tokens_fn(subject.tokenizer, parser)}

    return fresh


LIBRARIES: dict[str, Callable[[Subject, Grammar], Fresh]] = {
    "xgrammar": _xgrammar,
    "outlines over outlines_core": partial(_outlines, "outlines_core"),
    "outlines over xgrammar": partial(_outlines, "xgrammar"),
    "outlines over llguidance": partial(_outlines, "llguidance"),
    "llguidance": _llguidance,
    "lm-format-enforcer": _lm_format_enforcer,
}
"""Each makes what gives fresh options, of a grammar for a subject."""
