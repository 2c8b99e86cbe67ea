"""Answers of a form: JSON, JSON that fits a schema, text that a regular expression matches. By xgrammar."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, get_args

import torch
from transformers import LogitsProcessor, PreTrainedTokenizerBase

from selfspec.errors import UnsupportedOptionError
from selfspec.serve.call_grammar import CallGrammar
from selfspec.serve.schema_check import MOST_STATES, check_schema, pattern_states
from selfspec.serve.schemas import JsonObjectFormat, JsonSchemaFormat, RegexFormat

Wanted = JsonObjectFormat | JsonSchemaFormat | RegexFormat | CallGrammar
"""What an answer has to fit."""

# A model that is unsure of what follows would write blanks up to its limit.
_ANY_WHITESPACE = False
# What compiles within some tenths of a second does not wait for what has more states.
_FEW_STATES = 300


@dataclass(frozen=True)
class Grammar:
    """What an answer has to fit, compiled."""

    compiled: Any

    def processor(self) -> LogitsProcessor:
        """Make what keeps one answer to it."""
        from xgrammar.contrib.hf import LogitsProcessor as Masks

        return Masks(self.compiled)


class Grammars:
    """Compiles what answers have to fit, and keeps it; end tokens may end an answer once its grammar is complete.

    What that takes is loaded here: an import amid requests would hold up all of them. May be used by several threads.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocabulary: int, end_tokens: frozenset[int]) -> None:
        self._vocabulary = vocabulary
        self._compiler: Any = None
        self._why_not = ""
        try:
            import xgrammar
            import xgrammar.contrib.hf
            import xgrammar.structural_tag

            ends = sorted(end_tokens) or None
            info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocabulary, stop_token_ids=ends)
            # In the thread that asks, which gives way to the engine's.
            self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_limit_bytes=256 * 2**20)
            # The first use loads more.
            xgrammar.apply_token_bitmask_inplace(
                torch.zeros(1, vocabulary), xgrammar.allocate_token_bitmask(1, vocabulary)
            )
        except ImportError:
            self._why_not = "needs xgrammar where the server runs: pip install xgrammar"
        # What it raises of a tokenizer that it cannot read is its own.
        except Exception as error:
            self._why_not = (
                f"is not supported: xgrammar cannot read this tokenizer ({' '.join(str(error).split())[:300]})"
            )

    @staticmethod
    def compiles_fast(wanted: Wanted) -> bool:
        """Check the form, and say whether compiling it takes little.

        Raises:
            UnsupportedOptionError: it is too large, or asks for what no grammar can hold.
        """
        if isinstance(wanted, JsonSchemaFormat):
            return check_schema(wanted.json_schema.json_schema) <= _FEW_STATES
        if isinstance(wanted, CallGrammar):
            return sum(map(check_schema, wanted.schemas)) <= _FEW_STATES
        states = pattern_states(wanted.pattern) if isinstance(wanted, RegexFormat) else 0
        if states > MOST_STATES:
            raise UnsupportedOptionError(
                f"response_format: the pattern takes some {states} states, and at most {MOST_STATES} are compiled"
            )
        return states <= _FEW_STATES

    def compiled(self, wanted: Wanted) -> Grammar:
        """Compile a form, or find it among those that were compiled.

        Raises:
            UnsupportedOptionError: xgrammar is missing or cannot read the tokenizer or the form, or no answer fits it.
        """
        compiler = self._compiler
        if compiler is None:
            raise UnsupportedOptionError(f"response_format of type {wanted.type!r} {self._why_not}")
        import xgrammar

        try:
            match wanted:
                case JsonSchemaFormat():
                    found = compiler.compile_json_schema(
                        json.dumps(wanted.json_schema.json_schema), any_whitespace=_ANY_WHITESPACE
                    )
                case CallGrammar():
                    found = compiler.compile_structural_tag(
                        json.dumps(wanted.structural_tag(style_of(wanted, compiler)))
                    )
                case RegexFormat():
                    found = compiler.compile_regex(wanted.pattern)
                case _:
                    found = compiler.compile_json_schema('{"type": "object"}', any_whitespace=_ANY_WHITESPACE)
        except UnsupportedOptionError:
            raise
        # What the compiler raises is its own and RuntimeError.
        except Exception as error:
            reason = " ".join(str(error).split())[:300]
            raise UnsupportedOptionError(f"response_format cannot be compiled: {reason}") from error
        first = xgrammar.allocate_token_bitmask(1, self._vocabulary)
        xgrammar.GrammarMatcher(found).fill_next_token_bitmask(first)
        if not first.any():
            raise UnsupportedOptionError("response_format: no answer fits it; a schema may refer to itself alone")
        return Grammar(found)


def style_of(wanted: CallGrammar, compiler: Any) -> str:
    """Name how arguments are written, in xgrammar's terms: which of its styles takes such a text.

    Raises:
        UnsupportedOptionError: none does.
    """
    from xgrammar import GrammarMatcher
    from xgrammar.structural_tag import JSONSchemaFormat

    tags = wanted.form.tags
    if tags is None:
        return "json"
    trial = {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]}
    for style in get_args(JSONSchemaFormat.model_fields["style"].annotation):
        content = {"type": "json_schema", "json_schema": trial, "style": style}
        found = compiler.compile_structural_tag(json.dumps({"type": "structural_tag", "format": content}))
        if GrammarMatcher(found).accept_string(f"{tags.before}key{tags.between}value{tags.after}"):
            return str(style)
    raise UnsupportedOptionError(
        "tool_choice: how this model writes calls is not known to grammars; say 'auto' or 'none'"
    )
