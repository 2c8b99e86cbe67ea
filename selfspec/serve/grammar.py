"""Answers of a given form: logits processors by xgrammar, where it is installed."""

from __future__ import annotations

import json
import threading
from typing import Any

from transformers import LogitsProcessor, PreTrainedTokenizerBase

from selfspec.errors import UnsupportedOptionError
from selfspec.serve.schemas import JsonObjectFormat, JsonSchemaFormat, RegexFormat, ResponseFormat

# A model that is unsure of what follows would write blanks up to its limit.
_ANY_WHITESPACE = False


class Grammars:
    """Compiles what answers have to fit, and keeps it; end tokens may end an answer once its grammar is complete."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocabulary: int, end_tokens: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._end_tokens = end_tokens
        self._lock = threading.Lock()
        self._compiler: Any = None

    def processor(self, wanted: ResponseFormat | None) -> tuple[LogitsProcessor, ...]:
        """A fresh processor for one answer; none for any text.

        Raises:
            UnsupportedOptionError: xgrammar is not installed, or cannot read the form.
        """
        if wanted is None or wanted.type == "text":
            return ()
        try:
            from xgrammar.contrib.hf import LogitsProcessor as Masks
        except ImportError as error:
            raise UnsupportedOptionError(
                f"response_format of type {wanted.type!r} needs xgrammar where the server runs: pip install xgrammar"
            ) from error
        with self._lock:
            try:
                return (Masks(self._compiled(wanted)),)
            # What the compiler raises is its own and RuntimeError.
            except Exception as error:
                reason = " ".join(str(error).split())[:300]
                raise UnsupportedOptionError(f"response_format cannot be compiled: {reason}") from error

    def _compiled(self, wanted: JsonObjectFormat | JsonSchemaFormat | RegexFormat) -> Any:
        compiler = self._compiler = self._compiler or self._made()
        match wanted:
            case JsonSchemaFormat():
                return compiler.compile_json_schema(
                    json.dumps(wanted.json_schema.json_schema), any_whitespace=_ANY_WHITESPACE
                )
            case RegexFormat():
                return compiler.compile_regex(wanted.pattern)
            case _:
                return compiler.compile_json_schema('{"type": "object"}', any_whitespace=_ANY_WHITESPACE)

    def _made(self) -> Any:
        import xgrammar

        ends = sorted(self._end_tokens) or None
        info = xgrammar.TokenizerInfo.from_huggingface(
            self._tokenizer, vocab_size=self._vocabulary, stop_token_ids=ends
        )
        return xgrammar.GrammarCompiler(info, cache_limit_bytes=256 * 2**20)
