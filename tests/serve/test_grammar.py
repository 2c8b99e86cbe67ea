"""Schemas that a grammar cannot hold are refused by name; those that clients send are taken, and kept to."""

from __future__ import annotations

import json
from typing import Any

import pytest

from selfspec.errors import UnsupportedOptionError
from selfspec.serve.grammar import check_schema, pattern_states

INTEGER = {"type": "integer"}
KIND = {"type": "object", "properties": {"kind": {"const": "a"}, "x": INTEGER}, "required": ["kind"]}
OTHER = {"type": "object", "properties": {"kind": {"const": "b", "type": "string"}}, "required": ["kind"]}

# Each with what the grammar of xgrammar lets through although it does not fit.
REFUSED: list[tuple[str, dict[str, Any], Any]] = [
    ("not", {"not": INTEGER}, 3),
    ("uniqueItems", {"type": "array", "items": INTEGER, "uniqueItems": True}, [1, 1]),
    ("contains", {"type": "array", "items": {"type": "string"}, "contains": INTEGER}, ["a"]),
    ("if", {"if": INTEGER, "then": {"minimum": 3}}, 2),
    (
        "dependentRequired",
        {"type": "object", "properties": {"a": INTEGER, "b": INTEGER}, "dependentRequired": {"a": ["b"]}},
        {"a": 1},
    ),
    ("allOf", {"allOf": [INTEGER, {"type": "integer", "minimum": 3}]}, 2),
    ("allOf", {"type": "integer", "allOf": [{"type": "integer", "minimum": 3}], "maximum": 9}, 12),
    ("minimum", {"anyOf": [INTEGER], "minimum": 3}, 2),
    ("minimum", {"$ref": "#/$defs/a", "$defs": {"a": INTEGER}, "minimum": 3}, 2),
    ("minLength", {"enum": ["a"], "minLength": 3}, "a"),
    ("type", {"type": "integer", "enum": ["a"]}, "a"),
    ("const", {"type": "string", "const": 3}, 3),
    ("minimum", {"minimum": 3}, 2),
    ("pattern", {"type": "string", "pattern": "^a*$", "maxLength": 2}, "aaa"),
    ("multipleOf", {"type": "number", "multipleOf": 0.5}, 0.3),
    ("required", {"type": "object", "properties": {"a": INTEGER}, "required": ["b"]}, {"a": 1}),
    ("oneOf", {"oneOf": [INTEGER, {"type": "number"}]}, 3),
    ("another document", {"$ref": "https://example.com/a.json"}, 3),
    ("another document", {"$ref": "#a", "$defs": {"x": {"$anchor": "a", "type": "string"}}}, 3),
]


@pytest.mark.parametrize(("words", "schema", "instance"), REFUSED)
def test_what_a_grammar_cannot_hold_is_refused(words: str, schema: dict[str, Any], instance: Any) -> None:
    """Wherever it stands. A later xgrammar that can hold it needs no refusal."""
    with pytest.raises(UnsupportedOptionError, match=words):
        check_schema(schema)
    deeper = {"type": "object", "properties": {"a": {"type": "array", "items": schema}}}
    if "$defs" not in schema:
        with pytest.raises(UnsupportedOptionError, match="#/properties/a/items"):
            check_schema(deeper)
    pytest.importorskip("xgrammar")
    from xgrammar import Grammar
    from xgrammar.testing import _is_grammar_accept_string as accepts

    assert accepts(Grammar.from_json_schema(json.dumps(schema), any_whitespace=False), json.dumps(instance))


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "maxLength": 8, "title": "A", "description": "b", "default": "c"},
        {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None, "title": "Name"},
        {"$ref": "#/$defs/a", "description": "a", "$defs": {"a": {"enum": ["b"], "type": "string"}}},
        {"allOf": [INTEGER], "default": 3},
        {"const": "a", "enum": ["a"], "type": "string"},
        {"type": ["string", "null"], "minLength": 2},
        {"type": "array", "prefixItems": [INTEGER], "items": False, "minItems": 1},
        {"type": "object", "properties": {"not": INTEGER}, "required": ["not"], "additionalProperties": False},
        {"type": "array", "items": INTEGER, "uniqueItems": False},
        {"oneOf": [KIND, OTHER], "discriminator": {"propertyName": "kind"}},
        {"oneOf": [{"$ref": "#/$defs/k"}, {"$ref": "#/$defs/o"}], "$defs": {"k": KIND, "o": OTHER}},
        {"oneOf": [INTEGER, {"type": "string"}]},
        {},
        {"$schema": "https://json-schema.org/draft/2020-12/schema", "type": "integer", "multipleOf": 3},
    ],
)
def test_what_clients_send_is_taken(schema: dict[str, Any]) -> None:
    assert check_schema(schema) >= 1


@pytest.mark.parametrize(
    ("pattern", "states"),
    [("abc", 3), ("a{3}", 3), ("(ab){2,5}", 10), (r"\d{4}-\d{2}", 7), ("[a-z{9}]+", 2), ("((a{2}b){3}c){2}", 20)],
)
def test_states_of_patterns(pattern: str, states: int) -> None:
    assert pattern_states(pattern) == states
