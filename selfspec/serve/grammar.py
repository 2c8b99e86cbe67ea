"""What answers have to fit: JSON, a schema, a regular expression, or calls of tools. By xgrammar."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from transformers import LogitsProcessor, PreTrainedTokenizerBase

from selfspec.errors import UnsupportedOptionError
from selfspec.serve.chat.call_formats import CallFormat
from selfspec.serve.schemas import JsonObjectFormat, JsonSchemaFormat, RegexFormat


@dataclass(frozen=True)
class CallGrammar:
    """What an answer fits that calls tools, or may.

    `tools` has the JSON schema of each one's arguments. Where a call is not `needed`, text may stand before calls, or
    alone, or what fits the schema `otherwise`. Several calls may be made if `many`.
    """

    form: CallFormat
    tools: Mapping[str, Mapping[str, Any]]
    needed: bool
    many: bool = False
    otherwise: Mapping[str, Any] | None = None
    type: Literal["tools"] = "tools"

    @property
    def schemas(self) -> list[Mapping[str, Any]]:
        """All schemas that it holds."""
        return [*self.tools.values(), *([] if self.otherwise is None else [self.otherwise])]

    def structural_tag(self, style: str = "json") -> dict[str, Any]:
        """Write it in xgrammar's terms; `style` is its name of how arguments are written."""
        form = self.form
        alone = not self.needed and self.otherwise is None

        def tag(name: str, schema: Mapping[str, Any]) -> dict[str, Any]:
            begin, end = f"{form.before}{name}{form.between}", form.after
            # Where text may come first, a call stands alone.
            begin, end = (form.begin.lstrip() + begin, end + form.end) if alone else (begin, end)
            content = _json(schema) | {"style": style}
            return {"type": "tag", "begin": begin, "content": content, "end": end}

        tags = [tag(name, schema) for name, schema in self.tools.items()]
        if alone:
            trigger = form.begin.lstrip() + form.before
            kind = {"type": "triggered_tags", "stop_after_first": not self.many}
            return _tagged({**kind, "triggers": [trigger], "tags": tags})
        calls = {
            "type": "tags_with_separator",
            "tags": tags,
            "separator": form.separator or "",
            "at_least_one": True,
            "stop_after_first": not self.many or form.separator is None,
        }
        ends = [{"type": "const_string", "value": text} for text in (form.begin, form.end)]
        parts = [part for part in (ends[0], calls, ends[1]) if part.get("value", "-")]
        sequence = {"type": "sequence", "elements": parts}
        return _tagged(
            sequence if self.otherwise is None else {"type": "or", "elements": [sequence, _json(self.otherwise)]}
        )


def _json(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": dict(schema), "max_whitespace_cnt": 1}


def _tagged(form: dict[str, Any]) -> dict[str, Any]:
    return {"type": "structural_tag", "format": form}


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
        """Make the processor that keeps one answer to it."""
        from xgrammar.contrib.hf import LogitsProcessor as Masks

        return Masks(self.compiled)


class Grammars:
    """Compiles what answers have to fit, and keeps it; end tokens may end an answer once its grammar is complete.

    It loads xgrammar at once: an import amid requests would hold up all of them. Several threads may use it.
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
        """Check a form, and return whether compiling it takes little time."""
        if isinstance(wanted, JsonSchemaFormat):
            return check_schema(wanted.json_schema.json_schema) <= _FEW_STATES
        if isinstance(wanted, CallGrammar):
            return sum(map(check_schema, wanted.schemas)) <= _FEW_STATES
        states = 0
        if isinstance(wanted, RegexFormat):
            _check_pattern(_Part({}, "", 1), wanted.pattern)
            states = pattern_states(wanted.pattern)
        if states > MOST_STATES:
            raise UnsupportedOptionError(
                f"response_format: the pattern takes some {states} states, and at most {MOST_STATES} are compiled"
            )
        return states <= _FEW_STATES

    def compiled(self, wanted: Wanted) -> Grammar:
        """Compile a form, or find it among those that were compiled."""
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
    """Return which of xgrammar's styles takes arguments as they are written."""
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

_NAMED_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions")

_ASSERTIONS = tuple(name for names in _OF_TYPES.values() for name in names)

# Where these stand, the grammar knows the type without being told.
_TELLING = ("properties", "additionalProperties", "patternProperties", "items", "prefixItems")

_KINDS: Mapping[str, tuple[type, ...]] = {
    **{"string": (str,), "boolean": (bool,), "null": (type(None),), "integer": (int,), "number": (int, float)},
    **{"array": (list,), "object": (dict,)},
}


# The types of what keywords say: what is of another one is no schema.
_SHAPES: Mapping[str, type | tuple[type, ...]] = {
    **dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"), int),
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"), (int, float)),
    **dict.fromkeys(("pattern", "format", "$ref"), str),
    **dict.fromkeys(("enum", "required", "anyOf", "oneOf", "allOf", "prefixItems"), list),
    **dict.fromkeys(("properties", "patternProperties", "$defs", "definitions"), dict),
    **dict.fromkeys(("items", "additionalProperties", "propertyNames"), (dict, bool)),
    **dict.fromkeys(("unevaluatedItems", "unevaluatedProperties"), (dict, bool)),
    "type": (str, list),
}

_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")

_MOST_MULTIPLE = 1024


@dataclass(frozen=True)
class _Part:
    """A schema within another, by its path, nested `depth` deep."""

    schema: Mapping[str, Any]
    path: str
    depth: int

    def refuse(self, reason: str) -> UnsupportedOptionError:
        return UnsupportedOptionError(f"response_format: {reason}, at {self.path or '#'} of the schema")


def check_schema(schema: Mapping[str, Any]) -> int:
    """Refuse a schema that would not be kept to, or would take long to compile; return about how many states it has."""
    if len(json.dumps(schema)) > MOST_CHARACTERS:
        raise UnsupportedOptionError(f"response_format: the schema has more than {MOST_CHARACTERS} characters")
    values = states = 0
    paths, refs = set(), []
    for part in _parts(_Part(schema, "", 1)):
        if part.depth > MOST_DEPTH:
            raise part.refuse(f"schemas are nested more than {MOST_DEPTH} deep")
        _check_shape(part)
        paths.add(part.path or "#")
        refs += [part] if "$ref" in part.schema else []
        if len(part.schema.get("properties", ())) > MOST_PROPERTIES:
            raise part.refuse(f"an object has more than {MOST_PROPERTIES} properties")
        _check_keywords(part, schema)
        values += 1 + len(part.schema.get("enum", ()))
        states += _states(part)
    if values > MOST_VALUES:
        raise UnsupportedOptionError(f"response_format: the schema has more than {MOST_VALUES} parts and values")
    if states > MOST_STATES:
        raise UnsupportedOptionError(
            f"response_format: patterns and lengths of the schema take some {states} states, and at most {MOST_STATES} "
            "are compiled; bound fewer strings, or repeat less"
        )
    astray = next((part for part in refs if part.schema["$ref"] not in paths), None)
    if astray is not None:
        raise astray.refuse(f"{astray.schema['$ref']!r} refers to no schema of this document; put it into $defs")
    return states + values


def _check_shape(part: _Part) -> None:
    """Refuse keywords whose values have another type than JSON Schema says."""
    for name, kinds in _SHAPES.items():
        value = part.schema.get(name, part)
        wrong = value is not part and (not isinstance(value, kinds) or (isinstance(value, bool) and kinds is int))
        if wrong or (kinds is int and isinstance(value, int) and value < 0):
            raise part.refuse(f"{name!r} cannot be {json.dumps(value)[:100]}")
    for name in ("anyOf", "oneOf", "allOf", "prefixItems", *_NAMED_SCHEMAS):
        inner = part.schema.get(name, ())
        if not all(isinstance(each, dict | bool) for each in (inner.values() if isinstance(inner, dict) else inner)):
            raise part.refuse(f"{name!r} has an entry that is no schema")
    types = part.schema.get("type", "object")
    if not all(isinstance(name, str) for name in (*part.schema.get("required", ()), *types)):
        raise part.refuse("'required' and 'type' list names")
    if not {types} <= _KINDS.keys() if isinstance(types, str) else not set(types) <= _KINDS.keys():
        raise part.refuse(f"'type' cannot be {json.dumps(types)[:100]}")
    if any(part.schema.get(name) == [] for name in ("enum", "anyOf", "oneOf")):
        raise part.refuse("nothing fits an empty list")


def _states(part: _Part) -> int:
    """Estimate how many states a schema takes, without those within it."""
    schema = part.schema
    patterns = [schema.get("pattern", ""), *schema.get("patternProperties", ())]
    digits = sum(len(str(schema[name])) for name in _BOUNDS if name in schema)
    optional = len(schema.get("properties", {}).keys() - set(schema.get("required", ())))
    fewest: int = max(schema.get("minProperties", 0), min(schema.get("maxProperties", 0), optional))
    longest: int = max(schema.get("maxLength", 0), schema.get("minLength", 0))
    return sum(map(pattern_states, patterns)) + 2 * digits + optional * fewest + min(longest, 500)


def _check_pattern(part: _Part, pattern: str) -> None:
    """Refuse patterns that look around, or have anchors elsewhere than at their ends: the grammar leaves these out."""
    inner = pattern.removeprefix("^").removesuffix("$")
    # An escaped dollar is none.
    inner = pattern.removeprefix("^") if inner.endswith("\\") else inner
    tokens = re.findall(r"\\.|\[(?:\\.|[^\]])*\]|\(\?:|\(\?|.", inner, re.DOTALL)
    if any(token in ("^", "$", "(?", "\\b", "\\B") for token in tokens if not token.endswith("\\$")):
        raise part.refuse(f"the pattern {pattern[:100]!r} looks around, or has an anchor within; write it without")


def pattern_states(pattern: str) -> int:
    """Estimate how many states a regular expression takes: its letters, as often as they are repeated."""
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
    """Yield a schema and all that lie in it; what is of another shape is for the compiler to refuse."""
    yield part
    for name, value in part.schema.items():
        if name in _NAMED_SCHEMAS and isinstance(value, dict):
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
        if whole[0] == "$ref" and not schema["$ref"].startswith("#/") and schema["$ref"] != "#":
            raise part.refuse(f"{schema['$ref']!r} refers to another document; put it into $defs")
        if whole[0] == "oneOf" and not _disjoint(schema["oneOf"], root):
            raise part.refuse("schemas of 'oneOf' may fit at once, which a grammar cannot tell; say 'anyOf'")
        return
    if not types and asserted and not any(name in schema for name in _TELLING):
        raise part.refuse(f"{asserted[0]!r} without 'type' cannot be held by a grammar; add the type")
    if "multipleOf" in schema and types != ["integer"]:
        raise part.refuse("'multipleOf' is held for integers alone")
    bounded = any(name in schema for name in _BOUNDS)
    if "multipleOf" in schema and (bounded or not 0 < schema["multipleOf"] <= _MOST_MULTIPLE):
        raise part.refuse(f"'multipleOf' is held up to {_MOST_MULTIPLE}, and without bounds beside it")
    for pattern in ([schema["pattern"]] if "pattern" in schema else []) + list(schema.get("patternProperties", ())):
        _check_pattern(part, pattern)
    names = [name for name in ("patternProperties", "propertyNames") if name in schema]
    if names and ("properties" in schema or len(names) + len(schema.get("patternProperties", ())) > 2):
        raise part.refuse(f"{names[0]!r} beside other names cannot be held by a grammar; describe them in one way")
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
    """Return whether no value can fit two of the schemas: they are of different types, or differ in a constant."""
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
    """Return a schema, or what it refers to within the document."""
    for _ in range(MOST_DEPTH):
        if not isinstance(schema, dict) or "$ref" not in schema:
            break
        target: Any = root
        for key in str(schema["$ref"]).split("/")[1:]:
            target = target.get(key.replace("~1", "/").replace("~0", "~"), {}) if isinstance(target, dict) else {}
        schema = target
    return schema if isinstance(schema, dict) else {}
