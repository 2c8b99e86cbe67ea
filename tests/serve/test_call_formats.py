"""Calls of the published shapes are found, with thoughts before them or none, whole and in pieces; nothing else is.

Grammars take what the formats write. What is said is in what a template writes, as text or as parts, or it is refused
by name. Schemas are kept to, and what is not held is refused.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from helpers import tiny
from helpers.published_templates import ANSWERS, HERMES, PUBLISHED, READS_PARTS, Published
from helpers.tokenizers import BARE, PLAIN
from helpers.tokenizers import CALLS as WRITTEN_CALLS
from selfspec.errors import CheckpointError, PromptError, UnsupportedOptionError
from selfspec.serve.chat.call_formats import HERMES as HERMES_FORMAT
from selfspec.serve.chat.call_formats import CallFormat, Tags
from selfspec.serve.chat.template import ChatTemplate, TemplateSource
from selfspec.serve.chat.thoughts import MARKS, ThoughtReader, Thoughts
from selfspec.serve.choice import Choice
from selfspec.serve.events import Committed, Finished
from selfspec.serve.grammar import CallGrammar, Grammars, Wanted

SCHEMAS: dict[str, dict[str, Any]] = {
    "weather": {"properties": {"city": {"type": "string"}, "days": {"type": "array"}, "sure": {"type": "boolean"}}},
    "get.time-of_day": {},
}
CALLS = [("weather", {"city": "Zürich } ] 5", "days": [1, {"a": None}], "sure": True}), ("get.time-of_day", {})]
TOOLS = [{"type": "function", "function": {"name": name, "parameters": SCHEMAS[name]}} for name in SCHEMAS]

NO_FORMAT = ANSWERS.replace(
    "CALL", "{{ c.function.name }}({% for k, v in c.function.arguments | items %}{{ k }}={{ v }}, {% endfor %})"
)
WRITES_NONE = BARE.replace(WRITTEN_CALLS, "")
FOUND = {BARE: HERMES_FORMAT, WRITES_NONE: HERMES_FORMAT, NO_FORMAT: None}


def served(template: ChatTemplate, text: str, at_once: bool) -> tuple[str, list[tuple[str, Any]], int]:
    """What a client gets of an answer: its text, its calls, and in how many pieces these came."""
    tokenizer = template.tokenizer
    tokens = tokenizer(text, add_special_tokens=False).input_ids
    tools: Any = template.callable(SCHEMAS)
    choice = Choice(tokenizer, (1,), (), tools)
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


def written_as(form: CallFormat, calls: Sequence[tuple[str, dict[str, Any]]]) -> str:
    """Calls in a format."""

    def inner(given: dict[str, Any]) -> str:
        if form.tags is None:
            return json.dumps(given)
        values = {key: value if isinstance(value, str) else json.dumps(value) for key, value in given.items()}
        before, between, after = form.tags.before, form.tags.between, form.tags.after
        return "".join(f"{before}{key}{between}{value}{after}" for key, value in values.items())

    each = [f"{form.before}{name}{form.between}{inner(given)}{form.after}" for name, given in calls]
    return form.begin + (form.separator or "").join(each) + form.end


def without(special: Sequence[str], text: str) -> str:
    for each in special:
        text = text.replace(each, "")
    return text


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("thinks", ["before", "off", "empty"])
@pytest.mark.parametrize("name", PUBLISHED)
def test_calls_of_published_shapes(name: str, thinks: str, at_once: bool) -> None:
    shape = PUBLISHED[name]
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


def test_a_named_template_writes_what_has_tools() -> None:
    template = ChatTemplate(PUBLISHED["hermes-2-pro"].tokenizer)
    assert template.writers[True].reads_tools
    assert not template.writers[False].reads_tools
    question = [{"role": "user", "content": "Hi"}]
    assert "weather" in template.tokenizer.decode(template.prompt(question, TOOLS))
    assert "ools" not in template.tokenizer.decode(template.prompt(question))


def test_a_response_template_that_cannot_be_read_is_refused() -> None:
    tokenizer = Published(WRITES_NONE).tokenizer
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
    tokenizer = Published(WRITES_NONE).tokenizer
    tokenizer.response_template = {"start_anchor": "assistant:", "fields": {"tool_calls": calls, "content": {}}}
    template = ChatTemplate(tokenizer)
    for thought in ("<think>\nLet me see.\n</think>\n\n", ""):
        for count in (1, 2):
            found = served(template, thought + shape.calls(CALLS[:count]), at_once)
            assert found[:2] == (thought.rstrip(), CALLS[:count])
        for said in ("It is {5} o'clock.", shape.calls([("nobody", {})]), shape.calls(CALLS)[:11] + " begins a call."):
            assert served(template, thought + said, at_once)[:2] == (thought + said, [])


@pytest.mark.parametrize(
    ("answer", "begun", "thought", "said"),
    [
        ("<think>\nLet me see.\n</think>\n\nIt is < 5.\n", False, "Let me see.", "It is < 5.\n"),
        (" <think></think> Yes", False, "", "Yes"),
        ("So </thin\n</think>No", True, "So </thin", "No"),
        ("Never ends </thi", True, "Never ends </thi", ""),
        (" I <think> so </think>", False, "", " I <think> so </think>"),
        ("<thin", False, "", "<thin"),
        ("", False, "", ""),
    ],
)
def test_thoughts_are_parted_from_what_is_said(answer: str, begun: bool, thought: str, said: str) -> None:
    for pieces in ([answer], [*answer]):
        reader = ThoughtReader(Thoughts(MARKS[0], begun=begun))
        parted = [*map(reader.push, pieces), reader.push("", ended=True)]
        assert ("".join(each.thought for each in parted), "".join(each.said for each in parted)) == (thought, said)


ANALYSIS = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"


@pytest.mark.parametrize(
    ("name", "answer", "thought", "said"),
    [
        (
            "gpt-oss",
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes",
            "Hm.",
            "Yes",
        ),
        ("gpt-oss", "<|channel|>final<|message|>Yes", "", "Yes"),
        ("gpt-oss", "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant to=", "Hm.", "<|start|>assistant to="),
        ("gemma-4", "<|channel>thought\nHm.\n<channel|>Yes", "Hm.", "Yes"),
        ("gemma-4", "Yes", "", "Yes"),
    ],
)
def test_thoughts_of_other_marks(name: str, answer: str, thought: str, said: str) -> None:
    sources = {"gpt-oss": str(PUBLISHED["gpt-oss"].source), "gemma-4": "{{ m.split('<channel|>')[-1] }}"}
    marks = TemplateSource(PUBLISHED["gpt-oss"].tokenizer, sources[name]).thinks
    assert marks is not None
    for pieces in ([answer], [*answer]):
        reader = ThoughtReader(Thoughts(marks))
        parted = [*map(reader.push, pieces), reader.push("", ended=True)]
        assert ("".join(each.thought for each in parted), "".join(each.said for each in parted)) == (thought, said)


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


@pytest.mark.parametrize("source", FOUND)
def test_formats(source: str) -> None:
    assert ChatTemplate(Published(source).tokenizer).reads == FOUND[source]


@pytest.mark.parametrize(
    ("name", "text", "arguments"),
    [
        ("llama-3.1", '{"name": "weather", "parameters": {"city": "Zü', '{"city": "Zü'),
        (
            "qwen3-coder",
            '<tool_call>\n<function=weather>\n<parameter=city>\nZü\n } 5\n</parameter>\n<parameter=days>\n[1, {"a',
            '{"city": "Zü\\n } 5"',
        ),
    ],
)
def test_a_call_that_is_cut_off_is_what_was_written_of_it(name: str, text: str, arguments: str) -> None:
    tools: Any = ChatTemplate(PUBLISHED[name].tokenizer).callable(SCHEMAS)
    for pieces in ([text], [*text]):
        reader = tools.reader()
        found = [reader.push(piece) for piece in pieces] + [reader.push("", ended=True)]
        assert "".join(each.text for each in found) == ""
        assert "".join(delta.arguments for each in found for delta in each.calls) == arguments


@pytest.mark.parametrize("name", [name for name in PUBLISHED if name != "functiongemma"])
def test_what_is_cut_off_of_the_end_of_a_call_is_no_text(name: str) -> None:
    template = ChatTemplate(PUBLISHED[name].tokenizer)
    tools, form = template.callable(SCHEMAS), template.reads
    assert tools is not None
    assert isinstance(form, CallFormat)
    whole = written_as(form, [("weather", {"city": "Bern"})]).rstrip()
    for cut in range(len((form.after + form.end).strip()) + 1):
        reader, answer = tools.reader(), whole[: len(whole) - cut]
        said = [reader.push(letter) for letter in answer] + [reader.push("", ended=True)]
        assert "".join(each.text for each in said) == "", answer
        assert [call.begins for each in said for call in each.calls].count(True) == 1


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    pytest.importorskip("llguidance")
    return Grammars(tiny.tokenizer(), 256, frozenset())


def fits(grammars: Grammars, wanted: Wanted, text: str) -> bool:
    """Whether an answer may be this text, by its bytes, which are the tokens."""
    processor = grammars.compiled(wanted)
    tokens: list[int] = tiny.tokenizer()(text).input_ids
    scores, seen = torch.zeros(1, 256), [0]
    for token in tokens:
        if not processor(torch.tensor([seen]), scores)[0, token].isfinite():
            return False
        seen.append(token)
    processor(torch.tensor([seen]), scores)
    return bool(processor._matcher.is_accepting())


@pytest.mark.parametrize("name", [name for name in PUBLISHED if name != "functiongemma"])
def test_a_grammar_takes_what_the_format_writes(name: str, grammars: Grammars) -> None:
    form = ChatTemplate(PUBLISHED[name].tokenizer).reads
    assert isinstance(form, CallFormat)
    assert (form.separator is None) == (name in ("llama-3.1", "gpt-oss"))
    schema = {"type": "object", "properties": {"days": {"type": "integer"}}, "required": ["days"]}
    call, wrong = (written_as(form, [("weather", {"days": each})]) for each in (3, "three"))
    tools = {"weather": schema, "time": {"type": "object", "properties": {}}}

    def takes(text: str, needed: bool, many: bool = False, otherwise: dict[str, Any] | None = None) -> bool:
        return fits(grammars, CallGrammar(form, tools, needed, many, otherwise), text)

    assert takes(call, True)
    assert not takes(wrong, True)
    assert takes(call.lstrip(), False)
    assert not takes(wrong.lstrip(), False)
    assert takes("It is warm.", False)
    assert not takes("It is warm.", True)
    if form.separator is not None:
        both = written_as(form, [("weather", {"days": 3}), ("time", {})])
        assert takes(both, True, many=True)
        assert not takes(both, True)
        assert not takes(both, False)
        if not form.begin:
            # With one, calls that may be come each by itself.
            assert takes(both, False, many=True)
    assert takes(call, False, otherwise=schema)
    assert takes('{"days": 3}', False, otherwise=schema)
    assert not takes("It is warm.", False, otherwise=schema)


def test_arguments_between_tags_are_of_their_types(grammars: Grammars) -> None:
    form = CallFormat("<f=", ">", "</f>", tags=Tags("<p=", ">", "</p>"))
    properties = {"a": {"enum": ["x", 5]}, "b": {"type": "string"}, "c": {"$ref": "#/$defs/n"}, "d": {}}
    schema = {"properties": properties, "required": ["a", "c"], "$defs": {"n": {"type": "integer"}}}
    wanted = CallGrammar(form, {"t": schema, "u": {"type": "object"}}, needed=True)

    def takes(name: str, **given: str) -> bool:
        written = "".join(f"<p={key}>{value}</p>" for key, value in given.items())
        return fits(grammars, wanted, f"<f={name}>{written}</f>")

    assert all((takes("t", a="x", c="3"), takes("t", a="5", b="any {text}", c="3"), takes("t", a="5", c="-3", d="all")))
    assert not any(
        (takes("t", a="y", c="3"), takes("t", a="x", c="three"), takes("t", c="3"), takes("t", b="x", a="x", c="3"))
    )
    assert takes("u", any="thing", more="")


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
PLACES = {
    "type": "object",
    "properties": {"a": {}},
    "patternProperties": {"^b": INTEGER},
    "additionalProperties": False,
}


# Of each schema: what fits, and what does not. What fits is written in the order of the schema.
HELD: list[tuple[dict[str, Any], list[Any], list[Any]]] = [
    ({"type": "integer", "minimum": 0, "multipleOf": 5}, [0, 25], [3, -5]),
    ({"type": "integer", "multipleOf": 5000}, [5000, -10_000], [2500]),
    ({"type": "number", "exclusiveMinimum": 0.5, "maximum": 2}, [0.75, 2], [0.5, 2.5]),
    ({"type": "string", "minLength": 2, "maxLength": 3}, ["ab", "äöü"], ["a", "abcd"]),
    ({"type": "string", "pattern": "^a*$", "maxLength": 2}, ["aa"], ["aaa", "b"]),
    ({"type": "string", "pattern": "b[0-9]"}, ["ab1c"], ["ab"]),
    ({"type": "string", "format": "uuid"}, ["123e4567-e89b-12d3-a456-426614174000"], ["123"]),
    ({"enum": ["a", 3, None, [1]]}, ["a", 3, None, [1]], ["b", [2]]),
    ({"enum": ["a", "bcd"], "minLength": 3}, ["bcd"], ["a"]),
    ({"const": {"a": 1}}, [{"a": 1}], [{"a": 2}]),
    ({"type": ["string", "null"], "minLength": 2}, ["ab", None], ["a", 3]),
    ({"minimum": 3}, [3, "a", []], [2]),
    ({"type": "array", "items": INTEGER, "minItems": 1, "maxItems": 2}, [[1], [1, 2]], [[], [1, 2, 3], ["a"]]),
    ({"type": "array", "prefixItems": [INTEGER, {"type": "string"}], "items": False}, [[1, "a"]], [[1, 2]]),
    ({"type": "array", "items": INTEGER, "uniqueItems": False}, [[1, 1]], [["a"]]),
    ({"type": "object", "properties": {"a": INTEGER}, "required": ["a"]}, [{"a": 1}], [{}, {"a": 1, "b": 2}]),
    (
        {"type": "object", "properties": {"a": INTEGER}, "additionalProperties": True},
        [{"a": 1, "b": "x"}],
        [{"a": "x"}],
    ),
    ({"type": "object", "additionalProperties": INTEGER}, [{}, {"a": 1, "b": 2}], [{"a": "x"}]),
    (PLACES, [{"a": "x", "b1": 2}], [{"b1": "x"}, {"c": 1}]),
    ({"type": "object", "properties": {"a": {}}, "patternProperties": {"^a": INTEGER}}, [{"a": 1}], [{"a": "b"}]),
    ({"anyOf": [INTEGER, {"type": "string"}], "minimum": 3}, [3, "a"], [2, None]),
    ({"oneOf": [INTEGER, {"type": "string"}]}, [3, "a"], [None]),
    ({"oneOf": [KIND, OTHER], "discriminator": {"propertyName": "kind"}}, [{"kind": "a", "x": 1}], [{"kind": "c"}]),
    (
        {"oneOf": [{"$ref": "#/$defs/k"}, {"$ref": "#/$defs/o"}], "$defs": {"k": KIND, "o": OTHER}},
        [{"kind": "b"}],
        [{}],
    ),
    ({"allOf": [INTEGER, {"minimum": 3}], "maximum": 9}, [3, 9], [2, 12, "a"]),
    ({"$ref": "#/$defs/a", "$defs": {"a": INTEGER}, "minimum": 3}, [4], [2]),
    ({"$ref": "#/$defs/x/y", "$defs": {"x": {"y": INTEGER}}}, [3], ["a"]),
    ({"$defs": {"t": {"type": "array", "items": {"$ref": "#/$defs/t"}}}, "$ref": "#/$defs/t"}, [[], [[], [[]]]], [[1]]),
]


@pytest.mark.parametrize(("schema", "valid", "invalid"), HELD)
def test_schemas_are_kept_to(schema: dict[str, Any], valid: list[Any], invalid: list[Any], grammars: Grammars) -> None:
    places: list[tuple[dict[str, Any], bool]] = [(schema, False)]
    if "$defs" not in schema:
        places.append(({"type": "array", "items": schema}, True))
    for wanted, wrap in places:
        for instances, fit in ((valid, True), (invalid, False)):
            for instance in instances:
                text = json.dumps([instance] if wrap else instance, ensure_ascii=False)
                assert fits(grammars, wanted, text) == fit, text


LARGE = {f"p{number}": {"type": "integer"} for number in range(200)}


@pytest.mark.parametrize(
    ("words", "schema"),
    [
        *(
            (name, {name: schema})
            for name, schema in (
                ("not", INTEGER),
                ("if", INTEGER),
                ("uniqueItems", True),
                ("contains", INTEGER),
                ("dependentRequired", {"a": ["b"]}),
                ("propertyNames", {"pattern": "^a"}),
                ("unevaluatedProperties", False),
            )
        ),
        ("oneOf", {"oneOf": [INTEGER, {"type": "number"}]}),
        ("maxProperties only", {"type": "object", "properties": LARGE, "minProperties": 100}),
        ("unsatisfiable", {"oneOf": [INTEGER, {"type": "string"}], "anyOf": []}),
        ("unsatisfiable", {"enum": []}),
        ("look-?around", {"type": "string", "pattern": "(?=a)b"}),
        *(("lookarounds", {"type": "string", "pattern": each}) for each in ("a^b", "a$b", r"a\bb", "(a$)b")),
        ("look-?around", {"type": "object", "patternProperties": {"(?!a)": INTEGER}}),
        *(("expected|must be|invalid", {name: None}) for name in ("maxLength", "properties", "type", "enum", "$ref")),
        ("must be", {"enum": 5}),
        ("integer", {"type": "array", "minItems": -1}),
        ("integer", {"type": "string", "maxLength": True}),
        ("object or boolean", {"properties": {"a": 3}}),
        ("string", {"type": "object", "required": [3]}),
        ("type", {"type": "text"}),
        ("unsatisfiable", {"type": "integer", "enum": ["a"]}),
        ("unsatisfiable", {"type": "object", "properties": {"a": INTEGER}, "required": ["b"]}),
        ("not present", {"$ref": "https://example.com/a.json"}),
    ],
)
def test_what_is_not_held_is_refused(words: str, schema: dict[str, Any], grammars: Grammars) -> None:
    """Wherever it stands."""
    for where in (
        schema,
        {"type": "object", "properties": {"a": {"type": "array", "items": schema, "minItems": 1}}, "required": ["a"]},
    ):
        with pytest.raises(UnsupportedOptionError, match=rf"(?i)response_format.*{words}"):
            grammars.compiled({**where, "x-guidance": {"lenient": True}})


def test_a_grammar_goes_back(grammars: Grammars) -> None:
    processor = grammars.compiled("(ab|ac)+")
    a, b, c = tiny.tokenizer()("abc").input_ids

    def allowed(*tokens: int) -> list[int]:
        scores = processor(torch.tensor([[7, *tokens]]), torch.zeros(1, 256))[0]
        return sorted(int(token) for token in scores.isfinite().nonzero())

    for _ in range(2):
        assert allowed() == [a]
        assert allowed(a) == [b, c]
        # A draft that does not fit is not filtered any more, and is taken back.
        assert len(allowed(a, a)) == len(allowed(a, a, b)) == 256
        processor.rollback(2)
        assert a in allowed(a, c)
        processor.rollback(3)
