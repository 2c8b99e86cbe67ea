"""What answers have to fit: JSON, a schema, a regular expression, or calls of tools. By llguidance."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import LogitsProcessor, PreTrainedTokenizerBase

from selfspec.errors import UnsupportedOptionError
from selfspec.serve.chat.call_formats import CallFormat, Tags

MOST_CHARACTERS = 65_536
"""The most characters of a schema."""

# Steps and memory that a grammar may take, at first and before each token.
_LIMITS = {
    "max_items_in_row": 5_000,
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 100_000,
    "step_max_items": 50_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 200_000,
}

# How JSON is written, and that keywords which are not held are refused. A model that is unsure of what follows would
# write blanks up to its limit.
_OPTIONS = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False, "lenient": False}

# Where one of these stands beside properties, more of them may be described there.
_OPENING = ("additionalProperties", "unevaluatedProperties", "patternProperties", "allOf", "anyOf", "oneOf", "$ref")


@dataclass(frozen=True)
class CallGrammar:
    """What an answer fits that calls tools, or may.

    `tools` has the JSON schema of each one's arguments, which those of `strict` ones are held to in any case. Where a
    call is not `needed`, text may stand before calls, or alone, or what fits the schema `otherwise`. Several calls may
    be made if `many`.
    """

    form: CallFormat
    tools: Mapping[str, Mapping[str, Any]]
    needed: bool
    many: bool = False
    otherwise: Mapping[str, Any] | None = None
    strict: frozenset[str] = frozenset()

    def lark(self, special: Mapping[str, int]) -> str:
        """Write it in Lark's syntax; `special` are the tokens, by their text, that stand for nothing else."""
        form, rules = self.form, _Rules(special)
        if self.otherwise is not None and (form.begin + form.before).startswith("{"):
            # An object of either kind begins alike.
            rules.add("start", " | ".join(map(_json, [*self._objects(), self.otherwise])))
            return rules.written
        calls = " | ".join(
            f"{rules.text(name + form.between)} {self._arguments(rules, schema)} {rules.text(form.after)}"
            for name, schema in self.tools.items()
        )
        rules.add("rest", calls)
        if self.needed or self.otherwise is not None:
            call = f"{rules.text(form.before)} rest"
            more = f"({rules.text(form.separator)} {call})*" if self.many and form.separator is not None else ""
            start = f"{rules.text(form.begin)} {call} {more} {rules.text(form.end)}"
            rules.add("start", start if self.otherwise is None else f"{start} | {_json(self.otherwise)}")
        else:
            # Where text may come first, a call stands alone.
            call = f"{rules.until(form.begin.lstrip() + form.before)} rest {rules.text(form.end)}"
            rules.add("start", f"({call})* ANYTHING" if self.many else f"{call} | ANYTHING")
        return rules.written

    def _objects(self) -> Iterator[dict[str, Any]]:
        """Write the schema of each call, where a call is an object."""
        shape = json.loads(self.form.before + self.form.between + "{}" + self.form.after)
        for name, schema in self.tools.items():
            inner = {key: schema if value == {} else {"const": value or name} for key, value in shape.items()}
            yield {**_definitions(schema), "type": "object", "properties": inner, "required": list(inner)}

    def _arguments(self, rules: _Rules, schema: Mapping[str, Any]) -> str:
        tags, needed = self.form.tags, schema.get("required", ())
        if tags is None:
            return _json(schema)
        definitions = _definitions(schema)
        if "properties" not in schema:
            return f"({rules.text(tags.before)} KEY {rules.text(tags.between)} {rules.until(tags.after)})*"
        each = [
            (key, f"({rules.text(tags.before + key + tags.between)} {_value(rules, tags, value, definitions)})")
            for key, value in schema["properties"].items()
        ]
        return " ".join(written + ("" if key in needed else "?") for key, written in each)


def _value(rules: _Rules, tags: Tags, schema: Any, definitions: Mapping[str, Any]) -> str:
    """Write an argument and the tag behind it: strings as they are, other values as JSON."""
    schema = schema if isinstance(schema, dict) else {}
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if values is not None:
        texts = (each if isinstance(each, str) else json.dumps(each, ensure_ascii=False) for each in values)
        return f"({' | '.join(map(rules.text, texts))}) {rules.text(tags.after)}"
    if any(_may_be_text(each) for each in (schema, *schema.get("anyOf", ()), *schema.get("oneOf", ()))):
        return rules.until(tags.after)
    return f"{_json({**definitions, **schema})} {rules.text(tags.after)}"


def _definitions(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {name: schema[name] for name in ("$defs", "definitions") if name in schema}


def _may_be_text(schema: Any) -> bool:
    kinds = schema.get("type", ()) if isinstance(schema, dict) else ()
    return not schema or "string" in ([kinds] if isinstance(kinds, str) else kinds)


class _Rules:
    """A grammar in Lark's syntax, as it is written."""

    def __init__(self, special: Mapping[str, int]) -> None:
        self._special = special
        self._rules = ["%llguidance {}", r"ANYTHING: /(.|\n)*/", r"KEY: /[^<>=\"\n]+/"]

    @property
    def written(self) -> str:
        return "\n".join(self._rules)

    def add(self, name: str, body: str) -> None:
        self._rules.append(f"{name}: {body}")

    def text(self, text: str) -> str:
        """Write a text; special tokens in it are these alone."""
        parts = re.split(f"({'|'.join(map(re.escape, self._special))})", text) if self._special else [text]
        return " ".join(
            f"<[{self._special[part]}]>" if part in self._special else json.dumps(part, ensure_ascii=False)
            for part in parts
            if part
        )

    def until(self, text: str) -> str:
        """Write all that may come before a text, and the text."""
        if self.text(text).startswith("<["):
            return f"ANYTHING {self.text(text)}"
        number = len(self._rules)
        self.add(f"UNTIL_{number}", rf"/(.|\n)*/ {json.dumps(text, ensure_ascii=False)}")
        self.add(f"until_{number}[lazy]", f"UNTIL_{number}")
        return f"until_{number}"


def _json(schema: Mapping[str, Any]) -> str:
    return "%json " + json.dumps({**_closed(schema, schema), "x-guidance": _OPTIONS})


def _closed(schema: Any, root: Mapping[str, Any]) -> Any:
    """Return a schema without properties besides those named, unless it speaks of others.

    So OpenAI's strict schemas are, and models that may write properties of their own go on doing so. Choices of `oneOf`
    are written in place of references to them, since they are held where they can be told apart.
    """
    if isinstance(schema, list):
        return [_closed(each, root) for each in schema]
    if not isinstance(schema, dict):
        return schema
    if isinstance(schema.get("oneOf"), list):
        schema = {**schema, "oneOf": [_definition(each, root) for each in schema["oneOf"]]}
    if schema.get("uniqueItems") is False:
        schema = {name: value for name, value in schema.items() if name != "uniqueItems"}
    # What is described in several schemas is not named by one of them; values are no schemas.
    apart = {"allOf", "const", "enum", "default", "examples", *(("anyOf", "oneOf") if "properties" in schema else ())}
    named = ("properties", "patternProperties", "$defs", "definitions")
    found = {
        name: {key: _closed(each, root) for key, each in value.items()}
        if name in named and isinstance(value, dict)
        else value
        if name in apart
        else _closed(value, root)
        for name, value in schema.items()
    }
    if isinstance(schema.get("properties"), dict) and not any(name in schema for name in _OPENING):
        found["additionalProperties"] = False
    return found


def _definition(schema: Any, root: Mapping[str, Any]) -> Any:
    """Return what a schema refers to in the definitions of a document; any other schema as it is."""
    place = schema.get("$ref") if isinstance(schema, dict) and len(schema) == 1 else None
    found = re.fullmatch(r"#/(\$defs|definitions)/([^/~]+)", place) if isinstance(place, str) else None
    definitions = root.get(found[1]) if found else None
    return definitions.get(found[2], schema) if found and isinstance(definitions, dict) else schema


Wanted = Mapping[str, Any] | str | CallGrammar
"""A JSON schema, a regular expression, or calls of tools: what restricts an answer."""


class GrammarProcessor(LogitsProcessor):
    """Keeps one row to a grammar. It can go back, so that it filters drafts, too: see `docs/grammars.md`."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher
        # Of each call: whether it took a token; None: it was the first, which shows the prompt.
        self._took: list[bool | None] = []

    def fresh(self) -> GrammarProcessor:
        """Make another one, as at the beginning."""
        return GrammarProcessor(self._matcher.deep_copy())

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return scores, `[1, vocab]`, of -inf where a token does not fit; RuntimeError: it took too many steps."""
        left = False in self._took
        if not self._took:
            self._took.append(None)
        else:
            # A draft may leave the grammar, and is then taken back.
            self._took.append(not left and self._matcher.try_consume_tokens([int(input_ids[0, -1])]) == 1)
        if self._took[-1] is False:
            return scores
        mask = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        if self._matcher.is_error():
            raise RuntimeError(f"the grammar took more steps than one token may: {self._matcher.get_error()}")
        fits = torch.from_numpy(np.unpackbits(mask, bitorder="little", count=scores.shape[1])).bool()
        return scores.masked_fill(~fits.to(scores.device), -torch.inf)

    def rollback(self, calls: int) -> None:
        """Undo the last calls."""
        undone, self._took = self._took[len(self._took) - calls :], self._took[: len(self._took) - calls]
        taken = undone.count(True)
        if taken and not self._matcher.rollback(taken):
            raise RuntimeError(f"the grammar cannot go back: {self._matcher.get_error()}")


class Grammars:
    """Compiles what answers have to fit, in bounded steps; end tokens may end an answer once its grammar is complete.

    It loads llguidance at once: an import amid requests would hold up all of them. Several threads may use it. `tokens`
    is the vocabulary as llguidance reads it; None: it cannot.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocabulary: int, end_tokens: frozenset[int]) -> None:
        # Those that no text is written with.
        special = ((number, token) for number, token in tokenizer.added_tokens_decoder.items() if token.special)
        self._special = {str(token): number for number, token in special}
        self.tokens: Any = None
        self._why_not = ""
        try:
            import llguidance
            import llguidance.hf

            self._matcher_of = llguidance.LLMatcher
            self._limits = llguidance.LLParserLimits(**_LIMITS, verbose_errors=False)
            ends = sorted(token for token in end_tokens if token < vocabulary) or None
            self.tokens = llguidance.hf.from_tokenizer(tokenizer, n_vocab=vocabulary, eos_token=ends)
        except ImportError:
            self._why_not = "needs llguidance where the server runs: pip install llguidance"
        # What it raises of a tokenizer that it cannot read is its own.
        except Exception as error:
            self._why_not = (
                f"is not supported: llguidance cannot read this tokenizer ({' '.join(str(error).split())[:300]})"
            )

    def compiled(self, wanted: Wanted) -> GrammarProcessor:
        """Compile a form into a processor, which each answer has a `fresh` one of.

        An UnsupportedOptionError: it is too large, takes too many steps, has a keyword that is not held, or nothing
        fits it.
        """
        if self.tokens is None:
            raise UnsupportedOptionError(f"response_format {self._why_not}")
        match wanted:
            case str():
                source = self._matcher_of.grammar_from_regex(wanted)
            case CallGrammar():
                source = replace(wanted, tools=self._tools_held(wanted)).lark(self._special)
            case _:
                source = f"start: {_json(wanted)}"
        return GrammarProcessor(self._matcher(source))

    def _matcher(self, source: str) -> Any:
        if len(source) > MOST_CHARACTERS:
            raise UnsupportedOptionError(f"response_format: it has more than {MOST_CHARACTERS} characters")
        matcher = self._matcher_of(self.tokens, source, log_level=0, limits=self._limits)
        first = b"" if matcher.is_error() else matcher.compute_bitmask()
        # Behind the reason it shows lines of the grammar.
        said = " ".join(re.split(r"\n *\d+ \||<non-verbose/>", matcher.get_error())[0].split())
        if said and "NoExtension" not in said:
            reason = said.rpartition("failed to compile JSON schema: ")[2][:300]
            raise UnsupportedOptionError(f"response_format cannot be held: {reason}")
        if matcher.is_stopped() or not any(first):
            raise UnsupportedOptionError("response_format: no answer fits it; a schema may refer to itself alone")
        return matcher

    def _tools_held(self, wanted: CallGrammar) -> dict[str, Mapping[str, Any]]:
        """Return the schemas of a grammar's tools; any object in place of those that are not strict and not held."""
        found: dict[str, Mapping[str, Any]] = {}
        for name, schema in wanted.tools.items():
            try:
                self._matcher(f"start: {_json(schema)}")
            except UnsupportedOptionError as error:
                if name in wanted.strict:
                    raise UnsupportedOptionError(f"tools: {name}: {error}") from error
                schema = {"type": "object"}
            found[name] = schema
        return found
