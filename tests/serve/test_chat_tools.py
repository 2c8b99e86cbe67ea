"""Tools in chats: told to the model, called by grammar, streamed, and fed back."""

from __future__ import annotations

import json
from typing import Any

import pytest

from helpers.http_server import Running, running
from helpers.published_templates import TAGGED

pytest.importorskip("llguidance")

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Says how the weather is.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Bern", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
TIME = {"type": "function", "function": {"name": "time"}}
NAMED = {"type": "function", "function": {"name": "weather"}}


def text_of(server: Running, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> str:
    assert server.served.template is not None
    return str(server.tokenizer.decode(server.served.template.prompt(messages, tools)))


def check_call(call: dict[str, Any]) -> None:
    assert call["type"] == "function"
    assert call["function"]["name"] == "weather"
    arguments = json.loads(call["function"]["arguments"])
    assert arguments["city"] in ("Bern", "Rome")
    assert 1 <= arguments["days"] <= 9


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_a_call_that_must_be(bare: Running, choice: Any) -> None:
    tools = [WEATHER] if choice == "required" else [TIME, WEATHER]
    reply = bare.chat(tools=tools, tool_choice=choice, max_tokens=140, n=2, temperature=1, seed=3)
    assert reply.status == 200, reply.raw
    for each in reply.body["choices"]:
        assert each["finish_reason"] == "tool_calls"
        assert each["message"]["content"] is None
        assert len(each["message"]["tool_calls"]) == 1
        check_call(each["message"]["tool_calls"][0])
    ids = [each["message"]["tool_calls"][0]["id"] for each in reply.body["choices"]]
    assert len(set(ids)) == 2


def test_calls_in_a_stream(bare: Running) -> None:
    body = {"tools": [WEATHER], "tool_choice": "required", "max_tokens": 140, "temperature": 0, "stream": True}
    deltas = [each["choices"][0] for each in bare.chat(**body).events]
    calls = [call for each in deltas for call in each["delta"].get("tool_calls", ())]
    # Its name once, its arguments while they are written.
    assert len(calls) > 3
    assert {call["index"] for call in calls} == {0}
    assert not any({"id", "type"} & call.keys() for call in calls[1:])
    arguments = "".join(call["function"]["arguments"] for call in calls)
    check_call({**calls[0], "function": {**calls[0]["function"], "arguments": arguments}})
    assert not any(each["delta"].get("content") for each in deltas)
    assert deltas[-1]["finish_reason"] == "tool_calls"


def test_a_call_whose_arguments_stand_between_tags() -> None:
    with running(template=TAGGED) as server:
        body = {"tools": [WEATHER], "tool_choice": NAMED, "max_tokens": 140, "temperature": 0}
        reply = server.chat(**body)
        assert reply.status == 200, reply.raw
        check_call(reply.body["choices"][0]["message"]["tool_calls"][0])


def test_several_calls(bare: Running) -> None:
    """The grammar leaves it to the model whether another one follows: here it may not end before two."""
    tools = [{"type": "function", "function": {"name": "t", "parameters": {"type": "object", "properties": {}}}}]
    body = {"tools": tools, "tool_choice": "required", "parallel_tool_calls": True, "temperature": 0}
    calls = bare.chat(**body, max_tokens=200, min_tokens=100).body["choices"][0]["message"]["tool_calls"]
    assert len(calls) > 1
    assert {call["function"]["name"] for call in calls} == {"t"}


def test_a_strict_tool_may_be_called(bare: Running) -> None:
    strict = {**WEATHER, "function": {**WEATHER["function"], "strict": True}}
    reply = bare.chat(tools=[strict], max_tokens=8)
    assert reply.body["choices"][0]["message"]["content"]
    begun = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": '<tool_call>\n{"name": "weather", "arguments": '},
    ]
    # What continues a call is judged from its own beginning, and is text.
    assert bare.chat(messages=begun, tools=[strict], continue_final_message=True, max_tokens=40).status == 200


def test_json_or_a_call(bare: Running) -> None:
    schema = {"type": "object", "properties": {"done": {"const": True}}, "required": ["done"]}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    reply = bare.chat(tools=[WEATHER], response_format=form, max_tokens=140, temperature=0)
    message = reply.body["choices"][0]["message"]
    if message.get("tool_calls"):
        check_call(message["tool_calls"][0])
    else:
        assert json.loads(message["content"]) == {"done": True}


def test_what_the_template_cannot_write_of_tools_is_refused() -> None:
    call = {"id": "a", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    told = [{"role": "assistant", "content": None, "tool_calls": [call]}]
    with running(template="{% for message in messages %}{{ message.content }} {% endfor %}") as server:
        refused = server.chat(tools=[WEATHER])
        assert (refused.status, refused.body["error"]["param"]) == (400, "tools")
        assert "--template FILE" in refused.body["error"]["message"]
        refused = server.chat(messages=[{"role": "user", "content": "Weather?"}, *told])
        assert (refused.status, refused.body["error"]["param"]) == (400, "messages")
        assert server.chat(tools=[WEATHER], tool_choice="none", max_tokens=2).status == 200


def test_calls_and_results_are_fed_back(bare: Running) -> None:
    def said(content: str | None, arguments: Any) -> list[dict[str, Any]]:
        call = {"id": "a", "type": "function", "function": {"name": "weather", "arguments": arguments}}
        return [
            {"role": "user", "content": "Weather?"},
            {"role": "assistant", "content": content, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "a", "name": "weather", "content": "sunny"},
        ]

    reply = bare.chat(messages=said(None, '{"city": "Bern"}'), tools=[WEATHER])
    assert reply.status == 200, reply.raw
    told = text_of(bare, said("", {"city": "Bern"}), [WEATHER])
    assert '{"name": "weather", "arguments": {"city": "Bern"}}' in told
    assert "tool: sunny" in told
    assert reply.body["usage"]["prompt_tokens"] == len(bare.tokenizer(told, add_special_tokens=False).input_ids)


def test_variables_of_the_template(bare: Running) -> None:
    plain = bare.chat(max_tokens=4).body["usage"]["prompt_tokens"]
    more = bare.chat(max_tokens=4, chat_template_kwargs={"kind": " (said kindly)"}).body["usage"]["prompt_tokens"]
    assert more > plain


def test_an_answer_that_goes_on(bare: Running) -> None:
    messages = [{"role": "user", "content": "Tell me."}, {"role": "assistant", "content": "Once upon a"}]
    # As vLLM's clients must say it.
    asked = {"continue_final_message": True, "add_generation_prompt": False}
    found = bare.chat(messages=messages, **asked, temperature=0, max_tokens=6)
    whole = bare.complete(prompt="user: Tell me.\nassistant: Once upon a", temperature=0, max_tokens=6)
    assert found.body["choices"][0]["message"]["content"] == whole.body["choices"][0]["text"]


def test_a_least_length_and_counts_in_every_event(server: Running) -> None:
    ends = server.tokenizer(" was").input_ids[-1:]
    short = server.complete(temperature=0, max_tokens=20, stop_token_ids=ends)
    assert short.body["usage"]["completion_tokens"] < 15
    options = {"include_usage": True, "continuous_usage_stats": True}
    stream = server.complete(
        temperature=0, max_tokens=20, stop_token_ids=ends, min_tokens=15, stream=True, stream_options=options
    )
    counts = [each["usage"]["completion_tokens"] for each in stream.events]
    assert counts == sorted(counts)
    assert 15 <= counts[-1] <= 20
