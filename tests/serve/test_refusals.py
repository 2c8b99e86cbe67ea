"""Bad requests: each field wrong in turn is refused by name, and the server lives."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers.http_server import NAME, Running, running
from selfspec.serve.client_limits import ServerLimits
from selfspec.serve.schemas import ChatCompletionRequest, CompletionRequest

MESSAGES = [{"role": "user", "content": "Tell me of Lily."}]
COMPLETION = {"model": NAME, "prompt": "Once upon", "max_tokens": 2}
CHAT = {"model": NAME, "messages": MESSAGES, "max_tokens": 2}

NOT_TEXT = st.one_of(
    st.integers(), st.booleans(), st.lists(st.none(), min_size=1), st.dictionaries(st.text(), st.integers())
)
NOT_A_NUMBER = st.one_of(st.text(), st.booleans(), st.lists(st.integers()), st.dictionaries(st.text(), st.integers()))
NOT_A_FLAG = st.one_of(st.text(), st.integers(), st.lists(st.booleans()))


def outside(low: float, high: float) -> st.SearchStrategy[Any]:
    far = st.one_of(
        st.floats(max_value=low, exclude_max=True, allow_infinity=False),
        st.floats(min_value=high, exclude_min=True, allow_infinity=False),
    )
    return st.one_of(far, NOT_A_NUMBER)


def whole_outside(low: int, high: int) -> st.SearchStrategy[Any]:
    far = st.one_of(st.integers(max_value=low - 1), st.integers(min_value=high + 1))
    return st.one_of(far, NOT_A_NUMBER, st.just(1.5))


BOTH: dict[str, st.SearchStrategy[Any]] = {
    "model": NOT_TEXT,
    "max_tokens": whole_outside(1, 10**6),
    "temperature": outside(0, 2),
    "top_p": outside(0, 1),
    "top_k": whole_outside(-1, 10**400),
    "min_p": outside(0, 1),
    "n": whole_outside(1, 128),
    "stop": st.one_of(NOT_TEXT.filter(lambda value: value != []), st.just(""), st.just(["a"] * 33), st.just(["a", 3])),
    "seed": whole_outside(-(2**63), 2**63 - 1),
    "logit_bias": st.one_of(
        st.text(), st.integers(), st.just({"a": 1}), st.just({"1": 101}), st.just({"-1": 1}), st.just({"99999999": 1})
    ),
    "presence_penalty": outside(-2, 2),
    "frequency_penalty": outside(-2, 2),
    "repetition_penalty": st.one_of(outside(0, 10), st.just(0)),
    "draft": st.one_of(NOT_TEXT, st.just("int8")),
    "stop_token_ids": st.one_of(st.text(), st.integers(), st.just([-1]), st.just([10**8]), st.just(["a"])),
    "ignore_eos": NOT_A_FLAG,
    "min_tokens": st.one_of(whole_outside(0, 10**6), st.just(100)),
    "stream": NOT_A_FLAG,
    "stream_options": st.one_of(st.text(), st.just({"include_usage": True}), st.just({"include": True})),
    "response_format": st.one_of(
        st.text(), st.just({"type": "xml"}), st.just({"type": "json_schema"}), st.just({"type": "regex", "pattern": ""})
    ),
    "structured_outputs": st.one_of(st.text(), st.just({"regex": "a", "choice": ["a"]}), st.just({"colour": "red"})),
    "skip_special_tokens": st.one_of(NOT_A_FLAG, st.just(False)),
    "include_stop_str_in_output": st.one_of(NOT_A_FLAG, st.just(True)),
    "use_beam_search": st.one_of(NOT_A_FLAG, st.just(True)),
    "length_penalty": outside(1, 1),
    "prediction": st.one_of(
        st.text(), st.integers(), st.just({"type": "content"}), st.just({"type": "x", "content": "a"})
    ),
}
COMPLETIONS: dict[str, st.SearchStrategy[Any]] = {
    **BOTH,
    "prompt": st.one_of(
        st.integers(),
        st.booleans(),
        st.sampled_from([None, [], [[]], [-1], [10**6], [1, "a"], {"text": "a"}]),
    ),
    "logprobs": whole_outside(0, 20),
    "echo": st.one_of(NOT_A_FLAG, st.just(True)),
    "best_of": whole_outside(1, 1),
    "suffix": st.text(min_size=1),
}
CHATS: dict[str, st.SearchStrategy[Any]] = {
    **BOTH,
    "messages": st.one_of(
        st.text(),
        st.sampled_from(
            [
                None,
                [],
                [{"role": "user"}],
                [{"role": "king", "content": "a"}],
                [{"content": "a"}],
                [{"role": "user", "content": 3}],
                [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a"}}]}],
                [{"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "a", "arguments": "{"}}]}],
                [{"role": "user", "content": "Lily " * 600}],
            ]
        ),
    ),
    "max_completion_tokens": whole_outside(1, 10**6),
    "logprobs": NOT_A_FLAG,
    "top_logprobs": st.one_of(whole_outside(0, 20), st.just(3)),
    "tools": st.one_of(st.text(), st.just([{}]), st.just([{"type": "function"}]), st.just([{"type": "code"}])),
    "tool_choice": st.one_of(NOT_TEXT, st.just("required"), st.just({"type": "function", "function": {"name": "a"}})),
    "chat_template_kwargs": st.one_of(st.text(), st.integers(), st.just({"colour": "red"})),
    "reasoning_effort": st.one_of(NOT_TEXT, st.just("high")),
    "enable_thinking": st.one_of(NOT_A_FLAG, st.just(True)),
    "add_generation_prompt": NOT_A_FLAG,
    "continue_final_message": st.one_of(NOT_A_FLAG, st.just(True)),
    "modalities": st.one_of(st.text(), st.just(["audio"])),
}


@pytest.mark.parametrize(
    ("path", "body", "wrong"),
    [("/v1/completions", COMPLETION, COMPLETIONS), ("/v1/chat/completions", CHAT, CHATS)],
    ids=["completions", "chats"],
)
@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_wrong_field_is_refused_by_name(
    server: Running, path: str, body: dict[str, Any], wrong: dict[str, Any], data: st.DataObject
) -> None:
    field = data.draw(st.sampled_from(sorted(wrong)))
    reply = server.ask(path, {**body, field: data.draw(wrong[field])})
    assert 400 <= reply.status < 500, reply.raw
    error = reply.body["error"]
    assert error["message"]
    named = {"max_completion_tokens": "max_tokens"}
    assert error["param"] in (field, named.get(field)), error


@pytest.mark.parametrize(("path", "wrong"), [("/v1/completions", COMPLETIONS), ("/v1/chat/completions", CHATS)])
def test_there_is_a_wrong_value_for_every_field(path: str, wrong: dict[str, Any]) -> None:
    fields = (CompletionRequest if path == "/v1/completions" else ChatCompletionRequest).model_fields.keys()
    assert wrong.keys() | {"parallel_tool_calls"} >= fields


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "body"),
        (b"{", "not JSON"),
        (b'{"model": ', "not JSON"),
        (b"\xff\xfe", ""),
        (b"[" * 100_000, ""),
        (b"null", ""),
        (b"[]", ""),
        (b'{"model": "stories", "prompt": "\\ud800"}', "prompt"),
        (b'{"model": "stories", "prompt": "a", "temperature": 1e-40}', "temperature"),
        (b'{"model": "stories", "prompt": "a", "repetition_penalty": 1e-300}', "repetition_penalty"),
        (b'{"model": "stories", "prompt": "a", "temperature": NaN}', "temperature"),
        (b'{"model": "stories", "prompt": "a", "temperature": 1e999}', "temperature"),
        (b'{"model": "stories", "prompt": "a", "n": ' + b"9" * 5000 + b"}", ""),
    ],
)
def test_malformed_bodies(server: Running, body: bytes, words: str) -> None:
    reply = server.ask("/v1/completions", body)
    assert 400 <= reply.status < 500, reply.raw
    assert words in json.dumps(reply.body["error"])


# Requests with tools or forms, to a template that reads none.
NEEDS_LLGUIDANCE = pytest.mark.skipif(find_spec("llguidance") is None, reason="needs llguidance")
ARGUMENTS = {"type": "object", "properties": {"city": {"enum": ["Bern", "Rome"]}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": ARGUMENTS}}
STRICT = {"type": "function", "function": {"name": "a", "strict": True, "parameters": {"not": {}}}}
MESSAGE_TOOL = {"name": "weather", "input_schema": ARGUMENTS}
HALF_SAID = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "So"}]
GOES_ON = {"messages": HALF_SAID, "continue_final_message": True, "add_generation_prompt": True}
IMAGE = {"role": "user", "content": [{"type": "input_image", "image_url": "a"}]}
BY_NAME: list[Any] = [
    (Running.complete, {"prompts": "a"}, "prompts", "unrecognized"),
    (Running.complete, {"prompt": "Lily " * 600}, "prompt", "beyond the context of 512"),
    (Running.complete, {"prompt": "Lily " * 100, "max_tokens": 500}, "max_tokens", "ask for at most"),
    (Running.complete, {"max_tokens": 0}, "max_tokens", "greater"),
    (Running.complete, {"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs", "say one of"),
    (
        Running.complete,
        {"guided_regex": "a", "response_format": {"type": "json_object"}},
        "structured_outputs",
        "mean the same",
    ),
    (Running.chat, {"skip_special_tokens": False}, "skip_special_tokens", "True"),
    (Running.complete, {"echo": True, "logprobs": 1}, "echo", "False"),
    (Running.complete, {"n": 200}, "n", "128"),
    (Running.complete, {"prompt": ["a"] * 100, "n": 2}, "n", "128"),
    (Running.complete, {"prompt": []}, "prompt", "no list may be empty"),
    (Running.complete, {"prompt": [3, "a"]}, "prompt", "integer"),
    pytest.param(
        Running.complete,
        {"response_format": {"type": "regex", "pattern": "(("}},
        "response_format",
        "invalid regex",
        marks=NEEDS_LLGUIDANCE,
    ),
    (
        Running.chat,
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "a"}}},
        "tool_choice",
        "among",
    ),
    (Running.chat, {"tool_choice": "required"}, "tool_choice", "no tools"),
    (Running.chat, {"messages": [{"role": "user", "content": "a", "name": "Lily"}]}, "messages", "name"),
    (Running.chat, {"chat_template_kwargs": {"colour": 1}}, "chat_template_kwargs", "it reads kind"),
    (Running.chat, {"reasoning_effort": "high"}, "reasoning_effort", "reads none"),
    (Running.chat, {"continue_final_message": True}, "continue_final_message", "assistant"),
    (Running.chat, GOES_ON, "add_generation_prompt", "drop"),
    (Running.chat, {"min_tokens": 600}, "min_tokens", "room"),
    (
        Running.chat,
        {"tools": [TOOL], "response_format": {"type": "regex", "pattern": "a"}},
        "response_format",
        "JSON alone",
    ),
    (Running.chat, {"tools": [STRICT]}, "tools", '"not"'),
    (Running.respond, {"previous_response_id": "resp_1"}, "previous_response_id", ""),
    (Running.respond, {"input": []}, "input", ""),
    (Running.respond, {"input": "Lily " * 3000}, "input", ""),
    (Running.respond, {"text": {"format": {"type": "json_schema", "schema": {"not": {}}}}}, "text", ""),
    (Running.respond, {"tools": [{"type": "file_search"}]}, "tools", ""),
    (Running.respond, {"input": [IMAGE]}, "input", ""),
    (Running.respond, {"input": [{"type": "picture"}]}, "input", "is none of message"),
    (Running.respond, {"colour": 1}, "colour", ""),
    (Running.respond, {"temperature": 1e-38}, "temperature", ""),
    (Running.respond, {"metadata": {"a": "\ud800"}}, "metadata", ""),
    # It speaks of the fields that there are.
    (Running.respond, {"max_output_tokens": 9000}, "max_output_tokens", "max_output_tokens is 9000"),
    (Running.message, {"thinking": {"type": "enabled", "budget_tokens": 2000}}, "thinking", ""),
    (Running.message, {"stop_sequences": [""]}, "stop_sequences", ""),
    (Running.message, {"max_tokens": 0}, "max_tokens", ""),
    (Running.message, {"tools": [MESSAGE_TOOL], "tool_choice": {"type": "tool", "name": "a"}}, "tool_choice", ""),
    (Running.message, {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages", ""),
    (Running.message, {"tools": [MESSAGE_TOOL], "tool_choice": {"type": "auto", "name": "weather"}}, "tool_choice", ""),
    (Running.message, {"temperature": 1e-38}, "temperature", ""),
    (Running.message, {"system": "\ud800"}, "system", ""),
]


@pytest.mark.parametrize(("ask", "fields", "param", "words"), BY_NAME)
def test_refused_by_name(bare: Running, ask: Any, fields: dict[str, Any], param: str, words: str) -> None:
    reply = ask(bare, **fields)
    assert reply.status == 400, reply.raw
    error = reply.body["error"]
    assert (error["param"], error["type"]) == (param, "invalid_request_error")
    assert words in error["message"]
    assert "lambda" not in error["message"]
    assert reply.body["type"] == "error"
    assert ask is not Running.respond or " max_tokens" not in error["message"]


@pytest.mark.parametrize("ask", [Running.complete, Running.chat])
def test_unknown_models_and_methods(server: Running, ask: Callable[..., Any]) -> None:
    reply = ask(server, model="gpt-9")
    assert reply.status == 404
    assert reply.body["error"]["code"] == "model_not_found"
    assert reply.body["error"]["param"] == "model"
    assert server.ask("/v1/models/gpt-9").status == 404
    assert server.ask("/v1/completions").status == 405


def test_a_bound_on_new_tokens() -> None:
    with running(limits=ServerLimits(new_tokens=10, answers=2)) as server:
        reply = server.complete(max_tokens=11)
        assert (reply.status, reply.body["error"]["param"]) == (400, "max_tokens")
        assert server.complete(n=3).body["error"]["param"] == "n"
        assert server.chat(max_tokens=None, ignore_eos=True).body["usage"]["completion_tokens"] == 10
