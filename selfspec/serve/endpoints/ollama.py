"""`/api/chat`, `/api/generate` and what else Ollama's clients ask: lines of JSON, options, durations in nanoseconds."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, ClassVar, Literal

from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from selfspec.serve.api_error import ApiError
from selfspec.serve.chat.call_reader import ToolCall
from selfspec.serve.choice import Choice, Counts, Piece
from selfspec.serve.endpoints.answering import Body, Form, Work, answer
from selfspec.serve.endpoints.chat_completions import answer_as, parsed
from selfspec.serve.endpoints.completions import completion_work
from selfspec.serve.schemas import CompletionRequest, Many, Message, Strict, Tool, validated
from selfspec.serve.served import Served
from selfspec.version import __version__


class OllamaOptions(Strict):
    """How an answer is chosen; the defaults are Ollama's."""

    # Where the weights lie, for how long, and how much is read at once is said when the server starts.
    hints = frozenset(
        {
            "f16_kv", "logits_all", "low_vram", "main_gpu", "num_batch", "num_ctx", "num_gpu", "num_keep",
            "num_thread", "numa", "use_mlock", "use_mmap", "vocab_only", "embedding_only",
        }
    )  # fmt: skip
    only: ClassVar = {"repeat_last_n": -1, "mirostat": 0, "tfs_z": 1, "typical_p": 1}
    num_predict: int | None = None
    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.9
    min_p: float | None = None
    seed: int | None = None
    stop: str | Many[str] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repeat_penalty: float | None = None


class OllamaRequest(Strict):
    """Holds the fields that `/api/chat` and `/api/generate` share."""

    hints = frozenset({"keep_alive"})
    renamed: ClassVar[Mapping[str, str]] = {
        "max_tokens": "num_predict",
        "response_format": "format",
        "enable_thinking": "think",
        "reasoning_effort": "think",
        "repetition_penalty": "repeat_penalty",
    }
    model: str
    stream: bool = True
    format: Literal["", "json"] | dict[str, Any] | None = None
    options: OllamaOptions = Field(default_factory=OllamaOptions)
    think: bool | str | None = None

    @property
    def alike(self) -> Body:
        """The fields of a chat or a completion that say the same, but for what is said."""
        options = self.options
        schema = {"type": "json_schema", "json_schema": {"schema": self.format}}
        form = schema if isinstance(self.format, dict) else {"type": "json_object"}
        names = {"temperature", "top_k", "top_p", "min_p", "seed", "presence_penalty", "frequency_penalty"}
        return {
            **options.model_dump(include=names),
            "model": self.model,
            "stream": self.stream,
            # Below 0 it is any number.
            "max_tokens": None if (options.num_predict or 0) < 0 else options.num_predict,
            "stop": options.stop or None,
            "repetition_penalty": options.repeat_penalty,
            "response_format": form if self.format else None,
        }

    @property
    def thinking(self) -> Body:
        """The fields of a chat that say whether the model thinks."""
        return {"enable_thinking" if isinstance(self.think, bool) else "reasoning_effort": self.think}

    def form(self, served: Served, work: Work) -> Form:
        """Return how the answer is written."""
        return OllamaForm(served, work, isinstance(self, OllamaChat))


class OllamaMessage(Message):
    """A message of the conversation."""

    content: str = ""
    thinking: str | None = None
    tool_name: str | None = None


class OllamaChat(OllamaRequest):
    """`POST /api/chat`."""

    messages: Many[OllamaMessage] = Field(default_factory=list)
    tools: Many[Tool] | None = None

    def chat(self, reads: Collection[str]) -> Body:
        """Return the fields of a chat request that say the same."""
        messages: list[Body] = []
        # Of calls whose results are still to come; Ollama's have none of their own.
        open_ids: list[str] = []
        for message in self.messages:
            own = open_ids.pop(0) if message.role == "tool" and open_ids else None
            calls = message.tool_calls or []
            if calls:
                open_ids = [call.id or f"call{len(messages):03d}{index:02d}" for index, call in enumerate(calls)]
            for call, id_ in zip(calls, open_ids, strict=False):
                call.id = id_
            said = message.model_dump(exclude={"thinking", "tool_name"})
            said["tool_call_id"] = message.tool_call_id or own
            said["name"] = message.tool_name or message.name
            said["reasoning_content"] = message.thinking or message.reasoning_content
            messages.append(said)
        tools = [tool.model_dump(exclude_none=True) for tool in self.tools or ()]
        return {**self.alike, **self.thinking, "messages": messages, "tools": tools or None}


class OllamaGenerate(OllamaRequest):
    """`POST /api/generate`."""

    only: ClassVar = {"suffix": "", "template": "", "context": [], "images": []}
    prompt: str = ""
    system: str | None = None
    raw: bool | None = None

    def chat(self, reads: Collection[str]) -> Body:
        """Return the fields of a chat request that say the same."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        messages = [*system, {"role": "user", "content": self.prompt}]
        return {**self.alike, **self.thinking, "messages": messages}


class ShowRequest(Strict):
    """`POST /api/show`."""

    hints = frozenset({"verbose"})
    model: str = ""
    name: str = ""


async def ollama(served: Served, http: Request, asked: OllamaChat | OllamaGenerate) -> Response | Body:
    """Answer a request; one that says nothing asks whether the model is loaded."""
    if not (asked.messages if isinstance(asked, OllamaChat) else asked.prompt or asked.system):
        served.check(asked.model)
        form = OllamaForm(served, Work([()], None, "prompt"), isinstance(asked, OllamaChat))
        return form.line(Piece(""), done_reason="load")
    if isinstance(asked, OllamaChat) or not (asked.raw or served.template is None):
        return await answer_as(served, http, asked)
    if asked.system or asked.think:
        said = "system and think need a chat template; start the server with --template FILE, or drop raw"
        raise ApiError(400, said, "system", "no_chat_template")
    request = await served.read(lambda: validated(CompletionRequest, {**asked.alike, "prompt": asked.prompt}))
    work = await completion_work(served, http, request, None)
    return await answer(served, http, request, work, asked.form(served, work))


class OllamaForm(Form):
    """Lines of JSON: what is new in each, and the counts in the last."""

    media_type = "application/x-ndjson"

    def __init__(self, served: Served, work: Work, chats: bool) -> None:
        self._model = served.name
        self._prompt_tokens = work.prompt_tokens
        self._chats = chats
        self._begun = time.monotonic_ns()
        self._calls = 0

    def line(self, new: Piece, calls: Sequence[ToolCall] = (), **more: Any) -> Body:
        """Make an object of what is new, the last one where `more` is said of the whole answer."""
        said: Body = {"role": "assistant", "content": new.text} if self._chats else {"response": new.text}
        if new.thought:
            said["thinking"] = new.thought
        if calls:
            self._calls += len(calls)
            said["tool_calls"] = [{"function": {"name": call.name, "arguments": parsed(call)}} for call in calls]
        stamp = datetime.now(UTC).isoformat().replace("+00:00", "Z")
        head = {"model": self._model, "created_at": stamp, **({"message": said} if self._chats else said)}
        return {**head, "done": bool(more), **more}

    def whole(self, choices: Sequence[Choice], counts: Counts) -> Body:
        (choice,) = choices
        return self.line(Piece(choice.text, thought=choice.thought), choice.calls, **self._ending(choice, counts))

    def piece(self, index: int, new: Piece, counts: Counts) -> Iterable[str]:
        calls = [each.call for each in new.calls if each.ends]
        if new.text or new.thought or calls:
            yield _written(self.line(new, calls))

    def end(self, choices: Sequence[Choice], counts: Counts) -> Iterable[str]:
        (choice,) = choices
        # One that is cut off has no end of its own.
        yield _written(self.line(Piece(""), choice.calls[self._calls :], **self._ending(choice, counts)))

    def failed(self, error: ApiError) -> Iterable[str]:
        yield _written({"error": error.message})

    def _ending(self, choice: Choice, counts: Counts) -> Body:
        now = time.monotonic_ns()
        first = choice.begun or now
        return {
            "done_reason": "length" if choice.finish_reason == "length" else "stop",
            "total_duration": now - self._begun,
            "load_duration": 0,
            "prompt_eval_count": self._prompt_tokens,
            "prompt_eval_duration": first - self._begun,
            "eval_count": counts.tokens,
            "eval_duration": now - first,
        }


def _written(line: Body) -> str:
    return json.dumps(line, separators=(",", ":")) + "\n"


def _about(served: Served) -> Body:
    """Return the details of the model that every listing has."""
    model = served.engine.spec.model
    family, count = model.config.model_type, model.num_parameters()
    size = f"{count / 1e9:.1f}B" if count >= 10**9 else f"{count / 1e6:.1f}M"
    kind = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}.get(str(model.dtype).removeprefix("torch."), "")
    details = {"format": "safetensors", "family": family, "families": [family], "parent_model": ""}
    details |= {"parameter_size": size, "quantization_level": kind}
    return {"details": details, "modified_at": datetime.fromtimestamp(served.created, UTC).isoformat()}


async def show(served: Served, _: Request, asked: ShowRequest) -> Body:
    """Describe the model."""
    served.check(asked.model or asked.name)
    about, writer = _about(served), None if served.template is None else served.template.writers[False]
    family, count = about["details"]["family"], served.engine.spec.model.num_parameters()
    sizes = {"general.parameter_count": count, f"{family}.context_length": served.engine.longest}
    can = {"completion": True, "tools": writer is not None, "thinking": writer is not None and writer.thinks}
    return {
        **about,
        "modelfile": f"FROM {served.name}\n",
        "parameters": "",
        "template": "" if writer is None else writer.source,
        "model_info": {"general.architecture": family, **sizes},
        "capabilities": [name for name, does in can.items() if does],
    }


def listings(served: Served) -> APIRouter:
    """Tell Ollama's clients which model there is, and that somebody answers."""
    router = APIRouter(tags=["operation"])

    @router.head("/", include_in_schema=False)
    @router.get("/", include_in_schema=False)
    async def root() -> Response:
        return Response("selfspec is running", media_type="text/plain")

    @router.get("/api/version", summary="The version of selfspec")
    async def version() -> Body:
        return {"version": __version__}

    @router.get("/api/tags", summary="The model that is served, as Ollama's clients ask")
    async def tags() -> Body:
        size = sum(each.nbytes for each in served.engine.spec.model.parameters())
        digest = hashlib.sha256(f"{served.name} {served.created}".encode()).hexdigest()
        about = {**_about(served), "size": size, "digest": digest}
        return {"models": [{"name": name, "model": name, **about} for name in served.names]}

    return router
