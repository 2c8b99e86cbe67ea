"""Calls as the common templates write them: the format is read off the template, and read again in any pieces."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2.sandbox import ImmutableSandboxedEnvironment

from helpers.tokenizers import QWEN_CODER
from selfspec.errors import UnsupportedOptionError
from selfspec.serve.chat.call_formats import HERMES, CallFormat, ResponseFormat
from selfspec.serve.chat.call_learning import find_format
from selfspec.serve.chat.call_reader import CallReader
from selfspec.serve.grammar import CallGrammar, style_of

TURN = "<|im_start|>{{ m.role }}\n{{ m.content }}"
HERMES_LIKE = (
    "{% for m in messages %}" + TURN + "{% for c in m.tool_calls or [] %}"
    "{% if m.content or not loop.first %}\n{% endif %}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA = (
    "{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{% if m.tool_calls %}"
    "{% if m.tool_calls | length > 1 %}{{ raise_exception('one call at once') }}{% endif %}"
    '{"name": "{{ m.tool_calls[0].function.name }}", "parameters": {{ m.tool_calls[0].function.arguments | tojson }}}'
    "{% else %}{{ m.content }}{% endif %}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
MISTRAL = (
    "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }}[/INST]{% elif m.tool_calls %}"
    "[TOOL_CALLS] [{% for c in m.tool_calls %}"
    "{% if c.id | length != 9 %}{{ raise_exception('ids have nine letters') }}{% endif %}"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}, "id": "{{ c.id }}"}'
    "{% if not loop.last %}, {% endif %}{% endfor %}]</s>{% else %} {{ m.content }}</s>{% endif %}{% endfor %}"
)
MISTRAL_NAMED = (
    "{% for m in messages %}{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]{% else %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}[TOOL_CALLS]{{ c.function.name }}[ARGS]{{ c.function.arguments | tojson }}"
    "{% endfor %}</s>{% endif %}{% endfor %}"
)
DEEPSEEK = (
    "{% for m in messages %}{% if m.role == 'user' %}<User>{{ m.content }}{% elif m.tool_calls %}<Assistant><calls>"
    "{% for c in m.tool_calls %}{% if not loop.first %}\n{% endif %}"
    "<call>function<sep>{{ c.function.name }}\n```json\n{{ '' + c.function.arguments }}\n```<end>{% endfor %}"
    "</calls><eos>{% else %}<Assistant>{{ m.content }}<eos>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<Assistant>{% endif %}"
)
FUNCTIONARY = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% for c in m.tool_calls or [] %}"
    "<function={{ c.function.name }}>{{ c.function.arguments | tojson }}</function>{% endfor %}<eot>"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
XML = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% for c in m.tool_calls or [] %}"
    "<function={{ c.function.name }}>{% for k, v in c.function.arguments.items() %}"
    "<parameter={{ k }}>{{ v if v is string else v | tojson }}</parameter>{% endfor %}</function>"
    "{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
GENERATION = "{% if add_generation_prompt %}[assistant]{% endif %}"
GLM = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% for c in m.tool_calls or [] %}"
    "\n<tool_call>{{ c.function.name }}\n{% for k, v in c.function.arguments.items() %}<arg_key>{{ k }}</arg_key>\n"
    "<arg_value>{{ v if v is string else v | tojson }}</arg_value>\n{% endfor %}</tool_call>{% endfor %}{% endfor %}"
    + GENERATION
)
PYTHONIC = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name }}("
    "{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }}, {% endfor %}){% endfor %}{% endfor %}" + GENERATION
)
TAGGED = {"xml": XML, "qwen-coder": QWEN_CODER, "glm": GLM}
BARE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}it:{% endif %}"
CALLING = {
    "hermes": HERMES_LIKE,
    "llama": LLAMA,
    "mistral": MISTRAL,
    "mistral-named": MISTRAL_NAMED,
    "deepseek": DEEPSEEK,
    "functionary": FUNCTIONARY,
    "bare": BARE,
}
SCHEMAS: dict[str, dict[str, Any]] = {
    "weather": {"properties": {"city": {"type": "string"}, "days": {"type": "array"}}},
    "time": {},
}
ARGUMENTS = {"city": "Zürich </tool_call> } ]", "days": [1, {"a": None}]}


def rendered(source: str, messages: list[dict[str, Any]]) -> str:
    def refuse(message: str) -> None:
        raise ValueError(message)

    environment = ImmutableSandboxedEnvironment()
    environment.globals["raise_exception"] = refuse
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    template = environment.from_string(source)
    return template.render(messages=messages, add_generation_prompt=False)


def written(source: str, content: str, **arguments: dict[str, Any]) -> str:
    """What a template between `[assistant]` and an end writes of a text and calls."""
    calls = [{"function": {"name": name, "arguments": each}} for name, each in arguments.items()]
    text = rendered(source, [{"role": "assistant", "content": content, "tool_calls": calls}])
    return text.removeprefix("[assistant]").removesuffix("<end>\n")


def found_format(source: str) -> CallFormat | ResponseFormat | None:
    return find_format(lambda messages, _: rendered(source, messages), source)


def format_of(source: str) -> CallFormat:
    found = found_format(source)
    assert isinstance(found, CallFormat)
    return found


def read(form: CallFormat, text: str, cuts: list[int]) -> tuple[str, list[tuple[str, str]]]:
    """Read a text in pieces: what is text of it, and each call as its deltas tell it."""
    reader, said, names, arguments = CallReader(form, SCHEMAS), "", list[str](), list[str]()
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    for start, end in pairwise(places):
        new = reader.push(text[start:end], ended=start == places[-2] and end == len(text))
        said += new.text
        for each in new.calls:
            assert each.begins == (each.index == len(names))
            if each.begins:
                names.append(each.call.name)
                arguments.append("")
            arguments[each.index] += each.arguments
            assert arguments[each.index] == each.call.arguments or not each.ends
    return said + reader.push("", ended=True).text, list(zip(names, arguments, strict=True))


def read_whole(form: CallFormat, text: str, cuts: list[int]) -> tuple[str, list[tuple[str, Any]]]:
    said, calls = read(form, text, cuts)
    return said, [(name, json.loads(arguments)) for name, arguments in calls]


@pytest.mark.parametrize("name", CALLING)
@settings(max_examples=30)
@given(cuts=st.lists(st.integers(0, 260), max_size=40))
def test_calls_are_read_as_the_template_writes_them(name: str, cuts: list[int]) -> None:
    form = format_of(CALLING[name])
    wanted = [("weather", ARGUMENTS), ("time", {})][: 1 if form.separator is None else 2]
    text = form.text([(tool, json.dumps(arguments, ensure_ascii=False)) for tool, arguments in wanted])
    assert read_whole(form, text, cuts) == ("", wanted)
    if (form.begin + form.before).partition("{")[0].strip():
        said, calls = read_whole(form, "Let me see. " + text, cuts)
        assert (said.strip(), calls) == ("Let me see.", wanted)


@pytest.mark.parametrize("name", CALLING)
@settings(max_examples=15)
@given(cuts=st.lists(st.integers(0, 120), max_size=20))
@pytest.mark.parametrize(
    "text",
    [
        "Hello, it is {5} o'clock [now].",
        '{"name": "nobody", "arguments": {}} is no call',
        '{"name": "weather", "argume',
        "<tool_call>\n{'name': 'weather'}\n</tool_call>",
        "[1, 2] and more",
        "",
    ],
)
def test_what_is_no_call_is_text(name: str, text: str, cuts: list[int]) -> None:
    form = format_of(CALLING[name])
    assert read(form, text, cuts) == (text, [])


@pytest.mark.contract
@pytest.mark.parametrize("name", TAGGED)
@settings(max_examples=30)
@given(cuts=st.lists(st.integers(0, 260), max_size=40))
def test_arguments_between_tags(name: str, cuts: list[int]) -> None:
    form = format_of(TAGGED[name])
    arguments = {"city": "Zürich\n } 5", "days": [1, {"a": None}], "more": 3}
    text = written(TAGGED[name], "So: ", weather=arguments, time={})
    said, found = read_whole(form, text, cuts)
    assert (said.strip(), found) == ("So:", [("weather", arguments), ("time", {})])
    assert read(form, text[: text.index('"a"')], cuts)[1] == [("weather", '{"city": "Zürich\\n } 5"')]
    no_call = "<tool_call>nobody\n<function=nobody><arg_key>a"
    assert read(form, no_call, cuts) == (no_call, [])


@pytest.mark.parametrize("name", TAGGED)
def test_a_grammar_takes_arguments_between_tags(name: str) -> None:
    pytest.importorskip("xgrammar")
    from xgrammar import Grammar, GrammarCompiler, TokenizerInfo
    from xgrammar.testing import _is_grammar_accept_string as accepts

    form = format_of(TAGGED[name])
    schema = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
    schema |= {"required": ["city", "days"]}
    compiler = GrammarCompiler(TokenizerInfo([bytes([byte]) for byte in range(256)]))
    wanted = CallGrammar(form, {"weather": schema}, needed=True)
    tag = wanted.structural_tag(style_of(wanted, compiler))
    for days, right in ((3, True), ("three", False)):
        text = written(TAGGED[name], "", weather={"city": "Bern", "days": days})
        assert accepts(Grammar.from_structural_tag(json.dumps(tag)), text) is right


def test_tags_that_no_grammar_has() -> None:
    pytest.importorskip("xgrammar")
    from xgrammar import GrammarCompiler, TokenizerInfo

    form = format_of(XML.replace("<parameter=", "<qx:").replace("</parameter>", "</qx>"))
    compiler = GrammarCompiler(TokenizerInfo([bytes([byte]) for byte in range(256)]))
    with pytest.raises(UnsupportedOptionError, match="tool_choice"):
        style_of(CallGrammar(form, {"weather": {}}, needed=True), compiler)


def test_a_call_that_is_cut_off_is_what_was_written_of_it() -> None:
    begun = '{"name": "weather", "arguments": {"city": "Zü'
    assert read(format_of(LLAMA), begun, [3, 30]) == ("", [("weather", '{"city": "Zü')])


def test_formats() -> None:
    assert format_of(BARE) == HERMES
    assert found_format(PYTHONIC) is None
    llama = format_of(LLAMA)
    assert (llama.separator, llama.before) == (None, '{"name": "')
    mistral = format_of(MISTRAL)
    assert (mistral.begin, mistral.separator) == ("[TOOL_CALLS] [", ", ")
    deepseek = format_of(DEEPSEEK)
    assert (deepseek.begin, deepseek.before) == ("<calls>", "<call>function<sep>")


@pytest.mark.parametrize("name", CALLING)
def test_a_grammar_takes_what_the_format_writes(name: str) -> None:
    pytest.importorskip("xgrammar")
    from xgrammar import Grammar
    from xgrammar.testing import _is_grammar_accept_string as accepts

    form = format_of(CALLING[name])
    schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    call, wrong = (form.text([("weather", json.dumps(each))]) for each in ({"city": "Bern"}, {"city": 3}))
    tools = {"weather": schema, "time": {"type": "object", "properties": {}}}

    def takes(text: str, needed: bool, many: bool = False, otherwise: dict[str, Any] | None = None) -> bool:
        tag = CallGrammar(form, tools, needed, many, otherwise).structural_tag()
        found: bool = accepts(Grammar.from_structural_tag(json.dumps(tag)), text)
        return found

    for needed in (True, False):
        assert takes(call, needed)
        assert not takes(wrong, needed)
    assert takes("It is warm.", False)
    assert not takes("It is warm.", True)
    if form.separator is not None:
        both = form.text([("weather", '{"city": "Bern"}'), ("time", "{}")])
        assert takes(both, True, many=True)
        assert not takes(both, True)
        assert not takes(both, False)
        if not form.begin:
            # With one, calls that may be come each by itself.
            assert takes(both, False, many=True)
    assert takes(call, False, otherwise=schema)
    assert takes('{"city": "Bern"}', False, otherwise=schema)
    assert not takes("It is warm.", False, otherwise=schema)
