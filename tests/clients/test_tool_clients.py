"""Calls of the published shapes, as clients read them: the engine says what a model of each family would."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from helpers import tiny
from helpers.http_server import NAME, Running, running
from helpers.published_templates import PUBLISHED
from selfspec.serve.chat.template import ChatTemplate
from selfspec.serve.events import Committed, Event, Finished, Ticket
from selfspec.serve.row_request import RowRequest

# Of what others do within their own libraries.
pytestmark = pytest.mark.filterwarnings("default")

KEY = "open sesame"
QUESTION = "How is the weather?"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
NAMES = ("weather", "time")
CALLS: list[tuple[str, Any]] = [("weather", {"city": "Zürich } 5", "days": 3}), ("time", {})]
SPECIAL = sorted({token for shape in PUBLISHED.values() for token in shape.special})
Read = tuple[str, list[tuple[str, Any]]]


def tokenizer() -> PreTrainedTokenizerBase:
    found = tiny.tokenizer()
    found.add_special_tokens({"additional_special_tokens": SPECIAL})
    return found


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    model = tiny.llama(vocab_size=512, max_position_embeddings=16_384)
    with running(model=model, draft="lookup", api_key=KEY, tokenizer=tokenizer()) as found:
        yield found


def says(server: Running, monkeypatch: pytest.MonkeyPatch, text: str, at_once: bool) -> None:
    """Let the engine answer with a text, all at once or token by token."""
    tokens = server.served.tokenizer(text, add_special_tokens=False).input_ids

    def submit(_: RowRequest, listen: Callable[[Event], object]) -> Ticket:
        for each in [tuple(tokens)] if at_once else [(token,) for token in tokens]:
            listen(Committed(each, None, 0, 0))
        listen(Finished("stop", None, 1, len(tokens), 0, 0))
        return Ticket(listen)

    monkeypatch.setattr(server.served.engine, "submit", submit)


def openai_chat(url: str) -> Iterator[Read]:
    """Whole, and as a stream."""
    openai = pytest.importorskip("openai")
    tools = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in NAMES]
    asked: Any = {"model": NAME, "messages": [{"role": "user", "content": QUESTION}], "tools": tools}
    with openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0) as client:
        answers = [client.chat.completions.create(**asked)]
        with client.chat.completions.stream(**asked) as events:
            answers.append(events.get_final_completion())
    for each in answers:
        message, calls = each.choices[0].message, each.choices[0].message.tool_calls or []
        assert each.choices[0].finish_reason == ("tool_calls" if calls else "stop")
        assert len({call.id for call in calls}) == len(calls)
        yield message.content or "", [(call.function.name, json.loads(call.function.arguments)) for call in calls]


def openai_responses(url: str) -> Iterator[Read]:
    openai = pytest.importorskip("openai")
    tools = [{"type": "function", "name": name, "parameters": SCHEMA, "strict": False} for name in NAMES]
    asked: Any = {"model": NAME, "input": QUESTION, "tools": tools}
    with openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0) as client:
        answers = [client.responses.create(**asked)]
        with client.responses.stream(**asked) as events:
            answers.append(events.get_final_response())
    for each in answers:
        calls = [item for item in each.output if item.type == "function_call"]
        yield each.output_text, [(call.name, json.loads(call.arguments)) for call in calls]


def anthropic_chat(url: str) -> Iterator[Read]:
    anthropic = pytest.importorskip("anthropic")
    tools = [{"name": name, "input_schema": SCHEMA} for name in NAMES]
    asked: Any = {"model": NAME, "messages": [{"role": "user", "content": QUESTION}], "tools": tools, "max_tokens": 999}
    with anthropic.Anthropic(base_url=url, api_key=KEY, max_retries=0) as client:
        answers = [client.messages.create(**asked)]
        with client.messages.stream(**asked) as events:
            answers.append(events.get_final_message())
    for each in answers:
        uses = [block for block in each.content if block.type == "tool_use"]
        assert each.stop_reason == ("tool_use" if uses else "end_turn")
        text = "".join(block.text for block in each.content if block.type == "text")
        yield text, [(use.name, use.input) for use in uses]


def without_marks(text: str) -> str:
    for each in SPECIAL:
        text = text.replace(each, "")
    return text


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("client", [openai_chat, openai_responses, anthropic_chat])
@pytest.mark.parametrize("name", PUBLISHED)
def test_clients_read_calls(
    server: Running, monkeypatch: pytest.MonkeyPatch, name: str, client: Callable[[str], Iterator[Read]], at_once: bool
) -> None:
    shape, url = PUBLISHED[name], f"http://127.0.0.1:{server.port}"
    monkeypatch.setattr(server.served.tokenizer, "chat_template", shape.source)
    monkeypatch.setattr(server.served, "template", ChatTemplate(server.served.tokenizer))
    for thought in (shape.thought.format("Let me see."), "", shape.empty):
        before = without_marks(thought.removesuffix("<|start|>assistant")).rstrip()
        for count in (1, 2):
            says(server, monkeypatch, thought + shape.calls(CALLS[:count]), at_once)
            assert list(client(url)) == [(before, CALLS[:count])] * 2
        for said in ("It is warm.", shape.calls([("nobody", {})])):
            answer = thought + shape.begins + said
            says(server, monkeypatch, answer, at_once)
            assert list(client(url)) == [(without_marks(answer), [])] * 2
