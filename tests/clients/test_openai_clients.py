"""Clients of OpenAI's API, as they are installed, against a server of the stories on the loopback."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from helpers.http_server import NAME, Running, running

pytest.importorskip("openai")

import openai
from openai import OpenAI

KEY = "open sesame"
MESSAGES = [{"role": "user", "content": "Tell me of Lily."}]


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(api_key=KEY) as found:
        yield found


@pytest.fixture
def client(server: Running) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key=KEY, max_retries=0) as found:
        yield found


def expected(server: Running, new: int = 12) -> str:
    """The greedy answer to the messages, by a plain request."""
    reply = server.ask(
        "/v1/chat/completions",
        {"model": NAME, "messages": MESSAGES, "max_tokens": new, "temperature": 0},
        authorization=f"Bearer {KEY}",
    )
    found: str = reply.body["choices"][0]["message"]["content"]
    return found


def test_openai_completes_and_chats(server: Running, client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [NAME]
    assert client.models.retrieve(NAME).id == NAME
    answer = client.chat.completions.create(model=NAME, messages=MESSAGES, max_tokens=12, temperature=0)
    assert answer.choices[0].message.content == expected(server)
    assert answer.usage.completion_tokens_details.accepted_prediction_tokens > 0
    text = client.completions.create(model=NAME, prompt="Once upon", max_tokens=8, temperature=0, logprobs=2, n=2)
    assert len(text.choices) == 2
    assert len(text.choices[0].logprobs.token_logprobs) == 8


def test_openai_streams(server: Running, client: OpenAI) -> None:
    stream = client.chat.completions.create(
        model=NAME,
        messages=MESSAGES,
        max_completion_tokens=12,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        logprobs=True,
        top_logprobs=2,
    )
    chunks = list(stream)
    assert "".join(each.choices[0].delta.content or "" for each in chunks if each.choices) == expected(server)
    assert chunks[-1].usage.completion_tokens == 12
    with client.chat.completions.stream(model=NAME, messages=MESSAGES, max_tokens=12, temperature=0) as events:
        assert "".join(event.delta for event in events if event.type == "content.delta") == expected(server)


def test_openai_reads_errors(server: Running, client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="no model"):
        client.completions.create(model="gpt-9", prompt="a")
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=NAME, prompt="a", temperature=9)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()


def test_langchain(server: Running) -> None:
    pytest.importorskip("langchain_openai")
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(
        model=NAME, base_url=f"http://127.0.0.1:{server.port}/v1", api_key=KEY, temperature=0, max_tokens=12
    )
    assert model.invoke("Tell me of Lily.").content == expected(server)
    assert "".join(str(chunk.content) for chunk in model.stream("Tell me of Lily.")) == expected(server)
    assert [answer.content for answer in model.batch(["Tell me of Lily."] * 3)] == [expected(server)] * 3
    tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
    assert model.bind_tools([tool]).invoke("Tell me of Lily.").content


def test_llama_index(server: Running) -> None:
    pytest.importorskip("llama_index.llms.openai_like")
    from llama_index.core.llms import ChatMessage
    from llama_index.llms.openai_like import OpenAILike

    model = OpenAILike(
        model=NAME,
        api_base=f"http://127.0.0.1:{server.port}/v1",
        api_key=KEY,
        is_chat_model=True,
        context_window=512,
        max_tokens=12,
        temperature=0,
    )
    message = ChatMessage(role="user", content="Tell me of Lily.")
    # It takes space off the ends of a text.
    assert model.chat([message]).message.content == expected(server)
    pieces = list(model.stream_chat([message]))
    assert pieces[-1].message.content == expected(server)
