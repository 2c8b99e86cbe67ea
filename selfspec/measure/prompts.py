"""Prompts to measure on: texts from files, whole, or cut or joined to one length in tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from selfspec.arguments import shown
from selfspec.decode.inputs import checked_ids
from selfspec.errors import PromptError, SelfSpecError, UnsupportedModelError
from selfspec.files.json_text import parse_json
from selfspec.measure.checkpoint import Checkpoint
from selfspec.measure.embedded import PROMPTS
from selfspec.measure.stock import end_tokens, own_text, until_end
from selfspec.model.registry import has_encoder

BUILT_IN = "demo"
"""Name of the default workload: beginnings of four Python files."""

BEGINNINGS = (
    "Once upon a time, there was a little",
    "The capital of France is",
    "def add(a, b):\n    return",
    "Monday, Tuesday, Wednesday,",
)
"""Short beginnings of prose, a fact, code and a list."""

# Characters of a document that make a prompt of text.
_BEGINNING = 400
_FIELDS = ("prompt", "turns", "text", "messages")
# Values of a field that a message lists.
_VALUES = 8

Message = dict[str, Any]
"""A message with `role` and `content`, as chat templates read it."""


@dataclass(frozen=True)
class Text:
    """A text for prompts: a whole document, whose beginning is used, or one whose end is kept, behind messages."""

    text: str
    whole: bool = False
    messages: tuple[Message, ...] = ()

    @property
    def prompt(self) -> str:
        """Text of a whole prompt: all of it, or the beginning of a document."""
        return self.text[:_BEGINNING] if self.whole else self.text


@dataclass(frozen=True)
class Workload:
    """Texts of one sort, at least one, under the name that reports show."""

    name: str
    texts: tuple[Text, ...]

    def whole_prompts(self, writer: PromptWriter, number: int | None = None) -> list[Tensor]:
        """Return whole prompts, `[1, tokens]` each, spread evenly over the texts; `number`, or as many as there are.

        Raises:
            PromptError: a text has no token, or a chat template refuses it.
        """
        count = min(number or len(self.texts), len(self.texts))
        chosen = [writer.ids(self.texts[row * len(self.texts) // count]) for row in range(count)]
        if not all(chosen):
            raise PromptError(f"a text of workload {self.name!r} has no tokens; take it out")
        return [torch.tensor([[*ids]]) for ids in chosen]

    def prompts(self, tokenizer: PreTrainedTokenizerBase, number: int, batch: int, context: int) -> list[Tensor]:
        """Return prompts of one length, `[batch, context]` for each call; `number` rows in all, at least `batch`.

        They are spread evenly over the texts. A document gives its first tokens and any other text its last ones; texts
        that are too short have others of the workload before them. Each begins with the tokenizer's bos token, where it
        adds one.

        Raises:
            PromptError: no text has a token.
        """
        rows, texts = max(number // batch, 1) * batch, len(self.texts)
        first: list[int] = tokenizer("a").input_ids[:1]
        begin = first if first == [tokenizer.bos_token_id] else []
        ids = [_token_ids(tokenizer, text, context) for text in self.texts]
        if not any(ids):
            raise PromptError(f"the texts of workload {self.name!r} have no tokens; give others")
        made, wanted = [], context - len(begin)
        for row in range(rows):
            place = row % texts if rows > texts else row * texts // rows
            tokens: list[int] = []
            while len(tokens) < wanted:
                tokens = ids[place % texts] + tokens
                place -= 1
            made.append(begin + tokens[len(tokens) - wanted :])
        return list(torch.tensor(made).split(batch))


class PromptWriter:
    """Writes texts as prompts, for every tool alike: as they are, or as a user's messages by the chat template.

    A prompt holds all turns before it. As chats, the model itself answers greedily those that nobody answered, in at
    most `answer` tokens. `template` writes the tokens of messages, up to where an answer begins; None: prompts are
    text.
    """

    def __init__(
        self, checkpoint: Checkpoint, answer: int, template: Callable[[Sequence[Message]], list[int]] | None = None
    ) -> None:
        self._checkpoint = checkpoint
        self._answer = answer
        self._answers: dict[tuple[int, ...], str] = {}
        self._template = template

    def ids(self, text: Text) -> list[int]:
        """Return the tokens of a prompt, with what the tokenizer or the template begins it with."""
        if self._template is None:
            said = [each["content"] for each in text.messages if isinstance(each.get("content"), str)]
            ids: list[int] = self._checkpoint.tokenizer("\n\n".join([*said, text.prompt])).input_ids
            return ids
        written: list[Message] = []
        for message in [*text.messages, {"role": "user", "content": text.prompt}]:
            if written and written[-1].get("role") == message.get("role") == "user":
                written.append({"role": "assistant", "content": self._answered(self._template(written))})
            written.append(message)
        return self._template(written)

    def _answered(self, prompt: list[int]) -> str:
        key = tuple(prompt)
        if key not in self._answers:
            model = self._checkpoint.model
            ids = own_text(model, torch.tensor([prompt], device=model.device), self._answer, 0.0)
            answer = until_end(ids[0, len(prompt) :].tolist(), end_tokens(model))
            self._answers[key] = self._checkpoint.tokenizer.decode(answer, skip_special_tokens=True)
        return self._answers[key]


def read_given(
    model: PreTrainedModel,
    prompts: Tensor | Sequence[str] | Sequence[Tensor],
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> list[Tensor]:
    """Return a caller's prompts, each as `[1, tokens]` on the model's device; a PromptError says what cannot be.

    They are texts, with a tokenizer, or token ids, `[texts, tokens]` or each `[1, tokens]`.
    """
    if isinstance(prompts, Tensor):
        if prompts.ndim != 2 or not prompts.numel():
            raise PromptError(f"prompts have shape {list(prompts.shape)}, not [texts, tokens]")
        return [checked_ids(model, each).to(model.device) for each in prompts.split(1)]
    if isinstance(prompts, str) or not isinstance(prompts, Sequence) or not prompts:
        raise PromptError("prompts must be several texts, or token ids, [texts, tokens]")
    if tokenizer is not None and not callable(tokenizer):
        raise PromptError(f"tokenizer={shown(tokenizer)} is none; pass the model's own, as AutoTokenizer loads it")
    found: list[Tensor] = []
    for prompt in prompts:
        if isinstance(prompt, Tensor):
            if prompt.ndim != 2 or len(prompt) != 1:
                raise PromptError(f"each prompt must be of shape [1, tokens], got {list(prompt.shape)}")
            found.append(checked_ids(model, prompt).to(model.device))
        elif tokenizer is None:
            raise PromptError("prompts that are texts need tokenizer=...; or pass token ids, [texts, tokens]")
        else:
            found += read_given(model, tokenizer(prompt, return_tensors="pt").input_ids.long())
    return found


def check_context(model: PreTrainedModel, prompts: Sequence[Tensor], new_tokens: int) -> None:
    """Refuse prompts, `[rows, tokens]` each, that leave no room in the model's context for new tokens."""
    limit = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    longest = max(prompt.shape[1] for prompt in prompts)
    if limit is not None and longest + new_tokens > limit:
        raise PromptError(
            f"a prompt of {longest} and {new_tokens} new tokens exceed the model's context of {limit}; give fewer new "
            "tokens, or shorter prompts"
        )


def beginnings() -> Workload:
    """Return short beginnings that any language model has something to continue with."""
    return Workload("beginnings", tuple(map(Text, BEGINNINGS)))


def built_in() -> Workload:
    """Return the beginnings of four Python files that the embedded model was not trained on."""
    return Workload(BUILT_IN, tuple(Text(text, whole=True) for text in PROMPTS))


def read_workloads(given: Sequence[str]) -> dict[str, Workload]:
    """Read workloads by name: `demo` is built in, any other is read by `parse_workloads`. No two may have one name."""
    found = [each for text in given for each in ([built_in()] if text == BUILT_IN else parse_workloads(text))]
    named = {each.name: each for each in found}
    if len(named) < len(found):
        raise PromptError(f"two workloads have one name ({', '.join(each.name for each in found)}); give each another")
    return named


def parse_workloads(given: str) -> list[Workload]:
    """Read `NAME=FILE`, `NAME=FILE#FIELD=VALUE` (only lines that say so) or `NAME=FILE#FIELD` (one for each value).

    A file is JSONL, with `prompt`, `turns`, `text` (a document) or `messages` in each line. Of `turns` and `messages`
    every turn of the user is a prompt.

    Raises:
        PromptError: the words are malformed, or the file cannot be used.
    """
    name, named, place = given.partition("=")
    file, _, selection = place.partition("#")
    if not named or not name or not file:
        raise PromptError(f"workload {given!r} is not understood; write NAME=FILE, e.g. code=humaneval.jsonl")
    field, selected, value = selection.partition("=")
    lines = _lines(Path(file))
    if not field or selected:
        chosen = {name: [line for line in lines if not field or str(line.get(field)) == value]}
    else:
        chosen = {}
        for line in lines:
            if field in line:
                chosen.setdefault(f"{name}/{line[field]}", []).append(line)
    if field and not any(chosen.values()):
        there = sorted({str(line[field]) for line in lines if field in line})
        known = f"; it has {', '.join(there[:_VALUES])}" if there else ""
        wanted = f"with {field}={value}{known}" if selected and there else f"with a field {field!r}"
        raise PromptError(f"{file} has no line {wanted}")
    found = []
    for each, said in chosen.items():
        texts = tuple(text for line in said for text in _texts(line))
        if not texts:
            raise PromptError(
                f"workload {each!r}: no line of {file} that was asked for has any of {', '.join(_FIELDS)}"
            )
        found.append(Workload(each, texts))
    return found


def read_prompts(file: Path) -> Workload:
    """Read prompts from a file: one a line, or JSONL as of a workload if the file's name ends in `.jsonl`.

    Raises:
        PromptError: the file cannot be read, is not UTF-8, or holds no prompt.
    """
    if file.suffix == ".jsonl":
        found = [_texts(line) for line in _lines(file)]
        if () in found:
            raise PromptError(f"line {found.index(()) + 1} of {file} has no text in any of {', '.join(_FIELDS)}")
        texts = tuple(text for line in found for text in line)
    else:
        texts = tuple(Text(line) for line in _read(file).splitlines() if line.strip())
    if not texts:
        raise PromptError(f"{file} holds no prompt; write one a line")
    return Workload("prompts", texts)


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise PromptError(f"the prompts in {file} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise PromptError(f"{file} is not UTF-8 text ({error}); convert it first") from error


def json_lines(text: str, file: Path, error: type[SelfSpecError]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the objects of JSONL, each with its line's number; an `error` names a line that holds none."""
    # Not `splitlines`: a JSON string may hold other line separators than this.
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                found = parse_json(line)
            except ValueError as wrong:
                raise error(f"line {number} of {file} is no JSON ({wrong})") from wrong
            if not isinstance(found, dict):
                raise error(f"line {number} of {file} is no JSON object")
            yield number, found


def _lines(file: Path) -> list[dict[str, Any]]:
    return [line for _, line in json_lines(_read(file), file, PromptError)]


def _texts(line: dict[str, Any]) -> tuple[Text, ...]:
    """Return every prompt of a line: of a conversation each message of the user, with all before it."""
    messages, turns = line.get("messages"), line.get("turns")
    if not isinstance(messages, list) and isinstance(turns, list):
        messages = [{"role": "user", "content": turn} for turn in turns]
    if isinstance(messages, list) and all(isinstance(each, dict) for each in messages):
        found = tuple(
            Text(each["content"], messages=tuple(messages[:place]))
            for place, each in enumerate(messages)
            if each.get("role") == "user" and isinstance(each.get("content"), str) and each["content"]
        )
        if found:
            return found
    for field in ("prompt", "text"):
        if isinstance(text := line.get(field), str) and text:
            return (Text(text, whole=field == "text"),)
    return ()


def _token_ids(tokenizer: PreTrainedTokenizerBase, text: Text, context: int) -> list[int]:
    # Long documents need not be read whole.
    part = text.text[: 16 * context] if text.whole else text.text
    ids: list[int] = tokenizer(part, add_special_tokens=False).input_ids
    return ids[:context] if text.whole else ids


def check_reads_text(model: PreTrainedModel) -> None:
    """Refuse a model with an encoder, for commands in which decoders read texts by themselves."""
    if has_encoder(model):
        raise UnsupportedModelError(
            f"{type(model).__name__} has an encoder, and this command reads texts by decoders alone; decode with "
            "selfspec.wrap(model, draft).generate(...)"
        )
