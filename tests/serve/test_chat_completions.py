"""`/v1/chat/completions`: messages through the template, answers and streams of them."""

from __future__ import annotations

from typing import Any

import pytest

from helpers.http_server import Running, running
from helpers.tokenizers import PLAIN
from selfspec.serve.chat.template import ChatTemplate

USER = {"role": "user", "content": "Tell me of Lily."}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


def prompt_tokens(server: Running, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None) -> int:
    return len(ChatTemplate(server.tokenizer, PLAIN).prompt(messages, tools))


def test_an_answer_is_that_of_the_templates_prompt(server: Running) -> None:
    reply = server.chat(temperature=0)
    prompt = ChatTemplate(server.tokenizer, PLAIN).prompt([USER])
    assert reply.status == 200
    (choice,) = reply.body["choices"]
    completion = server.complete(prompt=prompt, temperature=0).body["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": completion["text"], "refusal": None}
    assert reply.body["object"] == "chat.completion"
    assert reply.body["usage"]["prompt_tokens"] == len(prompt)


@pytest.mark.parametrize("n", [1, 3])
def test_a_stream_says_the_same(server: Running, n: int) -> None:
    whole = server.chat(seed=2, n=n).body
    events = server.chat(seed=2, n=n, stream=True).events
    texts = [""] * n
    assert [event["choices"][0]["delta"] for event in events[:n]] == [{"role": "assistant", "content": ""}] * n
    for event in events:
        (choice,) = event["choices"]
        texts[choice["index"]] += choice["delta"].get("content", "")
        assert "usage" not in event
    assert texts == [choice["message"]["content"] for choice in whole["choices"]]
    assert events[-1]["choices"][0]["finish_reason"] == "length"


def test_logprobs(server: Running) -> None:
    (choice,) = server.chat(temperature=0, logprobs=True, top_logprobs=3).body["choices"]
    content = choice["logprobs"]["content"]
    said = b"".join(bytes(each["bytes"]) for each in content).decode()
    assert said.endswith(choice["message"]["content"])
    for each in content:
        assert len(each["top_logprobs"]) == 3
        assert each["top_logprobs"][0]["logprob"] == each["logprob"]
    streamed = server.chat(temperature=0, logprobs=True, stream=True).events
    found = [one for event in streamed for one in (event["choices"][0]["logprobs"] or {"content": []})["content"]]
    assert [each["token"] for each in found] == [each["token"] for each in content]
    assert found[0]["top_logprobs"] == []


def test_parts_of_text_are_one_text(server: Running) -> None:
    parts = [{"type": "text", "text": "Tell me "}, {"type": "text", "text": "of Lily."}]
    reply = server.chat(messages=[{"role": "user", "content": parts}], temperature=0)
    assert reply.body["choices"] == server.chat(temperature=0).body["choices"]


def test_tools_reach_the_template(server: Running) -> None:
    assert server.chat(tools=[WEATHER]).body["usage"]["prompt_tokens"] == prompt_tokens(server, [USER], [WEATHER])
    none = server.chat(tools=[WEATHER], tool_choice="none")
    assert none.body["usage"]["prompt_tokens"] == prompt_tokens(server, [USER])


@pytest.mark.parametrize(("arguments", "status"), [('{"city": "Oslo"}', 200), ("", 200), ("{", 400), ("no", 400)])
def test_a_call_that_takes_nothing_may_have_empty_arguments(server: Running, arguments: str, status: int) -> None:
    def asked(arguments: str) -> list[dict[str, Any]]:
        called = {"id": "a", "type": "function", "function": {"name": "weather", "arguments": arguments}}
        calling = {"role": "assistant", "content": None, "tool_calls": [called], "refusal": None, "annotations": []}
        answered = {"role": "tool", "content": "rain", "tool_call_id": "a"}
        return [{"role": "developer", "content": "Be kind."}, USER, calling, answered]

    reply = server.chat(messages=asked(arguments), tools=[WEATHER], temperature=0)
    assert reply.status == status
    if not arguments:
        same = server.chat(messages=asked("{}"), tools=[WEATHER], temperature=0)
        assert reply.body["choices"] == same.body["choices"]


def test_what_the_template_refuses_is_the_clients_to_mend(server: Running) -> None:
    reply = server.chat(messages=[{"role": "user", "content": "mute"}])
    assert reply.status == 400
    assert "nothing is said" in reply.body["error"]["message"]
    assert reply.body["error"]["param"] == "messages"


@pytest.mark.contract
def test_an_answer_without_a_length_may_fill_the_context(server: Running) -> None:
    assert server.chat(max_tokens=None, temperature=0, stop=["."]).body["choices"][0]["finish_reason"] == "stop"
    messages = [{"role": "user", "content": "Tell me of Lily. " * 50}]
    long = server.chat(messages=messages, max_tokens=None, temperature=0, ignore_eos=True).body["usage"]
    assert long["total_tokens"] == server.served.engine.longest


def test_without_a_template_there_is_a_clear_word() -> None:
    with running(template=None) as server:
        reply = server.chat()
        assert reply.status == 400
        assert "--template FILE" in reply.body["error"]["message"]
        assert server.complete().status == 200
