"""What a request may say, field by field, as OpenAI's clients say it. What is not here is refused by name.

Fields that would change an answer are honoured or refused; those that change nothing here are read and left.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from itertools import accumulate
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
    model_validator,
)
from pydantic_core import PydanticCustomError

from selfspec.serve.api_error import ApiError, validation_error

MOST_STOPS = 32
MOST_PROMPTS = 2048

_Each = TypeVar("_Each")

Many = Annotated[list[_Each], Field(fail_fast=True)]
"""A list whose first wrong item is the only one that is reported."""

Token = Annotated[int, Field(ge=0)]
Stop = Annotated[str, StringConstraints(min_length=1, max_length=1000)]


def _listed(value: Any) -> Any:
    """Return a text, or the token ids of one, as a list of these."""
    alone = isinstance(value, str) or (isinstance(value, list) and value and isinstance(value[0], int))
    return [value] if alone else value


Stops = Annotated[
    Many[Stop], Field(max_length=MOST_STOPS), BeforeValidator(_listed, json_schema_input_type=str | list[str])
]
Bias = Annotated[float, Field(ge=-100, le=100)]
TokenId = Annotated[str, StringConstraints(pattern=r"^[0-9]{1,9}$")]


_MOST_FIELDS, _MOST_BIASES = 64, 4096


class Strict(BaseModel):
    """No field but those that are named, no number for a string, no NaN. A field that is null is not there.

    Fields of `hints` change nothing here and are left unread; those of `only` may say what holds anyway.
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    hints: ClassVar[frozenset[str]] = frozenset()
    only: ClassVar[Mapping[str, Any]] = {}

    @model_validator(mode="before")
    @classmethod
    def _fields_that_count(cls, fields: Any) -> Any:
        if not isinstance(fields, dict):
            return fields
        # Each that is unknown would be reported by itself.
        if len(fields) > _MOST_FIELDS:
            raise ValueError(f"more than {_MOST_FIELDS} fields")
        # Clients send back what they were sent, with fields that say nothing.
        said = {name: value for name, value in fields.items() if value is not None and name not in cls.hints}
        for name in cls.only.keys() & said.keys():
            held, value = cls.only[name], said.pop(name)
            if value != held or isinstance(value, bool) != isinstance(held, bool):
                raise PydanticCustomError("only", "may be {held} alone here", {"name": name, "held": repr(held)})
        return said


def _few(values: Any) -> Any:
    if isinstance(values, dict) and len(values) > _MOST_BIASES:
        raise ValueError(f"more than {_MOST_BIASES} entries")
    return values


HINTS = frozenset(
    {
        "metadata", "store", "user", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    }
)  # fmt: skip
"""Fields that clients of OpenAI's and Anthropic's interfaces send, and that change nothing here."""


class Part(Strict):
    """A part of a content or a conversation, of one of the `kinds`: of each its fields; it may lack those with "?"."""

    kinds: ClassVar[Mapping[str, str]] = {}
    # What is read before is kept here in any case.
    hints = frozenset({"cache_control"})
    type: str

    @model_validator(mode="after")
    def _is_of_its_kind(self) -> Self:
        if self.type not in self.kinds:
            raise ValueError(f"type {self.type[:50]!r} is none of {', '.join(self.kinds)}")
        told = self.kinds[self.type].split()
        if missing := [name for name in told if name[-1] != "?" and name not in self.model_fields_set]:
            raise ValueError(f"{self.type} needs {', '.join(missing)}")
        if beyond := sorted(self.model_fields_set - {name.removesuffix("?") for name in told} - {"type"}):
            raise ValueError(f"{self.type} has no {', '.join(beyond)}")
        return self


def _prompts(value: Any) -> Any:
    if not isinstance(value, (str, list)) or (not value and value != "") or len(_listed(value)) > MOST_PROMPTS:
        raise ValueError(f"say a text, token ids, or up to {MOST_PROMPTS} of either; no list may be empty")
    return _listed(value)


class StreamOptions(Strict):
    """How a stream is written."""

    hints = frozenset({"include_obfuscation"})
    include_usage: bool = False
    continuous_usage_stats: bool = False


class JsonSchema(Strict):
    """A schema that the answer fits."""

    name: str | None = None
    description: str | None = None
    json_schema: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class AnswerFormat(Part):
    """Restricts an answer: to any JSON object, a schema, or a regular expression that matches all of it; or not."""

    kinds: ClassVar = {"text": "", "json_object": "", "json_schema": "json_schema", "regex": "pattern"}
    json_schema: JsonSchema | None = None
    pattern: Annotated[str, StringConstraints(min_length=1, max_length=10_000)] | None = None


class StructuredOutputs(Strict):
    """Says what an answer has to fit, in the terms of vLLM's clients: one of these."""

    json_schema: dict[str, Any] | None = Field(None, alias="json")
    regex: Annotated[str, StringConstraints(min_length=1, max_length=10_000)] | None = None
    choice: Annotated[Many[str], Field(min_length=1, max_length=1000)] | None = None

    @model_validator(mode="after")
    def _is_one(self) -> StructuredOutputs:
        if len(self.model_fields_set) != 1:
            raise ValueError("say one of json, regex and choice")
        return self

    @property
    def wanted(self) -> dict[str, Any] | str:
        """The JSON schema or the regular expression."""
        if self.json_schema is not None:
            return self.json_schema
        return self.regex or "|".join(map(re.escape, self.choice or ()))


BYTES_PER_ITEM = 16
"""A body may hold one item for each `BYTES_PER_ITEM` bytes of its size limit."""

_BYTES_PER_CONTAINER, _MOST_DEPTH = 128, 256

_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))

_HALF_OF_PAIR = re.compile(rb"\\u[dD][89a-fA-F]")

ModelT = TypeVar("ModelT", bound=BaseModel)


def parse_body(body: bytes, model: type[ModelT], most: int) -> ModelT:
    """Read the JSON of a request of at most `most` items.

    An ApiError: it has more, is nested too deep, is no JSON, or its fields are refused.
    """
    _check_items(body, most)
    try:
        fields = json.loads(body.decode())
    except ValueError as error:
        # No JSON, no Unicode, or a number of too many digits.
        raise ApiError(400, f"the body is not JSON: {error}", None, "invalid_json") from error
    if _HALF_OF_PAIR.search(body):
        _check_unicode(fields)
    return validated(model, fields)


def validated(model: type[ModelT], fields: Any) -> ModelT:
    """Read fields; raise an ApiError that names the one that is refused."""
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        raise validation_error(error.errors(include_url=False)) from error


def _check_items(body: bytes, most: int) -> None:
    """Refuse a body whose items take far more memory and time than its bytes: objects and lists most of all."""
    plain = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    strings = plain.count(b'"') // 2
    marks = b"" if strings > most else b"".join(plain.split(b'"')[::2])
    brackets = marks.translate(None, _NO_BRACKETS)
    items = strings + marks.count(b",") + len(brackets) // 2 * (_BYTES_PER_CONTAINER // BYTES_PER_ITEM)
    if items > most:
        objects = most * BYTES_PER_ITEM // _BYTES_PER_CONTAINER
        said = f"the body has more than {most} texts and numbers, or {objects} objects and lists; send less at once"
        raise ApiError(400, said, None, "too_large")
    if max(accumulate(1 if mark in b"[{" else -1 for mark in brackets), default=0) > _MOST_DEPTH:
        raise ApiError(400, f"the body is nested more than {_MOST_DEPTH} deep", None, "invalid_json")


def _check_unicode(fields: Any) -> None:
    """Refuse halves of pairs, which JSON may write and no tokenizer reads."""
    for name, value in fields.items() if isinstance(fields, dict) else ():
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeError as error:
            raise ApiError(400, f"{name}: it is no Unicode text", name) from error


def in_one_piece(content: Any) -> str:
    """Return a content in one piece: of a text, of parts with texts, or of nothing."""
    return content if isinstance(content, str) else "".join(part.text for part in content or ())


class TextPart(Strict):
    """A piece of a text, as any door has it."""

    hints = frozenset({"cache_control", "annotations", "citations", "logprobs"})
    type: Literal["text", "input_text", "output_text", "reasoning_text"]
    text: str


Content = str | Many[TextPart]


class Prediction(Strict):
    """What an answer is expected to be, such as a file before an edit: a draft of it."""

    type: Literal["content"]
    content: Content


class GenerationFields(Strict):
    """What both kinds of request may say."""

    hints = HINTS
    only: ClassVar = {
        "skip_special_tokens": True,
        "include_stop_str_in_output": False,
        "use_beam_search": False,
        "length_penalty": 1,
    }
    model: str
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    n: Annotated[int, Field(ge=1)] | None = None
    stop: Stops | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    logit_bias: Annotated[dict[TokenId, Bias] | None, BeforeValidator(_few)] = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    response_format: AnswerFormat | None = None
    prediction: Prediction | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # As other servers of this kind take them, beside what OpenAI's API has.
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    stop_token_ids: Annotated[Many[Token], Field(max_length=MOST_STOPS)] | None = None
    draft: Literal["none"] | None = None
    structured_outputs: StructuredOutputs | None = None

    @model_validator(mode="before")
    @classmethod
    def _as_older_clients_say_it(cls, fields: Any) -> Any:
        guided = ("guided_json", "guided_regex", "guided_choice")
        if not isinstance(fields, dict) or not any(fields.get(name) for name in guided):
            return fields
        said = {name.removeprefix("guided_"): fields[name] for name in guided if name in fields}
        return {**{name: each for name, each in fields.items() if name not in guided}, "structured_outputs": said}

    @model_validator(mode="after")
    def _fits_together(self) -> GenerationFields:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is for streams: set stream to true, or drop it")
        if self.structured_outputs is not None and self.response_format is not None:
            raise ValueError("structured_outputs and response_format mean the same; give one of them")
        return self

    @property
    def wanted(self) -> dict[str, Any] | str | None:
        """The JSON schema or the regular expression that restricts the answer; None: any text."""
        if self.structured_outputs is not None:
            return self.structured_outputs.wanted
        form = self.response_format
        if form is None or form.type == "text":
            return None
        return form.pattern or ({"type": "object"} if form.json_schema is None else form.json_schema.json_schema)


class CompletionRequest(GenerationFields):
    """`POST /v1/completions`."""

    only: ClassVar = {**GenerationFields.only, "echo": False, "suffix": ""}
    prompt: Annotated[
        Many[str | Annotated[Many[Token], Field(min_length=1)]],
        BeforeValidator(_prompts, json_schema_input_type=str | list[str] | list[int] | list[list[int]]),
    ]
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    best_of: Annotated[int, Field(ge=1)] | None = None

    @model_validator(mode="after")
    def _means_what_it_says(self) -> CompletionRequest:
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise ValueError("best_of is not supported; ask for n answers and choose among them")
        return self


class CalledFunction(Strict):
    """A function that the model called."""

    name: str
    arguments: str | dict[str, Any]
    index: int | None = None


class ToolCall(Strict):
    """A call of a tool, in a message of the assistant."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None


class Message(Strict):
    """One message of a conversation."""

    only: ClassVar = {"annotations": []}
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    name: str | None = None
    tool_calls: Many[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None

    @model_validator(mode="after")
    def _says_something(self) -> Message:
        if self.content is None and not (self.role == "assistant" and self.tool_calls):
            raise ValueError("content is missing")
        return self


class Function(Strict):
    """A function that a template tells the model of."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Strict):
    """A tool that a template tells the model of, or that an answer calls."""

    type: Literal["function"]
    function: Function


class ChatCompletionRequest(GenerationFields):
    """`POST /v1/chat/completions`."""

    only: ClassVar = {**GenerationFields.only, "modalities": ["text"]}
    messages: Annotated[Many[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: Many[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | Tool | None = None
    parallel_tool_calls: bool | None = None
    # What the chat template reads of these, and of nothing else.
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    enable_thinking: bool | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None

    @model_validator(mode="after")
    def _means_what_it_says(self) -> ChatCompletionRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: set it to true, or drop top_logprobs")
        names = [tool.function.name for tool in self.tools or ()]
        if isinstance(self.tool_choice, Tool) and self.tool_choice.function.name not in names:
            raise ValueError(f"tool_choice names {self.tool_choice.function.name!r}, which is not among the tools")
        if self.tool_choice == "required" and not names:
            raise ValueError("tool_choice is 'required' and there are no tools; give some, or drop it")
        if self.continue_final_message and self.messages[-1].role != "assistant":
            raise ValueError("continue_final_message needs a last message of the role assistant")
        if self.continue_final_message and self.add_generation_prompt:
            raise ValueError("add_generation_prompt begins an answer of its own; drop continue_final_message, or this")
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise ValueError("max_tokens and max_completion_tokens mean the same; give one of them")
        return self


class RefusalError(BaseModel):
    """What is wrong, and what to do about it."""

    message: str
    type: str
    param: str | None = Field(description="The field that is wrong.")
    code: str | None


class Refusal(BaseModel):
    """What comes in place of an answer."""

    type: Literal["error"]
    error: RefusalError
