"""Calls of the published shapes are found, with thoughts before them or none, whole and in pieces; nothing else is.

Grammars take what the formats write. What is said is in what a template writes, as text or as parts, or it is refused
by name. So are schemas that a grammar cannot hold.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import pytest

from helpers import tiny
from helpers.published_templates import ANSWERS, HERMES, PUBLISHED, READS_PARTS, TAGGED, Published
from helpers.tokenizers import BARE, PLAIN
from selfspec.errors import CheckpointError, PromptError, UnsupportedOptionError
from selfspec.serve.chat.call_formats import HERMES as TOLD
from selfspec.serve.chat.call_formats import CallFormat, Tags
from selfspec.serve.chat.template import ChatTemplate
from selfspec.serve.choice import Choice
from selfspec.serve.events import Committed, Finished
from selfspec.serve.grammar import CallGrammar, check_schema, pattern_states, style_of

SCHEMAS: dict[str, dict[str, Any]] = {
    "weather": {"properties": {"city": {"type": "string"}, "days": {"type": "array"}, "sure": {"type": "boolean"}}},
    "get.time-of_day": {},
}
CALLS = [("weather", {"city": "Zürich } ] 5", "days": [1, {"a": None}], "sure": True}), ("get.time-of_day", {})]
TOOLS = [{"type": "function", "function": {"name": name, "parameters": SCHEMAS[name]}} for name in SCHEMAS]

LISTED = ANSWERS.replace(
    "CALL",
    "{% if loop.first %}<calls>{% else %}{{ '\n' }}{% endif %}<call>function<sep>{{ c.function.name }}\n```json\n"
    "{{ '' + c.function.arguments }}\n```<end>{% if loop.last %}</calls>{% endif %}",
)
NO_FORMAT = ANSWERS.replace(
    "CALL", "{{ c.function.name }}({% for k, v in c.function.arguments | items %}{{ k }}={{ v }}, {% endfor %})"
)
SHAPES = PUBLISHED | {"tagged": Published(TAGGED), "listed": Published(LISTED, as_text=True)}
LEARNED = {
    TAGGED: CallFormat("<function=", ">", "</function>", tags=Tags("<parameter=", ">", "</parameter>")),
    LISTED: CallFormat("<call>function<sep>", "\n```json\n", "\n```<end>", "<calls>", "</calls>", "\n"),
    BARE: TOLD,
    NO_FORMAT: None,
}


def served(template: ChatTemplate, text: str, at_once: bool) -> tuple[str, list[tuple[str, Any]], int]:
    """What a client gets of an answer: its text, its calls, and in how many pieces these came."""
    tokenizer = template.tokenizer
    tokens = tokenizer(text, add_special_tokens=False).input_ids
    tools: Any = template.callable(SCHEMAS)
    choice = Choice(tokenizer, (1,), (), tools.reader(), frozenset(tools.shown))
    rounds = [tuple(tokens)] if at_once else [(token,) for token in tokens]
    pieces = [choice.take(Committed(each, None, 0, 0)) for each in rounds if each]
    pieces.append(choice.end(Finished("stop", None, 1, len(tokens), 0, 0)))
    deltas = [delta for piece in pieces for delta in piece.calls]
    said: list[tuple[str, str]] = []
    for delta in deltas:
        assert delta.begins == (delta.index == len(said))
        said += [(delta.call.name, "")] if delta.begins else []
        name, before = said[delta.index]
        said[delta.index] = (name, before + delta.arguments)
    assert "".join(piece.text for piece in pieces) == choice.text
    assert [(call.name, call.arguments) for call in choice.calls] == said
    assert sum(delta.ends for delta in deltas) == len(said)
    return choice.text, [(name, json.loads(arguments)) for name, arguments in said], len(deltas)


def without(special: Sequence[str], text: str) -> str:
    for each in special:
        text = text.replace(each, "")
    return text


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("thinks", ["before", "off", "empty"])
@pytest.mark.parametrize("name", SHAPES)
def test_calls_of_published_shapes(name: str, thinks: str, at_once: bool) -> None:
    shape = SHAPES[name]
    template = ChatTemplate(shape.tokenizer)
    thought = {"before": shape.thought.format("Let me see."), "off": "", "empty": shape.empty}[thinks]
    # What begins the message of a call is no text.
    before = without(shape.special, thought.removesuffix("<|start|>assistant")).rstrip()
    for count in (1, 2):
        text, calls, pieces = served(template, thought + shape.calls(CALLS[:count]), at_once)
        assert (text, calls) == (before, CALLS[:count])
        assert at_once or name == "functiongemma" or pieces > 3 * count
    for said in (
        "It is {5} o'clock [now].",
        shape.calls([("nobody", {"city": "Bern"})]),
        f"The mark {shape.calls(CALLS)[:11]} begins a call.",
        shape.calls(CALLS[:1])[:13],
    ):
        answer = thought + shape.begins + said
        assert served(template, answer, at_once)[:2] == (without(shape.special, answer), [])


@pytest.mark.parametrize("name", PUBLISHED)
def test_blanks_without_an_end_are_not_held_back(name: str) -> None:
    """What is held back is searched again with each token."""
    shape = PUBLISHED[name]
    tools: Any = ChatTemplate(shape.tokenizer).callable(SCHEMAS)
    for begun in ("", "So"):
        reader = tools.reader()
        said = reader.push(begun).text + "".join(reader.push(blank).text for blank in " \n" * 500)
        assert len(said) > 500


@pytest.mark.parametrize("name", PUBLISHED)
def test_calls_and_results_are_in_what_is_written(name: str) -> None:
    template = ChatTemplate(PUBLISHED[name].tokenizer)
    call: dict[str, Any] = {
        "id": "abcdefghi",
        "type": "function",
        "function": {"name": "weather", "arguments": {"city": "Bern"}},
    }
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "abcdefghi", "name": "weather", "content": "sunny"},
        {"role": "user", "content": "Really?"},
    ]
    for tools in (TOOLS, []):
        written = template.tokenizer.decode(template.prompt(messages, tools))
        assert all(each in written for each in ("Weather?", "weather", "city", "Bern", "sunny", "Really?"))
        assert "{'" not in written
        assert ("get.time-of_day" in written) == bool(tools)


@pytest.mark.parametrize("name", ["hermes-2-pro", "command-r"])
def test_a_named_template_writes_what_has_tools(name: str) -> None:
    template = ChatTemplate(PUBLISHED[name].tokenizer)
    assert template.writer(True).reads_tools
    assert not template.writer(False).reads_tools
    question = [{"role": "user", "content": "Hi"}]
    assert "weather" in template.tokenizer.decode(template.prompt(question, TOOLS))
    assert "ools" not in template.tokenizer.decode(template.prompt(question))


def test_a_response_template_that_cannot_be_read_is_refused() -> None:
    tokenizer = Published(BARE).tokenizer
    tokenizer.response_template = {"start_anchor": "a", "fields": {"tool_calls": {"open_pattern": "(", "close": "b"}}}
    with pytest.raises(CheckpointError, match="response_template cannot be read"):
        ChatTemplate(tokenizer)


# Four fields of `tool_calls`, as tokenizers bring them, and what is written so.
RESPONSES: dict[str, tuple[dict[str, Any], Published]] = {
    "object": ({"open": "<tool_call>", "close": "</tool_call>", "content": "json"}, PUBLISHED["qwen3"]),
    "named": (
        {"open_pattern": r"<function=(?P<name>[^>]+)>", "close": "</function>", "content": "json"},
        Published(
            "", lambda calls: "".join(f"<function={name}>{json.dumps(given)}</function>" for name, given in calls)
        ),
    ),
    "tags": (
        {
            "open_pattern": r"\s*<tool_call>\s*<function=(?P<name>[^>\n]+)>",
            "close_pattern": r"</function>\s*</tool_call>",
            "content": "xml-inline",
            "content_args": {"tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\s*(?P<value>.*?)\s*</parameter>"},
        },
        PUBLISHED["qwen3-coder"],
    ),
    "braces": (
        {
            "open_pattern": r"<start_function_call>call:(?P<name>[\w.-]+)",
            "close": "<end_function_call>",
            "content": "json",
            "content_args": {"unquoted_keys": True, "string_delims": [["<escape>", "<escape>"]]},
        },
        PUBLISHED["functiongemma"],
    ),
}


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("name", RESPONSES)
def test_a_response_template_of_the_tokenizer_is_used(name: str, at_once: bool) -> None:
    field, shape = RESPONSES[name]
    function = "{content}" if name == "object" else {"name": "{name}", "arguments": "{content}"}
    calls = {**field, "repeats": True, "transform": {"type": "function", "function": function}}
    tokenizer = Published(BARE).tokenizer
    tokenizer.response_template = {"start_anchor": "assistant:", "fields": {"tool_calls": calls, "content": {}}}
    template = ChatTemplate(tokenizer)
    for thought in ("<think>\nLet me see.\n</think>\n\n", ""):
        for count in (1, 2):
            found = served(template, thought + shape.calls(CALLS[:count]), at_once)
            assert found[:2] == (thought.rstrip(), CALLS[:count])
        for said in ("It is {5} o'clock.", shape.calls([("nobody", {})]), shape.calls(CALLS)[:11] + " begins a call."):
            assert served(template, thought + said, at_once)[:2] == (thought + said, [])


def test_arguments_are_of_the_types_that_they_may_have() -> None:
    schemas: dict[str, Any] = {
        "a": {"type": "string"},
        "b": {"type": "integer"},
        "c": {"type": ["string", "null"]},
        "d": {"anyOf": [{"type": "number"}, {"type": "string"}]},
        "e": {"type": "boolean"},
        "f": {},
        "g": {"enum": ["x", "y"]},
    }
    given = {"a": "5", "b": "5", "c": "null", "d": "2.5", "e": "True", "f": "[1]", "g": " x"}
    text = PUBLISHED["qwen3-coder"].calls([("t", given)])
    template = ChatTemplate(PUBLISHED["qwen3-coder"].tokenizer)
    tools: Any = template.callable({"t": {"properties": schemas}})
    (call,) = (each.call for each in tools.reader().push(text, ended=True).calls)
    assert json.loads(call.arguments) == {"a": "5", "b": 5, "c": None, "d": 2.5, "e": True, "f": [1], "g": "x"}


OWN = (
    "{%- for m in messages %}[{{ m.role }}]{%- if m.role == 'assistant' %}{%- if BLOCK %}"
    "<think>{{ m.reasoning_content or '' }}</think>{%- endif %}{{ m.content }}{%- for c in m.tool_calls or [] %}"
    "<my:call>{{ c.function.name }}|{{ c.function.arguments | tojson }}</my:call>{%- endfor %}"
    "{%- else %}{{ m.content }}{%- endif %}<end>{%- endfor %}{%- if add_generation_prompt %}[assistant]{%- endif %}"
)


@pytest.mark.parametrize(
    "block", ["true", "m.tool_calls", "not m.tool_calls", "m.reasoning_content", "enable_thinking | default(true)"]
)
def test_a_format_that_nobody_knows_is_learned_without_its_thoughts(block: str) -> None:
    template = ChatTemplate(Published(OWN.replace("BLOCK", block)).tokenizer)
    text = "".join(f"<my:call>{name}|{json.dumps(given)}</my:call>" for name, given in CALLS)
    assert template.calls == CallFormat("<my:call>", "|", "</my:call>")
    for thought in ("<think>Let me see.</think>", "", "<think></think>"):
        for at_once in (True, False):
            assert served(template, thought + text, at_once)[:2] == (thought, CALLS)
            said = f"{thought}A <my:call> is a mark."
            assert served(template, said, at_once)[:2] == (said, [])


@pytest.mark.parametrize("source", LEARNED)
def test_formats(source: str) -> None:
    assert ChatTemplate(Published(source).tokenizer).calls == LEARNED[source]


@pytest.mark.parametrize(
    ("name", "text", "arguments"),
    [
        ("llama-3.1", '{"name": "weather", "parameters": {"city": "Zü', '{"city": "Zü'),
        (
            "tagged",
            '<function=weather><parameter=city>Zü\n } 5</parameter><parameter=days>[1, {"a',
            '{"city": "Zü\\n } 5"',
        ),
    ],
)
def test_a_call_that_is_cut_off_is_what_was_written_of_it(name: str, text: str, arguments: str) -> None:
    tools: Any = ChatTemplate(SHAPES[name].tokenizer).callable(SCHEMAS)
    for pieces in ([text], [*text]):
        reader = tools.reader()
        found = [reader.push(piece) for piece in pieces] + [reader.push("", ended=True)]
        assert "".join(each.text for each in found) == ""
        assert "".join(delta.arguments for each in found for delta in each.calls) == arguments


@pytest.mark.parametrize("name", [name for name in SHAPES if name != "functiongemma"])
def test_a_grammar_takes_what_the_format_writes(name: str) -> None:
    pytest.importorskip("xgrammar")
    from xgrammar import Grammar, GrammarCompiler, TokenizerInfo
    from xgrammar.testing import _is_grammar_accept_string as accepts

    form = ChatTemplate(SHAPES[name].tokenizer).calls
    assert isinstance(form, CallFormat)
    assert (form.separator is None) == (name in ("llama-3.1", "gpt-oss"))
    schema = {"type": "object", "properties": {"days": {"type": "integer"}}, "required": ["days"]}
    call, wrong = (form.text([("weather", json.dumps({"days": each}))]) for each in (3, "three"))
    tools = {"weather": schema, "time": {"type": "object", "properties": {}}}
    compiler = GrammarCompiler(TokenizerInfo([bytes([byte]) for byte in range(256)]))

    def takes(text: str, needed: bool, many: bool = False, otherwise: dict[str, Any] | None = None) -> bool:
        wanted = CallGrammar(form, tools, needed, many, otherwise)
        tag = wanted.structural_tag(style_of(wanted, compiler))
        found: bool = accepts(Grammar.from_structural_tag(json.dumps(tag)), text)
        return found

    assert takes(call, True)
    assert not takes(wrong, True)
    assert takes(call.lstrip(), False)
    assert takes("It is warm.", False)
    assert not takes("It is warm.", True)
    if form.separator is not None:
        both = form.text([("weather", '{"days": 3}'), ("time", "{}")])
        assert takes(both, True, many=True)
        assert not takes(both, True)
        assert not takes(both, False)
        if not form.begin:
            # With one, calls that may be come each by itself.
            assert takes(both, False, many=True)
    assert takes(call, False, otherwise=schema)
    assert takes('{"days": 3}', False, otherwise=schema)
    assert not takes("It is warm.", False, otherwise=schema)


def test_tags_that_no_grammar_has() -> None:
    pytest.importorskip("xgrammar")
    from xgrammar import GrammarCompiler, TokenizerInfo

    form = CallFormat("<function=", ">", "</function>", tags=Tags("<qx:", ">", "</qx>"))
    compiler = GrammarCompiler(TokenizerInfo([bytes([byte]) for byte in range(256)]))
    with pytest.raises(UnsupportedOptionError, match="tool_choice"):
        style_of(CallGrammar(form, {"weather": {}}, needed=True), compiler)


MESSAGES = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "Who was Tom?"},
    {"role": "assistant", "content": "A boy."},
    {"role": "user", "content": "And Lily?"},
]
WRITTEN = {name: shape.source for name, shape in PUBLISHED.items()} | READS_PARTS | {"plain": PLAIN}


@pytest.mark.parametrize("name", WRITTEN)
def test_what_is_said_is_written(name: str) -> None:
    template = ChatTemplate(Published(WRITTEN[name]).tokenizer)
    tokenizer = template.tokenizer
    written = tokenizer.decode(template.prompt(MESSAGES))
    places = [written.find(message["content"]) for message in MESSAGES]
    assert min(places) >= 0
    # Some put what the system says before the last question.
    assert places[1:] == sorted(places[1:])
    # An answer that goes on ends with what it has said.
    assert tokenizer.decode(template.prompt(MESSAGES[:3], goes_on=True)).endswith("A boy.")


@pytest.mark.parametrize(
    ("role", "remedy"), [("system", "or say it in a user's message"), ("assistant", "--template FILE")]
)
def test_what_a_template_leaves_out_is_refused(role: str, remedy: str) -> None:
    source = "{% for m in messages if m.role != ROLE %}{{ m.content }}{% endfor %}".replace("ROLE", repr(role))
    template = ChatTemplate(tiny.tokenizer(), source)
    assert template.prompt(MESSAGES[1:2])
    with pytest.raises(PromptError, match=rf"leaves out.*'{role}'.*{remedy}"):
        template.prompt(MESSAGES)


LEAVES_OUT = "[INST] {% for part in messages[0].content.parts or [] %}{{ part }}{% endfor %}[/INST]"


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (None, r"--template FILE.*selfspec generate"),
        ("{% for", "does not write one message"),
        ("{{ raise_exception('no') }}", "does not write one message"),
        ("{{ messages[7].content }}", "does not write one message"),
        (LEAVES_OUT, r"leaves out.*'user'.*--template FILE"),
        ({"rag": HERMES}, r"named rag.*--template FILE"),
    ],
)
def test_a_template_that_cannot_serve_is_refused_before_work(source: Any, words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        ChatTemplate(Published(source).tokenizer)


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
    ("multipleOf", {"type": "integer", "multipleOf": 5, "minimum": 0}, 3),
    ("multipleOf", {"type": "integer", "multipleOf": 5000}, 3),
    ("no schema of", {"$ref": "#/$defs/x/y", "$defs": {"x": {"y": {"type": "integer", "not": {"const": 3}}}}}, 3),
    (
        "patternProperties",
        {"type": "object", "properties": {"a": {}}, "patternProperties": {"^a": INTEGER}},
        {"a": "b"},
    ),
    ("propertyNames", {"type": "object", "properties": {"b": INTEGER}, "propertyNames": {"pattern": "^a"}}, {"b": 1}),
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


INTEGERS = {f"p{number}": {"type": "integer", "minimum": -(10**17), "maximum": 10**17} for number in range(450)}


@pytest.mark.parametrize(
    ("words", "schema"),
    [
        *(
            (rf"'{re.escape(name)}' cannot be null", {name: None})
            for name in ("maxLength", "properties", "type", "enum", "$ref")
        ),
        ("'enum' cannot be 5", {"enum": 5}),
        ("'minItems' cannot be -1", {"type": "array", "minItems": -1}),
        ("'maxLength' cannot be true", {"type": "string", "maxLength": True}),
        ("'anyOf' has an entry", {"anyOf": [3]}),
        ("'properties' has an entry", {"properties": {"a": 3}}),
        ("list names", {"type": "object", "required": [3]}),
        ("'type' cannot be", {"type": "text"}),
        *(("empty list", {name: []}) for name in ("oneOf", "anyOf", "enum")),
        *(("looks around", {"type": "string", "pattern": each}) for each in ("(?=a)b", "a^b", "a$b", r"a\bb", "(a$)b")),
        ("looks around", {"type": "object", "patternProperties": {"(?!a)": INTEGER}}),
        ("states", {"type": "object", "patternProperties": {"[a-z]{9000}": INTEGER}}),
        ("states", {"type": "object", "properties": INTEGERS}),
        ("states", {"type": "object", "properties": {name: {} for name in INTEGERS}, "minProperties": 200}),
    ],
)
def test_what_is_no_schema_or_would_take_long_is_refused(words: str, schema: dict[str, Any]) -> None:
    for where in (schema, {"type": "array", "items": schema}):
        with pytest.raises(UnsupportedOptionError, match=words):
            check_schema(where)


@pytest.mark.parametrize(
    "schema",
    [
        *({"type": "string", "pattern": each} for each in (r"^a\$$", "^[^$]+$", "(?:a|b)+", r"^\^a$")),
        {"type": "object", "patternProperties": {"^a": INTEGER}},
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
