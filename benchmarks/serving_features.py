"""Ask servers of OpenAI's API for what today's clients ask first, and table what each does.

    python benchmarks/serving_features.py --to features.json ours=http://127.0.0.1:8000=MODEL ...

Each cell is what came back of requests: `yes`, that it was done; `refused`, that it was not, with a status of 4xx;
`ignored`, that the answer is as if nothing had been asked; `absent`, that there is no such place; `failed`, a status of
5xx or a closed connection; `silent`, that nothing came in ten minutes; a number, what was measured. All serve the same
chat model.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from selfspec.files.writing import write_json

_SECONDS = 600
_HELLO = [{"role": "user", "content": "Say hello."}]
_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Says how the weather is.",
        "parameters": {"type": "object", "properties": {"city": {"enum": ["Bern", "Rome"]}}, "required": ["city"]},
    },
}
_NAMED = {"type": "function", "function": {"name": "weather"}}
_CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bern"}'}}
_RESULT = {"role": "tool", "tool_call_id": "abcdefghi", "content": "It is qxsunny."}
_STORY = "Here is a list of numbers. " + " ".join(f"Number {index} is {index * 7}." for index in range(60))


class RefusedError(Exception):
    """A status that is not 200."""


@dataclass(frozen=True)
class Server:
    """A server, and the name of its model."""

    url: str
    model: str

    def ask(self, path: str, **body: Any) -> Any:
        """Send a request; return its JSON, or the events of its stream."""
        sent = json.dumps({"model": self.model, **body}).encode() if body else None
        request = urllib.request.Request(self.url + path, sent, {"content-type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=_SECONDS) as reply:
                text, kind = reply.read().decode(), reply.headers.get_content_type()
        except urllib.error.HTTPError as error:
            raise RefusedError(error.code) from error
        if kind == "application/json":
            return json.loads(text)
        if kind != "text/event-stream":
            return text
        lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: {")]
        return [json.loads(line) for line in lines]

    def chat(self, messages: Any = None, **body: Any) -> Any:
        """Ask for an answer."""
        body = {"max_tokens": 24, "temperature": 0, **body}
        return self.ask("/v1/chat/completions", messages=messages or _HELLO, **body)

    def said(self, messages: Any = None, **body: Any) -> str:
        """Return the text of an answer."""
        return str(self.chat(messages, **body)["choices"][0]["message"]["content"])

    def complete(self, **body: Any) -> Any:
        """Ask for a completion."""
        return self.ask("/v1/completions", **{"prompt": "One, two,", "max_tokens": 8, "temperature": 0, **body})


def _schema(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}


def _fits(server: Server) -> bool:
    schema = {**_TOOL["function"]["parameters"], "additionalProperties": False}
    found = json.loads(server.said(response_format=_schema(schema), max_tokens=60))
    return bool(found.get("city") in ("Bern", "Rome"))


def _unique(server: Server) -> bool:
    schema = {"type": "array", "items": {"enum": [1, 2, 3]}, "minItems": 3, "maxItems": 3, "uniqueItems": True}
    found = json.loads(server.said(response_format=_schema(schema), max_tokens=40))
    return len(set(found)) == 3


def _calls(server: Server, choice: Any) -> bool:
    message = server.chat(tools=[_TOOL], tool_choice=choice, max_tokens=80)["choices"][0]["message"]
    (call,) = message["tool_calls"]
    return bool(json.loads(call["function"]["arguments"])["city"] in ("Bern", "Rome"))


def _streamed_call(server: Server) -> bool:
    events = server.chat(tools=[_TOOL], tool_choice=_NAMED, max_tokens=80, stream=True)
    deltas = [each for event in events for each in event["choices"][0]["delta"].get("tool_calls") or ()]
    arguments = [each["function"].get("arguments") or "" for each in deltas]
    return json.loads("".join(arguments)).keys() == {"city"} and len([each for each in arguments if each]) > 1


def _hears(server: Server) -> bool:
    turn = {"role": "assistant", "content": None, "tool_calls": [_CALL]}
    asked = [{"role": "user", "content": "Weather?"}, turn]
    with_result = server.chat([*asked, _RESULT], tools=[_TOOL])["usage"]["prompt_tokens"]
    longer = server.chat([*asked, {**_RESULT, "content": "It is " + "qxsunny " * 40}], tools=[_TOOL])
    return bool(longer["usage"]["prompt_tokens"] > with_result + 40)


def _told(server: Server) -> bool:
    return bool(
        server.chat(tools=[_TOOL], tool_choice="auto")["usage"]["prompt_tokens"]
        > server.chat()["usage"]["prompt_tokens"]
    )


def _cached(server: Server) -> bool:
    messages: list[Any] = [{"role": "user", "content": _STORY}]
    answer = server.said(messages)
    turn = [*messages, {"role": "assistant", "content": answer}, *_HELLO]
    usage = server.chat(turn)["usage"]
    return bool((usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0) > 100)


def _same(server: Server) -> bool:
    drawn = [server.said(seed=seed, temperature=1.0) for seed in (3, 3, 4, 5)]
    return drawn[0] == drawn[1] and len(set(drawn)) > 1


def _prompts_of_four(server: Server) -> str:
    """Return the time of a prompt of 1,000 tokens or so with four answers, over that with one: medians of five."""

    def seconds(n: int, turn: int) -> float:
        # Nothing of it was read before.
        prompt = " ".join(f"Of {n} in turn {turn} number {index} is {index * 7}." for index in range(60))
        begun = time.perf_counter()
        server.complete(prompt=prompt, n=n, max_tokens=1)
        return time.perf_counter() - begun

    seconds(1, -1)
    one, four = zip(*((seconds(1, turn), seconds(4, turn)) for turn in range(5)), strict=True)
    return f"{statistics.median(four) / statistics.median(one):.2f}"


_FEATURES: dict[str, Callable[[Server], bool | str]] = {
    "chat, with usage in a stream": lambda s: any(
        (event.get("usage") or {}).get("completion_tokens")
        for event in s.chat(stream=True, stream_options={"include_usage": True})
    ),
    "`seed`": _same,
    "`n` of 2": lambda s: len(s.chat(n=2)["choices"]) == 2,
    "time of a prompt of 1,000 tokens with `n` of 4, over that of 1": _prompts_of_four,
    "`stop`": lambda s: "four" not in s.complete(stop=["four"], max_tokens=16)["choices"][0]["text"],
    "`logit_bias`": lambda s: (
        s.complete(logit_bias={"100": 100})["choices"][0]["text"] != s.complete()["choices"][0]["text"]
    ),
    "chat's `logprobs`": lambda s: len(s.chat(logprobs=True, top_logprobs=2)["choices"][0]["logprobs"]["content"]) > 1,
    "`response_format` with a schema": _fits,
    "a keyword that grammars do not hold": _unique,
    "tools for a model whose template reads none": _told,
    "`tool_choice` required": lambda s: _calls(s, "required"),
    "`tool_choice` by name": lambda s: _calls(s, _NAMED),
    "a call's arguments as deltas": _streamed_call,
    "results of calls fed back": _hears,
    "`continue_final_message`": lambda s: (
        s.said(
            [{"role": "user", "content": "Count."}, {"role": "assistant", "content": "1, 2, 3,"}],
            continue_final_message=True,
            add_generation_prompt=False,
        )
        .strip()
        .startswith("4")
    ),
    "`cached_tokens` of a second turn": _cached,
    "`/v1/responses`": lambda s: (
        s.ask("/v1/responses", input="Hi", max_output_tokens=16, stream=False)["object"] == "response"
    ),
    "`/v1/messages`": lambda s: s.ask("/v1/messages", messages=_HELLO, max_tokens=8)["type"] == "message",
    "`/metrics`": lambda s: "# TYPE" in s.ask("/metrics"),
    "`/health`": lambda s: s.ask("/health") is not None,
}
_REFUSALS: dict[str, Callable[[Server], Any]] = {
    "a field that nobody knows": lambda s: s.chat(surprise=1),
    "another model's name": lambda s: Server(s.url, "no-such-model").chat(),
    "a prompt beyond the context": lambda s: s.complete(prompt="word " * 9_000, max_tokens=4),
    "a picture for a model of text": lambda s: s.chat(
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}]}]
    ),
    "a token id outside the vocabulary": lambda s: s.complete(prompt=[10**7]),
}


def feature(server: Server, works: Callable[[Server], bool | str]) -> str:
    """Return the results of requests for one feature."""
    try:
        found = works(server)
        return found if isinstance(found, str) else "yes" if found else "ignored"
    except RefusedError as error:
        status = error.args[0]
        return "absent" if status in (404, 405, 501) else "refused" if status < 500 else "failed"
    # An answer of another shape than was asked for.
    except (KeyError, TypeError, IndexError, ValueError):
        return "ignored"
    except OSError as error:
        return "silent" if isinstance(getattr(error, "reason", error), TimeoutError) else "failed"


def refusal(server: Server, sends: Callable[[Server], Any]) -> str:
    """Return the result of a request that cannot be honoured; an answer to it is no honour."""
    found = feature(server, lambda each: sends(each) is None)
    return "refused" if found == "absent" else found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("servers", nargs="+", metavar="NAME=URL=MODEL")
    parser.add_argument("--to", type=Path)
    given = parser.parse_args()
    servers = {name: Server(url, model) for name, url, model in (each.split("=", 2) for each in given.servers)}
    table = {}
    for name, works in _FEATURES.items():
        table[name] = {each: feature(server, works) for each, server in servers.items()}
    for name, sends in _REFUSALS.items():
        table[name] = {each: refusal(server, sends) for each, server in servers.items()}
    print("| |", " | ".join(servers), "|")
    print("|---" * (1 + len(servers)) + "|")
    for name, row in table.items():
        print("|", name, "|", " | ".join(row.values()), "|")
    if given.to is not None:
        write_json(given.to, table)


if __name__ == "__main__":
    main()
