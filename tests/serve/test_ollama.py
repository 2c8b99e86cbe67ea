"""Ollama's doors: what they answer is what a chat or a completion answers, in lines of JSON with counts and times."""

from __future__ import annotations

import json
from typing import Any

import pytest

from helpers.http_server import NAME, Reply, Running, running
from selfspec.serve.chat.call_reader import CallDelta, ToolCall
from selfspec.serve.choice import Counts, Piece
from selfspec.serve.endpoints.answering import Work
from selfspec.serve.endpoints.ollama import OllamaForm

GREEDY = {"temperature": 0, "num_predict": 12}
QUESTION = {"role": "user", "content": "Tell me of Lily."}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"enum": ["Bern", "Rome"]}}, "required": ["city"]},
    },
}


def chat(server: Running, **fields: Any) -> Reply:
    return server.ask("/api/chat", {"model": NAME, "messages": [QUESTION], "options": GREEDY, **fields})


def lines(reply: Reply) -> list[dict[str, Any]]:
    """Of a stream, of which the last alone is done."""
    assert reply.headers["content-type"] == "application/x-ndjson"
    found = [json.loads(line) for line in reply.raw.decode().splitlines()]
    assert [line["done"] for line in found] == [False] * (len(found) - 1) + [True]
    return found


def test_a_chat_says_what_openais_does(bare: Running) -> None:
    expected = bare.chat(max_tokens=12, temperature=0).body
    body = chat(bare, stream=False).body
    assert body["message"] == {"role": "assistant", "content": expected["choices"][0]["message"]["content"]}
    assert (body["model"], body["done"], body["done_reason"]) == (NAME, True, "length")
    counts = body["prompt_eval_count"], body["eval_count"]
    assert counts == (expected["usage"]["prompt_tokens"], expected["usage"]["completion_tokens"])
    assert body["total_duration"] == body["prompt_eval_duration"] + body["eval_duration"] > 0
    streamed = lines(chat(bare, model=f"{NAME}:latest"))
    assert "".join(line["message"]["content"] for line in streamed) == body["message"]["content"]
    assert streamed[-1]["eval_duration"] > 0
    assert streamed[-1].keys() == body.keys()


def test_options_are_those_of_a_chat(bare: Running) -> None:
    seeded = {"temperature": 1.3, "top_k": 9, "top_p": 0.8, "min_p": 0.01, "seed": 4, "presence_penalty": 0.5}
    text = bare.chat(max_tokens=20, **seeded, repetition_penalty=1.2).body["choices"][0]["message"]["content"]
    options = {**seeded, "num_predict": 20, "repeat_penalty": 1.2, "num_ctx": 4096}
    assert chat(bare, options=options, stream=False).body["message"]["content"] == text
    cut = chat(bare, options={**options, "stop": [text[5:8]]}, stream=False, keep_alive="5m").body
    assert (cut["message"]["content"], cut["done_reason"]) == (text[: text.find(text[5:8])], "stop")
    # Unless a request says otherwise, they are Ollama's.
    own = {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "seed": 1, "max_tokens": 12}
    text = bare.chat(**own).body["choices"][0]["message"]["content"]
    assert chat(bare, options={"seed": 1, "num_predict": 12}, stream=False).body["message"]["content"] == text


def test_a_prompt_goes_through_the_template_unless_it_is_raw(bare: Running) -> None:
    asked = {"model": NAME, "prompt": "Once upon", "options": GREEDY, "stream": False}
    raw = bare.ask("/api/generate", {**asked, "raw": True}).body
    assert raw["response"] == bare.complete(max_tokens=12, temperature=0).body["choices"][0]["text"]
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Once upon"}]
    said = bare.chat(messages=messages, max_tokens=12, temperature=0).body["choices"][0]["message"]["content"]
    assert bare.ask("/api/generate", {**asked, "system": "Be kind."}).body["response"] == said
    streamed = lines(bare.ask("/api/generate", {**asked, "raw": True, "stream": True}))
    assert "".join(line["response"] for line in streamed) == raw["response"]
    loaded = bare.ask("/api/generate", {"model": NAME}).body
    assert (loaded["response"], loaded["done"], loaded["done_reason"]) == ("", True, "load")


def test_calls_and_schemas(bare: Running) -> None:
    pytest.importorskip("llguidance")
    schema = TOOL["function"]["parameters"]
    held = chat(bare, format=schema, options={"num_predict": 100}, stream=False).body["message"]["content"]
    assert json.loads(held)["city"] in ("Bern", "Rome")
    assert chat(bare, format="json", options={"num_predict": 3}, stream=False).body["message"]["content"][0] == "{"
    # What the grammar of a call allows beside it is the form alone.
    strict = {**TOOL, "function": {**TOOL["function"], "strict": True}}
    both = {"tools": [strict], "format": {"type": "object", "properties": {}, "required": ["a"]}}
    assert "error" in chat(bare, **both).body
    call = {"function": {"name": "weather", "arguments": {"city": "Bern"}}}
    told = [
        QUESTION,
        {"role": "assistant", "content": "", "tool_calls": [call, call]},
        *({"role": "tool", "content": said, "tool_name": "weather"} for said in ("sunny", "rainy")),
    ]
    assert chat(bare, messages=told, tools=[TOOL], stream=False).status == 200


def test_thoughts_and_calls_stand_apart() -> None:
    template = "{% for m in messages %}{{ m.content }}{% if m.thought %}</think>{% endif %}{% endfor %}<think>"
    with running(template=template) as server:
        body = chat(server, stream=False).body["message"]
        assert body["content"] == ""
        assert "".join(line["message"].get("thinking", "") for line in lines(chat(server))) == body["thinking"]
        assert chat(server, think=False).body["error"].startswith("think: the template of this model has no switch")
        form = OllamaForm(server.served, Work([(1, 2)], None, "messages"), True)
        call = ToolCall("weather", '{"city": "Bern"}')
        new = Piece("", calls=(CallDelta(call, 0, call.arguments, True, True),))
        (line,) = map(json.loads, form.piece(0, new, Counts(3)))
        assert line["message"]["tool_calls"] == [{"function": {"name": "weather", "arguments": {"city": "Bern"}}}]


def test_refusals_are_one_text(bare: Running) -> None:
    for fields, status, words in (
        ({"model": "none"}, 404, "no model 'none'"),
        ({"options": {"mirostat": 1}}, 400, "options.mirostat"),
        ({"options": {"num_predict": -5, "temperature": 9}}, 400, "temperature"),
        ({"images": ["aa"]}, 400, "images"),
        ({"messages": [{**QUESTION, "images": ["aa"]}]}, 400, "images"),
        ({"format": {"type": "nothing"}}, 400, "format"),
    ):
        reply = chat(bare, **fields)
        assert reply.status == status, reply.raw
        assert reply.body.keys() == {"error"}
        assert words in reply.body["error"]
    assert bare.ask("/api/pull", {}).body["error"].endswith("/docs shows what there is")


def test_what_there_is(bare: Running) -> None:
    (card,) = bare.ask("/api/tags").body["models"]
    assert (card["name"], card["model"]) == (NAME, NAME)
    assert card["size"] == sum(each.nbytes for each in bare.spec.model.parameters())
    shown = bare.ask("/api/show", {"model": NAME}).body
    assert shown["details"] == card["details"]
    assert shown["model_info"]["llama.context_length"] == 512
    assert shown["capabilities"] == ["completion", "tools"]
    assert bare.ask("/api/version").body.keys() == {"version"}
    assert bare.ask("/", method="HEAD").status == 200
    with running(api_keys=("secret",)) as server:
        assert server.ask("/api/tags").body == {"error": server.ask("/v1/models").body["error"]["message"]}
