"""Calls of the published shapes are found, with thoughts before them or none, whole and in pieces; nothing else is."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from helpers import tiny
from helpers.published_templates import HERMES, PUBLISHED, Published
from helpers.tokenizers import BARE
from selfspec.errors import CheckpointError
from selfspec.serve.chat.call_formats import CallFormat
from selfspec.serve.chat.template import ChatTemplate
from selfspec.serve.choice import Choice
from selfspec.serve.events import Committed, Finished

SCHEMAS: dict[str, dict[str, Any]] = {
    "weather": {"properties": {"city": {"type": "string"}, "days": {"type": "array"}, "sure": {"type": "boolean"}}},
    "get.time-of_day": {},
}
CALLS = [("weather", {"city": "Zürich } ] 5", "days": [1, {"a": None}], "sure": True}), ("get.time-of_day", {})]
TOOLS = [{"type": "function", "function": {"name": name, "parameters": SCHEMAS[name]}} for name in SCHEMAS]


def tokenizer_of(shape: Published) -> PreTrainedTokenizerBase:
    tokenizer = tiny.tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": [*shape.special]})
    tokenizer.chat_template = shape.source
    return tokenizer


def served(template: ChatTemplate, text: str, at_once: bool) -> tuple[str, list[tuple[str, Any]], int]:
    """What a client gets of an answer: its text, its calls, and in how many pieces these came."""
    tokenizer = template.tokenizer
    tokens = tokenizer(text, add_special_tokens=False).input_ids
    tools = template.callable(SCHEMAS)
    assert tools is not None
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
@pytest.mark.parametrize("name", PUBLISHED)
def test_calls_of_published_shapes(name: str, thinks: str, at_once: bool) -> None:
    shape = PUBLISHED[name]
    template = ChatTemplate(tokenizer_of(shape))
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
    tools = ChatTemplate(tokenizer_of(shape)).callable(SCHEMAS)
    assert tools is not None
    for begun in ("", "So"):
        reader = tools.reader()
        said = reader.push(begun).text + "".join(reader.push(blank).text for blank in " \n" * 500)
        assert len(said) > 500


@pytest.mark.parametrize("name", PUBLISHED)
def test_calls_and_results_are_in_what_is_written(name: str) -> None:
    """By the template that is used, with tools and without."""
    template = ChatTemplate(tokenizer_of(PUBLISHED[name]))
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
    template = ChatTemplate(tokenizer_of(PUBLISHED[name]))
    assert template.writer(True).reads_tools
    assert not template.writer(False).reads_tools
    question = [{"role": "user", "content": "Hi"}]
    assert "weather" in template.tokenizer.decode(template.prompt(question, TOOLS))
    assert "ools" not in template.tokenizer.decode(template.prompt(question))


def test_named_templates_without_a_default_name_the_remedy() -> None:
    with pytest.raises(CheckpointError, match=r"named rag.*--template FILE"):
        ChatTemplate(tokenizer_of(Published({"rag": HERMES}, str)))


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
    """Whatever the chat template writes."""
    field, shape = RESPONSES[name]
    function = "{content}" if name == "object" else {"name": "{name}", "arguments": "{content}"}
    calls = {**field, "repeats": True, "transform": {"type": "function", "function": function}}
    tokenizer = tokenizer_of(Published(BARE, str))
    tokenizer.response_template = {"start_anchor": "assistant:", "fields": {"tool_calls": calls, "content": {}}}
    template = ChatTemplate(tokenizer)
    for thought in ("<think>\nLet me see.\n</think>\n\n", ""):
        for count in (1, 2):
            found = served(template, thought + shape.calls(CALLS[:count]), at_once)
            assert found[:2] == (thought.rstrip(), CALLS[:count])
        for said in ("It is {5} o'clock.", shape.calls([("nobody", {})]), shape.calls(CALLS)[:11] + " begins a call."):
            assert served(template, thought + said, at_once)[:2] == (thought + said, [])


def test_a_response_template_that_is_none() -> None:
    tokenizer = tokenizer_of(Published(BARE, str))
    tokenizer.response_template = {"start_anchor": "a", "fields": {"tool_calls": {"open_pattern": "(", "close": "b"}}}
    with pytest.raises(CheckpointError, match="response_template cannot be read"):
        ChatTemplate(tokenizer)


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
    template = ChatTemplate(tokenizer_of(PUBLISHED["qwen3-coder"]))
    tools = template.callable({"t": {"properties": schemas}})
    assert tools is not None
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
    template = ChatTemplate(tokenizer_of(Published(OWN.replace("BLOCK", block), str)))
    text = "".join(f"<my:call>{name}|{json.dumps(given)}</my:call>" for name, given in CALLS)
    assert template.calls == CallFormat("<my:call>", "|", "</my:call>")
    for thought in ("<think>Let me see.</think>", "", "<think></think>"):
        for at_once in (True, False):
            assert served(template, thought + text, at_once)[:2] == (thought, CALLS)
            said = f"{thought}A <my:call> is a mark."
            assert served(template, said, at_once)[:2] == (said, [])
