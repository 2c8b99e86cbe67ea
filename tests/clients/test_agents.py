"""Sessions of coding agents and desktop clients, by the shape that their documentation and sources give requests.

Each is sent as it is, a first turn and one after a call and its result, and answered: to the prompt that a plain chat
of the same messages has, so that nothing of it is lost.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from helpers import tiny
from helpers.http_server import NAME, Reply, Running, running
from helpers.tokenizers import BARE

KEY = "open sesame"
SYSTEM, CONTEXT, TASK = "You are a coding agent.", "<cwd>/home/me</cwd>", "List the files."
SAID, RESULT = "I look.", "Exit code: 0\nmain.py"
PARAMETERS = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
ARGUMENTS = {"command": "ls"}
FUNCTION = {"name": "shell", "description": "Run a command.", "parameters": PARAMETERS}
CALLED = {"id": "call_1", "type": "function", "function": {"name": "shell", "arguments": json.dumps(ARGUMENTS)}}
CACHED: Any = {"cache_control": {"type": "ephemeral"}}


@dataclass(frozen=True)
class Turn:
    """A request, and the messages of the plain chat that says the same."""

    path: str
    body: dict[str, Any]
    messages: Sequence[dict[str, Any]]
    tools: Sequence[dict[str, Any]] = ()
    headers: dict[str, str] = field(default_factory=dict)


def of_role(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def text(said: str, kind: str = "text", **more: Any) -> dict[str, Any]:
    return {"type": kind, "text": said, **more}


FIRST = (of_role("system", SYSTEM), of_role("user", TASK))
LATER = (*FIRST, of_role("assistant", SAID, tool_calls=[CALLED]), of_role("tool", RESULT, tool_call_id="call_1"))
TOOLS = [{"type": "function", "function": FUNCTION}]


def codex() -> Iterator[Turn]:
    """Codex CLI, of a provider with `wire_api = "responses"`."""
    begun = [
        {"type": "message", "role": "developer", "content": [text("Ask first.", "input_text")]},
        {"type": "message", "role": "user", "content": [text(CONTEXT, "input_text")]},
        {"type": "message", "role": "user", "content": [text(TASK, "input_text")]},
    ]
    worked = [
        {"type": "reasoning", "summary": [], "content": None, "encrypted_content": None},
        {"type": "message", "role": "assistant", "content": [text(SAID, "output_text")], "phase": "commentary"},
        {"type": "function_call", "name": "shell", "arguments": json.dumps(ARGUMENTS), "call_id": "call_1"},
        {"type": "function_call_output", "call_id": "call_1", "output": RESULT},
    ]
    asked = {
        "model": NAME,
        "instructions": SYSTEM,
        "tools": [
            {"type": "function", "strict": False, **FUNCTION},
            {"type": "web_search", "external_web_access": False},
            {"type": "image_generation", "output_format": "png"},
            {"type": "namespace", "name": "mcp__docs", "description": "", "tools": []},
        ],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"effort": None, "summary": "auto"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "0199",
        "text": {"verbosity": "medium"},
        "client_metadata": {"x-codex-installation-id": "0198"},
    }
    plain = [FIRST[0], of_role("developer", "Ask first."), of_role("user", CONTEXT), FIRST[1]]
    tools = [{"type": "function", "function": {**FUNCTION, "strict": False}}]
    yield Turn("/v1/responses", {**asked, "input": begun}, plain, tools)
    yield Turn("/v1/responses", {**asked, "input": [*begun, *worked]}, [*plain, *LATER[2:]], tools)


def claude_code() -> Iterator[Turn]:
    """Claude Code, with ANTHROPIC_BASE_URL."""
    begun = of_role("user", [text(CONTEXT), text(TASK, **CACHED)])
    used = {"type": "tool_use", "id": "call_1", "name": "shell", "input": ARGUMENTS}
    result = {"type": "tool_result", "tool_use_id": "call_1", "content": [text(RESULT)], "is_error": False, **CACHED}
    tool = {"name": "shell", "description": "Run a command.", "input_schema": PARAMETERS, "eager_input_streaming": True}
    counted = {
        "model": NAME,
        "system": [text(SYSTEM, cache_control={"type": "ephemeral", "ttl": "1h", "scope": "global"})],
        "tools": [tool],
        "thinking": {"type": "adaptive"},
    }
    asked = {
        **counted,
        "metadata": {"user_id": "user_1_account__session_2"},
        "max_tokens": 64,
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
        "stream": True,
    }
    headers = {"anthropic_version": "2023-06-01", "anthropic_beta": "claude-code-20250219", "x_app": "cli"}
    place, plain = "/v1/messages?beta=true", [FIRST[0], of_role("user", CONTEXT + TASK)]
    quota = {"model": NAME, "max_tokens": 1, "messages": [of_role("user", "quota")], "metadata": {"user_id": "user_1"}}
    yield Turn(place, quota, [of_role("user", "quota")], headers=headers)
    yield Turn("/v1/messages/count_tokens?beta=true", {**counted, "messages": [begun]}, plain, TOOLS, headers)
    yield Turn(place, {**asked, "messages": [begun]}, plain, TOOLS, headers)
    worked = [of_role("assistant", [text(SAID), used]), of_role("user", [result])]
    yield Turn(place, {**asked, "messages": [begun, *worked]}, [*plain, *LATER[2:]], TOOLS, headers)


def openhands() -> Iterator[Turn]:
    """OpenHands, through LiteLLM's `openai/` models."""
    asked = {
        "model": NAME,
        "tools": TOOLS,
        "temperature": 0.0,
        "top_p": 1.0,
        "max_completion_tokens": 64,
        "metadata": {"trace_version": "1.0", "tags": ["app:openhands", "model:served"]},
    }
    begun = [of_role("system", [text(SYSTEM, **CACHED)]), of_role("user", [text(TASK)])]
    worked = [
        of_role("assistant", [text(SAID)], tool_calls=[CALLED]),
        of_role("tool", [text(RESULT, **CACHED)], tool_call_id="call_1", name="shell"),
    ]
    yield Turn("/v1/chat/completions", {**asked, "messages": begun}, FIRST, TOOLS)
    yield Turn("/v1/chat/completions", {**asked, "messages": [*begun, *worked]}, LATER, TOOLS)


def continue_dev() -> Iterator[Turn]:
    """Continue: its chat and agent, and its completion of code."""
    asked = {
        "model": NAME,
        "max_tokens": 64,
        "stream": True,
        "tools": TOOLS,
        "stream_options": {"include_usage": True},
    }
    worked = [of_role("assistant", SAID, tool_calls=[CALLED]), LATER[3]]
    yield Turn("/v1/chat/completions", {**asked, "messages": [*FIRST]}, FIRST, TOOLS)
    yield Turn("/v1/chat/completions", {**asked, "messages": [*FIRST, *worked]}, LATER, TOOLS)
    sampled = {"temperature": 0.01, "max_tokens": 64, "stop": ["<fim_prefix>", "<fim_suffix>", "\n\n"]}
    yield Turn("/v1/completions", {"model": NAME, "prompt": "def f(", "stream": True, **sampled}, ())
    options = {"temperature": 0.01, "num_predict": 64, "num_ctx": 8192, "stop": ["\n\n"]}
    asked = {"model": NAME, "prompt": "def f(", "raw": True, "stream": True, "keep_alive": 1800, "options": options}
    yield Turn("/api/generate", asked, ())


def aider() -> Iterator[Turn]:
    """Aider, through LiteLLM's `openai/` and `ollama_chat/` models."""
    spoken = [*FIRST, of_role("assistant", SAID), of_role("user", "Go on.")]
    asked = {"model": NAME, "messages": spoken, "temperature": 0, "stream": True}
    yield Turn("/v1/chat/completions", asked, spoken)
    cached = [of_role("system", [text(SYSTEM, **CACHED)]), *spoken[1:]]
    yield Turn("/v1/chat/completions", {**asked, "messages": cached, "stream": False}, spoken)
    options = {"temperature": 0, "num_ctx": 8192}
    yield Turn("/api/chat", {"model": NAME, "messages": spoken, "options": options, "stream": True}, spoken)


def open_webui() -> Iterator[Turn]:
    """Open WebUI, of both of its kinds of connection, with the request that names a chat."""
    asked = {"model": NAME, "messages": [*FIRST], "stream": True}
    yield Turn("/v1/chat/completions", {**asked, "stream_options": {"include_usage": True}}, FIRST)
    title = {"model": NAME, "messages": [FIRST[1]], "stream": False, "max_completion_tokens": 64}
    yield Turn("/v1/chat/completions", title, FIRST[1:])
    called = {"function": {"name": "shell", "arguments": ARGUMENTS, "index": 0}}
    worked = [of_role("assistant", SAID, tool_calls=[called]), of_role("tool", RESULT, tool_call_id="call_1")]
    options = {"temperature": 0.7, "num_ctx": 4096, "seed": 1}
    more = {"model": f"{NAME}:latest", "tools": TOOLS, "options": options, "keep_alive": "5m"}
    yield Turn("/api/chat", {**asked, **more}, FIRST, TOOLS)
    yield Turn("/api/chat", {**asked, **more, "messages": [*FIRST, *worked]}, LATER, TOOLS)


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    model = tiny.llama(vocab_size=512, max_position_embeddings=1024, eos_token_id=2)
    with running(model=model, draft="lookup", template=BARE, api_keys=(KEY,)) as found:
        yield found


def read(reply: Reply) -> list[dict[str, Any]]:
    """The objects of a reply: one, or the events of a stream."""
    lines = [line.removeprefix("data: ") for line in reply.raw.decode().splitlines()]
    return [json.loads(line) for line in lines if line.startswith("{")]


def prompt_tokens(events: Sequence[dict[str, Any]]) -> int | None:
    """Tokens of the prompt, as the last event that counts them says."""
    found = None
    for event in events:
        for said in (event, event.get("response") or {}, event.get("message") or {}):
            usage = said.get("usage") or said
            if "cache_read_input_tokens" in usage:
                found = usage["input_tokens"] + usage["cache_read_input_tokens"]
            else:
                names = ("prompt_tokens", "input_tokens", "prompt_eval_count")
                found = next((usage[name] for name in names if name in usage), found)
    return found


@pytest.mark.parametrize("agent", [codex, claude_code, openhands, continue_dev, aider, open_webui])
def test_sessions_of_agents(server: Running, agent: Any) -> None:
    key = {"authorization": f"Bearer {KEY}"}
    for turn in agent():
        reply = server.ask(turn.path, turn.body, **key, **turn.headers)
        assert reply.status == 200, reply.raw
        events = read(reply)
        assert events
        assert not any("error" in event and event["error"] for event in events)
        if not turn.messages:
            continue
        plain = {"model": NAME, "messages": [*turn.messages], "max_tokens": 1, "tools": [*turn.tools] or None}
        expected = server.ask("/v1/chat/completions", plain, **key).body["usage"]["prompt_tokens"]
        assert prompt_tokens(events) in (expected, None)
        assert turn.body.get("stream") or prompt_tokens(events) == expected


def test_what_clients_look_up(server: Running) -> None:
    key = {"authorization": f"Bearer {KEY}"}
    assert [each["id"] for each in server.ask("/v1/models", **key).body["data"]] == [NAME]
    assert server.ask("/v1/models?client_version=0.152.0", **key).status == 200
    assert [each["model"] for each in server.ask("/api/tags", **key).body["models"]] == [NAME]
    assert server.ask("/api/version", **key).body["version"]
    assert server.ask("/api/show", {"name": NAME}, **key).body["capabilities"]


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/responses", {"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
        ("/v1/responses", {"tools": [{"type": "custom", "name": "apply_patch"}]}, "tools"),
        ("/v1/messages", {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, None),
        ("/v1/messages", {"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking"),
    ],
)
def test_what_would_change_the_answer_is_refused(server: Running, path: str, fields: Any, param: str | None) -> None:
    said = {"input": TASK} if path == "/v1/responses" else {"messages": [of_role("user", TASK)], "max_tokens": 8}
    reply = server.ask(path, {"model": NAME, **said, **fields}, authorization=f"Bearer {KEY}")
    assert reply.status == 400
    assert reply.body["error"]["param"] == (param or next(iter(fields)))
