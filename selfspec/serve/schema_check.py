"""What a grammar can hold of a JSON schema, and how much of one may be asked for: the rest is refused by name."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from selfspec.errors import UnsupportedOptionError

MOST_CHARACTERS, MOST_DEPTH, MOST_VALUES, MOST_PROPERTIES, MOST_STATES = 65_536, 64, 5_000, 500, 5_000

# No grammar remembers what it has read, or reads a text twice.
_DROPPED = (
    *("not", "if", "then", "else", "uniqueItems", "contains", "minContains", "maxContains", "dependentRequired"),
    *("dependentSchemas", "dependencies", "$dynamicRef", "$recursiveRef"),
)
# The first of these that a schema has is all that the grammar reads of it.
_WHOLE = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf")
_OF_TYPES: Mapping[str, tuple[str, ...]] = {
    "string": ("minLength", "maxLength", "pattern", "format"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    "array": ("items", "prefixItems", "minItems", "maxItems", "unevaluatedItems"),
    "object": (
        *("properties", "required", "additionalProperties", "patternProperties", "propertyNames"),
        *("minProperties", "maxProperties", "unevaluatedProperties"),
    ),
}
_ASSERTIONS = tuple(name for names in _OF_TYPES.values() for name in names)
# Where these stand, the grammar knows the type without being told.
_TELLING = ("properties", "additionalProperties", "patternProperties", "items", "prefixItems")
_KINDS: Mapping[str, tuple[type, ...]] = {
    **{"string": (str,), "boolean": (bool,), "null": (type(None),), "integer": (int,), "number": (int, float)},
    **{"array": (list,), "object": (dict,)},
}


@dataclass(frozen=True)
class _Part:
    """A schema within another, by its path, as deep as that many schemas."""

    schema: Mapping[str, Any]
    path: str
    depth: int

    def refuse(self, reason: str) -> UnsupportedOptionError:
        return UnsupportedOptionError(f"response_format: {reason}, at {self.path or '#'} of the schema")


def check_schema(schema: Mapping[str, Any]) -> int:
    """Refuse a schema that would not be kept to, or would take long to compile; return how many states it has, about.

    Raises:
        UnsupportedOptionError: it holds more than is taken, or a keyword that no grammar can hold.
    """
    if len(json.dumps(schema)) > MOST_CHARACTERS:
        raise UnsupportedOptionError(f"response_format: the schema has more than {MOST_CHARACTERS} characters")
    values = states = 0
    for part in _parts(_Part(schema, "", 1)):
        if part.depth > MOST_DEPTH:
            raise part.refuse(f"schemas are nested more than {MOST_DEPTH} deep")
        if len(part.schema.get("properties", ())) > MOST_PROPERTIES:
            raise part.refuse(f"an object has more than {MOST_PROPERTIES} properties")
        _check_keywords(part, schema)
        values += 1 + len(part.schema.get("enum", ()))
        longest = part.schema.get("maxLength", part.schema.get("minLength", 0))
        states += pattern_states(part.schema.get("pattern", "")) + min(longest, 500)
    if values > MOST_VALUES:
        raise UnsupportedOptionError(f"response_format: the schema has more than {MOST_VALUES} parts and values")
    if states > MOST_STATES:
        raise UnsupportedOptionError(
            f"response_format: patterns and lengths of the schema take some {states} states, and at most {MOST_STATES} "
            "are compiled; bound fewer strings, or repeat less"
        )
    return states + values


def pattern_states(pattern: str) -> int:
    """About how many states a regular expression takes: its letters, as often as they are repeated."""
    open_sums, last = [0], 0
    for token in re.findall(r"\\.|\[(?:\\.|[^\]])*\]|\{\d+(?:,\d*)?\}|.", pattern, re.DOTALL):
        if token[0] == "{" and len(token) > 1:
            times = max(int(number) for number in re.findall(r"\d+", token))
            open_sums[-1] += last * (times - 1)
            last *= times
        elif token == "(":
            open_sums.append(0)
        elif token == ")" and len(open_sums) > 1:
            last = open_sums.pop()
            open_sums[-1] += last
        else:
            last = 1
            open_sums[-1] += 1
    return sum(open_sums)


def _parts(part: _Part) -> Iterator[_Part]:
    """A schema and all that lie in it; what is of another shape is for the compiler to refuse."""
    yield part
    for name, value in part.schema.items():
        if name in ("properties", "patternProperties", "$defs", "definitions") and isinstance(value, dict):
            inner = {f"{name}/{key}": each for key, each in value.items()}
        elif name in ("anyOf", "oneOf", "allOf", "prefixItems") and isinstance(value, list):
            inner = {f"{name}/{index}": each for index, each in enumerate(value)}
        elif name in (*_OF_TYPES["array"], *_OF_TYPES["object"]):
            inner = {name: value}
        else:
            continue
        for key, each in inner.items():
            if isinstance(each, dict):
                if part.depth > MOST_DEPTH:
                    return
                yield from _parts(_Part(each, f"{part.path or '#'}/{key}", part.depth + 1))


def _check_keywords(part: _Part, root: Mapping[str, Any]) -> None:
    schema = part.schema
    dropped = next((name for name in _DROPPED if schema.get(name, False) is not False), None)
    if dropped is not None:
        raise part.refuse(f"{dropped!r} cannot be held by a grammar; drop it, and check the answer yourself")
    asserted = [name for name in _ASSERTIONS if name in schema]
    whole = [name for name in _WHOLE if name in schema]
    types = schema.get("type", [])
    types = [types] if isinstance(types, str) else types
    if whole:
        _check_whole(part, whole, [*whole[1:], *asserted], types)
        if whole[0] == "$ref" and not str(schema["$ref"]).startswith("#/") and schema["$ref"] != "#":
            raise part.refuse(f"{schema['$ref']!r} refers to another document; put it into $defs")
        if whole[0] == "oneOf" and not _disjoint(schema["oneOf"], root):
            raise part.refuse("schemas of 'oneOf' may fit at once, which a grammar cannot tell; say 'anyOf'")
        return
    if not types and asserted and not any(name in schema for name in _TELLING):
        raise part.refuse(f"{asserted[0]!r} without 'type' cannot be held by a grammar; add the type")
    if "multipleOf" in schema and types != ["integer"]:
        raise part.refuse("'multipleOf' is held for integers alone")
    if ("pattern" in schema) + ("format" in schema) + bool({"minLength", "maxLength"} & schema.keys()) > 1:
        raise part.refuse("of 'pattern', 'format' and lengths only one is held; keep one of them")
    unknown = [name for name in schema.get("required", ()) if name not in schema.get("properties", {})]
    if unknown:
        raise part.refuse(f"{unknown[0]!r} is required and not among the properties; describe it there")


def _check_whole(part: _Part, whole: list[str], others: list[str], types: list[str]) -> None:
    """Refuse what stands beside a keyword that the grammar reads alone."""
    schema, first = part.schema, whole[0]
    values = [schema["const"]] if first == "const" else schema["enum"] if first == "enum" else []
    if first == "const" and schema["const"] in schema.get("enum", ()):
        others = [name for name in others if name != "enum"]
    if first == "allOf" and len(schema["allOf"]) != 1:
        raise part.refuse("'allOf' of several schemas cannot be held by a grammar; write them as one")
    kinds = tuple(kind for name in types for kind in _KINDS.get(name, (object,)))
    if kinds and not all(isinstance(value, kinds) for value in values):
        raise part.refuse(f"{first!r} has a value that is not of the type {types}")
    if others or (types and first == "$ref"):
        raise part.refuse(
            f"{(others or ['type'])[0]!r} beside {first!r} cannot be held by a grammar; move it into there"
        )


def _disjoint(schemas: list[Any], root: Mapping[str, Any]) -> bool:
    """Whether no value can fit two of the schemas: they are of different types, or differ in a constant property."""
    found = [_resolved(each, root) for each in schemas]
    types = [each.get("type") for each in found]
    if len({"number" if kind == "integer" else kind for kind in map(str, types)}) == len(found) and all(
        isinstance(kind, str) for kind in types
    ):
        return True
    constants = [
        {
            name: json.dumps(_resolved(value, root)["const"])
            for name, value in each.get("properties", {}).items()
            if "const" in _resolved(value, root) and name in each.get("required", ())
        }
        for each in found
    ]
    shared = set(constants[0]).intersection(*constants[1:]) if constants else set()
    return any(len({each[name] for each in constants}) == len(found) for name in shared)


def _resolved(schema: Any, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """A schema, or what it refers to within the document."""
    for _ in range(MOST_DEPTH):
        if not isinstance(schema, dict) or "$ref" not in schema:
            break
        target: Any = root
        for key in str(schema["$ref"]).split("/")[1:]:
            target = target.get(key.replace("~1", "/").replace("~0", "~"), {}) if isinstance(target, dict) else {}
        schema = target
    return schema if isinstance(schema, dict) else {}
