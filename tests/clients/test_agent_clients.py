"""Clients of OpenAI's and other APIs, by their ordinary examples: chats, tools, objects, streams and errors.

The model is random: the grammar makes it say what can be read, or the test says it in the model's place. A client that
is not installed is passed over.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import pytest
from pydantic import BaseModel, Field

from helpers import tiny
from helpers.http_server import NAME, Running, running
from helpers.published_templates import PUBLISHED
from helpers.tokenizers import BARE
from selfspec.serve.chat.template import ChatTemplate
from selfspec.serve.events import Committed, Finished, Ticket
from selfspec.serve.row_request import RowRequest

pytest.importorskip("openai")
pytest.importorskip("xgrammar")

import openai
from openai import OpenAI

# Of what others do within their own libraries.
pytestmark = pytest.mark.filterwarnings("default")

QUESTION = "How is the weather?"
SAID: Any = [{"role": "user", "content": QUESTION}]
KEY = "open sesame"
SETTINGS: Any = {"max_tokens": 200, "temperature": 0}


class Weather(BaseModel):
    """The weather of a city."""

    city: Literal["Bern", "Rome"]
    days: int = Field(ge=1, le=9)


def weather(city: Literal["Bern", "Rome"]) -> str:
    """Say the weather of a city."""
    return f"sunny in {city}"


# Some look for the names in annotations where this module is not to be found.
weather.__annotations__ = {"city": Literal["Bern", "Rome"], "return": str}


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    model = tiny.llama(vocab_size=512, max_position_embeddings=16_384, eos_token_id=2)
    with running(model=model, draft="lookup", template=BARE, api_keys=(KEY,)) as found:
        yield found


@pytest.fixture
def url(server: Running) -> str:
    return f"http://127.0.0.1:{server.port}/v1"


@pytest.fixture
def client(url: str) -> Iterator[OpenAI]:
    with OpenAI(base_url=url, api_key=KEY, max_retries=0) as found:
        yield found


def expected(server: Running, new: int = 12) -> str:
    """The greedy answer to the messages, by a plain request."""
    asked = {"model": NAME, "messages": SAID, "max_tokens": new, "temperature": 0}
    reply = server.ask("/v1/chat/completions", asked, authorization=f"Bearer {KEY}")
    found: str = reply.body["choices"][0]["message"]["content"]
    return found


def test_openai_completes_and_chats(server: Running, client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [NAME]
    assert client.models.retrieve(NAME).id == NAME
    answer = client.chat.completions.create(model=NAME, messages=SAID, max_tokens=12, temperature=0)
    assert answer.choices[0].message.content == expected(server)
    long = expected(server, 60)
    edited: Any = {"type": "content", "content": [{"type": "text", "text": long.replace(" the ", " a ", 1)}]}
    again = client.chat.completions.create(model=NAME, messages=SAID, max_tokens=60, temperature=0, prediction=edited)
    assert again.choices[0].message.content == long
    # How many are drafted depends on what passes cost by the clock; tests of predictions count them by a fixed control.
    details = again.usage.completion_tokens_details
    assert details.accepted_prediction_tokens + details.rejected_prediction_tokens > 0
    text = client.completions.create(model=NAME, prompt="Once upon", max_tokens=8, temperature=0, logprobs=2, n=2)
    assert len(text.choices) == 2
    assert len(text.choices[0].logprobs.token_logprobs) == 8


def test_openai_streams(server: Running, client: OpenAI) -> None:
    asked: Any = {"model": NAME, "messages": SAID, "temperature": 0, "logprobs": True, "top_logprobs": 2}
    options = {"include_usage": True}
    chunks = [*client.chat.completions.create(**asked, max_completion_tokens=12, stream=True, stream_options=options)]
    assert "".join(each.choices[0].delta.content or "" for each in chunks if each.choices) == expected(server)
    assert chunks[-1].usage.completion_tokens == 12
    with client.chat.completions.stream(model=NAME, messages=SAID, max_tokens=12, temperature=0) as events:
        assert "".join(event.delta for event in events if event.type == "content.delta") == expected(server)


def test_openai_reads_errors(server: Running, client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="no model"):
        client.completions.create(model="gpt-9", prompt="a")
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=NAME, prompt="a", temperature=9)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()


def test_langchain_chats_and_binds_tools(server: Running, url: str) -> None:
    pytest.importorskip("langchain_openai")
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(model=NAME, base_url=url, api_key=KEY, temperature=0, max_tokens=200)
    assert model.invoke(QUESTION, max_tokens=12).content == expected(server)
    assert "".join(str(chunk.content) for chunk in model.stream(QUESTION, max_tokens=12)) == expected(server)
    bound = model.bind_tools([tool(weather)], tool_choice="any")
    called = bound.invoke(QUESTION)
    (call,) = called.tool_calls
    assert call["name"] == "weather"
    assert call["args"]["city"] in ("Bern", "Rome")
    result = ToolMessage(weather(**call["args"]), tool_call_id=call["id"])
    assert model.bind_tools([tool(weather)]).invoke([HumanMessage(QUESTION), called, result], max_tokens=5).content
    whole: Any = None
    for chunk in bound.stream(QUESTION):
        whole = chunk if whole is None else whole + chunk
    assert [each["args"] for each in whole.tool_calls] == [call["args"]]
    for method in ("json_schema", "function_calling"):
        assert isinstance(model.with_structured_output(Weather, method=method).invoke(QUESTION), Weather)


def test_llama_index_chats_calls_and_asks_for_objects(server: Running, url: str) -> None:
    pytest.importorskip("llama_index.llms.openai_like")
    from llama_index.core.llms import ChatMessage
    from llama_index.core.tools import FunctionTool
    from llama_index.llms.openai_like import OpenAILike

    model = OpenAILike(
        model=NAME,
        api_base=url,
        api_key=KEY,
        is_chat_model=True,
        is_function_calling_model=True,
        context_window=16_384,
        max_tokens=200,
        temperature=0,
    )
    answer = expected(server, 200).strip()
    assert model.chat([ChatMessage(content=QUESTION)]).message.content.strip() == answer
    *_, last = model.stream_chat([ChatMessage(content=QUESTION)])
    assert last.message.content.strip() == answer
    tool = FunctionTool.from_defaults(weather)
    assert "sunny" in str(model.predict_and_call([tool], QUESTION, tool_required=True))
    assert Weather.model_validate_json(model.as_structured_llm(Weather).complete(QUESTION).text)


def test_openai_responds(url: str) -> None:
    from openai.types.responses import Response

    with OpenAI(base_url=url, api_key=KEY, max_retries=0) as client:
        parsed = client.responses.parse(model=NAME, input=QUESTION, text_format=Weather, max_output_tokens=200)
        assert isinstance(parsed.output_parsed, Weather)
        tool = {"type": "function", "name": "weather", "parameters": Weather.model_json_schema(), "strict": False}
        asked = {"model": NAME, "input": QUESTION, "tools": [tool], "tool_choice": "required", "temperature": 0}
        response = client.responses.create(**asked)
        # The client itself checks nothing.
        (call,) = Response.model_validate_json(response.to_json()).output
        assert Weather.model_validate_json(call.arguments)
        with client.responses.stream(**asked) as events:
            assert events.get_final_response().output[0].arguments == call.arguments
        items = [*SAID, call, {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}]
        assert client.responses.create(model=NAME, input=items, max_output_tokens=16, temperature=0).output_text
        calls = client.chat.completions.parse(model=NAME, messages=SAID, response_format=Weather, max_tokens=200)
        assert isinstance(calls.choices[0].message.parsed, Weather)


def test_instructor(url: str) -> None:
    instructor = pytest.importorskip("instructor")

    asked = {"model": NAME, "messages": SAID, "max_tokens": 200}
    with OpenAI(base_url=url, api_key=KEY) as client:
        chats = instructor.from_openai(client).chat.completions
        assert isinstance(chats.create(**asked, response_model=Weather), Weather)
        *_, last = chats.create_partial(**asked, response_model=Weather)
        assert Weather.model_validate(last.model_dump())


def test_pydantic_ai(url: str) -> None:
    pytest.importorskip("pydantic_ai")
    from openai import AsyncOpenAI
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    async def asked() -> None:
        async with AsyncOpenAI(base_url=url, api_key=KEY) as client:
            model = OpenAIChatModel(NAME, provider=OpenAIProvider(openai_client=client))
            agent = Agent(model, output_type=Weather, tools=[weather], model_settings=SETTINGS)
            assert isinstance((await agent.run(QUESTION)).output, Weather)
            async with agent.run_stream(QUESTION) as streamed:
                assert isinstance(await streamed.get_output(), Weather)

    asyncio.run(asked())


@pytest.mark.parametrize("kind", ["OpenAIChatCompletionsModel", "OpenAIResponsesModel"])
def test_openai_agents(url: str, kind: str) -> None:
    agents = pytest.importorskip("agents")
    from openai import AsyncOpenAI

    agents.set_tracing_disabled(True)
    cities = []

    def weather_of(city: Literal["Bern", "Rome"]) -> str:
        """Say the weather of a city."""
        cities.append(city)
        return "sunny"

    async def asked() -> None:
        async with AsyncOpenAI(base_url=url, api_key=KEY) as client:
            model = getattr(agents, kind)(model=NAME, openai_client=client)
            agent = agents.Agent(
                name="a",
                instructions="Be brief.",
                tools=[agents.function_tool(weather_of)],
                model=model,
                model_settings=agents.ModelSettings(tool_choice="required", **SETTINGS),
                tool_use_behavior="stop_on_first_tool",
            )
            assert (await agents.Runner.run(agent, QUESTION)).final_output == "sunny"
            streamed = agents.Runner.run_streamed(agent, QUESTION)
            assert [event async for event in streamed.stream_events()]
            assert streamed.final_output == "sunny"
            assert len(cities) == 2
            settings = agents.ModelSettings(**SETTINGS)
            typed = agents.Agent(name="a", output_type=Weather, model=model, model_settings=settings)
            assert isinstance((await agents.Runner.run(typed, QUESTION)).final_output, Weather)

    asyncio.run(asked())


def test_anthropic(url: str) -> None:
    anthropic = pytest.importorskip("anthropic")

    client = anthropic.Anthropic(base_url=url.removesuffix("/v1"), api_key=KEY, max_retries=0)
    asked = {"model": NAME, "messages": SAID, "extra_body": {"temperature": 0}}
    answer = client.messages.create(**asked, max_tokens=12, system="Be brief.")
    with client.messages.stream(**asked, max_tokens=12, system="Be brief.") as stream:
        assert "".join(stream.text_stream) == answer.content[0].text
    tools = [{"name": "weather", "description": "Weather.", "input_schema": Weather.model_json_schema()}]
    called = client.messages.create(**asked, max_tokens=200, tools=tools, tool_choice={"type": "any"})
    (use,) = called.content
    assert Weather.model_validate(use.input)
    back = [
        *SAID,
        {"role": "assistant", "content": [use.model_dump()]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": use.id, "content": "sunny"}]},
    ]
    assert client.messages.create(**{**asked, "messages": back}, max_tokens=12, tools=tools).content
    assert client.messages.count_tokens(model=NAME, messages=SAID).input_tokens > 0
    with pytest.raises(anthropic.AuthenticationError):
        anthropic.Anthropic(base_url=url.removesuffix("/v1"), api_key="wrong").messages.create(**asked, max_tokens=1)


def test_ollama(server: Running) -> None:
    ollama = pytest.importorskip("ollama")

    client = ollama.Client(f"http://127.0.0.1:{server.port}", headers={"authorization": f"Bearer {KEY}"})
    asked: Any = {"model": NAME, "options": {"temperature": 0, "num_predict": 12}}
    answer = client.chat(messages=SAID, **asked)
    assert (answer.message.content, answer.eval_count, answer.done_reason) == (expected(server), 12, "length")
    pieces = [*client.chat(messages=SAID, **asked, stream=True)]
    assert "".join(piece.message.content for piece in pieces) == answer.message.content
    assert pieces[-1].eval_duration > 0
    assert client.generate(prompt=QUESTION, **asked).response == answer.message.content
    asked["options"] = {"temperature": 0, "num_predict": 200}
    typed = client.chat(messages=SAID, **asked, format=Weather.model_json_schema())
    assert Weather.model_validate_json(typed.message.content)
    tool: Any = {"type": "function", "function": {"name": "weather", "parameters": Weather.model_json_schema()}}
    call = {"function": {"name": "weather", "arguments": {"city": "Bern", "days": 1}}}
    told = [*SAID, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "sunny"}]
    assert client.chat(messages=told, **asked, tools=[tool]).done
    (model,) = client.list().models
    assert client.show(model.model).capabilities == ["completion", "tools"]
    with pytest.raises(ollama.ResponseError, match="no model"):
        client.chat("none", SAID)


def test_litellm(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    # It sets this one itself.
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", "unset")
    litellm = pytest.importorskip("litellm")

    asked = {"model": f"openai/{NAME}", "api_base": url, "api_key": KEY, "temperature": 0, "messages": SAID}
    whole = litellm.completion(**asked, max_tokens=8).choices[0].message.content
    pieces = litellm.completion(**asked, max_tokens=8, stream=True)
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == whole
    tool = {"type": "function", "function": {"name": "weather", "parameters": Weather.model_json_schema()}}
    called = litellm.completion(**asked, max_tokens=200, tools=[tool], tool_choice="required")
    assert Weather.model_validate_json(called.choices[0].message.tool_calls[0].function.arguments)
    typed = litellm.completion(**asked, max_tokens=200, response_format=Weather)
    assert Weather.model_validate_json(typed.choices[0].message.content)


def test_llm(url: str) -> None:
    pytest.importorskip("llm")
    from llm.default_plugins.openai_models import Chat

    model = Chat("served", model_name=NAME, api_base=url, can_stream=True, supports_schema=True)
    model.key = model.needs_key = KEY
    whole = model.prompt(QUESTION, max_tokens=8, temperature=0, stream=False).text()
    assert "".join(model.prompt(QUESTION, max_tokens=8, temperature=0)) == whole
    assert Weather.model_validate_json(model.prompt(QUESTION, schema=Weather, max_tokens=200, stream=False).text())


SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
NAMES = ("weather", "time")
CALLS: list[tuple[str, Any]] = [("weather", {"city": "Zürich } 5", "days": 3}), ("time", {})]
Read = tuple[str, str, list[tuple[str, Any]]]
"""What a client reads of an answer: its thought, its text, its calls."""


def says(server: Running, monkeypatch: pytest.MonkeyPatch, text: str, at_once: bool) -> None:
    """Let the engine answer with a text, all at once or token by token."""
    tokens = server.served.tokenizer(text, add_special_tokens=False).input_ids

    def submit_all(_: Sequence[RowRequest], tickets: Sequence[Ticket]) -> Sequence[Ticket]:
        for ticket in tickets:
            for each in [tuple(tokens)] if at_once else [(token,) for token in tokens]:
                ticket.deliver(Committed(each, None, 0, 0))
            ticket.deliver(Finished("stop", None, 1, len(tokens), 0, 0))
        return tickets

    monkeypatch.setattr(server.served.engine, "submit_all", submit_all)


def openai_chat(url: str) -> Iterator[Read]:
    tools = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in NAMES]
    asked: Any = {"model": NAME, "messages": SAID, "tools": tools}
    with OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0) as client:
        answers = [client.chat.completions.create(**asked)]
        with client.chat.completions.stream(**asked) as events:
            answers.append(events.get_final_completion())
    for each in answers:
        message, calls = each.choices[0].message, each.choices[0].message.tool_calls or []
        assert each.choices[0].finish_reason == ("tool_calls" if calls else "stop")
        assert len({call.id for call in calls}) == len(calls)
        thought = getattr(message, "reasoning_content", None) or ""
        called = [(call.function.name, json.loads(call.function.arguments)) for call in calls]
        yield thought, message.content or "", called


def openai_responses(url: str) -> Iterator[Read]:
    tools = [{"type": "function", "name": name, "parameters": SCHEMA, "strict": False} for name in NAMES]
    asked: Any = {"model": NAME, "input": QUESTION, "tools": tools}
    with OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0) as client:
        answers = [client.responses.create(**asked)]
        with client.responses.stream(**asked) as events:
            answers.append(events.get_final_response())
    for each in answers:
        calls = [item for item in each.output if item.type == "function_call"]
        thoughts = [part.text for item in each.output if item.type == "reasoning" for part in item.content or ()]
        yield "".join(thoughts), each.output_text, [(call.name, json.loads(call.arguments)) for call in calls]


def anthropic_chat(url: str) -> Iterator[Read]:
    anthropic = pytest.importorskip("anthropic")
    tools = [{"name": name, "input_schema": SCHEMA} for name in NAMES]
    asked: Any = {"model": NAME, "messages": SAID, "tools": tools, "max_tokens": 999}
    with anthropic.Anthropic(base_url=url, api_key=KEY, max_retries=0) as client:
        answers = [client.messages.create(**asked)]
        with client.messages.stream(**asked) as events:
            answers.append(events.get_final_message())
    for each in answers:
        uses = [block for block in each.content if block.type == "tool_use"]
        assert each.stop_reason == ("tool_use" if uses else "end_turn")
        text = "".join(block.text for block in each.content if block.type == "text")
        thought = "".join(block.thinking for block in each.content if block.type == "thinking")
        yield thought, text, [(use.name, use.input) for use in uses]


@pytest.fixture(scope="module")
def saying() -> Iterator[Running]:
    """Says what a test lets it. Some marks are special tokens."""
    model, tokenizer = tiny.llama(vocab_size=512, max_position_embeddings=16_384), PUBLISHED["deepseek-3"].tokenizer
    with running(model=model, draft="lookup", api_keys=(KEY,), tokenizer=tokenizer) as found:
        yield found


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("client", [openai_chat, openai_responses, anthropic_chat])
@pytest.mark.parametrize("name", ["qwen3", "qwen3-coder", "functiongemma", "deepseek-3"])
def test_clients_read_calls(
    saying: Running, monkeypatch: pytest.MonkeyPatch, name: str, client: Callable[[str], Iterator[Read]], at_once: bool
) -> None:
    shape, url = PUBLISHED[name], f"http://127.0.0.1:{saying.port}"
    monkeypatch.setattr(saying.served.tokenizer, "chat_template", shape.source)
    template = ChatTemplate(saying.served.tokenizer)
    monkeypatch.setattr(saying.served, "template", template)
    for thought in (shape.thought.format("Let me see."), ""):
        apart, before = ("Let me see.", "") if thought and template.writers[True].thinks else ("", thought)
        for count in (1, 2):
            says(saying, monkeypatch, thought + shape.calls(CALLS[:count]), at_once)
            assert list(client(url)) == [(apart, before.rstrip(), CALLS[:count])] * 2
        answer = thought + shape.calls([("nobody", {})])
        says(saying, monkeypatch, answer, at_once)
        said = before + answer.removeprefix(thought)
        for mark in shape.special:
            said = said.replace(mark, "")
        assert list(client(url)) == [(apart, said, [])] * 2
