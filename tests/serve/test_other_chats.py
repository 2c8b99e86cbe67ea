"""Other doors to the same chat: responses and messages."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from helpers.http_server import NAME, Reply, Running, running
from selfspec.serve.chat.call_formats import HERMES
from selfspec.serve.endpoints.chat_completions import call_grammar
from selfspec.serve.endpoints.messages import MessagesRequest
from selfspec.serve.schemas import ChatCompletionRequest

ARGUMENTS = {"type": "object", "properties": {"city": {"enum": ["Bern", "Rome"]}}, "required": ["city"]}
RESPONSE_TOOL = {"type": "function", "name": "weather", "parameters": ARGUMENTS}
MESSAGE_TOOL = {"name": "weather", "input_schema": ARGUMENTS}
QUESTION = "Tell me of Lily."


def named_events(reply: Reply) -> list[dict[str, Any]]:
    """The events of a stream, each of which has its type for its name."""
    found = []
    for block in reply.raw.decode().split("\n\n")[:-1]:
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def test_a_response_says_what_a_chat_does(bare: Running) -> None:
    chat = bare.chat(max_tokens=12, temperature=0).body
    body = bare.respond().body
    (item,) = body["output"]
    assert item["content"][0]["text"] == chat["choices"][0]["message"]["content"]
    assert (body["status"], body["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert body["usage"]["input_tokens"] == chat["usage"]["prompt_tokens"]
    assert body["usage"]["output_tokens"] == 12
    parts = [{"role": "user", "content": [{"type": "input_text", "text": QUESTION}]}]
    assert bare.respond(input=parts).body["output"][0]["content"] == item["content"]


def test_a_response_in_a_stream(bare: Running) -> None:
    whole = bare.respond().body["output"][0]["content"][0]["text"]
    events = named_events(bare.respond(stream=True))
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert "".join(event["delta"] for event in events if event["type"].endswith("text.delta")) == whole
    kinds = [event["type"].removeprefix("response.") for event in events if not event["type"].endswith("delta")]
    assert kinds == [
        *("created", "in_progress", "output_item.added", "content_part.added", "output_text.done"),
        *("content_part.done", "output_item.done", "incomplete"),
    ]
    assert events[-1]["response"]["output"][0]["content"][0]["text"] == whole


def test_a_response_calls_a_tool_and_hears_of_it(bare: Running) -> None:
    pytest.importorskip("llguidance")
    tools = {"tools": [RESPONSE_TOOL], "max_output_tokens": 150}
    (call,) = bare.respond(**tools, tool_choice="required").body["output"]
    assert call["type"] == "function_call"
    assert json.loads(call["arguments"])["city"] in ("Bern", "Rome")
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "sunny"}
    items = [{"role": "user", "content": "Weather?"}, call, result]
    assert bare.respond(input=items, tools=[RESPONSE_TOOL]).status == 200
    named = {"type": "function", "name": "weather"}
    events = named_events(bare.respond(**tools, tool_choice=named, stream=True))
    assert events[-1]["type"] == "response.completed"
    assert events[-1]["response"]["output"][0]["arguments"] == call["arguments"]
    deltas = [event["delta"] for event in events if event["type"].endswith("arguments.delta")]
    assert len(deltas) > 2
    assert "".join(deltas) == call["arguments"]


def test_a_response_goes_on_from_another(bare: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    first = bare.respond(instructions="Be kind.").body
    assert first["store"]
    asks = [{"role": "user", "content": QUESTION}, *first["output"], {"role": "user", "content": "Why?"}]
    expected = bare.respond(input=asks, store=False).body
    for stream in (False, True):
        reply = bare.respond(input="Why?", previous_response_id=first["id"], stream=stream)
        body = named_events(reply)[-1]["response"] if stream else reply.body
        assert body["previous_response_id"] == first["id"]
        assert body["usage"]["input_tokens"] == expected["usage"]["input_tokens"]
        assert body["output"][0]["content"] == expected["output"][0]["content"]
    monkeypatch.setattr(bare.served, "limits", replace(bare.served.limits, stored_bytes=600))
    last = bare.respond().body["id"]
    assert list(bare.served.stored) == [last]
    for gone in (first["id"], expected["id"]):
        error = bare.respond(previous_response_id=gone).body["error"]
        assert (error["param"], error["code"]) == ("previous_response_id", "previous_response_not_found")


def test_a_response_of_a_form(bare: Running) -> None:
    pytest.importorskip("llguidance")
    text = {"format": {"type": "json_schema", "name": "a", "schema": ARGUMENTS, "strict": True}}
    answer = bare.respond(text=text, max_output_tokens=100).body["output"][0]["content"][0]["text"]
    assert json.loads(answer)["city"] in ("Bern", "Rome")


def test_a_message_says_what_a_chat_does(bare: Running) -> None:
    chat = bare.chat(max_tokens=12, temperature=0).body
    body = bare.message().body
    assert body["content"] == [{"type": "text", "text": chat["choices"][0]["message"]["content"]}]
    assert (body["stop_reason"], body["stop_sequence"]) == ("max_tokens", None)
    usage = body["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == chat["usage"]["prompt_tokens"]
    text = body["content"][0]["text"]
    stopped = bare.message(stop_sequences=[text[4:7], "never"]).body
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", text[4:7])
    blocks = [{"role": "user", "content": [{"type": "text", "text": QUESTION, "cache_control": {"type": "ephemeral"}}]}]
    assert bare.message(messages=blocks).body["content"] == body["content"]
    assert bare.message(system="Be kind.").body["usage"] != usage
    counted = bare.ask("/v1/messages/count_tokens", {"model": NAME, "messages": blocks})
    assert counted.body == {"input_tokens": chat["usage"]["prompt_tokens"]}


def test_a_message_in_a_stream(bare: Running) -> None:
    events = named_events(bare.message(stream=True))
    assert [event["type"] for event in events if event["type"] != "content_block_delta"] == [
        *("message_start", "content_block_start", "content_block_stop", "message_delta", "message_stop"),
    ]
    text = "".join(event["delta"]["text"] for event in events if event["type"] == "content_block_delta")
    assert text == bare.message().body["content"][0]["text"]
    assert events[-2]["usage"]["output_tokens"] == 12


def test_a_message_calls_a_tool_and_hears_of_it(bare: Running) -> None:
    pytest.importorskip("llguidance")
    tools = {"tools": [MESSAGE_TOOL], "max_tokens": 150}
    body = bare.message(**tools, tool_choice={"type": "any"}).body
    (use,) = body["content"]
    assert (use["type"], body["stop_reason"]) == ("tool_use", "tool_use")
    assert use["input"]["city"] in ("Bern", "Rome")
    messages = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": [{**use, "caller": None}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": use["id"], "content": "sunny"}]},
    ]
    assert bare.message(messages=messages, tools=[MESSAGE_TOOL]).status == 200
    choice = {"type": "tool", "name": "weather"}
    events = named_events(bare.message(**tools, tool_choice=choice, stream=True))
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    assert len(deltas) > 2
    assert json.loads("".join(delta["partial_json"] for delta in deltas)) == use["input"]


@pytest.mark.parametrize("limited", [True, False])
def test_calls_beside_each_other_are_let_be_unless_they_are_refused(limited: bool) -> None:
    fields = {"model": NAME, "messages": [{"role": "user", "content": "a"}], "max_tokens": 9, "tools": [MESSAGE_TOOL]}
    choice = {"type": "auto", "disable_parallel_tool_use": limited}
    chat = MessagesRequest.model_validate({**fields, "tool_choice": choice}).chat(())
    assert chat["parallel_tool_calls"] is not limited
    request = ChatCompletionRequest.model_validate({name: each for name, each in chat.items() if each is not None})
    grammar = call_grammar(request, HERMES, None)
    assert (grammar is not None and not grammar.many) == limited


def test_a_call_that_failed_is_said_to_have(bare: Running) -> None:
    use = {"type": "tool_use", "id": "a", "name": "weather", "input": {}}
    tokens = set()
    for fields in ({}, {"is_error": False}, {"is_error": True}):
        result = {"type": "tool_result", "tool_use_id": "a", "content": "boom", **fields}
        messages = [{"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
        body = bare.message(messages=[{"role": "user", "content": "a"}, *messages], tools=[MESSAGE_TOOL]).body
        tokens.add(body["usage"]["input_tokens"] + body["usage"]["cache_read_input_tokens"])
    assert len(tokens) == 2


THINKS = (
    "{% for m in messages %}{{ m.role }}: {% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>"
    "{% endif %}{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant:"
    "{% if enable_thinking %}<think>{% endif %}{% endif %}"
)


def test_thoughts_stand_apart_at_every_door_and_are_taken_back() -> None:
    with running(template=THINKS) as server:
        asked: dict[str, Any] = {"max_tokens": 12, "temperature": 0}
        prompt = server.tokenizer(f"user: {QUESTION}\nassistant:<think>", add_special_tokens=False).input_ids
        thought = server.complete(prompt=prompt, **asked).body["choices"][0]["text"].lstrip()
        chat = server.chat(**asked, enable_thinking=True).body["choices"][0]["message"]
        assert (chat["reasoning_content"], chat["content"]) == (thought, "")
        usage = server.chat(**asked, enable_thinking=True).body["usage"]["completion_tokens_details"]
        assert usage["reasoning_tokens"] == len(server.tokenizer(thought, add_special_tokens=False).input_ids) > 3
        deltas = [
            each["choices"][0]["delta"] for each in server.chat(**asked, enable_thinking=True, stream=True).events
        ]
        assert "".join(each.get("reasoning_content", "") for each in deltas) == thought
        assert "reasoning_content" not in server.chat(**asked, reasoning_effort="none").body["choices"][0]["message"]
        item = server.respond(reasoning={"effort": "high"}).body["output"][0]
        assert (item["type"], item["content"][0]["text"]) == ("reasoning", thought)
        events = named_events(server.respond(reasoning={"effort": "high"}, stream=True))
        assert "".join(each["delta"] for each in events if each["type"] == "response.reasoning_text.delta") == thought
        thinking = {"type": "enabled", "budget_tokens": 1024}
        block = server.message(thinking=thinking).body["content"][0]
        assert block == {"type": "thinking", "thinking": thought, "signature": ""}
        events = named_events(server.message(thinking=thinking, stream=True))
        blocks = [each["delta"] for each in events if each["type"] == "content_block_delta"]
        assert "".join(each["thinking"] for each in blocks) == thought
        # As an earlier answer brings them back.
        asks, again = {"role": "user", "content": QUESTION}, {"role": "user", "content": "Why?"}
        said = {"role": "assistant", "content": "So."}
        counts = {
            server.chat(messages=[asks, {**said, "reasoning_content": thought}, again]).body["usage"]["prompt_tokens"],
            server.respond(input=[asks, item, said, again]).body["usage"]["input_tokens"],
            server.ask(
                "/v1/messages/count_tokens",
                {
                    "model": NAME,
                    "messages": [asks, {**said, "content": [block, {"type": "text", "text": "So."}]}, again],
                },
            ).body["input_tokens"],
        }
        assert len(counts) == 1
        assert counts.pop() > server.chat(messages=[asks, said, again]).body["usage"]["prompt_tokens"]


@pytest.mark.parametrize("path", ["/v1/audio/transcriptions", "/v1/embeddings", "/v1/responses/resp_1", "/v1/batches"])
def test_what_is_not_there_says_where_to_look(bare: Running, path: str) -> None:
    reply = bare.ask(path, {})
    assert reply.status == 404
    assert f"{path}; /docs shows" in reply.body["error"]["message"]
    assert reply.body["error"]["type"] == "not_found_error"


def test_keys_names_and_pages() -> None:
    with running(api_keys=("secret", "other"), aliases=("gpt-4",), origins=("https://a.example",)) as server:
        body = {"model": "gpt-4", "max_tokens": 2, "messages": [{"role": "user", "content": "Hello"}]}
        for headers in ({}, {"authorization": "Bearer open"}, {"authorization": "secret"}):
            reply = server.ask("/v1/messages", body, **headers)
            assert (reply.status, reply.body["error"]["code"]) == (401, "invalid_api_key")
            assert reply.headers["www-authenticate"] == "Bearer"
        for key in ("secret", "other"):
            assert server.ask("/v1/models", authorization=f"Bearer {key}").status == 200
        assert server.ask("/version").body.keys() == {"version"}
        assert server.complete().status == server.ask("/v1/models").status == 401
        assert server.ask("/v1/messages", body, x_api_key="secret").status == 200
        cards = server.ask("/v1/models", x_api_key="secret").body["data"]
        assert [(card["id"], card["object"], card["max_model_len"]) for card in cards] == [
            (name, "model", 512) for name in (NAME, "gpt-4")
        ]
        assert server.ask(f"/v1/models/{NAME}", x_api_key="secret").body == cards[0]
        asked = {"origin": "https://a.example", "access_control_request_method": "POST"}
        allowed = server.ask("/v1/messages", method="OPTIONS", **asked)
        assert allowed.headers["access-control-allow-origin"] == "https://a.example"
        other = server.ask("/health", origin="https://b.example")
        assert other.status == 200
        assert "access-control-allow-origin" not in other.headers
